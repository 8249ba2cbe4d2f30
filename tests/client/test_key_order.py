"""`consumer.run(listener, order="key")` and its asyncio version, on a cluster."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Message, Rollback, TopicPartition, aio
from metamq.client.consumer.key_order import SPAN_PER_HANDLER
from metamq.errors import ConfigError, WrongType
from tests.client.idle import all_of, run_until
from tests.database_offsets import offsets_in
from tests.parts import wait_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop

KEYS = 10


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


def keyed(shop: Shop, topic: str, count: int, *, keys: int = KEYS) -> None:
    """Stores b"0", b"1", ... in partition 0-0, in batches of different sizes, with `keys` keys in turn."""
    for start in range(0, count, 7):
        numbers = range(start, min(start + 7, count))
        values, names = [b"%d" % number for number in numbers], [b"%d" % (number % keys) for number in numbers]
        for value, name in zip(values, names, strict=True):
            delivery = shop.producer.send(topic, value, key=name, partition="0-0")
        delivery.result(60)


class Seen:
    """A listener that notes what it gets, and fails if two messages of a key run at a time, or in another order."""

    def __init__(self, work: Any = lambda message: None) -> None:
        self.work = work
        self.lock = threading.Lock()
        self.counts: Counter[int] = Counter()
        self.by_key: dict[bytes | None, list[int]] = defaultdict(list)
        self.now: Counter[bytes | None] = Counter()
        self.most_at_once = 0

    def __call__(self, message: Message[Any]) -> None:
        self.begins(message)
        try:
            self.work(message)
        finally:
            self.ends(message)

    def begins(self, message: Message[Any]) -> None:
        with self.lock:
            self.now[message.key] += 1
            assert message.key is None or self.now[message.key] == 1, "two messages of a key are processed at a time"
            self.most_at_once = max(self.most_at_once, self.now.total())
            self.counts[message.offset] += 1
            self.by_key[message.key].append(message.offset)

    def ends(self, message: Message[Any]) -> None:
        with self.lock:
            self.now[message.key] -= 1

    def check_order(self) -> None:
        assert all(offsets == sorted(offsets) for offsets in self.by_key.values())


def test_one_partition_is_processed_side_by_side_and_each_key_in_order(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 200)
    together = threading.Barrier(KEYS)

    def meet(message: Message[Any]) -> None:
        if message.offset < KEYS:
            together.wait(60)  # the first message of each key, at the same time

    seen = Seen(meet)
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        run_until(lambda: len(seen.counts) == 200, consumer, seen, order="key", concurrency=KEYS)
    assert seen.counts == Counter(range(200))
    seen.check_order()
    assert shop.committed(group)[tp(topic)] == 200


def test_messages_without_a_key_have_no_order(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 8)
    together = threading.Barrier(8)
    seen = Seen(lambda message: together.wait(60))
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        run_until(lambda: len(seen.counts) == 8, consumer, seen, order="key", concurrency=8)
    assert seen.counts == Counter(range(8))


def test_a_commit_never_passes_an_unfinished_message(shop: Shop, group: str) -> None:
    topic, concurrency = shop.topic(), 4
    span = SPAN_PER_HANDLER * concurrency
    keyed(shop, topic, 3 * span)
    slow, go_on = threading.Event(), threading.Event()

    def wait_at_13(message: Message[Any]) -> None:
        if message.offset == 13:
            slow.set()
            assert go_on.wait(60)

    seen = Seen(wait_at_13)
    with shop.consumer(topic, group, commit_interval_ms=20, idle_timeout_s=0.5) as consumer:
        settings = {"order": "key", "concurrency": concurrency}
        thread = threading.Thread(
            target=run_until, args=(lambda: len(seen.counts) == 3 * span, consumer, seen), kwargs=settings
        )
        thread.start()
        assert slow.wait(60)
        others = {offset for offset in range(13 + span) if offset % KEYS != 3 or offset <= 13}
        shop.until(lambda: set(seen.counts) == others and shop.committed(group)[tp(topic)] == 13)
        health = consumer.health().partitions[tp(topic)]
        assert (health.done_offset, health.in_hand) == (13, True)
        assert [(each.offset, each.key) for each in health.running] == [(13, b"3")]
        assert health.running[0].running_s > 0
        assert set(seen.counts) == others, "messages beyond the span were processed"
        go_on.set()
        thread.join(60)
        assert consumer.health().partitions[tp(topic)].running == ()
    assert seen.counts == Counter(range(3 * span))
    seen.check_order()
    assert shop.committed(group)[tp(topic)] == 3 * span


def test_a_failing_message_holds_up_its_key_only_and_goes_to_the_dead_letters(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 60)

    def fail(message: Message[Any]) -> None:
        if message.offset == 2:
            if len(seen.counts) < 55:  # all but those behind it
                raise Rollback(0.01)
            raise ValueError("never")

    seen = Seen(fail)
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        settings = {"order": "key", "concurrency": 8, "max_attempts": 2, "retry_delay_s": 0}
        run_until(lambda: len(seen.counts) == 60, consumer, seen, **settings)
    assert list(dict.fromkeys(seen.by_key[b"2"])) == [2, 12, 22, 32, 42, 52]
    assert set((seen.counts - Counter(range(60))).elements()) <= {2}
    assert shop.committed(group)[tp(topic)] == 60
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.5) as letters:
        [letter] = all_of(letters, 1)
    assert (letter.key, letter.value, letter.headers["metamq-attempts"]) == (b"2", b"2", b"2")


def test_an_error_ends_it_and_nothing_is_lost(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 100)
    broken = True

    def fail(message: Message[Any]) -> None:
        if message.offset == 41 and broken:
            raise RuntimeError("cannot be done")

    seen = Seen(fail)
    settings: dict[str, Any] = {"order": "key", "concurrency": 4, "dead_letter": False, "retry_delay_s": 0}
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        with pytest.raises(RuntimeError, match="cannot be done"):
            consumer.run(seen, **settings, max_attempts=2)
        done = consumer.health().partitions[tp(topic)].done_offset
        assert done <= 41
        assert not consumer.health().partitions[tp(topic)].in_hand
        broken = False
        before = set(seen.counts)
        seen.counts.clear()
        run_until(lambda: set(seen.counts) == set(range(done, 100)), consumer, seen, **settings)
    assert seen.counts == Counter(range(done, 100))
    assert before >= set(range(done))
    assert shop.committed(group)[tp(topic)] == 100


def test_a_rebalance_repeats_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    for index in range(2):
        for number in range(150):
            delivery = shop.producer.send(topic, b"", key=b"%d" % (number % KEYS), partition=f"0-{index}")
        delivery.result(60)
    counts: Counter[tuple[str, int]] = Counter()
    lock = threading.Lock()

    def slow(message: Message[Any]) -> None:
        time.sleep(0.002 if message.key != b"3" else 0.03)
        with lock:
            counts[message.partition, message.offset] += 1

    def consume(name: str) -> None:
        with shop.consumer(topic, group, consumer_id=name, idle_timeout_s=1.0) as consumer:
            run_until(lambda: len(counts) == 300, consumer, slow, order="key", concurrency=8)

    members = [threading.Thread(target=consume, args=(name,)) for name in ("a", "b")]
    members[0].start()
    shop.until(lambda: len(counts) > 20)
    members[1].start()
    for member in members:
        member.join(60)
    assert sorted(counts) == sorted((f"0-{index}", offset) for index in range(2) for offset in range(150))
    assert set(counts.values()) == {1}
    assert shop.committed(group) == {tp(topic, 0): 150, tp(topic, 1): 150}


def test_decode_and_filter(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 20)
    shop.producer.send(topic, b"no number", key=b"3", partition="0-0").result(60)
    seen = Seen()
    even = shop.consumer(
        topic, group, decode=int, filter=lambda message: int(message.value) % 2 == 0, idle_timeout_s=0.5
    )
    with even as consumer:
        run_until(
            lambda: consumer.lag() == {tp(topic): 0}, consumer, seen, order="key", max_attempts=2, retry_delay_s=0
        )
    assert seen.counts == Counter(range(0, 20, 2))
    assert shop.committed(group)[tp(topic)] == 21
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.5) as letters:
        [letter] = all_of(letters, 1)
    assert letter.value == b"no number"


def test_a_commit_of_a_position_is_refused(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 1)
    errors: list[ConfigError] = []

    with shop.consumer(topic, group, auto_commit=False, idle_timeout_s=0.5) as consumer:

        def commits(message: Message[Any]) -> None:
            for position in (message, {tp(topic): 1}):
                with pytest.raises(ConfigError, match="unfinished messages") as refused:
                    consumer.commit(position)
                errors.append(refused.value)
            consumer.commit()

        run_until(lambda: len(errors) == 2, consumer, commits, order="key")
        assert shop.committed(group)[tp(topic)] == 0
        consumer.commit()
    assert shop.committed(group)[tp(topic)] == 1


def test_a_seek_in_the_middle(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 40)
    has_sought = threading.Event()

    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:

        def seeks(message: Message[Any]) -> None:
            if message.offset == 9 and not has_sought.is_set():
                seen.counts.clear()
                has_sought.set()
                consumer.seek(tp(topic), 0)

        seen = Seen(seeks)
        run_until(lambda: set(seen.counts) == set(range(40)), consumer, seen, order="key", concurrency=KEYS)
    assert shop.committed(group)[tp(topic)] == 40


def test_a_pause_in_the_middle_repeats_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 40)

    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:

        def pauses(message: Message[Any]) -> None:
            if message.offset in (9, 25):
                consumer.pause()
                consumer.resume()

        seen = Seen(pauses)
        run_until(lambda: len(seen.counts) == 40, consumer, seen, order="key", concurrency=KEYS)
    assert seen.counts == Counter(range(40))
    seen.check_order()
    assert shop.committed(group)[tp(topic)] == 40


def test_close_ends_it_at_once_and_no_message_is_begun_after_it(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 100)
    busy, go_on = threading.Barrier(5), threading.Event()

    def slow(message: Message[Any]) -> None:
        busy.wait(60)
        assert go_on.wait(60)

    seen = Seen(slow)
    consumer = shop.consumer(topic, group)
    thread = threading.Thread(target=consumer.run, args=(seen,), kwargs={"order": "key", "concurrency": 4})
    thread.start()
    busy.wait(60)
    start = time.monotonic()
    consumer.close()
    assert time.monotonic() - start < 30
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert seen.counts.total() == 4
    assert shop.committed(group)[tp(topic)] == 0


def test_an_order_that_does_not_exist(shop: Shop, group: str) -> None:
    topic = shop.topic()
    with (
        shop.consumer(topic, group) as consumer,
        pytest.raises(ConfigError, match=r"`order` is 'keys'.*'partition' or"),
    ):
        consumer.run(print, order="keys")  # type: ignore[arg-type]
    with shop.consumer(topic, group) as consumer, pytest.raises(WrongType, match="`dead_letter`"):
        consumer.run(print, dead_letter="letters")  # type: ignore[arg-type]


def test_the_order_of_keys_with_commits_in_a_database_is_refused(shop: Shop, group: str, tmp_path: Path) -> None:
    """Each message would fail, and become a dead letter."""
    offsets = offsets_in(lambda: sqlite3.connect(tmp_path / "offsets.db"))
    with (
        shop.consumer(shop.topic(), group, offsets=offsets, auto_commit=False) as consumer,
        pytest.raises(ConfigError, match="cannot be committed in a transaction"),
    ):
        consumer.run(print, order="key")


KILLED = """
import os, sys, time
from metamq import Consumer

