"""The driver's part of a query that reads: its plans."""
