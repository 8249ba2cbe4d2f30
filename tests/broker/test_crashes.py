"""kill -9 of the broker under load: what was acknowledged is there exactly once, where it was said to be, in order."""

from __future__ import annotations

import asyncio
import copy
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from metamq import Producer, aio
from metamq.client.outgoing import Delivery, ManyDelivery
from metamq.errors import BufferFull, MetamqError
from metamq.testing import Cluster, cluster
from tests.parts import Stored, read_topic, statistics

KEYS = [f"key-{n}".encode() for n in range(12)]


@dataclass
class Told:
    """What one producer was told, in the order in which it sent."""

    acknowledged: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """value -> (partition, offset)."""
    failed: dict[bytes, MetamqError] = field(default_factory=dict)
    sent: list[tuple[bytes | None, bytes]] = field(default_factory=list)
    """(key, value)."""


def check(told: list[Told], stored: dict[str, list[Stored]]) -> None:
    """What a topic with flush="ack" promises to its producers."""
    counts = Counter(message.value for messages in stored.values() for message in messages)
    twice = [value for value, count in counts.items() if count > 1]
    assert not twice, f"stored more than once: {twice[:10]}"
    places = {message.value: (name, message.offset) for name, messages in stored.items() for message in messages}
    for name, messages in stored.items():
        assert [message.offset for message in messages] == list(range(len(messages))), f"holes in the offsets of {name}"
    known = {value for one in told for _, value in one.sent}
    assert counts.keys() <= known, "something is stored that nobody sent"
    for one in told:
        for value, place in one.acknowledged.items():
            assert places.get(value) == place, f"{value!r} was acknowledged at {place}, it is at {places.get(value)}"
        for value, error in one.failed.items():
            assert error.outcome == "unknown" or value not in places, f"{value!r} failed for certain, and is stored"
        for key in {key for key, _ in one.sent if key is not None}:
            of_key = [value for k, value in one.sent if k == key and value in places]
            assert len({places[value][0] for value in of_key}) <= 1, f"{key!r} is in several partitions"
            ours = set(of_key)
            there = [m.value for messages in stored.values() for m in messages if m.value in ours]
            assert there == of_key, f"the messages of {key!r} are out of order"


class Load:
    """One producer's stream of messages, until told to stop; `told` is complete after join()."""

    def __init__(self, number: int, seed: int, run: Callable[[Load], None]) -> None:
        self.number = number
        self.random = random.Random(f"{seed}-{number}")
        self.told = Told()
        self.ending = threading.Event()
        self.problem: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._guarded)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run(self)
        except BaseException as error:
            self.problem = error

    def next_message(self, *, keyed: bool) -> tuple[bytes | None, bytes]:
        """The next (key, value), noted as sent."""
        # Keys are a producer's own: the order of a key's messages is promised to one producer.
        key = b"%d/" % self.number + self.random.choice(KEYS) if keyed else None
        message = key, b"%d-%d" % (self.number, len(self.told.sent))
        self.told.sent.append(message)
        return message

    def note(self, values: list[bytes], delivery: Delivery | ManyDelivery, timeout_s: float) -> None:
        """Notes what a delivery says of its messages."""
        try:
            result = delivery.result(timeout_s)
        except MetamqError as error:
            self.told.failed.update((value, error) for value in values)
            return
        if isinstance(delivery, Delivery):
            self.told.acknowledged[values[0]] = result.partition, result.offset
            return
        places = [(r.partition, r.offset + i) for r in result for i in range(r.count)]
        assert len(places) == len(values)
        self.told.acknowledged.update(zip(values, places, strict=True))

    def join(self) -> Told:
        """Ends the stream; raises what went wrong in it."""
        self.ending.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        if self.problem is not None:
            raise self.problem
        return self.told


def blocking(zookeeper: str, *, keyed: bool, **settings: Any) -> Callable[[Load], None]:
    """send(), many deliveries open at once."""

    def run(load: Load) -> None:
        with Producer[bytes](zookeeper, delivery_timeout_s=60, **settings) as producer:
            pending: list[tuple[bytes, Delivery]] = []
            while not load.ending.is_set():
                for _ in range(load.random.randint(1, 40)):
                    key, value = load.next_message(keyed=keyed)
                    pending.append((value, producer.send("t", value, key)))
                load.ending.wait(load.random.random() * 0.01)
                while len(pending) > 2000:
                    value, delivery = pending.pop(0)
                    load.note([value], delivery, 70)
            for value, delivery in pending:
                load.note([value], delivery, 70)

    return run


