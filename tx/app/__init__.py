"""The application's side of transactions: XAResource and the faces that stand on it."""
