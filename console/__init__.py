"""The console: pages in a browser about the brokers, topics and groups of a cluster, and the doctor's findings."""

if __name__ != "metamq.console":
    raise ImportError(f"import metamq.console, not {__name__}: a bare import makes a second copy of every class")
