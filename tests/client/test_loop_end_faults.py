"""Loops with `idle_timeout_s` while ZooKeeper, brokers and other members are away: all messages, or an error.

Each idle time here is shorter than the outage, so a loop that took the outage for the end of the data would end early.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from metamq import Consumer, Message, aio
from metamq.client.net import outages
from metamq.errors import ConnectError, Timeout, TopicNotFound
from metamq.testing import Cluster, cluster
from metamq.testing.network import Network, Way
from tests.client.idle import IdleTime
from tests.parts import SLOW_S, wait_until

MESSAGES = 400
SESSION_MS = 1_500
IDLE_S = 0.3
ZOOKEEPER, CLIENT = "zookeeper", "client"
_numbers = iter(range(1_000_000))


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    """A cluster to be broken; each test mends what it broke."""
    with cluster() as running:
        yield running


def filled_topic(parts: Cluster, partitions: int = 4, messages: int = MESSAGES) -> str:
    topic = f"t{next(_numbers)}"
    parts.create_topic(topic, partitions)
    with parts.producer() as producer:
        for number in range(messages):
            producer.send(topic, b"%d" % number, key=b"%d" % number)
        producer.flush(60)
    return topic


def iterate(consumer: Consumer[bytes], got: Callable[[bytes], None]) -> None:
    for message in consumer:
        got(message.value)


def take_batches(consumer: Consumer[bytes], got: Callable[[bytes], None]) -> None:
    for batch in consumer.batches():
        for value in batch.values:
            got(value)


def run(consumer: Consumer[bytes], got: Callable[[bytes], None]) -> None:
    consumer.run(lambda message: got(message.value), concurrency=2, dead_letter=False)


class Reading:
    """A loop in a thread of its own, and what became of it."""

    def __init__(self, loop: Callable[[Callable[[bytes], None]], None]) -> None:
        self.values: list[int] = []
        self.error: BaseException | None = None
        self._loop = loop
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._loop(self._got)
        except BaseException as error:
            self.error = error

    def _got(self, value: bytes) -> None:
        self.values.append(int(value))

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def all(self) -> list[int]:
        """What it read, once it has ended."""
        self._thread.join(SLOW_S)
        assert self.is_over
        if self.error is not None:
            raise self.error
        return sorted(self.values)


FACES = pytest.mark.parametrize("loop", [iterate, take_batches, run])
GROUPS = pytest.mark.parametrize("group", [None, "group"])


@contextmanager
def zookeeper_away(parts: Cluster, how: str) -> Iterator[None]:
    server = parts.zookeeper_server
    server.freeze() if how == "frozen" else server.kill()
    try:
        yield
    finally:
        server.thaw() if how == "frozen" else server.restart()


def is_cut_off(consumer: Consumer[bytes]) -> bool:
    """Whether ZooKeeper has been silent for longer than the lease."""
    return not consumer._core._lease.valid()


@pytest.mark.slow
@FACES
@GROUPS
def test_zookeeper_that_freezes_as_soon_as_the_consumer_is_made(
    parts: Cluster, loop: Callable[..., None], group: str | None
) -> None:
    topic = filled_topic(parts)
    with parts.consumer(
        topics=topic, group=group and f"{group}-{topic}", idle_timeout_s=IDLE_S, session_timeout_ms=SESSION_MS
    ) as consumer:
        with zookeeper_away(parts, "frozen"):
            reading = Reading(lambda got: loop(consumer, got))
            wait_until(lambda: is_cut_off(consumer))
            cut_off = threading.Event()
            cut_off.wait(3 * IDLE_S)
            assert not reading.is_over or reading.error, "the end of the data is not known"
        assert sorted(set(reading.all())) == list(range(MESSAGES))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "killed"])
@GROUPS
def test_zookeeper_that_goes_in_the_middle_and_comes_back(parts: Cluster, how: str, group: str | None) -> None:
    topic = filled_topic(parts)
    with (
        parts.producer(delivery_timeout_s=60) as producer,
        parts.consumer(
            topics=topic, group=group and f"{group}-{topic}", idle_timeout_s=60, session_timeout_ms=SESSION_MS
        ) as consumer,
    ):
        idle_time = IdleTime(consumer)
        reading = Reading(lambda got: iterate(consumer, got))
        wait_until(lambda: len(reading.values) == MESSAGES)
        with zookeeper_away(parts, how):
            wait_until(lambda: is_cut_off(consumer))
            idle_time.set(IDLE_S)
            threading.Event().wait(3 * IDLE_S)
            assert not reading.is_over, "there may be more"
            idle_time.set(60.0)
        producer.send(topic, b"%d" % MESSAGES).result(60)
        wait_until(lambda: MESSAGES in reading.values)
        idle_time.set(IDLE_S)
        assert sorted(set(reading.all())) == list(range(MESSAGES + 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "killed"])
@GROUPS
def test_zookeeper_that_stays_away_is_raised_by_name(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch, how: str, group: str | None
) -> None:
    monkeypatch.setattr(outages, "PATIENCE_S", 2 * SESSION_MS / 1000)
    topic = filled_topic(parts)
    with parts.consumer(
        topics=topic, group=group and f"{group}-{topic}", idle_timeout_s=IDLE_S, session_timeout_ms=SESSION_MS
    ) as consumer:
        with zookeeper_away(parts, how), pytest.raises(ConnectError, match="ZooKeeper at 127"):
            Reading(lambda got: iterate(consumer, got)).all()
        monkeypatch.setattr(outages, "PATIENCE_S", 30.0)
        found: list[int] = []
        wait_until(lambda: not is_cut_off(consumer))
        iterate(consumer, lambda value: found.append(int(value)))  # goes on once it is back


@pytest.mark.slow
@GROUPS
def test_asyncio_waits_for_zookeeper_and_raises_what_lasts(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    topic = filled_topic(parts)

    async def scenario() -> None:
        settings: dict[str, Any] = {"idle_timeout_s": IDLE_S, "session_timeout_ms": SESSION_MS}
        async with aio.Consumer(
            parts.zookeeper, topics=topic, group=group and f"{group}-{topic}", **settings
        ) as consumer:

            async def all_of_it() -> list[Message[bytes]]:
                return [message async for message in consumer]

            async def cut_off() -> None:
                await asyncio.to_thread(wait_until, lambda: not consumer._core._lease.valid())

            with zookeeper_away(parts, "frozen"):
                loop = asyncio.ensure_future(all_of_it())
                await cut_off()
                await asyncio.sleep(3 * IDLE_S)
                assert not loop.done()
            assert {int(message.value) for message in await loop} == set(range(MESSAGES))
            monkeypatch.setattr(outages, "PATIENCE_S", 1.5)
            with zookeeper_away(parts, "frozen"):
                await cut_off()
                with pytest.raises(ConnectError, match="ZooKeeper at 127"):
                    await all_of_it()
                with pytest.raises(ConnectError, match="ZooKeeper at 127"):
                    await consumer.run(lambda _message: None, dead_letter=False)

    asyncio.run(scenario())


@pytest.mark.slow
@GROUPS
def test_a_slow_line_to_zookeeper_costs_time_and_no_messages(parts: Cluster, group: str | None) -> None:
    topic = filled_topic(parts, partitions=100)
    network = Network(dict, CLIENT)
    try:
        port = int(parts.zookeeper.rpartition(":")[2])
        line = network.line(ZOOKEEPER, "127.0.0.9", port)
        with Consumer(line, topics=topic, group=group and f"{group}-{topic}", idle_timeout_s=0.05) as consumer:
            network.slow_down(0.15, Way(CLIENT, ZOOKEEPER), Way(ZOOKEEPER, CLIENT))
            assert sorted(Reading(lambda got: iterate(consumer, got)).all()) == list(range(MESSAGES))
            network.heal(Way(CLIENT, ZOOKEEPER), Way(ZOOKEEPER, CLIENT))
    finally:
        network.close()


@pytest.mark.slow
def test_a_broker_that_freezes_between_two_answers(parts: Cluster) -> None:
    topic = filled_topic(parts, partitions=1)
    with parts.consumer(topics=topic, group=f"frozen-{topic}", idle_timeout_s=60) as consumer:
        idle_time = IdleTime(consumer)
        reading = Reading(lambda got: iterate(consumer, got))
        wait_until(lambda: len(reading.values) == MESSAGES)
        parts.broker.freeze()
        try:
            idle_time.set(IDLE_S)
            threading.Event().wait(5 * IDLE_S)
            assert not reading.is_over, "the broker has not said that this is the end"
        finally:
            parts.broker.thaw()
        assert reading.all() == list(range(MESSAGES))


# Other members

MEMBER = """
import sys, time
from metamq import Consumer
with Consumer(sys.argv[1], topics=sys.argv[2], group=sys.argv[3], session_timeout_ms=int(sys.argv[4])) as consumer:
    while not consumer.assignment:
        time.sleep(0.01)
    print("owns", len(consumer.assignment), flush=True)
    time.sleep(3600)
