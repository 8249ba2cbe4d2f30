"""The manners on a terminal: colours, questions, progress bars; none of it in a pipe."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.cli.app import run
from metamq.cli.show.output import table_lines
from metamq.testing import Cluster
from tests.cli.test_app import all_commands
from tests.one_zookeeper import cluster

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]

LIMIT_S = 60.0
WIDTH = 80
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """Our end of a pseudo-terminal; `end` is for the command."""

    def __init__(self) -> None:
        self._ours, self.end = pty.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))

    def read_until(self, words: bytes) -> bytes:
        """What is printed, up to and with these words; all there is when they never come."""
        text = b""
        while words not in text:
            assert select.select([self._ours], [], [], LIMIT_S)[0], text
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not more:
                break
            text += more
        return text

    def rest(self) -> bytes:
        return self.read_until(b"\0 this is never printed")

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def hand_over(self) -> None:
        """The command has its copy: without ours, its end is seen."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        self.hand_over()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours(process: Start, terminal: Terminal, topic: str, environment: dict[str, str], coloured: bool) -> None:
    child = process("topic", "list", stdout=terminal.end, env=environment)
    terminal.hand_over()
    printed = terminal.rest()
    assert child.wait(60) == 0
    assert (b"\x1b[1mTOPIC" in printed) == coloured
    assert topic.encode() in printed


@pytest.fixture(scope="module")
def busy() -> Iterator[Cluster]:
    """With a topic of a usual name, which has messages in several partitions."""
    with cluster() as running:
        running.create_topic("flights-from-new-york", flush="ack", retention_bytes=10 << 30)
        with running.producer() as producer:
            producer.send_many("flights-from-new-york", [b"x" * 500] * 20_000).result(60)
        with running.consumer(group="the-group", topics=["flights-from-new-york"]) as consumer:
            next(iter(consumer))
            yield running


@pytest.mark.parametrize(
    "command",
    [
        "topic list",
        "topic describe flights-from-new-york",
        "topic list --root /elsewhere",
        "topic delete flights-from-new-york",
        "log verify DATA",
        "log dump DATA",
        "group describe the-group",
        "group explain the-group",
        "doctor",
        "consume flights-from-new-york -n 1 -o raw --group g --from 7",
    ],
)
def test_lines_fit_into_a_terminal_of_80_columns(
    offline: Metamq, terminal: Terminal, busy: Cluster, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    arguments = command.replace("DATA", str(busy.broker.data)).split()
    with os.fdopen(os.dup(terminal.end), "w") as screen, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO())
        patch.setattr("sys.stdout", screen)
        patch.setattr("sys.stderr", screen)
        run([*arguments, "--zookeeper", busy.zookeeper])
    terminal.hand_over()
    lines = STYLE.sub("", terminal.rest().decode()).splitlines()
    assert lines
    assert not [line for line in lines if "Traceback" in line]
    assert [line for line in lines if len(line) > WIDTH and " " in line.strip()] == []


def test_one_long_name_widens_no_other_line_than_its_own(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(terminal.end), "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setenv("NO_COLOR", "1")
        lines = table_lines(["TOPIC", "PARTITIONS", "CLEANUP"], [["a", 4, "delete"], ["b" * 100, 12, "delete"]])
    assert [len(line) for line in lines] == [80, 79, 100, 79]
    assert lines[1].index("4") == lines[0].index("PARTITIONS") + 9
    assert lines[3].split() == ["12", "delete"]
    assert lines[3].index("2") == lines[1].index("4")


def test_several_long_names_leave_a_table_in_its_place(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a", 1, "range", "t"], ["g" * 150, 2, "range", "t" * 100], ["b" * 20, 3, "range", "t"]]
    with os.fdopen(os.dup(terminal.end), "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setenv("NO_COLOR", "1")
        lines = table_lines(["GROUP", "MEMBERS", "STRATEGY", "TOPICS"], rows)
    place = lines[0].index("MEMBERS")
    assert len(lines) == 5
    assert place > 20, "who fits is not broken"
    assert [line[place:].split()[:2] for line in (lines[1], *lines[3:])] == [[n, "range"] for n in "123"]
    assert (lines[2], lines[3].split()[-1]) == ("g" * 150, "t" * 100)


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_help_fits_into_80_columns(offline: Metamq, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert [line for line in offline(*command, "--help").text.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_question_where_somebody_can_answer(
    process: Start, metamq: Metamq, terminal: Terminal, topic: str, answer: bytes, status: int
) -> None:
    child = process("topic", "delete", topic, stdin=terminal.end, stderr=terminal.end)
    terminal.hand_over()
    assert f"Delete topic {topic}".encode() in terminal.read_until(b"Do it? [y/N] ")
    terminal.type(answer)
    terminal.rest()
    assert child.wait(60) == status
    assert (f"{topic} " in metamq("topic", "list").text) == (status == 1)


def test_long_work_shows_a_bar(process: Start, terminal: Terminal, topic: str, until: Until) -> None:
    child = process("produce", topic, stderr=terminal.end)
    terminal.hand_over()
    printed: list[bytes] = []

    def read() -> None:
        printed.append(terminal.read_until(f"Sending to {topic}".encode()))
        printed.append(terminal.rest())

    reader = threading.Thread(target=read)
    reader.start()
    assert child.stdin is not None

    def go_on() -> bool:
        assert child.stdin is not None
        child.stdin.write(b"line\n")
        child.stdin.flush()
        return bool(printed)

    until(go_on, "a bar")
    child.stdin.close()
    child.stdin = None
    assert child.wait(60) == 0
    reader.join(60)
    assert f"Sending to {topic}".encode() in printed[0]
    assert f" messages to {topic} in ".encode() in printed[1]
