"""The sender: what an answer means, and that nothing is lost, doubled or out of order on a network that does its worst.

The network is simulated, so that thousands of runs take seconds, each from its seed; all else is real.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metamq.broker.data.partition import BatchIds, Partition
from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.trim import TrimmedLog
from metamq.client.net.cluster import ClusterClient, Source
from metamq.client.net.delays import Delays
from metamq.client.producer import partition_queue, sender
from metamq.client.producer.outgoing import OutgoingBatch
from metamq.client.producer.partition_queue import PartitionQueue
from metamq.client.producer.producer_core import ProducerOptions
from metamq.client.producer.sender import RefusalVerdict, Sender, verdict_on
from metamq.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    CorruptData,
    DeliveryTimeout,
    DiskFull,
    Fenced,
    MessageTooLarge,
    MetamqError,
    NotEnoughReplicas,
    Outcome,
    PartitionNotFound,
    SequenceGap,
    StorageError,
    TopicNotFound,
)
from metamq.wire import status
from metamq.wire.batch import read_header, walk
from metamq.wire.columns import decode
from metamq.wire.compression import Codec
from metamq.wire.connection import Response
from metamq.zk.cluster.topics import TopicConfig

TOPIC = TopicConfig("t", {0: 1})


def a_batch(*values: bytes, begun_ns: int = 0) -> OutgoingBatch:
    batch = OutgoingBatch("t")
    batch.broker_id = batch.partition = 0
    batch.values = list(values or (b"x",))
    batch.created_ns = begun_ns
    return batch


@pytest.fixture
def queue() -> PartitionQueue:
    return PartitionQueue("t", TOPIC.id, 0, 0)


def send_all(queue: PartitionQueue, now_s: float = 0.0) -> list[OutgoingBatch]:
    """Sends what may be sent now."""
    sent = []
    while queue.sendable(now_s):
        sent.append(queue.next_batch(Codec.NONE, now_s))
    return sent


def established(queue: PartitionQueue, count: int) -> list[OutgoingBatch]:
    """`count` batches under way, after one that was stored."""
    first, *rest = [a_batch() for _ in range(count + 1)]
    queue.waiting.extend([first, *rest])
    assert send_all(queue) == [first]
    queue.stored(first, 0.0)
    assert send_all(queue) == rest
    return rest


# -- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (SequenceGap("t/0", 1, 2), RefusalVerdict.GAP),
        (TopicNotFound("t"), RefusalVerdict.LOOK),
        (PartitionNotFound("t", "0-7"), RefusalVerdict.LOOK),
        (Fenced("broker 0", "replica 1 is"), RefusalVerdict.MOVE),
        (DiskFull("/data", 1, 2), RefusalVerdict.AGAIN),
        (NotEnoughReplicas("t/0", 1, 2), RefusalVerdict.AGAIN),
        (NotEnoughReplicas("t/0", 1, 2, outcome="unknown"), RefusalVerdict.UNSURE),
        (StorageError("the disk failed"), RefusalVerdict.UNSURE),
        (ClosedError("broker"), RefusalVerdict.UNSURE),
        (MessageTooLarge("a message", 2, 1), RefusalVerdict.NEVER),
        (CorruptData("batch", "the checksum"), RefusalVerdict.NEVER),
        (CorruptData("t/0", "the checksum").with_unknown_outcome(), RefusalVerdict.UNSURE),
        (MetamqError("of a newer release"), RefusalVerdict.NEVER),
    ],
)
def test_verdict(error: MetamqError, verdict: RefusalVerdict) -> None:
    number, fields = status.encode_error(error)
    assert verdict_on(error) is verdict
    assert verdict_on(status.decode_error(number, fields)) is verdict


@pytest.mark.parametrize("outcome", ["not_done", "unknown"])
def test_what_a_deposed_master_had_taken_may_be_stored(outcome: Outcome) -> None:
    sent_by = Sender(
        cast(ClusterClient, SimpleNamespace(configs={"t": TOPIC})),
        Codec.NONE,
        delivery_timeout_s=9,
        request_timeout_s=9,
    )
    batch, error = a_batch(), Fenced("broker 0", "replica 1 is")
    error.outcome = outcome
    sent_by.add([batch])
    (queue,) = sent_by._queues.values()
    queue.next_batch(Codec.NONE, 0.0)
    sent_by.refused(queue, batch, error)
    assert batch.unsure == (outcome == "unknown")
    queue.established = True
    sent_by.connection_changed(0)
    assert not queue.established, "the new master need not know the producer id"


@pytest.mark.parametrize("last", [MessageTooLarge("a message", 2, 1), CorruptData("t/0", "a checksum")])
@pytest.mark.parametrize("outcome", ["not_done", "unknown"])
def test_a_batch_is_not_called_refused_when_an_attempt_before_may_have_been_stored(
    last: MetamqError, outcome: Outcome
) -> None:
    sent_by = Sender(
        cast(ClusterClient, SimpleNamespace(configs={"t": TOPIC})),
        Codec.NONE,
        delivery_timeout_s=9,
        request_timeout_s=9,
    )
    batch, first = a_batch(), Fenced("broker 0", "replica 1 is")
    first.outcome = outcome
    sent_by.add([batch])
    (queue,) = sent_by._queues.values()
    queue.next_batch(Codec.NONE, 0.0)
    sent_by.refused(queue, batch, first)
    queue.paused_until_s = 0.0
    assert queue.sendable(1.0)
    queue.next_batch(Codec.NONE, 1.0)
    sent_by.refused(queue, batch, last)
    assert isinstance(batch.error, type(last))
    assert batch.error.outcome == outcome
    assert last.outcome == "not_done", "others are told of it, too"


# -- one queue, by value ------------------------------------------------------------------------------------------


def test_the_first_batch_of_an_id_is_under_way_alone_then_five_are(queue: PartitionQueue) -> None:
    batches = [a_batch() for _ in range(9)]
    queue.waiting.extend(batches)
    assert send_all(queue) == batches[:1]
    queue.stored(batches[0], 0.0)
    assert send_all(queue) == batches[1:6]
    assert [batch.sequence for batch in batches[:6]] == [0, 1, 2, 3, 4, 5]
    assert len({read_header(batch.encoded).producer_id for batch in batches[:6] if batch.encoded}) == 1


def test_all_that_has_no_answer_is_among_the_last_five_numbers(queue: PartitionQueue) -> None:
    """The broker knows where it stored those, and no others: the repeat of an older one would have no offset."""
    first, second, *others = established(queue, 5)
    queue.waiting.extend([a_batch(), a_batch()])
    for batch in (second, *others):
        queue.stored(batch, 0.0)
    assert send_all(queue) == []
    queue.stored(first, 0.0)
    assert len(send_all(queue)) == 2


def test_what_comes_back_goes_to_its_place_and_waits_for_the_others(queue: PartitionQueue) -> None:
    a, b, c, d = established(queue, 4)
    later = a_batch()
    queue.waiting.append(later)
    queue.put_back(c, unsure=False)
    queue.put_back(a, unsure=False)
    assert list(queue.waiting) == [a, c, later]
    assert send_all(queue) == []
    queue.stored(b, 0.0)
    queue.stored(d, 0.0)
    before = [a.sequence, c.sequence]
    assert send_all(queue) == [a, c, later]
    assert [a.sequence, c.sequence] == before


def test_after_a_lost_connection_one_goes_first_alone(queue: PartitionQueue) -> None:
    a, b = established(queue, 2)
    queue.put_back(a, unsure=True)
    queue.put_back(b, unsure=True)
    assert send_all(queue) == [a]
    queue.stored(a, 0.0)
    assert send_all(queue) == [b]


def test_a_gap_behind_a_batch_that_came_back_changes_no_numbers(queue: PartitionQueue) -> None:
    a, b = established(queue, 2)
    producer_id = queue.producer_id
    b.gapped = True
    queue.put_back(b, unsure=False)
    queue.put_back(a, unsure=False)
    assert send_all(queue) == [a, b]
    assert (queue.producer_id, a.sequence, b.sequence) == (producer_id, 1, 2)


def test_a_gap_behind_a_batch_that_failed_for_good_gives_new_numbers(queue: PartitionQueue) -> None:
    a, b, c = established(queue, 3)
    producer_id = queue.producer_id
    queue.drop(a)
    for batch in (b, c):
        batch.gapped = True
        queue.put_back(batch, unsure=False)
    assert send_all(queue) == [b]
    assert queue.producer_id != producer_id
    assert (b.sequence, c.sequence) == (0, -1)
    assert b.encoded is not None
    assert read_header(b.encoded).producer_id == queue.producer_id


def test_numbers_end_half_way(queue: PartitionQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_queue, "SEQUENCES_MAX", 3)
    a, b = established(queue, 2)
    producer_id = queue.producer_id
    later = a_batch()
    queue.waiting.append(later)
    assert send_all(queue) == []
    queue.stored(a, 0.0)
    assert send_all(queue) == []
    queue.stored(b, 0.0)
    assert send_all(queue) == [later]
    assert later.sequence == 0
    assert queue.producer_id != producer_id


def test_an_id_that_was_idle_for_long_is_given_up(queue: PartitionQueue) -> None:
    (a,) = established(queue, 1)
    queue.stored(a, 0.0)
    producer_id = queue.producer_id
    for now_s, same in ((3599.0, True), (7200.0, False)):
        batch = a_batch()
        queue.waiting.append(batch)
        assert send_all(queue, now_s) == [batch]
        queue.stored(batch, now_s)
        assert (queue.producer_id == producer_id) is same


def test_a_producer_gives_up_long_before_it_is_forgotten() -> None:
    forgotten_after_s = LogConfig().producer_expiry_ms / 1000
    assert forgotten_after_s == 7 * 86_400, "docs/producing.md says 7 days"
    longest_s = 86_400.0
    assert ProducerOptions(delivery_timeout_s=longest_s)
    with pytest.raises(ConfigError, match="delivery_timeout_s"):
        ProducerOptions(delivery_timeout_s=longest_s + 1)
    # A batch may be the first after the longest pause under one id, and then be repeated for as long as that.
    assert partition_queue.PRODUCER_ID_IDLE_S + longest_s < forgotten_after_s / 2


def test_time_is_over_for_a_batch_that_was_never_sent(queue: PartitionQueue) -> None:
    a, b = a_batch(begun_ns=5), a_batch(begun_ns=6)
    queue.waiting.extend([a, b])
    assert queue.expire(5) == []
    assert queue.expire(6) == [a]
    assert not a.unsure
    assert list(queue.waiting) == [b]


def test_time_is_over_for_a_batch_whose_every_attempt_was_refused(queue: PartitionQueue) -> None:
    a, b = established(queue, 2)
    b.created_ns = 10
    queue.put_back(a, unsure=False)
    queue.put_back(b, unsure=False)
    assert queue.expire(5) == [a]
    assert not a.unsure
    assert list(queue.waiting) == [b]


def test_time_is_over_under_way_and_the_batch_stays_until_its_answer(queue: PartitionQueue) -> None:
    (a,) = established(queue, 1)
    assert queue.expire(5) == [a]
    assert a.unsure
    a.complete(-1, DeliveryTimeout("a", 1), keep_encoded=True)
    assert queue.expire(5) == []
    assert list(queue.inflight) == [a]
    queue.stored(a, 0.0)


def test_a_ghost_is_sent_before_a_living_batch_with_a_later_number(queue: PartitionQueue) -> None:
    a, b = established(queue, 2)
    b.created_ns = 10
    queue.put_back(a, unsure=True)
    queue.put_back(b, unsure=True)
    assert queue.expire(5) == [a]
    a.complete(-1, DeliveryTimeout("a", 1), keep_encoded=True)
    assert send_all(queue) == [a]
    queue.stored(a, 0.0)
    assert send_all(queue) == [b]


def test_ghosts_alone_are_given_up_and_what_follows_has_new_numbers(queue: PartitionQueue) -> None:
    (a,) = established(queue, 1)
    producer_id = queue.producer_id
    later = a_batch(begun_ns=10)
    queue.waiting.append(later)
    queue.put_back(a, unsure=True)
    assert queue.expire(5) == [a]
    a.complete(-1, DeliveryTimeout("a", 1), keep_encoded=True)
    assert send_all(queue) == [later]
    assert queue.producer_id != producer_id
    assert later.sequence == 0


# -- the sender on a simulated network ----------------------------------------------------------------------------


class Wire:
    """A connection: requests in order, answers in any, until it is cut. What a broker has received stays received.

    An answer waits for what its other partitions wait for, as their flush, so a later one may come before it.
    """

    producer_prefix = 0
    delays = Delays("broker")

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.requests: deque[tuple[list[bytes], asyncio.Future[Response]]] = deque()
        self.answers: list[tuple[asyncio.Future[Response], Response]] = []
        self.waiting: list[asyncio.Future[Response]] = []

    def send(self, command: int, entries: list[Any], bodies: list[Any]) -> asyncio.Future[Response]:
        if not self.alive:
            raise ConnectError("broker", "the connection is closed")
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.requests.append(([bytes(body) for body in bodies], future))
        self.waiting.append(future)
        return future

    def abort(self) -> None:
        """The client's end is gone; what was sent may be handled by the broker still."""
        if self.alive:
            self.alive = False
            self.answers.clear()
            for future in self.waiting:
                if not future.done():
                    future.set_exception(ConnectError("broker", "cut", outcome="unknown"))

    def handle(self) -> None:
        """The broker handles the first request."""
        bodies, future = self.requests.popleft()
        results = [self.world.put(bytearray(body)) for body in bodies]
        if self.alive:
            self.answers.append((future, Response(3, 1, status.OK, results, memoryview(b""))))

    def deliver(self) -> None:
        """The client gets an answer."""
        future, response = self.answers.pop(self.world.random.randrange(len(self.answers)))
        future.set_result(response)


