"""The server: partition logs, the command processors, topics, registration, metrics."""

if __name__ != "metamq.broker":
    raise ImportError(f"import metamq.broker, not {__name__}: a bare import makes a second copy of every class")
