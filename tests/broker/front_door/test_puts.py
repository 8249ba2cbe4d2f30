"""PUTs that arrive together: each has a result of its own, and is answered once."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from metamq.broker.front_door.puts import PendingPut
from metamq.broker.front_door.writes import Writes
from metamq.errors import (
    CorruptData,
    MessageTooLarge,
    PartitionNotFound,
    ProtocolError,
    SequenceGap,
    StorageError,
    TopicNotFound,
)
from metamq.wire import status
from metamq.wire.commands import EARLIEST, LATEST, Command, GetPartition, GetResult, OffsetsEntry, PutEntry, PutResult
from metamq.wire.connection import Request
from metamq.wire.headers import unpack_list

LIMIT_BYTES = 1000


class Answers:
    """The end of a connection: what it would send."""

    def __init__(self) -> None:
        self.sent: list[list[PutResult]] = []

    def answer_soon(self, request: Request, results: list[PutResult]) -> None:
        self.sent.append(list(results))


def test_an_entry_of_a_put_is_done_once() -> None:
    connection = Answers()
    put = PendingPut(Request(1, Command.PUT, None, memoryview(b"")), cast(Any, connection), 2)
    put.done(0, PutResult(status.OK, 7, 1, None))
    code, fields = status.encode_error(StorageError("the flush that it waits for cannot begin"))
    put.done(0, PutResult(code, -1, -1, fields))
    assert connection.sent == [], "the other batch is still on its way"
    put.done(1, PutResult(status.OK, 8, 1, None))
    put.done(1, PutResult(status.OK, 9, 1, None))
    assert [[result.base_offset for result in results] for results in connection.sent] == [[7, 8]]
    assert connection.sent[0][0].status == status.OK


class Sender:
    """A writer that counts its flushes."""

    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


@pytest.mark.parametrize("held", [False, True])
def test_writes_come_once_in_a_turn(held: bool) -> None:
    async def run() -> None:
        writes, senders = Writes(), [Sender(), Sender()]
        if held:
            writes.hold()
        for sender in senders:
            writes.add(sender)
        if held:
            await asyncio.sleep(0)
            assert [sender.flushes for sender in senders] == [0, 0]
            writes.flush()
        await asyncio.sleep(0)
        assert [sender.flushes for sender in senders] == [1, 1]
        writes.add(senders[0])
        await asyncio.sleep(0)
        assert [sender.flushes for sender in senders] == [2, 1], "the promise was for one turn"

    asyncio.run(run())


class Model:
    """What a partition does with batches of one message."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self._stored: dict[int, list[int]] = {}
        """The offsets of each producer's batches."""

    def put(self, value: bytes, producer: int, sequence: int) -> int | type[Exception]:
        """The offset of the batch, or its error. -1: it is stored, but its place is not known any more."""
        known = self._stored.setdefault(producer, [])
        if sequence > len(known):
            return SequenceGap if known else self._store(value, known, sequence)
        if sequence < len(known):
            return known[sequence] if sequence >= len(known) - 5 else -1
        return self._store(value, known, sequence)

    def _store(self, value: bytes, known: list[int], sequence: int) -> int:
        known += [-1] * (sequence - len(known)) + [len(self.values)]
        self.values.append(value)
        return known[-1]


@pytest.mark.parametrize("seed", range(3))
def test_puts_that_arrive_together_are_stored_in_their_order(front: Any, seed: int) -> None:
    """Repeats, gaps, damage, and messages that are too large are among them."""
    topic, choice, model = f"together-{seed}", random.Random(seed), Model()
    topic_id = front.topic(topic, max_message_bytes=LIMIT_BYTES)
    clients = [front.connect() for _ in range(3)]
    sequences = dict.fromkeys(range(1, 8), 0)
    for _turn in range(20):
        client, sent, frames = choice.choice(clients), {}, []
        for _ in range(choice.randrange(1, 40)):
            producer = choice.randrange(1, 8)
            sequence = max(0, sequences[producer] + choice.choice((0, 0, 0, 0, 0, 0, -1, -6, 3)))
            kind = choice.choice(("sound",) * 8 + ("damaged", "large", "nowhere", "unknown"))
            value = choice.randbytes(LIMIT_BYTES + 100 if kind == "large" else 20)
            batch = front.batch([value], producer_id=producer, sequence=sequence)
            expected: Any = {
                "damaged": CorruptData, "large": MessageTooLarge, "nowhere": PartitionNotFound, "unknown": TopicNotFound
            }.get(kind)  # fmt: skip
            if expected is None:
                expected = model.put(value, producer, sequence)
                sequences[producer] += sequence == sequences[producer] and isinstance(expected, int)
            batch[-1 - choice.randrange(20)] ^= kind == "damaged"
            entry = PutEntry(topic if kind != "unknown" else "other", topic_id, 9 * (kind == "nowhere"), len(batch))
            opaque, frame = client.frame(Command.PUT, [entry], [batch])
            frames.append(frame)
            sent[opaque] = expected
        client.send(b"".join(frames))
        for _ in frames:
            answer = client.answer()
            (result,) = unpack_list(PutResult, answer.header)
            expected = sent.pop(answer.opaque)
            found = result.base_offset if result.status == status.OK else type(result_error(result))
            assert found == expected
        assert not sent
    answer = clients[0].ask(Command.GET, front.get(opened=[GetPartition(1, topic, topic_id, 0)], armed=[(1, 0)]))
    (fetched,) = unpack_list(GetResult, answer.header)
    assert front.values_in(answer.body[: fetched.size]) == model.values


