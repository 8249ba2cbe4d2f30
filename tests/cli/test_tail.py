"""`metamq topic tail`."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tests.cli.conftest import but_for_closing

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]


def test_the_last_messages_and_those_that_follow(process: Start, metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, *map(str, range(5)))
    child = process("topic", "tail", topic, "-n", 2)
    assert child.stdout is not None
    lines = [child.stdout.readline().decode() for _ in range(2)]
    assert [line.split(" ", 2)[2] for line in lines] == ["0-0@3 - 3\n", "0-0@4 - 4\n"]
    time = datetime.fromisoformat(" ".join(lines[0].split(" ", 2)[:2]))
    assert time.tzinfo is not None
    metamq("produce", topic, "-k", "k", "later")
    assert child.stdout.readline().endswith(b" 0-0@5 k later\n")
    child.send_signal(signal.SIGINT)
    rest, talk = child.communicate(timeout=90)
    assert (child.returncode, rest, but_for_closing(talk)) == (0, b"", b"")


def test_only_new_messages(process: Start, metamq: Metamq, topic: str, until: Callable[..., None]) -> None:
    metamq("produce", topic, "old")
    child = process("topic", "tail", topic, "-n", 0, "--count", 1, "-o", "json")
    seen = iter(range(10_000))
    until(lambda: metamq("produce", topic, f"new-{next(seen)}") and child.poll() is not None)
    assert child.stdout is not None
    assert json.loads(child.stdout.read())["value"].startswith("new-")


def test_filters_and_a_bound(metamq: Metamq, topic: str) -> None:
    lines = [{"key": f"k{n % 2}", "value": json.dumps({"n": n}), "headers": {"h": str(n % 3)}} for n in range(20)]
    metamq("produce", topic, "--json", stdin="\n".join(map(json.dumps, lines)).encode())
    options = ["--key", "k1", "--where", ".n > 4", "--count", 3]
    shown = metamq("topic", "tail", topic, "-n", 99, *options).text.splitlines()
    assert [line.split(" ", 2)[2] for line in shown] == [f'0-0@{n} k1 {{"n": {n}}}' for n in (5, 7, 9)]
    found = metamq("topic", "tail", f"{topic[:-1]}*", "--header", "h=2", "--count", 2).text.splitlines()
    assert [line.split()[2] for line in found] == [f"{topic}/0-0@11", f"{topic}/0-0@14"]


def test_a_message_is_one_short_line(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "-D", r"\0", stdin=b"two\nlines\x1b[2J\xff\0" + b"x" * 1000)
    first, second = metamq("topic", "tail", topic, "--width", 21, "--count", 2).text.splitlines()
    assert first.endswith(r" - two\nlines\x1b[2J\xff")
    assert second.endswith(f" - {'x' * 21}… (1,000 bytes)")
