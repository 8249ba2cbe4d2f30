"""Common parts of commands: tables, JSON, colours, progress, units, signals, and objects that options name."""
