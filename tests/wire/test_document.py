"""docs/wire-protocol.md: its examples are the bytes that are sent, its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from metamq.errors import ProtocolError
from metamq.wire import commands, limits, status, sync
from metamq.wire.batch import make_batch_id, stamp
from metamq.wire.columns import encode
from metamq.wire.commands import Command, Get, GetPartition, GetResult, Hello, HelloReply, PutEntry, PutResult
from metamq.wire.connection import ClientConnection, Greeted, ServerConnection
from metamq.wire.frames import PREFIX, Buffer, encode_frame
from metamq.wire.xa import Verb
from tests.hexdumps import bytes_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "wire-protocol.md").read_text()
SENT_US = 1357034400000000
TOPIC_ID = "5f0c9a3e71b2d864"
GREETING = HelloReply(1, 0, 3, limits.MESSAGE_BYTES_MAX, limits.BATCH_BYTES_MAX, limits.FRAME_BYTES_MAX, "metamq 0.1.0")


def example(name: str, text: str = TEXT) -> bytes:
    return bytes_of(text, name)


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(buffers)


def feed(end: Any, data: bytes) -> list[Any]:
    end.next_buffer()[: len(data)] = data
    return list(end.received(len(data)))


def put_batch() -> bytearray:
    return encode([b"UA 1545", b"AA 1141"], base_timestamp_us=SENT_US, producer_id=7)


def stored_batch() -> bytearray:
    batch = put_batch()
    stamp(
        batch,
        0,
        epoch=3,
        base_offset=0,
        batch_id=make_batch_id(3, 1),
        append_time_us=SENT_US + 250_000,
        unflushed_bytes=0,
    )
    return batch


def test_the_whole_example() -> None:
    """Both ends, fed with the document's bytes."""
    client, broker = ClientConnection("broker:8123", "example"), ServerConnection("client", GREETING)
    assert joined(client.hello()) == example("hello")
    (greeted,) = feed(broker, example("hello"))
    assert isinstance(greeted, Greeted)
    assert joined(greeted.buffers) == example("hello-answer")
    assert feed(client, example("hello-answer")) == []
    assert client.greeting == GREETING

    batch = put_batch()
    _opaque, put = client.request(Command.PUT, [PutEntry("flights", TOPIC_ID, 0, len(batch))], [batch])
    assert joined(put) == example("put")
    (request,) = feed(broker, example("put"))
    assert request.body == batch
    answer = broker.respond(request, [PutResult(0, 0, SENT_US + 250_000, None)])
    assert joined(answer) == example("put-answer")

    poll = Get(500, 1, 1 << 20, 1 << 18, [GetPartition(1, "flights", TOPIC_ID, 0)], [(1, 0)], [])
    _opaque, get = client.request(Command.GET, poll)
    assert joined(get) == example("get")
    (request,) = feed(broker, example("get"))
    stored = stored_batch()
    assert stored == example("log", (DOCS / "log-format.md").read_text())
    answer = broker.respond(request, [GetResult(1, 0, len(stored), 0, 2, None)], [stored])
    assert joined(answer) == example("get-answer") + stored

    _opaque, unknown = client.request(99, None)
    (request,) = feed(broker, joined(unknown))
    error = ProtocolError("command 99 is not known to this broker", hint="It knows 3 PUT, 4 GET, 6 OFFSETS, 7 STATS.")
    number, fields = status.encode_error(error)
    assert joined(broker.respond(request, fields, number=number)) == example("error")

    answers = example("put-answer") + example("get-answer") + stored + example("error")
    responses = feed(client, answers)
    assert [(r.opaque, r.status) for r in responses] == [(1, 0), (2, 0), (3, 2)]
    assert responses[1].body == stored


