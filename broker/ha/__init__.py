"""Replication: the links between a master and its slaves, and the in-sync set."""

if __name__ != "metamq.broker.ha":
    raise ImportError(
        f"import metamq.broker.ha, not {__name__}: a bare import makes a silent second copy of every class"
    )
