"""The metamq command."""

if __name__ != "metamq.cli":
    raise ImportError(f"import metamq.cli, not {__name__}: a bare import makes a second copy of every class")
