"""How commands show things: tables, JSON, colours, progress, units."""
