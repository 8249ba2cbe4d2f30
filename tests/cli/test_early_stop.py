"""Servers and the demo that are stopped before they are up: nothing is left behind, whenever the signal comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metamq.zk.server.ports import free_port
from tests.cli.test_up import free_ports

Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]


class Starting:
    """A process that is on its way up, and the children it had at any time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._seen: dict[int, psutil.Process] = {}

    def has_child(self, word: str) -> bool:
        """Whether a child, or one of its own, runs with this word in its command line."""
        assert self.process.poll() is None, self.process.communicate()
        found = {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        self._seen |= found
        return any(word in " ".join(_command(child)) for child in found.values())

    def stop(self, number: signal.Signals, *, group: bool = False) -> tuple[int, str]:
        """The exit status, and all that was said."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, (out + err).decode()

    def left(self) -> list[psutil.Process]:
        return [child for child in self._seen.values() if child.is_running() and _command(child)]


def _command(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()  # a zombie has none
    except psutil.NoSuchProcess:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("its folder", signal.SIGTERM),
        ("QuorumPeerMain", signal.SIGINT),
        ("--with-parent", signal.SIGHUP),
    ],
)
def test_up(process: Start, tmp_path: Path, temporary: Path, until: Until, stage: str, number: signal.Signals) -> None:
    starting = Starting(process("up", "--ephemeral", *free_ports(), cwd=tmp_path, env={"TMPDIR": str(temporary)}))
    until(lambda: any(temporary.iterdir()) if stage == "its folder" else starting.has_child(stage), stage)
    status, talk = starting.stop(number)
    assert (status, talk) == (0, "Stopping.\n")
    assert list(temporary.iterdir()) == []
    until(lambda: not starting.left(), "the end of all children")


@pytest.mark.slow
def test_up_and_an_impatient_second_ctrl_c(process: Start, tmp_path: Path, until: Until) -> None:
    """It may come at any step of the stop: no child is left in any case."""
    starting = Starting(process("up", *free_ports(), cwd=tmp_path))
    until(lambda: starting.has_child("--with-parent"))
    starting.process.send_signal(signal.SIGINT)
    status, talk = starting.stop(signal.SIGINT)
    assert status in (0, 130)
    assert "Traceback" not in talk
    until(lambda: not starting.left(), "the end of all children")


def test_zookeeper(process: Start, tmp_path: Path, until: Until) -> None:
    starting = Starting(process("zookeeper", "--port", free_port(), cwd=tmp_path))
    until(lambda: starting.has_child("QuorumPeerMain"))
    assert starting.stop(signal.SIGTERM) == (0, "")
    assert not starting.left()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what a process ignores from /proc")
def test_a_hangup_that_is_ignored_stays_so(process: Start, tmp_path: Path) -> None:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = process("zookeeper", "--port", free_port(), cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert child.stderr is not None
    assert b"ZooKeeper serves at" in child.stderr.readline()
    (ignored,) = re.findall(r"^SigIgn:\t(\w+)", Path(f"/proc/{child.pid}/status").read_text(), re.MULTILINE)
    assert int(ignored, 16) & 1 << (signal.SIGHUP - 1)
    assert Starting(child).stop(signal.SIGTERM) == (0, "")


@pytest.fixture
def demo(process: Start, flights: Path, temporary: Path) -> Iterator[Starting]:
    settings: dict[str, Any] = {"env": {"TMPDIR": str(temporary), "PYTHONPATH": str(flights)}}
    starting = Starting(process("demo", **settings, start_new_session=True))
    yield starting
    for child in starting.left():
        child.kill()


@pytest.mark.slow
def test_demo(demo: Starting, temporary: Path, until: Until) -> None:
    until(lambda: demo.has_child("metamq.broker"))
    status, talk = demo.stop(signal.SIGTERM)
    assert status == 130
    assert "Traceback" not in talk
    assert list(temporary.iterdir()) == []
    until(lambda: not demo.left(), "the end of all children")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_demo_at_work(demo: Starting, temporary: Path, until: Until, number: signal.Signals) -> None:
    until(lambda: demo.has_child("cli.demo.worker"))
    status, talk = demo.stop(number, group=number == signal.SIGINT)  # as the terminal's Ctrl-C does it
    assert "Traceback" not in talk
    until(lambda: not demo.left(), "the end of all children")
    if number == signal.SIGINT:
        assert status == 130
        assert list(temporary.iterdir()) == []
