"""Servers as child processes, the signals that stop them, and the error for a child that has ended."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from metamq.cli.show.progress import download_progress
from metamq.cli.show.units import Parsed, parse_bytes, show_bytes
from metamq.errors import MetamqError, Timeout
from metamq.zk.server.embedded import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, how_it_ended
from metamq.zk.server.jars import find_jars
from metamq.zk.server.java import find_java

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
LOG_LINES = 12
ERROR_PREFIX = "metamq: "
"""The beginning of the error message of a command that fails."""
POLL_S = 0.05
KILLED_HINT = "A user killed it, or the kernel did because memory ran out; its log cannot say which."


class BrokerChild:
    """A `metamq broker` process; its log goes to a file."""

    def __init__(self, arguments: list[str], log_path: Path, *, name: str, pass_fds: tuple[int, ...] = ()) -> None:
        """Starts the process. `name` is for messages. `pass_fds` stay open in the child, which so keeps a lock."""
        self.name = name
        self._is_terminated = False
        self._log_path = log_path
        self.port = 0
        self.http_port = 0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "metamq.cli", "broker", "--with-parent", "--output=json", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=pass_fds,
                # Ctrl-C goes to the whole foreground group: the parent decides when its children end.
                start_new_session=True,
            )

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Waits until the broker serves. Raises MetamqError, with the end of its log, if it ends first; Timeout.

        `check` is called often; an exception that it raises ends the wait.
        """
        assert self._process.stdout is not None
        answer = select.poll()
        answer.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answer.poll(POLL_S * 1000):
            check()
            if time.monotonic() > deadline:
                raise Timeout(f"the start of {self.name}", START_TIMEOUT_S, hint=self._end_of_log())
        line = self._process.stdout.readline()
        if line:
            address = json.loads(line)
            self.port, self.http_port = address["port"], address["http_port"]
            return
        status = self._process.wait()
        raise MetamqError(f"{self.name} {how_it_ended(status)} before it served", hint=self._end_of_log())

    def failure(self) -> MetamqError | None:
        """Returns None while the process runs; after it has ended by itself, the error with the end of its log."""
        if self._process.poll() is None:
            return None
        hint = KILLED_HINT if self.was_killed() else self._end_of_log()
        return MetamqError(f"{self.name} {self.how_it_ended()}", hint=hint)

    def how_it_ended(self) -> str:
        """Describes the end of the process, which must have ended: "was ended by SIGKILL"."""
        return how_it_ended(self._process.wait())

    def was_killed(self) -> bool:
        """True if SIGKILL ended the process: then its log does not say why."""
        return self._process.wait() == -signal.SIGKILL

    def _end_of_log(self) -> str:
        """Returns the error message in the log of this process, or else the last lines of the log."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self._log_path} cannot be read: {error.strerror}"
        errors = [number for number, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
        shown = lines[errors[-1] :] if errors else lines[-LOG_LINES:]
        return "\n    ".join([f"Its log {self._log_path} ends:", *shown])

    def end(self) -> None:
        """Stops the process gracefully. Raises MetamqError if it fails while it stops."""
        status = self.stop()
        if status:
            raise MetamqError(f"{self.name} {how_it_ended(status)} while it stopped", hint=self._end_of_log())

    def terminate(self) -> None:
        """Sends SIGTERM, once: a second one could come after the process has removed its handler."""
        if not self._is_terminated and self._process.poll() is None:
            self._is_terminated = True
            self._process.terminate()

    def stop(self) -> int:
        """Sends SIGTERM, then SIGKILL after a time; waits for the end and returns the status. May be repeated."""
        if self._process.poll() is None:
            self.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also after a second Ctrl-C: the child must not write after this call
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait()


class Stopped(KeyboardInterrupt):
    """Raised after a signal that stops this process."""


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP, which then do not end the process; a second Ctrl-C raises KeyboardInterrupt.

    Enter it before you start anything that must be stopped. An exception from a signal handler can come between any
    two steps, also between the start of a process and the note of it. So code that starts processes calls `check` now
    and then, and only code that holds nothing runs `at_once`.
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


def find_java_and_jars(signals: StopSignals) -> None:
    """Finds Java and ZooKeeper's jars, and downloads missing jars. Raises as EmbeddedZooKeeper.start; Stopped."""
    with download_progress() as progress, signals.at_once():
        find_java()
        find_jars(progress)


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
