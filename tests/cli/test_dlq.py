"""`metamq dlq`: the dead letters of a group."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.client.handling.dead_letters import dead_letter_headers, dead_letter_topic
from metamq.client.model import Message
from metamq.errors import ConnectError
from metamq.testing import Cluster
from tests.cli.conftest import Metamq


@pytest.fixture
def group(running: Cluster, topic: str) -> str:
    """Its two letters are of `topic`."""
    group = f"g-{topic}"
    running.create_topic(dead_letter_topic(group), partitions=1)
    with running.producer() as producer:
        for number, error in enumerate((ValueError("odd"), ConnectError("the shop", "away"))):
            message = Message(topic, "0-0", number, b"k", b"v%d" % number, {"h": b"\xff"}, 1_000_000)
            headers = dead_letter_headers(message, error, 5)
            producer.send(dead_letter_topic(group), message.value, b"k", headers).result(60)
    return group


def test_letters_are_listed_shown_and_exported(metamq: Metamq, group: str, topic: str, tmp_path: Path) -> None:
    (found,) = [one for one in metamq("dlq", "list", "-o", "json").json if one["group"] == group]
    assert (found["letters"], found["errors"]) == (2, {"ValueError": 1, "ConnectError": 1})
    line = metamq("dlq", "list", group).text.splitlines()[1]
    assert line.split()[:2] == [group, "2"]
    assert line.endswith("ValueError (1), ConnectError (1)")
    (shown,) = metamq("dlq", "show", group, "--error", "the shop", "-o", "json").json
    assert (shown["id"], shown["topic"], shown["offset"], shown["value"]) == ("0-0:1", topic, 1, "v1")
    whole = metamq("dlq", "show", group, "--id", "0-0:1").text
    assert whole.startswith("Letter: 0-0:1\nGiven up: 2")
    assert f"From: {topic}/0-0 at 1\n" in whole
    assert "Header h: \\xff\n" in whole
    assert "Error: ConnectError: " in whole
    assert re.search("\\nTraceback:\n.*ConnectError: .*\nValue:\nv1\n$", whole)
    assert "ConnectError" in shown["traceback"]
    table = metamq("dlq", "show", group, "-n", "1").text.splitlines()
    assert len(table) == 2
    assert f"{topic}/0-0 at 0" in table[1]
    assert table[1].endswith("ValueError: odd")
    file = tmp_path / "letters.jsonl"
    assert metamq("dlq", "export", group, str(file)).talk == f"2 dead letters of {group} are in {file}.\n"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["topic"], one["value"], one["headers_base64"]) for one in lines] == [
        (topic, "v0", {"h": "/w=="}),
        (topic, "v1", {"h": "/w=="}),
    ]
    assert metamq("dlq", "export", group, "-", "--key", "other").data == b""
    assert metamq("dlq", "show", group, "--key", "other").talk == f"No dead letter of {group} is selected.\n"
    assert metamq("dlq", "export", group, str(file), "--key", b"\xff").status == 0
    assert file.read_bytes() == b"", "an older export does not stay"


def test_letters_are_sent_again_and_purged(metamq: Metamq, group: str, topic: str) -> None:
    asked = metamq("dlq", "resend", group)
    assert asked.status == 1
    assert f"Dead letters of {group} to send again: {topic} (2).\n" in asked.talk
    done = metamq("dlq", "resend", group, "--id", "0-0:1", "--yes")
    assert done.talk.endswith(f"1 dead letter of {group} is resent.\n")
    assert metamq("consume", topic, "-e", "--format", "%v\\n").text == "v1\n"
    assert metamq("dlq", "purge", group, "--yes").talk.endswith(f"1 dead letter of {group} is purged.\n")
    for command in ("resend", "purge"):
        nothing = metamq("dlq", command, group, "--yes")
        assert (nothing.status, nothing.talk) == (0, f"No dead letter of {group} is selected.\n")
    assert metamq("consume", topic, "-e", "--format", "%v\\n").text == "v1\n"


def test_a_topic_that_is_gone_can_be_replaced(metamq: Metamq, group: str, topic: str) -> None:
    metamq("topic", "delete", topic, "--yes")
    ended = metamq("dlq", "resend", group, "--yes")
    assert ended.status == 1
    assert f"Create the topic {topic}, or send its letters to another one with --to TOPIC." in ended.talk
    metamq("topic", "create", f"{topic}-2", "-p", 1)
    assert metamq("dlq", "resend", group, "--to", f"{topic}-2", "--yes").status == 0
    assert sorted(metamq("consume", f"{topic}-2", "-e").text.split()) == ["v0", "v1"]


def test_ctrl_c_says_what_is_resent(metamq: Metamq, group: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def interrupting(*_arguments: object) -> Iterator[Callable[[int], None]]:
        main = threading.main_thread().ident
        assert main is not None
        yield lambda _number: signal.pthread_kill(main, signal.SIGINT)  # which waits, and so is interrupted

    monkeypatch.setattr("metamq.tx.app.aio_dead_letters.CHUNK_LETTERS", 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr("metamq.cli.messages.dlq.progress_bar", interrupting)
            ended = metamq("dlq", "resend", group, "--yes")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.status == 130
    assert re.search(f"Stopped: [12] of 2 dead letters of {group} are resent. Repeat the command for", ended.talk)
    assert metamq("dlq", "resend", group, "--yes").status == 0
    assert sorted(metamq("consume", topic, "-e").text.split()) == ["v0", "v1"]


def test_a_group_without_letters(metamq: Metamq, topic: str) -> None:
    metamq("consume", topic, "-g", f"{topic}-good", "-e")
    for words in (["list"], ["show"], ["resend", "--yes"], ["purge", "--yes"]):
        assert metamq("dlq", words[0], f"{topic}-good", *words[1:]).status == 0
        done = metamq("dlq", words[0], f"{topic}-god", *words[1:])
        assert done.status == 1
        assert f"there is no group '{topic}-god'" in done.talk
        assert f"Did you mean '{topic}-good'" in done.talk
    wrong = metamq("dlq", "show", "never-heard-of", "--id", "17")
    assert (wrong.status, "write it like 0-0:17" in wrong.talk) == (2, True)
