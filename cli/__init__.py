"""The metamq command."""

from __future__ import annotations

if __name__ != "metamq.cli":
    raise ImportError(f"import metamq.cli, not {__name__}: a bare import makes a second copy of every class")


def main() -> int:
    """Runs the command line in sys.argv; returns the exit status: 0 ok, 1 failed, 2 usage, 3 unreachable."""
    try:
        from metamq.cli.app import run

        return run()
    except KeyboardInterrupt:  # during the import
        return 130