servers, topic, group, file = sys.argv[1:]
told = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def listener(message):
    time.sleep(0.001 * (message.offset % 5))
    os.write(told, b"%s %d\\n" % (message.key, message.offset))

with Consumer(servers, topics=topic, group=group, commit_interval_ms=10, session_timeout_ms=2000) as consumer:
    consumer.run(listener, order="key", concurrency=8)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing(shop: Shop, group: str, tmp_path: Path) -> None:
    count = 2_000
    topic, file = shop.topic(), tmp_path / "handled"
    keyed(shop, topic, count)
    file.touch()
    lives = 0
    while b"\n" not in file.read_bytes() or len(set(file.read_bytes().splitlines())) < count:
        before = len(file.read_bytes())
        command = [sys.executable, "-c", KILLED, shop.cluster.zookeeper, topic, group, str(file)]
        with subprocess.Popen(command) as process:
            goal = before + 4_000

            def is_far_enough(goal: int = goal) -> bool:
                handled = file.read_bytes()
                return len(handled) > goal or len(set(handled.splitlines())) == count

            wait_until(is_far_enough, what="progress")
            process.send_signal(signal.SIGKILL)
        lives += 1
    lines = [line.split() for line in file.read_bytes().splitlines()]
    handled = [(key, int(offset)) for key, offset in lines]
    print(f"{lives} lives, {len(handled) - count} messages again")
    assert {offset for _, offset in handled} == set(range(count))
    assert lives > 2
    for key in range(KEYS):
        first = list(dict.fromkeys(offset for name, offset in handled if name == b"%d" % key))
        assert first == sorted(first)