class World:
    """A cluster as the sender sees it, of one broker with one partition; `random` decides what happens."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.configs = {"t": TOPIC}
        self.full = False
        self.wires: list[Wire] = []
        self.folder = folder
        self.files = FileCache(sync=lambda fd: None)
        self.starts = 0
        self.start()

    def start(self) -> None:
        """The broker starts, after a crash or for the first time."""
        self.starts += 1
        config = LogConfig(segment_bytes=4000, flush=FlushPolicy(every_ms=None))
        log = TrimmedLog.open(self.folder / "0", "t/0", config, self.files, now_us=time.time_ns() // 1000)
        log.clear_bound()
        self.partition = Partition("t", TOPIC.id, 0, log)
        self.ids = BatchIds(self.starts)

    def crash(self) -> None:
        """kill -9: the kernel keeps what was written; connections and what they carried are gone."""
        for wire in self.wires:
            wire.requests.clear()
            wire.abort()
        self.wires.clear()
        self.partition.log.close(clean=False)
        self.start()

    def put(self, body: bytearray) -> list[Any]:
        """What the broker does with one batch of a PUT; a value that starts with "never" it always refuses."""
        header = read_header(body)
        try:
            if self.full:
                raise DiskFull("/data", 1, 2)
            if decode(memoryview(body), header).values.tolist()[0].startswith(b"never"):
                raise MessageTooLarge("a message", 2, 1)
            appended = (at := self.partition).stored_before(header) or at.append(memoryview(body), [header], self.ids)
        except MetamqError as error:
            number, fields = status.encode_error(error)
            return [number, -1, -1, fields]
        return [status.OK, appended.base_offset, appended.time_us, None]

    async def connection(self, broker_id: int) -> Wire:
        """As metamq.client.net.cluster.Cluster has it."""
        wire = next((wire for wire in self.wires if wire.alive), None)
        if wire is None:
            wire = Wire(self)
            self.wires.append(wire)
        return wire

    def is_current(self, source: Source, address: str) -> bool:
        """As metamq.client.net.cluster.Cluster has it."""
        return True

    def stored(self) -> list[bytes]:
        """The values in the log, by offset."""
        log = self.partition.log
        values: list[bytes] = []
        while len(values) < log.end_offset:
            view = memoryview(log.read(len(values), 1 << 20).data)
            for at, header in walk(view):
                assert header.base_offset == len(values)
                values += decode(view[at : at + header.size], header).values.tolist()
        return values


async def simulate(world: World, steps: int) -> list[tuple[list[bytes], OutgoingBatch]]:
    """Runs the sender in the world; returns the batches in the order in which they were added, all done."""
    choice = world.random
    outgoing = Sender(world, Codec.NONE, delivery_timeout_s=1000.0, request_timeout_s=1000.0)  # type: ignore[arg-type]
    batches: list[tuple[list[bytes], OutgoingBatch]] = []
    now_ns = 0

    def add() -> None:
        kind = "never" if choice.random() < 0.03 else "m"
        values = [f"{kind}-{len(batches)}-{i}".encode() for i in range(choice.randint(1, 3))]
        batches.append((values, a_batch(*values, begun_ns=now_ns)))
        outgoing.add([batches[-1][1]])

    def some(waiting: str) -> None:
        ready = [wire for wire in world.wires if getattr(wire, waiting)]
        if ready:
            wire = choice.choice(ready)
            wire.handle() if waiting == "requests" else wire.deliver()

    def cut() -> None:
        for wire in world.wires:
            if wire.alive:
                while wire.requests and choice.random() < 0.3:
                    wire.requests.pop()  # never reached the broker
                wire.abort()

    def fill() -> None:
        world.full = not world.full

    def expire() -> None:
        outgoing._expire(now_ns + 1000 * 10**9 - choice.randint(0, 30))

    actions = [add, lambda: some("requests"), lambda: some("answers"), cut, fill, expire, world.crash]
    weights = [30, choice.choice([10, 30]), 30, choice.choice([1, 3, 10]), 3, choice.choice([1, 3, 10]), 1]
    for _ in range(steps):
        now_ns += 1
        choice.choices(actions, weights)[0]()
        outgoing.pump()
        await asyncio.sleep(0)
    world.full = False
    for _ in range(20 * len(batches) + 200):  # the network is well again
        if all(batch.done for _, batch in batches) and not any(wire.requests for wire in world.wires):
            break
        some("requests")
        some("answers")
        outgoing.pump()
        await asyncio.sleep(0)
    await outgoing.close()
    return batches


def check(batches: list[tuple[list[bytes], OutgoingBatch]], stored: list[bytes]) -> None:
    """What a producer may rely on."""
    assert [batch for _, batch in batches if not batch.done] == []
    assert len(stored) == len(set(stored)), "something is stored twice"
    acknowledged = [(values, batch) for values, batch in batches if batch.error is None]
    for values, batch in acknowledged:
        assert stored[batch.base_offset : batch.base_offset + len(values)] == values
    offsets = [batch.base_offset for _, batch in acknowledged]
    assert offsets == sorted(offsets), "the order of the acknowledged ones is not that of send()"
    refused = {v for values, batch in batches if batch.error and batch.error.outcome == "not_done" for v in values}
    assert not refused & set(stored), "what was said not to be done is done"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(partition_queue, "SEQUENCES_MAX", 25)


async def settled(outgoing: Sender) -> None:
    """Lets the sender do all that it can do now."""
    for _ in range(10):
        outgoing.pump()
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_pauses")
def test_what_a_given_up_connection_carried_may_come_late(tmp_path: Path) -> None:
    """The broker freezes with two batches in its receive buffer; the first one's time is over; it thaws."""
    world = World(tmp_path, 0)

    async def run() -> list[OutgoingBatch]:
        outgoing = Sender(world, Codec.NONE, delivery_timeout_s=1.0, request_timeout_s=1.0)  # type: ignore[arg-type]
        first, late, alive = a_batch(b"first"), a_batch(b"late", begun_ns=1), a_batch(b"alive", begun_ns=2)
        outgoing.add([first])
        await settled(outgoing)
        frozen = world.wires[0]
        frozen.handle()
        frozen.deliver()
        await settled(outgoing)
        outgoing.add([late, alive])
        await settled(outgoing)
        frozen.abort()
        await asyncio.sleep(0)
        outgoing._expire(10**9 + 2)
        assert isinstance(late.error, DeliveryTimeout)
        assert late.error.outcome == "unknown"
        await settled(outgoing)
        fresh = world.wires[1]
        for _ in range(5):  # the new connection is served first, then what is left of the old one
            while fresh.requests:
                fresh.handle()
            while fresh.answers:
                fresh.deliver()
            await settled(outgoing)
            while frozen.requests and not fresh.requests:
                frozen.handle()
        await outgoing.close()
        return [first, late, alive]

    batches = asyncio.run(run())
    assert [batch.error is None for batch in batches] == [True, False, True]
    assert world.stored() == [b"first", b"late", b"alive"]
    world.partition.log.close(clean=False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("runs", [60, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_nothing_is_lost_doubled_or_out_of_order_on_the_worst_network(runs: int, tmp_path: Path) -> None:
    first_seed = secrets.randbits(32)
    outcomes: dict[str, int] = {}
    for seed in range(first_seed, first_seed + runs):
        print(f"seed {seed}")
        world = World(tmp_path / str(seed), seed)
        batches = asyncio.run(simulate(world, steps=400))
        check(batches, world.stored())
        for _, batch in batches:
            kind = f"{type(batch.error).__name__} {batch.error.outcome}" if batch.error else "stored"
            outcomes[kind] = outcomes.get(kind, 0) + 1
        world.partition.log.close(clean=False)
    print(outcomes)
    assert outcomes.keys() == {
        "stored",
        "MessageTooLarge not_done",
        "MessageTooLarge unknown",
        "DeliveryTimeout not_done",
        "DeliveryTimeout unknown",
    }


@pytest.mark.usefixtures("no_pauses")
def test_the_check_bites(tmp_path: Path) -> None:
    world = World(tmp_path / "w", 1)
    batches = asyncio.run(simulate(world, steps=100))
    stored = world.stored()
    check(batches, stored)
    first = next(batch.base_offset for _, batch in batches if batch.error is None)
    doctored = [
        stored[:first] + stored[first + 1 :],
        [*stored, stored[first]],
        [*stored[:first], stored[first + 1], stored[first], *stored[first + 2 :]],
    ]
    for values in doctored:
        with pytest.raises(AssertionError):
            check(batches, values)
    world.partition.log.close(clean=False)
