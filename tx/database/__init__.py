"""Transactions with a database: dbtx, the Coordinator, the data manager, and their recovery."""
