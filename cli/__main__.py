"""`python -m metamq.cli`: the same as `metamq`."""

from __future__ import annotations

import sys

from metamq.cli import main

if __name__ == "__main__":
    sys.exit(main())