def rows(after: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    table = re.search(rf"^{re.escape(after)}\n.*?^\|(?:-+\|)+\n((?:\|[^\n]*\n)+)", TEXT, re.MULTILINE | re.DOTALL)
    assert table is not None, after
    return [[cell.strip() for cell in line.strip("|").split(" |")[:3]] for line in table[1].splitlines()]


def test_the_prefix() -> None:
    letters = {"u8": "B", "u16": "H", "u32": "I"}
    at = 0
    for byte, kind, *_rest in rows("## Frames"):
        assert int(byte) == at
        at += int(kind[1:]) // 8
    assert at == PREFIX.size
    assert "<" + "".join(letters[row[1]] for row in rows("## Frames")) == PREFIX.format
    assert len(joined(encode_frame(1, 1, 0, 0, None))) == PREFIX.size + 1


def test_the_commands() -> None:
    assert {int(row[0]): row[1] for row in rows("## Commands")} == {c.value: c.name for c in Command}


TUPLES = [
    cls
    for module in (commands, sync)
    for cls in vars(module).values()
    if isinstance(cls, type) and hasattr(cls, "_fields") and cls.__module__ == module.__name__
]
KINDS: dict[Any, str] = {
    int: "int",
    str: "str",
    Any: "any",
    list[int]: "list of int",
    list[str]: "list of str",
    list[Any]: "list of any",
    list[tuple[int, int]]: "list of (int, int)",
    bool: "bool",
    bytes: "bytes",
    list[tuple[int, int, int]]: "list of (int, int, int)",
    list[tuple[int, int, int, int]]: "list of (int, int, int, int)",
    list[GetPartition]: "list of GetPartition",
    list[commands.DelegatedRight]: "list of DelegatedRight",
    list[sync.AttachPartition]: "list of AttachPartition",
    list[sync.AttachResult]: "list of AttachResult",
}


def test_every_header_has_a_table() -> None:
    named = re.findall(r"^#### `(\w+)`$", TEXT, re.MULTILINE)
    assert sorted(named) == sorted(cls.__name__ for cls in TUPLES)
    assert {Hello, Get, PutEntry, sync.Join} < set(TUPLES)


@pytest.mark.parametrize("cls", TUPLES)
def test_the_fields(cls: type) -> None:
    found = [(name.strip("`"), kind) for name, kind, *_meaning in rows(f"#### `{cls.__name__}`")]
    assert found == [(name, KINDS[kind]) for name, kind in get_type_hints(cls).items()]


def test_the_frames_of_sync() -> None:
    found = {int(number): (name.strip("`"), sender) for number, name, sender in rows("### SYNC")}
    ends = {"slave": sync.FROM_SLAVE, "master": sync.FROM_MASTER}
    assert found == {kind: (cls.__name__, end) for end, table in ends.items() for kind, cls in table.items()}
    assert f"{sync.MAGIC:#x}" in TEXT


def test_the_decisions_of_sync() -> None:
    found = {int(number): name for number, name, *_meaning in rows("#### Decisions")}
    assert found == {decision.value: decision.name for decision in sync.SyncDecision}


def test_the_limits() -> None:
    found = {name.strip("`"): int(value.replace(",", "")) for name, value, *_meaning in rows("## Limits")}
    assert found == {name: value for name, value in vars(limits).items() if name.isupper()}


def test_the_verbs() -> None:
    assert {int(number): name for number, name, *_meaning in rows("### TX")} == {v.value: v.name for v in Verb}


def test_the_statuses() -> None:
    found = {int(number): name.strip("`") for number, name, _fields in rows("## Errors")}
    assert found == {status.UNKNOWN: "MetamqError", **{n: cls.__name__ for n, cls in status._NUMBERS.items()}}


def test_numbers_in_the_text() -> None:
    assert f"Texts are cut after {limits.ERROR_TEXT_CHARS_MAX:,} characters" in TEXT
    from metamq.broker.front_door.protocol import HELLO_TIMEOUT_S, STALL_BYTES, WRITE_BUFFER_BYTES
    from metamq.broker.process.server import STALL_S

    assert f"A broker waits {HELLO_TIMEOUT_S:.0f} s for a HELLO" in TEXT
    assert f"more than {WRITE_BUFFER_BYTES // 2**20} MiB wait for it" in TEXT
    assert f"less than {STALL_BYTES // 1024} KiB more have come for {STALL_S:.0f} s" in TEXT
    assert f"after {2 * STALL_S:.0f} s at the latest" in TEXT
    assert (commands.EARLIEST, commands.LATEST) == (-2, -1)
    assert "-2: the earliest offset, -1: the end" in TEXT
