"""Helpers for all parts of the demo: lines with the time, waits, and applications that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
    """A module of the demo in a process of its own: it can be killed with its children, and started again.

    `name` is for errors. `check` is called during waits; an exception that it raises ends the wait.
    """

    def __init__(self, name: str, module: str, check: Callable[[], object], log: Path | None = None) -> None:
        self._name = name
        self._module = module
        self._check = check
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        """Starts it, with its output in `log`. It ends with its standard input."""
        with contextlib.nullcontext() if self._log is None else self._log.open("ab") as log:
            command = [sys.executable, "-m", self._module, *arguments]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """Ends it by SIGKILL, with its children; does nothing if it was not started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None

    def has_ended(self) -> bool:
        """True if it has ended by itself, without an error."""
        return self._process is not None and self._process.poll() == 0

    def until(self, condition: Callable[[], bool], what: str, *, limit_s: float, poll_s: float) -> None:
        """Waits as wait_for(). Raises MetamqError also if the application fails."""
        wait_for(condition, what, self._check_running, limit_s=limit_s, poll_s=poll_s)

    def _check_running(self) -> None:
        self._check()
        status = None if self._process is None else self._process.poll()
        if status:
            end = "" if self._log is None else f"; the end of its log: {self._log.read_text(errors='replace')[-2000:]}"
            raise MetamqError(f"{self._name} ended with status {status}{end}")
