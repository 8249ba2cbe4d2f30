"""Servers as child processes, the signals that end them, and what is left to say of one that ended."""

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
TELLS = "metamq: "
"""With this begins what a command says as it fails."""
POLL_S = 0.05
KILLED_HINT = "Somebody did, or the kernel when memory ran out: its log cannot tell."


class BrokerChild:
    """`metamq broker` in a process of its own; its log goes to a file."""

    def __init__(self, arguments: list[str], log_path: Path, *, name: str, pass_fds: tuple[int, ...] = ()) -> None:
        """`name`: for people. `pass_fds` stay open in the child: a lock that it holds on for as long as it lives."""
        self.name = name
        self._asked = False
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
        """Waits until it serves. Raises MetamqError, with the end of its log, when it ends instead; Timeout.

        `check` is called often; what it raises ends the wait.
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
            told = json.loads(line)
            self.port, self.http_port = told["port"], told["http_port"]
            return
        status = self._process.wait()
        raise MetamqError(f"{self.name} {how_it_ended(status)} instead of serving", hint=self._end_of_log())

    def failure(self) -> MetamqError | None:
        """None while it runs; the error, with the end of its log if that can tell, once it has ended by itself."""
        if self._process.poll() is None:
            return None
        hint = KILLED_HINT if self.was_killed() else self._end_of_log()
        return MetamqError(f"{self.name} {self.how_it_ended()}", hint=hint)

    def how_it_ended(self) -> str:
        """For a process that has ended: "was ended by SIGKILL"."""
        return how_it_ended(self._process.wait())

    def was_killed(self) -> bool:
        """Whether the process, which has ended, got a signal that it could not tell of in its log."""
        return self._process.wait() == -signal.SIGKILL

    def _end_of_log(self) -> str:
        """What it said in the end: its own error message where there is one, else the last lines since it began."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"Its log {self._log_path} cannot be read: {error.strerror}"
        told = [number for number, line in enumerate(lines) if line.startswith(TELLS)]
        shown = lines[told[-1] :] if told else lines[-LOG_LINES:]
        return "\n    ".join([f"Its log {self._log_path} ends:", *shown])

    def end(self) -> None:
        """A graceful stop. Raises MetamqError when it is none."""
        status = self.stop()
        if status:
            raise MetamqError(f"{self.name} {how_it_ended(status)} as it stopped", hint=self._end_of_log())

    def terminate(self) -> None:
        """SIGTERM, once: a second one would come to a process that is past its own handling of it."""
        if not self._asked and self._process.poll() is None:
            self._asked = True
            self._process.terminate()

    def stop(self) -> int:
        """SIGTERM, then SIGKILL when that does not help; waits for the end, and gives its status. May be repeated."""
        if self._process.poll() is None:
            self.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also after a second Ctrl-C: it is not to write any more once we go on
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait()


class Stopped(KeyboardInterrupt):
    """Raised where a signal has asked us to stop."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP are noted instead of ending the process; a second Ctrl-C raises KeyboardInterrupt.

    Entered before anything is started that is to be ended. An exception out of a signal's handler may come between any
    two steps, also between a start and the note of what was started; so what starts things asks `check` now and then,
    and only what holds nothing is interrupted `at_once`.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise Stopped when a signal has come."""
        if self.asked:
            raise Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raises Stopped when a signal comes, or has come: around what may take long and leaves nothing behind."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come; waits so long for one."""
        if not self.asked:
            time.sleep(seconds)
        return self.asked

    def _stop(self, number: int, _frame: object) -> None:
        again, self.asked = self.asked, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._at_once:
            raise Stopped


def fetch_what_zookeeper_needs(signals: StopSignals) -> None:
    """Looks for Java and the jars, which may have to be downloaded. Raises as EmbeddedZooKeeper.start; Stopped."""
    with download_progress() as progress, signals.at_once():
        find_java()
        find_jars(progress)


def parse_memory(text: str) -> int:
    """Bytes of memory for the embedded ZooKeeper. Raises ValueError."""
    try:
        wanted = parse_bytes(text)
    except ValueError:
        wanted = 0
    if not MEMORY_BYTES_MIN <= wanted <= MEMORY_BYTES_MAX:
        limits = f"{show_bytes(MEMORY_BYTES_MIN)} to {show_bytes(MEMORY_BYTES_MAX)}"
        raise ValueError(f"{text!r} is no size of ZooKeeper's memory: write it like 512MiB or 2GiB, {limits}")
    return wanted


MEMORY = Parsed("size", parse_memory)
