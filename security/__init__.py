"""Security: certificates, TLS, and the identity of both ends of a connection. It imports almost nothing of metamq."""

if __name__ != "metamq.security":
    raise ImportError(f"import metamq.security, not {__name__}: a bare import makes a second copy of every class")
