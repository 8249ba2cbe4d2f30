"""Everything in Apache ZooKeeper: paths, session, registration, ownership, offsets, the embedded server. Only here is kazoo."""

if __name__ != "metamq.zk":
    raise ImportError(f"import metamq.zk, not {__name__}: a bare import makes a second copy of every class")
