"""Output of commands: tables, JSON, colours, progress, units."""
