"""Replication: a master and its slaves, who of them is in sync, and what becomes of logs that differ."""

if __name__ != "metamq.broker.ha":
    raise ImportError(
        f"import metamq.broker.ha, not {__name__}: a bare import makes a silent second copy of every class"
    )
