"""The partition log: segments, indexes, producer states, recovery. Synchronous; only slow steps use other threads."""

if __name__ != "metamq.broker.log":
    raise ImportError(
        f"import metamq.broker.log, not {__name__}: a bare import makes a silent second copy of every class"
    )
