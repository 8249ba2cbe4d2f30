"""The protocol of clients and brokers: frames, commands and columnar batches. No socket, clock or thread."""

if __name__ != "metamq.wire":
    raise ImportError(f"import metamq.wire, not {__name__}: a bare import makes a silent second copy of every class")
