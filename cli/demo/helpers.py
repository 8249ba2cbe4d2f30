"""Helpers for all parts of the demo: lines with the time, waits, and the end of an application."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from metamq.errors import MetamqError

Say = Callable[[str], None]


def timed_lines(console: Console) -> Say:
    """Returns a function that prints a line with the time since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    return say


def wait_for(
    condition: Callable[[], bool], what: str, check: Callable[[], object], *, limit_s: float, poll_s: float
) -> None:
    """Waits until the condition holds. Raises MetamqError after the limit.

    `check` is called meanwhile; an exception that it raises ends the wait.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise MetamqError(f"{what} did not come within {limit_s:g} s")
        time.sleep(poll_s)