"""


@contextmanager
def member(parts: Cluster, topic: str, group: str, session_timeout_ms: int = 6_000) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns partitions of the group and reads nothing."""
    arguments = [parts.zookeeper, topic, group, str(session_timeout_ms)]
    process = subprocess.Popen([sys.executable, "-c", MEMBER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("owns")
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_partitions_of_a_member_that_died_are_waited_for(
    parts: Cluster, partitions: int, how: signal.Signals
) -> None:
    topic = filled_topic(parts, partitions)
    group = f"dead-{topic}"
    with member(parts, topic, group) as other:
        os.kill(other.pid, how)
        with parts.consumer(topics=topic, group=group, idle_timeout_s=IDLE_S) as consumer:
            assert sorted(Reading(lambda got: iterate(consumer, got)).all()) == list(range(MESSAGES))


def test_a_loop_without_partitions_ends_when_those_that_have_them_live(parts: Cluster) -> None:
    topic = filled_topic(parts, partitions=1)
    group = f"none-{topic}"
    # So long a session: what tells that the other one lives is its sign of life, not the time.
    settings: dict[str, Any] = {"topics": topic, "group": group, "session_timeout_ms": 60_000}
    with (
        parts.consumer(**settings, consumer_id="a", idle_timeout_s=IDLE_S) as one,
        parts.consumer(**settings, consumer_id="b", idle_timeout_s=IDLE_S) as two,
    ):
        loops = [Reading(lambda got, consumer=consumer: iterate(consumer, got)) for consumer in (one, two)]
        assert sorted(value for loop in loops for value in loop.all()) == list(range(MESSAGES))


@pytest.mark.slow
def test_a_partition_that_a_living_member_holds_on_to_is_an_error_that_names_it(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled_topic(parts, partitions=2)
    group = f"held-{topic}"
    busy, done = threading.Semaphore(0), threading.Event()

    def slow(_message: Message[bytes]) -> None:
        busy.release()
        done.wait(SLOW_S)

    settings: dict[str, Any] = {"topics": topic, "group": group, "session_timeout_ms": 2_000}
    with parts.consumer(**settings, consumer_id="a") as one:
        running = threading.Thread(target=lambda: one.run(slow, concurrency=2))
        running.start()
        try:
            assert busy.acquire(timeout=SLOW_S)
            assert busy.acquire(timeout=SLOW_S), "it has a message of each partition in hand"
            monkeypatch.setattr(outages, "PATIENCE_S", 0.5)
            with parts.consumer(**settings, consumer_id="b", idle_timeout_s=IDLE_S) as two:
                with pytest.raises(Timeout, match=rf"{topic}/0-1 first, which 'a' still owns"):
                    Reading(lambda got: iterate(two, got)).all()
                monkeypatch.setattr(outages, "PATIENCE_S", 30.0)
                done.set()
                assert Reading(lambda got: iterate(two, got)).all(), "its share, once it has it"
        finally:
            done.set()
            one.close()
            running.join(SLOW_S)


def test_a_topic_that_is_not_there_is_named_at_once_and_a_deleted_one_ends_the_loop(parts: Cluster) -> None:
    with pytest.raises(TopicNotFound):
        parts.consumer(topics="never", group="never", idle_timeout_s=IDLE_S)
    topic = filled_topic(parts)
    with parts.consumer(topics=topic, group=f"gone-{topic}", idle_timeout_s=IDLE_S) as consumer:
        assert len(Reading(lambda got: iterate(consumer, got)).all()) == MESSAGES
        with parts.admin() as admin:
            admin.delete(topic)
        wait_until(lambda: not consumer.assignment)
        assert Reading(lambda got: iterate(consumer, got)).all() == []
