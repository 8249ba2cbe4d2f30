"""ZooKeeper: paths, session, registration, ownership, offsets, the embedded server. Only this package uses kazoo."""

if __name__ != "metamq.zk":
    raise ImportError(f"import metamq.zk, not {__name__}: a bare import makes a second copy of every class")
