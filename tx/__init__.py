"""XA transactions: the broker's transaction journal and store, and the application's faces of it."""

if __name__ != "metamq.tx":
    raise ImportError(f"import metamq.tx, not {__name__}: a bare import makes a second copy of every class")
