"""The commands for the schemas of topics."""
