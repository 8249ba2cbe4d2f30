"""How the demo waits for what has to happen next."""

from __future__ import annotations

import time
from collections.abc import Callable

from metamq.errors import MetamqError


def wait_for(
    condition: Callable[[], bool], what: str, check: Callable[[], object], *, limit_s: float, poll_s: float
) -> None:
    """Returns once the condition holds. `check` is called meanwhile; what it raises ends the wait. Raises MetamqError
    after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise MetamqError(f"{what} did not come within {limit_s:g} s")
        time.sleep(poll_s)
