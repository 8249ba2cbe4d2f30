"""Transactions on the broker: the journal on disk, and the commands for branches."""

if __name__ != "metamq.broker.transactions":
    raise ImportError(f"import metamq.broker.transactions, not {__name__}: a bare import makes a second copy")
