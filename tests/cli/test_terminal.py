"""The manners on a terminal: colours, questions, progress bars; none of it in a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]

LIMIT_S = 20.0


class Terminal:
    """Our end of a pseudo-terminal; `end` is for the command."""

    def __init__(self) -> None:
        self._ours, self.end = pty.openpty()

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
    assert child.wait(20) == 0
    assert (b"\x1b[1mTOPIC" in printed) == coloured
    assert topic.encode() in printed


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_question_where_somebody_can_answer(
    process: Start, metamq: Metamq, terminal: Terminal, topic: str, answer: bytes, status: int
) -> None:
    child = process("topic", "delete", topic, stdin=terminal.end, stderr=terminal.end)
    terminal.hand_over()
    assert f"Delete topic {topic}".encode() in terminal.read_until(b"Do it? [y/N] ")
    terminal.type(answer)
    terminal.rest()
    assert child.wait(20) == status
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
    assert child.wait(20) == 0
    reader.join(20)
    assert f"Sending to {topic}".encode() in printed[0]
    assert f" messages to {topic} in ".encode() in printed[1]
