"""Everything in Apache ZooKeeper: znode paths, the session, registration, ownership, offsets, and the embedded server. Only place that imports kazoo."""

if __name__ != "metamq.zk":
    raise ImportError(f"import metamq.zk, not {__name__}: a bare import makes a second copy of every class")