def result_error(result: PutResult) -> Exception:
    return status.decode_error(result.status, result.error)


def test_the_requests_of_a_connection_begin_in_their_order(front: Any) -> None:
    client, batch = front.connect(), front.batch([b"one"])
    topic_id = front.topic("in-order")
    _, put = client.frame(Command.PUT, [PutEntry("in-order", topic_id, 0, len(batch))], [batch])
    asked, question = client.frame(
        Command.OFFSETS, [OffsetsEntry("in-order", topic_id, 0, at) for at in (EARLIEST, LATEST)]
    )
    client.send(put + question)
    answers = {answer.opaque: answer for answer in (client.answer(), client.answer())}
    assert [one[1] for one in answers[asked].header] == [0, 1]


def test_puts_that_arrive_together_respect_the_size_of_a_segment(front: Any) -> None:
    client, batch = front.connect(), front.batch([bytes(100)])
    topic_id = front.topic("small-segments", segment_bytes=1024)
    entry = PutEntry("small-segments", topic_id, 0, len(batch))
    client.send(b"".join(client.frame(Command.PUT, [entry], [batch])[1] for _ in range(50)))
    for _ in range(50):
        client.answer()
    folder = front.cluster.broker.data / "topics"
    sizes = [path.stat().st_size for path in folder.glob("small-segments@*/0/*.log")]
    assert sum(sizes) == 50 * len(batch)
    assert max(sizes) <= 1024


def test_what_arrives_before_a_broken_frame_is_stored_and_answered(front: Any) -> None:
    topic_id = front.topic("broken")
    rude, polite = front.connect(), front.connect()
    for number in range(20):
        puts = [put_of(client, front, topic_id, b"%d" % number) for client in (rude, rude, polite)]
        rude.send(puts[0] + puts[1] + bytes(16))
        polite.send(puts[2])
        answers = [rude.answer(), rude.answer(), polite.answer()]
        assert [unpack_list(PutResult, answer.header)[0].status for answer in answers] == [status.OK] * 3
        assert isinstance(front.error_of(rude.answer()), ProtocolError)
        assert rude.ended()
        rude = front.connect()
    answer = polite.ask(Command.GET, front.get(opened=[GetPartition(1, "broken", topic_id, 0)], armed=[(1, 0)]))
    (fetched,) = unpack_list(GetResult, answer.header)
    assert sorted(front.values_in(answer.body[: fetched.size])) == sorted(b"%d" % (n // 3) for n in range(60))


def put_of(client: Any, front: Any, topic_id: str, value: bytes) -> bytes:
    batch = front.batch([value])
    frame: bytes = client.frame(Command.PUT, [PutEntry("broken", topic_id, 0, len(batch))], [batch])[1]
    return frame


def test_a_repeat_waits_for_the_disk_as_the_first_does(front: Any) -> None:
    client, batch = front.connect(), front.batch([b"once"], producer_id=1, sequence=0)
    entry = PutEntry("repeated", front.topic("repeated", flush="ack"), 0, len(batch))
    puts = [client.frame(Command.PUT, [entry], [batch]) for _ in range(2)]
    client.send(puts[0][1] + puts[1][1])
    answers = [client.answer() for _ in puts]
    assert [answer.opaque for answer in answers] == [opaque for opaque, _frame in puts]
    assert [unpack_list(PutResult, answer.header)[0].base_offset for answer in answers] == [0, 0]


def test_a_bug_in_one_connection_keeps_no_answer_of_another_one() -> None:
    sent = []

    class Connection:
        def __init__(self, name: str) -> None:
            self.name = name

        def flush(self) -> None:
            if self.name == "bad":
                raise RuntimeError("seeded")
            sent.append(self.name)

    writes = Writes()
    writes.hold()
    for name in ("one", "bad", "two"):
        writes.add(Connection(name))
    writes.flush()
    assert sent == ["one", "two"]
