"""Helpers for all parts of the demo: lines with the time, waits, and applications that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

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


class Application:
    """A module that runs as a process in a session of its own, so that its children are killed with it."""

    def __init__(self, module: str, arguments: list[str], log: IO[bytes] | None = None) -> None:
        """Starts it, with its output in `log`. It ends with its standard input."""
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> int | None:
        """Returns the exit status; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Ends it by SIGKILL, with its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