# The asyncio API


def test_asyncio_side_by_side_and_each_key_in_order(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 200)
    seen = Seen()

    async def scenario() -> None:
        together = asyncio.Barrier(KEYS)

        async def listener(message: Message[bytes]) -> None:
            seen.begins(message)
            try:
                if message.offset < KEYS:
                    await asyncio.wait_for(together.wait(), 60)
                await asyncio.sleep(0.0001 * (message.offset % 3))
                if message.offset == 50 and seen.counts[50] < 3:
                    raise ValueError
            finally:
                seen.ends(message)

        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, idle_timeout_s=0.5) as consumer:
            while len(seen.counts) < 200:
                await consumer.run(listener, order="key", concurrency=64, retry_delay_s=0.001)
            assert consumer.health().partitions[tp(topic)].done_offset == 200

    asyncio.run(scenario())
    assert seen.counts == Counter(range(200)) + Counter({50: 2})
    seen.check_order()
    assert shop.committed(group)[tp(topic)] == 200


def test_asyncio_a_cancelled_run_loses_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 100)
    seen = Seen()

    async def scenario() -> int:
        reached = asyncio.Event()

        async def listener(message: Message[bytes]) -> None:
            seen.begins(message)
            try:
                if message.offset == 30 and not reached.is_set():
                    reached.set()
                    await asyncio.sleep(60)
                await asyncio.sleep(0.001)
            finally:
                seen.ends(message)

        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, idle_timeout_s=0.5) as consumer:
            run = asyncio.ensure_future(consumer.run(listener, order="key", concurrency=8))
            await reached.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            done = consumer.health().partitions[tp(topic)].done_offset
            assert seen.now.total() == 0
            seen.counts.clear()
            while set(seen.counts) != set(range(done, 100)):
                await consumer.run(listener, order="key", concurrency=8)
            return done

    done = asyncio.run(scenario())
    assert done <= 30
    assert seen.counts == Counter(range(done, 100))
    assert shop.committed(group)[tp(topic)] == 100


