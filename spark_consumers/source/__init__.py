"""The tasks of a query that reads: their options, ranges, and fetches."""
