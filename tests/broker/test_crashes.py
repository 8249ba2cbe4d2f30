"""kill -9 of the broker, under load and while it starts, and of ZooKeeper: acknowledged messages are there once, in
order and in place."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import random
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq import Producer, aio, testing
from metamq.client.producer.outgoing import Delivery
from metamq.errors import BufferFull, MetamqError
from metamq.testing import BrokerProcess, Cluster
from tests.load import Load, Told, blocking, check
from tests.parts import Stored, read_topic, statistics, wait_until


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
    with testing.cluster() as parts:  # with a ZooKeeper of its own, which is killed too
        yield parts


SEES_FILES = Path("/proc/self/fd").is_dir()
"""Only there it can be told how far a start has come."""
KILLS_BEFORE_READY: list[list[str]] = [["recovery"], [], ["soon", "recovery"], ["soon"], ["recovery", "recovery"]]
"""Between two times that it is ready, in turn."""
ZOOKEEPER_KILLED_EVERY = 4
"""In rounds. 4 and the 5 ways above have no common divisor, so ZooKeeper is killed with each way."""


def opens_logs(broker: BrokerProcess) -> bool:
    """Whether a starting broker has come to its logs: one of their files is open."""
    for descriptor in Path(f"/proc/{broker.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(f"{broker.data / 'topics'}/"):
                return True
    return False


def kill_while_it_starts(broker: BrokerProcess, when: str, choice: random.Random) -> str:
    """Starts the broker and kills it `soon`, or in its `recovery`; how far it had come by then."""
    broker.start(wait=False)
    if when == "recovery":
        wait_until(lambda: opens_logs(broker), what="the recovery")
        time.sleep(choice.random() * 0.01)
    else:
        time.sleep(choice.random() * 0.3)
    broker.freeze()  # so that it comes no further while it is looked at
    process = broker._process
    assert process is not None
    assert process.stdout is not None
    is_ready = select.select([process.stdout], [], [], 0)[0]
    stage = "ready" if is_ready else "in recovery" if opens_logs(broker) else "starting"
    broker.kill()
    return stage


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(20, marks=pytest.mark.timeout(900)),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
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
    stages: Counter[str] = Counter()
    try:
        for number in itertools.count():
            is_enough = repeats and (not SEES_FILES or (stages["starting"] and stages["in recovery"]))
            if number >= kills and (is_enough or number >= 5 * kills):
                break
            if number >= kills:  # on a slow machine producers may not have come back before
                wait_until(lambda: statistics(running.broker)["counters"]["messages_in"], what="messages")
            if kills_zookeeper := number % ZOOKEEPER_KILLED_EVERY == 0:
                running.zookeeper_server.kill()
            time.sleep(choice.random() * 0.2)  # the random moment
            repeats += statistics(running.broker)["counters"]["repeats"]
            running.broker.kill()
            if kills_zookeeper:
                running.zookeeper_server.restart()
            for when in KILLS_BEFORE_READY[number % len(KILLS_BEFORE_READY)] if SEES_FILES else []:
                stages[kill_while_it_starts(running.broker, when, choice)] += 1
            running.broker.start()
    finally:
        for load in loads:
            load.ending.set()
    told = [load.join() for load in loads]
    stored = read_topic(running.broker, "t", topic.id)
    repeats += statistics(running.broker)["counters"]["repeats"]
    acknowledged = sum(len(one.acknowledged) for one in told)
    print(f"{acknowledged} acknowledged, {sum(len(one.failed) for one in told)} failed, {repeats} batches came again")
    print(f"killed when it was ready: {number}; before that: {dict(stages)}")
    assert all(one.acknowledged for one in told)
    check(told, stored)
    assert repeats > 0
    assert not SEES_FILES or (stages["starting"] and stages["in recovery"])


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
