"""Starts the tests' brokers as forks of a process that has imported everything once.

Half of the processor time of a start goes to imports, and the tests start a thousand brokers. A fork is as real a
process as any: it has its own descriptors, session, signals and end. What a test starts by another command, as a user
would, is started by that command.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from metamq.testing import BrokerProcess, broker_process

COMMAND = [*BrokerProcess.command, "--with-parent"]
CLOCK_JUMPS_S = {signal.SIGUSR1: 3600, signal.SIGUSR2: -3600}
"""By the signal that makes it happen, how far the wall clock of a forked broker is off from then on. Only for Python:
the clocks of other processes stay as they are."""
NAME = "the zygote of the tests' brokers"
REQUEST_BYTES_MAX = 128 * 1024


class Forked:
    """A broker, with what of subprocess.Popen its users need."""

    def __init__(self, zygote: Zygote, environment: dict[str, str], stderr: int) -> None:
        self.args = COMMAND
        self.returncode: int | None = None
        stdin, write = os.pipe()
        read, stdout = os.pipe()
        self._status, status = os.pipe()
        try:
            self.pid = zygote.fork(environment, [stdin, stdout, stderr, status])
        finally:
            for descriptor in (stdin, stdout, status):
                os.close(descriptor)
        self.stdin: IO[str] = os.fdopen(write, "w")
        self.stdout: IO[str] = os.fdopen(read)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            answer = select.poll()
            answer.register(self._status, select.POLLIN)
            if answer.poll(None if timeout_s is None else timeout_s * 1000):
                text = os.read(self._status, 16)
                os.close(self._status)
                self.returncode = int(text or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.pid = self._process.pid

    def fork(self, environment: dict[str, str], descriptors: list[int]) -> int:
        """`descriptors`: standard input, output and error, and where the exit status goes. Returns the process id."""
        socket.send_fds(self._channel, [json.dumps(environment).encode()], descriptors)
        answer = self._channel.recv(16)
        assert answer, "the zygote has ended: its error is in the output"
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


_zygote: Zygote | None = None
commands: dict[int, str] = {}
"""By the process id of each broker that was started, and of the zygote."""


def popen(command: list[str], **settings: Any) -> subprocess.Popen[str] | Forked:
    """In the place of subprocess.Popen, for a BrokerProcess."""
    global _zygote
    if command != COMMAND:
        return subprocess.Popen(command, **settings)
    if _zygote is None:
        _zygote = Zygote()
        commands[_zygote.pid] = NAME
    environment = settings["env"]
    broker = Forked(_zygote, environment, settings["stderr"].fileno())
    commands[broker.pid] = f"broker of {environment['METAMQ_BROKER_DATA']}"
    return broker


def freeze(pid: int) -> None:
    """In the place of metamq.zk.server.embedded.freeze, which can wait for a child only."""
    os.kill(pid, signal.SIGSTOP)
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    return True


def install() -> None:
    """From now on brokers are forks, where the system can do it."""
    if hasattr(os, "pidfd_open"):
        BrokerProcess.popen = staticmethod(popen)
        broker_process.freeze = freeze


def close() -> None:
    """Ends the zygote, if there is one."""
    if _zygote is not None:
        _zygote.close()


def serve(channel: socket.socket) -> None:
    """Forks for each request, and sends on how each child ended, until the tests are gone."""
    from metamq.broker.__main__ import main

    gc.freeze()
    for number in CLOCK_JUMPS_S:
        signal.signal(number, _jump)
    loop, children = select.poll(), dict[int, tuple[int, int]]()
    loop.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in loop.poll():
            if descriptor in children:
                loop.unregister(descriptor)
                _report(descriptor, *children.pop(descriptor))
                continue
            request, given, _flags, _address = socket.recv_fds(channel, REQUEST_BYTES_MAX, 4)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                _become_broker(main, json.loads(request), given)
            *streams, status = given
            for stream in streams:
                os.close(stream)
            ended = os.pidfd_open(pid)
            children[ended] = pid, status
            loop.register(ended, select.POLLIN)
            channel.send(str(pid).encode())


def _jump(number: int, _frame: Any, time_ns: Callable[[], int] = time.time_ns) -> None:
    off_ns = CLOCK_JUMPS_S[signal.Signals(number)] * 1_000_000_000
    time.time_ns = lambda: time_ns() + off_ns
    time.time = lambda: time.time_ns() / 1e9


def _report(ended: int, pid: int, status: int) -> None:
    _, how = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
    os.close(status)
    os.close(ended)


def _become_broker(main: Callable[[], int], environment: dict[str, str], given: list[int]) -> None:
    """What `python -m metamq.broker` is, but for the imports. Does not return."""
    status = 1
    try:
        os.setsid()
        for stream, descriptor in enumerate(given[:3]):
            os.dup2(descriptor, stream)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = COMMAND[2:]
        status = main()
    except BaseException:  # as Python does at the end of a process: the loop of the zygote must not go on in its fork
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
