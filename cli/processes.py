"""Common parts of the commands that run servers: signals that stop them, Java, jars, the memory of ZooKeeper."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from metamq.cli.show.progress import download_progress
from metamq.cli.show.units import Parsed, parse_bytes, show_bytes
from metamq.zk.server.embedded import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN
from metamq.zk.server.jars import find_jars
from metamq.zk.server.java import find_java


class Stopped(KeyboardInterrupt):
    """Raised after a signal that stops this process."""


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP, which then do not end the process; a second Ctrl-C raises KeyboardInterrupt.

    Enter it before you start anything that must be stopped. An exception from a signal handler can come between any two
    steps, even between the start of a process and the note of it. So code that starts processes calls `check` from time
    to time, and only code that needs no clean-up runs `at_once`.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises Stopped if a signal has come."""
        if self.asked:
            raise Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raises Stopped at once when a signal comes, or has come: for slow work that leaves nothing behind."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def wait(self, seconds: float) -> bool:
        """Returns True if a signal has come; waits up to `seconds` for one."""
        if not self.asked:
            time.sleep(seconds)
        return self.asked

    def _stop(self, number: int, _frame: object) -> None:
        again, self.asked = self.asked, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._at_once:
            raise Stopped


def is_alive(pid: str) -> bool:
    """True if a process with this id runs; the text may be anything."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True


def find_java_and_jars(signals: StopSignals, *, secure: bool = False) -> None:
    """Finds Java and ZooKeeper's jars, with `secure` those for TLS, too, and downloads missing jars.

    Raises as EmbeddedZooKeeper.start; Stopped.
    """
    with download_progress() as progress, signals.at_once():
        find_java()
        find_jars(progress, secure=secure)


def parse_memory(text: str) -> int:
    """Returns the bytes of memory for the embedded ZooKeeper. Raises ValueError."""
    try:
        wanted = parse_bytes(text)
    except ValueError:
        wanted = 0
    if not MEMORY_BYTES_MIN <= wanted <= MEMORY_BYTES_MAX:
        limits = f"from {show_bytes(MEMORY_BYTES_MIN)} to {show_bytes(MEMORY_BYTES_MAX)}"
        raise ValueError(f"{text!r} is not a size for ZooKeeper's memory: write it like 512MiB or 2GiB, {limits}")
    return wanted


MEMORY = Parsed("size", parse_memory)
