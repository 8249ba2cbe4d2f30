"""Mutated requests and frames of slaves, thousands of them: whatever comes in, the broker goes on, and stores nothing
that nobody sent."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from metamq.wire import status, sync
from metamq.wire.commands import EARLIEST, LATEST, Command, GetPartition, GetResult, Hello, OffsetsEntry, PutEntry
from metamq.wire.frames import PREFIX, encode_frame
from metamq.wire.headers import unpack_list
from tests.parts import statistics

pytestmark = pytest.mark.timeout(600)  # thousands of connections
MUTATIONS = 2000
MEMORY_BYTES = 64 * 1024 * 1024
VALUES = [b"alpha", b"beta" * 50, b""]
INTERESTING = [0, 1, 127, 128, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]


def requests(front: Any) -> list[bytes]:
    """One valid request of each kind."""
    topic_id = front.topic("fuzz", 4)
    plain = front.batch(VALUES)
    rich = front.batch(VALUES, keys=[b"k", None, b""], headers=[{"a": b"1"}, None, None], timestamps_us=[3, 1, 2])
    put = [PutEntry("fuzz", topic_id, 0, len(plain)), PutEntry("fuzz", topic_id, 3, len(rich))]
    opened = [GetPartition(n, "fuzz", topic_id, n) for n in range(4)]
    poll = front.get(wait_ms=5, opened=opened, armed=[(0, 0), (1, 0)])
    asked = [OffsetsEntry("fuzz", topic_id, n, at) for n, at in enumerate((EARLIEST, LATEST, 2, 10**15))]
    frames = [
        (Command.PUT, put, [plain, rich]),
        (Command.GET, poll, None),
        (Command.OFFSETS, asked, None),
        (Command.STATS, None, None),
        (Command.HELLO, Hello(1, 1, "fuzz"), None),
    ]
    return [
        b"".join(encode_frame(1, command, 0, n, header, bodies)) for n, (command, header, bodies) in enumerate(frames)
    ]


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at : at + 4] = chance.choice(INTERESTING).to_bytes(4, chance.choice(["little", "big"]))


def cut_out(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.randint(1, 40)]


def repeat(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = data[at : at + chance.randint(1, 200)] * chance.randint(1, 5)


def insert_junk(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.randint(1, 60))


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def change_header(data: bytearray, chance: random.Random) -> None:
    """A valid frame whose header says something else: the deepest way in."""
    if len(data) < PREFIX.size:
        return
    _length, version, command, number, opaque, size = PREFIX.unpack_from(data)
    body = bytes(data[PREFIX.size + size :])
    header = msgpack.Unpacker(None)
    header.feed(bytes(data[PREFIX.size : PREFIX.size + size]))
    try:
        changed = replaced(header.unpack(), chance)
    except (ValueError, msgpack.OutOfData):
        return
    data[:] = b"".join(encode_frame(version, command, number, opaque, changed, [body] if body else None))


def replaced(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], replaced(value[at], chance), *value[at + 1 :]]
    strange = [None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64 - 1, 1.5, "", "fuzz", "x" * 5000, b"\xff", [], {}]
    return chance.choice([*strange, [value], {"a": value}, [value] * 50])


MUTATORS: list[Callable[[bytearray, random.Random], None]] = [
    flip_bits,
    overwrite,
    cut_out,
    repeat,
    insert_junk,
    truncate,
    change_header,
    change_header,
]


def send_and_hang_up(front: Any, data: bytes, join: sync.Join | None = None) -> Counter[str]:
    """Sends all of it, then the end of the stream; counts what the broker says until it closes.

    With a `join` it is sent over a link.
    """
    said: Counter[str] = Counter()
    client = front.connect(greet=join is not None)
    if join is not None:
        assert client.ask(Command.SYNC, join).status == status.OK
    try:
        client.send(data)
        client.socket.shutdown(socket.SHUT_WR)
        while True:
            answer = client.answer()
            kind = "OK" if answer.status == status.OK else type(front.error_of(answer)).__name__
            said[f"{answer.command} {kind}"] += 1
    except (EOFError, ConnectionError):
        return said
    finally:
        front.close_clients()


GREETING = b"".join(encode_frame(1, Command.HELLO, 0, 0, Hello(1, 1, "fuzz")))


def mutants(valid: list[bytes], chance: random.Random) -> bytes:
    """Up to three of the frames, changed."""
    sent = bytearray()
    for data in chance.choices(valid, k=chance.randint(1, 3)):
        mutated = bytearray(data)
        for mutate in chance.choices(MUTATORS, k=chance.randint(1, 2)):
            if mutated:
                mutate(mutated, chance)
        sent += mutated
    return bytes(sent)


@pytest.mark.slow
def test_mutated_requests(front: Any) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    valid = requests(front)
    send_and_hang_up(front, GREETING + b"".join(valid))
    before = front.rss()
    began = time.monotonic()
    said: Counter[str] = Counter()
    for number in range(MUTATIONS):
        said += send_and_hang_up(front, (b"" if chance.random() < 0.1 else GREETING) + mutants(valid, chance))
        if number % 200 == 0:
            front.still_serves()
    grown = front.rss() - before
    print(f"{MUTATIONS} mutations in {time.monotonic() - began:.1f} s, the broker grew by {grown / 1e6:.1f} MB")
    print(dict(said))
    assert min(said[f"{n} OK"] for n in (1, 3, 4, 6, 7)) > 20, f"seed {seed}"  # mutants went all the way in
    assert min(said[f"{n} ProtocolError"] for n in (1, 3, 4, 6)) > 20, f"seed {seed}"
    assert grown < MEMORY_BYTES, f"seed {seed}"
    assert stored(front) <= set(VALUES), f"seed {seed}"


def stored(front: Any) -> set[bytes]:
    """Every value in the topic."""
    found: set[bytes] = set()
    client = front.connect()
    for partition in range(4):
        offset = 0
        client.ask(
            Command.GET, front.get(wait_ms=0, opened=[GetPartition(partition, "fuzz", front.topic("fuzz"), partition)])
        )
        while offset < front.offset("fuzz", partition):
            answer = client.ask(Command.GET, front.get(armed=[(partition, offset)]))
            (result,) = unpack_list(GetResult, answer.header)
            assert result.status == status.OK
            values = front.values_in(answer.body)
            found.update(values)
            offset += len(values)
    assert found
    return found


LINKS = 3000
JOIN = sync.Join(sync.JOIN, 1, sync.MAGIC, 0, 7, 1, "a test", False, 1)


def attach(topic_id: str, ends: list[tuple[int, int]]) -> sync.Attach:
    """As if a slave had these parts of the topic's partitions, of the master's epoch."""
    return sync.Attach(
        sync.ATTACH,
        1,
        [
            sync.AttachPartition(n, "copied", topic_id, n, 0, 0, *end, 0, [(1, 0, 0)] if end[0] else [])
            for n, end in enumerate(ends)
        ],
    )


def pushed(*frames: sync.FromSlave) -> list[bytes]:
    return [b"".join(encode_frame(1, Command.SYNC, 0, 0, frame)) for frame in frames]


def frames_of_a_slave(attached: sync.Attach) -> list[bytes]:
    """One valid frame of each kind that a slave sends once it has joined."""
    return pushed(
        attached,
        sync.Ack(sync.ACK, 1, 0, 0, [(place.handle, place.end_position, 0) for place in attached.partitions]),
        sync.Detach(sync.DETACH, 1, [1, 3]),
        sync.HandOver(sync.HANDOVER, 1, 5),
        sync.Leave(sync.LEAVE, 1),
    )


def logs(front: Any) -> list[tuple[int, int]]:
    """(end offset, bytes) of each partition."""
    found = statistics(front.cluster.broker)["partitions"]
    return [(p["end_offset"], p["size_bytes"]) for p in found if p["topic"] == "copied"]


@pytest.mark.slow
def test_mutated_frames_of_slaves(front: Any) -> None:
    """Before and after a JOIN. What a slave says of itself may be anything: it changes nothing at the master."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topic_id = front.topic("copied", 4)
    for index in range(4):
        for _ in range(3):
            front.fill("copied", index, [b"value"])
    before, memory = logs(front), front.rss()
    valid = frames_of_a_slave(attach(topic_id, [(end * n // 3, size * n // 3) for n, (end, size) in enumerate(before)]))
    joins = [b"".join(encode_frame(1, Command.SYNC, 0, 1, JOIN))]
    said = send_and_hang_up(front, b"".join(valid), JOIN)
    assert said["5 OK"] >= 2, "it is told what becomes of its logs, and sent what it lacks"
    said.clear()
    for number in range(LINKS):
        if chance.random() < 0.2:
            said += send_and_hang_up(front, GREETING + mutants(joins, chance))
        else:
            ends = [(chance.randint(0, end), chance.randrange(0, size + 1, 8)) for end, size in before]
            first = chance.choice([b"", valid[0], *pushed(attach(topic_id, ends))])
            said += send_and_hang_up(front, first + mutants(valid + joins, chance), JOIN)
        if number % 100 == 0:
            serves_without_slaves(front)
    serves_without_slaves(front)
    grown = front.rss() - memory
    print(dict(said))
    assert min(said[f"{n} {kind}"] for n in (1, 5) for kind in ("OK", "ProtocolError")) > 20, f"seed {seed}"
    assert grown < MEMORY_BYTES, f"seed {seed}"
    assert logs(front) == before, f"seed {seed}"
    for index in range(4):
        front.fill("copied", index, [b"it is served still"])


def serves_without_slaves(front: Any) -> None:
    """Those who asked to become the master are gone, and writes are taken again."""

    def is_alone() -> bool:
        said = statistics(front.cluster.broker)
        return (said["replication"]["slaves"], said["replication"]["insync"], said["writes_refused"]) == ([], [0], None)

    front.until(is_alone)
    front.still_serves()