def test_asyncio_an_error_ends_it(shop: Shop, group: str) -> None:
    topic = shop.topic()
    keyed(shop, topic, 20)

    async def listener(message: Message[bytes]) -> None:
        if message.offset == 5:
            raise RuntimeError("cannot be done")

    async def scenario() -> None:
        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group) as consumer:
            with pytest.raises(RuntimeError, match="cannot be done"):
                await consumer.run(listener, order="key", max_attempts=1, dead_letter=False)

    asyncio.run(scenario())
    assert shop.committed(group)[tp(topic)] in {None, *range(6)}


@pytest.mark.parametrize("order", ["partition", "key"])
def test_an_outage_is_waited_for_in_tasks_and_makes_no_dead_letters(shop: Shop, group: str, order: Any) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    counts: Counter[int] = Counter()

    async def listener(message: Message[Any]) -> None:
        counts[message.offset] += 1
        if counts[message.offset] < 8:
            raise TimeoutError("the database does not answer")

    async def scenario() -> None:
        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, idle_timeout_s=0.5) as consumer:
            while counts[2] < 8:
                await consumer.run(listener, order=order, max_attempts=1, retry_delay_s=0.001, retry_on=TimeoutError)

    asyncio.run(scenario())
    assert counts == Counter(dict.fromkeys(range(3), 8))
    assert sum(offset or 0 for offset in shop.committed(group).values()) == 3
