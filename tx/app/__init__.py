"""The application's side of transactions: XAResource, and the APIs that are built on it."""
