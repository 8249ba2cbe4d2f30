"""The number of examples of a randomised test: all of them, or a fifth under `./dev test --fast`."""

from __future__ import annotations

import os

FRACTION = 5 if os.environ.get("METAMQ_FEW_EXAMPLES") else 1


def examples(count: int) -> int:
    """Returns how many examples a test takes that takes `count` in a whole run."""
    return max(count // FRACTION, 1)
