"""What the driver plans of a query that reads."""