def many(zookeeper: str) -> Callable[[Load], None]:
    """send_many(), one list at a time for one partition's worth of keys, so that its places are one range."""

    def run(load: Load) -> None:
        with Producer[bytes](zookeeper, delivery_timeout_s=60) as producer:
            while not load.ending.is_set():
                values = [load.next_message(keyed=False)[1] for _ in range(load.random.randint(1, 200))]
                load.note(values, producer.send_many("t", values), 70)

    return run


def asynchronous(zookeeper: str) -> Callable[[Load], None]:
    """The asyncio producer, keyed, with a small buffer and linger."""

    async def stream(load: Load) -> None:
        async with aio.Producer[bytes](
            zookeeper, delivery_timeout_s=60, linger_ms=2, buffer_bytes=20_000, compression="zstd"
        ) as producer:
            pending: list[tuple[bytes, Delivery]] = []
            while not load.ending.is_set():
                key, value = load.next_message(keyed=True)
                try:
                    pending.append((value, producer.send("t", value, key)))
                except BufferFull:
                    load.told.sent.pop()
                    await producer.drain()
                if len(pending) % 20 == 0:
                    await asyncio.sleep(0.001)
            for value, delivery in pending:
                try:
                    receipt = await delivery
                except MetamqError as error:
                    load.told.failed[value] = error
                else:
                    load.told.acknowledged[value] = receipt.partition, receipt.offset

    return lambda load: asyncio.run(stream(load))


@pytest.fixture
def running() -> Iterator[Cluster]:
    with cluster() as parts:
        yield parts


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_kill_9_under_load_loses_and_doubles_nothing(running: Cluster, kills: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    with running.admin() as admin:
        topic = admin.create_topic("t", partitions=3, flush="ack", segment_bytes=200_000)
    zookeeper = running.zookeeper
    kinds = [
        blocking(zookeeper, keyed=True),
        blocking(zookeeper, keyed=True, batch_bytes=300),
        blocking(zookeeper, keyed=False, linger_ms=1),
        many(zookeeper),
        asynchronous(zookeeper),
    ]
    loads = [Load(number, seed, kind) for number, kind in enumerate(kinds)]
    repeats = 0
    try:
        for _ in range(kills):
            time.sleep(choice.random() * 0.2)  # the random moment
            repeats += statistics(running.broker)["counters"]["repeats"]
            running.broker.kill()
            running.broker.start()
    finally:
        for load in loads:
            load.ending.set()
    told = [load.join() for load in loads]
    stored = read_topic(running.broker, "t", topic.id)
    repeats += statistics(running.broker)["counters"]["repeats"]
    acknowledged = sum(len(one.acknowledged) for one in told)
    print(f"{acknowledged} acknowledged, {sum(len(one.failed) for one in told)} failed, {repeats} batches came again")
    assert all(one.acknowledged for one in told)
    check(told, stored)


def test_the_check_bites() -> None:
    stored = {"0-0": [Stored(0, b"k", b"0-0"), Stored(1, b"k", b"0-1")], "0-1": [Stored(0, None, b"0-2")]}
    sent: list[tuple[bytes | None, bytes]] = [(b"k", b"0-0"), (b"k", b"0-1"), (None, b"0-2"), (None, b"0-3")]
    told = Told({b"0-0": ("0-0", 0), b"0-1": ("0-0", 1), b"0-2": ("0-1", 0)}, {b"0-3": MetamqError("no")}, sent)
    check([told], stored)

    def doctored(change: Callable[[dict[str, list[Stored]]], object]) -> None:
        wrong = copy.deepcopy(stored)
        change(wrong)
        with pytest.raises(AssertionError):
            check([told], wrong)

    doctored(lambda s: s["0-0"].pop())  # lost
    doctored(lambda s: s["0-0"].append(Stored(2, b"k", b"0-0")))  # doubled
    doctored(lambda s: s["0-1"].append(Stored(1, None, b"0-2")))
    doctored(lambda s: s.update({"0-0": [Stored(0, b"k", b"0-1"), Stored(1, b"k", b"0-0")]}))  # swapped
    doctored(lambda s: s.update({"0-0": [], "0-1": [*s["0-1"], *s["0-0"]]}))  # elsewhere
    doctored(lambda s: s["0-1"].append(Stored(1, None, b"0-3")))  # stored, though it was said not to be
    doctored(lambda s: s["0-1"].append(Stored(1, None, b"9-9")))  # of nobody
    unacknowledged = Told({}, {}, sent)
    with pytest.raises(AssertionError, match="out of order"):
        check([unacknowledged], {"0-0": [Stored(0, b"k", b"0-1"), Stored(1, b"k", b"0-0")]})
