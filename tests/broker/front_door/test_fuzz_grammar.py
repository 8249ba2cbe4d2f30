"""Frames made from the declarations of the headers: right in their structure, hostile in what they say.

Mutants of valid frames hardly get past the decoders. These do: every field has a value of its kind, mostly, and now and
then one of another; lists are empty, long, too long and nested; frames are cut, repeated, mixed and split at any byte.
Three targets: a broker over sockets, where each request gets one answer or the connection ends; both ends of a
connection in this process, millions of frames in the long run; and the blocking connection of a Spark task.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args, get_origin

import psutil
import pytest

from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import ConnectError, MetamqError, ProtocolError, Timeout
from metamq.wire import commands, sync
from metamq.wire.commands import (
    Command,
    Get,
    GetPartition,
    GetResult,
    Hello,
    HelloReply,
    OffsetsEntry,
    OffsetsResult,
    Promote,
    PutEntry,
    PutResult,
    Stats,
)
from metamq.wire.connection import ClientConnection, ConnectionState, Request, ServerConnection
from metamq.wire.frames import Buffer, encode_frame
from metamq.wire.headers import fields_of, unpack, unpack_list
from metamq.wire.limits import FRAME_BYTES_MAX, REQUEST_ENTRIES_MAX

pytestmark = pytest.mark.timeout(3600)
MEBIBYTE = 1024 * 1024
GREETING = HelloReply(1, 0, 5, 4_000_000, 16_000_000, FRAME_BYTES_MAX, "fuzz")
INTS = [
    0,
    1,
    2,
    3,
    7,
    -1,
    -2,
    100,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
]
STRINGS = ["", "t", "fuzz", "a/b", "..", "\0", "é" * 40, "x" * 300, "__journal", "0" * 16]
STRANGE: list[Any] = [None, True, 1.5, "", b"", b"\xff" * 20, [], {}, {"a": [1]}, [[[[]]]], [None] * 30]

REQUESTS: dict[int, Any] = {
    Command.PUT: [PutEntry],
    Command.GET: Get,
    Command.OFFSETS: [OffsetsEntry],
    Command.STATS: Stats,
    Command.PROMOTE: Promote,
    Command.TX: commands.Tx,
    Command.BRANCHES: commands.Branches,
    Command.TOPIC: commands.TopicChange,
    Command.HELLO: Hello,
}
ANSWERS: dict[int, Any] = {
    Command.PUT: [PutResult],
    Command.GET: [GetResult],
    Command.OFFSETS: [OffsetsResult],
    Command.TX: commands.TxReply,
    Command.BRANCHES: commands.BranchesReply,
    Command.TOPIC: commands.TopicChanged,
}


class Grammar:
    """Makes headers of what is declared."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def value(self, kind: Any) -> Any:
        chance = self.chance
        if chance.random() < 0.04:
            return chance.choice(STRANGE)
        if kind is int:
            return chance.choice(INTS)
        if kind is str:
            return chance.choice(STRINGS)
        if kind is bool:
            return chance.random() < 0.5
        if get_origin(kind) is list:
            (entry,) = get_args(kind)
            if chance.random() < 0.002:
                return [0] * (REQUEST_ENTRIES_MAX + 1)
            return [self.value(entry) for _ in range(chance.choice([0, 1, 1, 2, 3, 20]))]
        if get_origin(kind) is tuple:
            return [self.value(one) for one in get_args(kind)]
        if hasattr(kind, "_fields"):
            return self.header(kind)
        return chance.choice(STRANGE)

    def header(self, declared: Any) -> Any:
        """Of a class, or a list of entries of one."""
        if isinstance(declared, list):
            return [self.header(declared[0]) for _ in range(self.chance.choice([0, 1, 1, 2, 5]))]
        made = [self.value(kind) for _name, kind in fields_of(declared)]
        lucky = self.chance.random()
        return made[:-1] if lucky < 0.02 else [*made, 1] if lucky < 0.04 else made

    def frame(self, declared: dict[int, Any], opaque: int, number: int = 0) -> bytes:
        command = self.chance.choice([*declared])
        return self.frame_of(command, self.header(declared[command]), opaque, number)

    def frame_of(self, command: int, header: Any, opaque: int, number: int = 0) -> bytes:
        body: list[Buffer] | None = [bytes(8 * self.chance.randint(1, 30))] if self.chance.random() < 0.2 else None
        return b"".join(encode_frame(1, command, number, opaque, header, body, header_bytes_max=16 * MEBIBYTE))

    def spoilt(self, data: bytes) -> bytes:
        """Now and then cut, repeated, or with a bit that is wrong."""
        chance, lucky = self.chance, self.chance.random()
        if lucky < 0.01:
            return data[: chance.randrange(len(data))]
        if lucky < 0.02:
            return data * 2
        if lucky < 0.03:
            spoilt = bytearray(data)
            spoilt[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            return bytes(spoilt)
        return data


def feed(end: Any, data: bytes, chance: random.Random, taken: Callable[[Any], None]) -> None:
    """In pieces that end at any byte. Raises what the end does."""
    at = 0
    while at < len(data) and end.state is not ConnectionState.CLOSED:
        buffer = end.next_buffer()
        size = min(len(buffer), len(data) - at, chance.choice([1, 3, 17, 300, 1 << 20, 1 << 20]))
        buffer[:size] = data[at : at + size]
        at += size
        for event in end.received(size):
            taken(event)


def take_request(command: int, header: Any) -> bool:
    """As a broker unpacks a request; whether it is as declared. Any error but ProtocolError is a fault."""
    declared = REQUESTS.get(command)
    try:
        if command == Command.SYNC:
            sync.unpack_from_slave(header)
        elif isinstance(declared, list):
            unpack_list(declared[0], header)
        elif declared is not None:
            made = unpack(declared, header)
            if isinstance(made, Get):
                for entry in made.opened:
                    unpack(GetPartition, entry)
    except ProtocolError:
        return False
    return True


def take_answer(command: int, header: Any) -> bool:
    declared = ANSWERS.get(command)
    try:
        if isinstance(declared, list):
            unpack_list(declared[0], header)
        elif declared is not None:
            unpack(declared, header)
    except ProtocolError:
        return False
    return True


def fuzz_ends(frames: int, seed: int) -> Counter[str]:
    """Both ends of connections in this process: so many frames in all."""
    chance = random.Random(seed)
    grammar, counted = Grammar(chance), Counter[str]()
    slave_frames = {sync.JOIN + number: cls for number, cls in enumerate([sync.Join])} | dict(sync.FROM_SLAVE)
    pool = [grammar.spoilt(grammar.frame(REQUESTS, n)) for n in range(3000)]
    pool += [
        grammar.spoilt(grammar.frame_of(Command.SYNC, [kind, *grammar.header(cls)[1:]], 0))
        for kind, cls in slave_frames.items()
        for _ in range(60)
    ]
    commands = [*ANSWERS]
    answers = {command: [grammar.frame({command: ANSWERS[command]}, 1) for _ in range(300)] for command in commands}
    hello = b"".join(encode_frame(1, Command.HELLO, 0, 0, Hello(1, 1, "fuzz")))
    greeting = b"".join(encode_frame(1, Command.HELLO, 0, 0, GREETING))

    def requested(event: Any) -> None:
        if isinstance(event, Request):
            is_taken = take_request(event.command, event.unpacked().header)
            counted["request as declared" if is_taken else "request refused"] += 1

    def answered(event: Any) -> None:
        counted["answer as declared" if take_answer(event.command, event.header) else "answer refused"] += 1

    while sum(counted.values()) < frames:
        server = ServerConnection("fuzz", GREETING)
        try:
            feed(server, hello + b"".join(chance.choices(pool, k=60)), chance, requested)
        except ProtocolError:
            counted["connection refused"] += 1
        assert server.state in (ConnectionState.OPEN, ConnectionState.STREAMING, ConnectionState.CLOSED)
        client = ClientConnection("broker:1", "fuzz")
        sent = b""
        try:
            feed(client, greeting, chance, answered)
            for _ in range(60):
                command = chance.choice(commands)
                opaque, _buffers = client.request(command, None)
                found = grammar.spoilt(chance.choice(answers[command]))
                sent = found[:8] + opaque.to_bytes(4, "little") + found[12:]
                feed(client, sent, chance, answered)
        except MetamqError:
            counted["answer broke the connection"] += 1
    return counted


def check_ends(frames: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    fuzz_ends(2000, seed)  # what is made once is made now
    before = psutil.Process().memory_info().rss
    counted = fuzz_ends(frames, seed + 1)
    grown = psutil.Process().memory_info().rss - before
    print(f"{sum(counted.values())} frames, grown by {grown / 1e6:.1f} MB: {dict(counted)}")
    for kind in ("request as declared", "request refused", "answer as declared", "answer refused"):
        assert counted[kind] > frames // 100, f"seed {seed}: {counted}"
    assert counted["connection refused"] > 0
    assert grown < 64 * MEBIBYTE, f"seed {seed}"


@pytest.mark.slow
def test_both_ends_take_or_refuse_whatever_is_declared() -> None:
    check_ends(20_000)


@pytest.mark.long
def test_both_ends_take_or_refuse_ten_million_frames() -> None:
    check_ends(10_000_000)


OVER_SOCKETS = {
    command: REQUESTS[command]
    for command in (Command.PUT, Command.GET, Command.OFFSETS, Command.STATS, Command.PROMOTE, Command.BRANCHES)
}


def fuzz_broker(front: Any, connections: int) -> None:
    """Each request gets one answer, or its connection ends; the broker's memory stays as it was."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    grammar = Grammar(random.Random(seed))
    topic_id = front.topic("fuzz", 4)
    before = front.rss()
    said: Counter[str] = Counter()
    for number in range(connections):
        client = front.connect()
        sent: list[int] = []
        data = b""
        for opaque in range(1, 21):
            command = grammar.chance.choice([*OVER_SOCKETS])
            header = grammar.header(OVER_SOCKETS[command])
            if command == Command.GET and isinstance(header, list) and header and isinstance(header[0], int):
                header[0] = min(header[0], 5)  # a longer poll is answered by the next one, or after minutes
            elif command == Command.OFFSETS and grammar.chance.random() < 0.5:
                header = [OffsetsEntry("fuzz", topic_id, at, grammar.chance.choice(INTS)) for at in range(4)]
            data += grammar.frame_of(command, header, opaque)
            sent.append(opaque)
        client.send(data)
        answered: list[int] = []
        try:
            while len(answered) < len(sent):
                answer = client.answer()
                if answer.command == Command.HELLO:
                    said["connection refused"] += 1
                    break
                answered.append(answer.opaque)
                said[f"{Command(answer.command).name} {'OK' if answer.status == 0 else 'refused'}"] += 1
            else:
                assert sorted(answered) == sent, f"seed {seed}"
        except (EOFError, ConnectionError):
            said["connection closed"] += 1
        assert len(set(answered)) == len(answered), f"seed {seed}: answered twice"
        front.close_clients()
        if number % 50 == 0:
            front.still_serves()
    front.still_serves()
    grown = front.rss() - before
    print(f"the broker grew by {grown / 1e6:.1f} MB: {dict(said)}")
    assert min(said[f"{command.name} refused"] for command in (Command.PUT, Command.GET, Command.OFFSETS)) > 0
    assert min(said[f"{command.name} OK"] for command in (Command.GET, Command.OFFSETS, Command.STATS)) > 0
    assert grown < 64 * MEBIBYTE, f"seed {seed}"


def test_a_broker_answers_each_request_once(front: Any) -> None:
    fuzz_broker(front, 60)


@pytest.mark.long
def test_a_broker_answers_each_of_many_requests_once(front: Any) -> None:
    fuzz_broker(front, 20_000)


def fuzz_task(answers: int) -> None:
    """The connection of a Spark task: an answer, or one of the two errors that a task knows, and never a hang."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    grammar, said = Grammar(chance), Counter[str]()
    greeting = b"".join(encode_frame(1, Command.HELLO, 0, 0, GREETING))
    before = psutil.Process().memory_info().rss
    with socket.create_server(("127.0.0.1", 0)) as listener:
        while sum(said.values()) < answers:
            frame = grammar.frame({Command.GET: ANSWERS[Command.GET]}, 1)
            found = grammar.spoilt(frame)

            def serve(found: bytes = found) -> None:
                accepted, _address = listener.accept()
                with accepted:
                    accepted.recv(65536)
                    accepted.sendall(greeting)
                    accepted.recv(65536)
                    at = chance.randrange(len(found) + 1)
                    for piece in (found[:at], found[at:]):
                        accepted.sendall(piece)

            server = threading.Thread(target=serve)
            server.start()
            connection = BlockingConnection.open(*listener.getsockname())
            try:
                connection.send(Command.GET, None, timeout_s=60)
                response = connection.receive(timeout_s=60)
                said["taken" if take_answer(Command.GET, response.header) else "refused"] += 1
            except (ConnectError, Timeout):
                said["broken"] += 1
                assert not connection.is_open
            finally:
                connection.abort()
                server.join(60)
    grown = psutil.Process().memory_info().rss - before
    print(f"the task grew by {grown / 1e6:.1f} MB: {dict(said)}")
    assert min(said[kind] for kind in ("taken", "refused", "broken")) > 0, f"seed {seed}"
    assert grown < 64 * MEBIBYTE, f"seed {seed}"


def test_a_task_takes_or_refuses_any_answer() -> None:
    fuzz_task(400)


@pytest.mark.long
def test_a_task_takes_or_refuses_many_answers() -> None:
    fuzz_task(100_000)
