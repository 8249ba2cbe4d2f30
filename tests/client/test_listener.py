"""`consumer.run(listener)`: retry, rollback, dead letters, slow handlers; decisions by value, the rest on a cluster."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Message, Rollback, TopicPartition
from metamq.client.handling.dead_letters import dead_letter_headers, dead_letter_topic
from metamq.client.handling.retry_policy import RETRY_DELAY_MAX_S, RetryPolicy
from metamq.errors import ConfigError, DecodeError, WrongType
from tests.client.idle import all_of, run_until
from tests.parts import wait_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


# Decisions


def test_attempts_and_pauses() -> None:
    policy = RetryPolicy(max_attempts=4, retry_delay_s=0.1)
    error = ValueError("no")
    assert [policy.pause_after(error, failed) for failed in (1, 2, 3, 4, 5)] == [0.1, 0.2, 0.4, None, None]
    assert RetryPolicy(1, 0.1).pause_after(error, 1) is None
    assert RetryPolicy(10_000, 0.1).pause_after(error, 5_000) == RETRY_DELAY_MAX_S
    patient = RetryPolicy(1_000, 0.1)
    assert patient.pause_after(error, 200) == RETRY_DELAY_MAX_S
    assert RetryPolicy(3, 0.0).pause_after(error, 1) == 0.0


def test_a_rollback_is_no_failure() -> None:
    policy = RetryPolicy(max_attempts=1, retry_delay_s=0.1)
    for _ in range(100):
        assert policy.pause_after(Rollback(2.5), 0) == 2.5


def test_an_error_of_retry_on_has_no_limit_and_a_growing_pause() -> None:
    policy = RetryPolicy(max_attempts=1, retry_delay_s=0.1, retry_on=(OSError,))
    assert [policy.pause_after(ConnectionError(), 0, outages) for outages in (1, 2, 500)] == [0.1, 0.2, 30.0]
    assert policy.pause_after(ValueError(), 1) is None
    with pytest.raises(WrongType, match="retry_on"):
        RetryPolicy(1, 0.1, ("OSError",))  # type: ignore[arg-type]


@pytest.mark.parametrize(("attempts", "delay_s"), [(0, 0.1), (-1, 0.1), (3, -0.1), (3, math.nan)])
def test_a_policy_that_cannot_be(attempts: int, delay_s: float) -> None:
    with pytest.raises(ConfigError, match=r"`(max_attempts|retry_delay_s)` must be"):
        RetryPolicy(attempts, delay_s)


def test_dead_letters_say_where_they_come_from() -> None:
    message = Message("t", "0-3", 17, b"k", b"v", {"own": b"1"}, 123)
    headers = dead_letter_headers(message, ValueError("x" * 5_000), 5)
    assert headers["own"] == b"1"
    assert headers["metamq-topic"] == b"t"
    assert headers["metamq-partition"] == b"0-3"
    assert headers["metamq-offset"] == b"17"
    assert headers["metamq-timestamp"] == b"123"
    assert headers["metamq-attempts"] == b"5"
    assert headers["metamq-error"].startswith(b"ValueError: xxx")
    assert len(headers["metamq-error"]) <= 1_000
    assert headers["metamq-traceback"] == b"x" * 4_095 + b"\n"
    assert dead_letter_topic("etl") == "etl.dead-letter"
    with pytest.raises(ConfigError, match="belongs to a group"):
        dead_letter_topic(None)


async def awaits(_message: Message[Any]) -> None:
    raise AssertionError("nobody is to await it")


class AwaitsWhenCalled:
    async def __call__(self, message: Message[Any]) -> None:
        await awaits(message)


@pytest.mark.parametrize("listener", [awaits, partial(awaits), AwaitsWhenCalled(), AwaitsWhenCalled().__call__])
def test_a_coroutine_function_is_refused(shop: Shop, group: str, listener: Any) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    with shop.consumer(topic, group, idle_timeout_s=60) as consumer, pytest.raises(WrongType, match=r"metamq\.aio"):
        consumer.run(listener)
    assert shop.committed(group)[tp(topic)] in (None, 0)


def test_a_message_whose_listener_returns_something_to_be_awaited_is_not_done(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    with shop.consumer(topic, group, idle_timeout_s=60) as consumer:
        with pytest.raises(WrongType, match=r"plain function"):
            consumer.run(lambda message: awaits(message) if message.offset == 1 else None)
        assert next(iter(consumer)).offset == 1
    assert dead_letter_topic(group) not in shop.admin.topics()


# On a cluster


class Seen:
    """A listener that counts, and fails as `fail` says."""

    def __init__(self, fail: Any = None) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[int] = Counter()
        self.order: dict[str, list[int]] = defaultdict(list)
        self.now: Counter[str] = Counter()
        self.fail = fail

    def __call__(self, message: Message[Any]) -> None:
        with self.lock:
            self.now[message.partition] += 1
            assert self.now[message.partition] == 1, "two threads handle one partition"
            self.counts[int(message.value)] += 1
            self.order[message.partition].append(message.offset)
        try:
            if self.fail is not None:
                self.fail(message, self.counts[int(message.value)])
        finally:
            with self.lock:
                self.now[message.partition] -= 1


def test_every_message_is_handled_once_in_order_and_partitions_side_by_side(shop: Shop, group: str) -> None:
    topic = shop.topic(4)
    for index in range(4):
        shop.send(topic, [b"%d" % number for number in range(index, 400, 4)], f"0-{index}")
    together = threading.Barrier(4)

    def meet(message: Message[Any], attempt: int) -> None:
        if message.offset == 0:
            together.wait(60)  # four threads have the first message of a partition each, at the same time

    seen = Seen(meet)
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        run_until(lambda: len(seen.counts) == 400, consumer, seen, concurrency=4)
    assert seen.counts == Counter(range(400))
    assert all(order == sorted(order) for order in seen.order.values())
    assert sum(offset or 0 for offset in shop.committed(group).values()) == 400


def test_a_message_that_failed_comes_again_before_the_next_one(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)

    def twice(message: Message[Any], attempt: int) -> None:
        if int(message.value) % 2 and attempt < 3:
            raise ValueError(message.value)

    seen = Seen(twice)
    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        run_until(lambda: seen.counts[9], consumer, seen, retry_delay_s=0.001)
    assert seen.order["0-0"] == [0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 7, 7, 7, 8, 9, 9, 9]
    assert shop.committed(group)[tp(topic)] == 10


def test_a_message_that_is_rolled_back_comes_again_as_often_as_that(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)

    def third_time(message: Message[Any], attempt: int) -> None:
        if attempt < 3:
            raise Rollback(0.001)

    seen = Seen(third_time)
    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        run_until(lambda: seen.counts[2], consumer, seen, max_attempts=1)
    assert seen.order["0-0"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("order", ["partition", "key"])
def test_an_outage_makes_no_dead_letters_and_health_shows_it(shop: Shop, group: str, order: Any) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    is_down, handled = threading.Event(), []
    is_down.set()

    def during_an_outage(message: Message[Any]) -> None:
        if is_down.is_set():
            raise ConnectionRefusedError("the database is down")
        handled.append(message.offset)

    settings = {"order": order, "max_attempts": 1, "retry_delay_s": 0.001, "retry_on": OSError}
    with shop.consumer(topic, group) as consumer:
        running = threading.Thread(target=partial(consumer.run, during_an_outage, **settings))
        running.start()

        def shown() -> set[str]:
            return {one.handler_error for one in consumer.health().partitions.values()}

        wait_until(lambda: shown() == {"ConnectionRefusedError: the database is down"}, what="the error in health()")
        assert not handled
        is_down.clear()
        wait_until(lambda: len(handled) == 3 and shown() == {""}, what="the end of the outage")
        is_down.set()
        shop.numbers(topic, 1)
        wait_until(lambda: shown() != {""}, what="the second outage")
        consumer.stop()
        running.join(60)
        assert not running.is_alive()
    assert handled == [0, 1, 2] if order == "partition" else sorted(handled) == [0, 1, 2]
    assert shop.committed(group)[tp(topic)] == 3


@pytest.mark.slow
def test_what_is_given_up_goes_to_the_dead_letter_topic_as_it_was_stored(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    shop.producer.send(topic, b"1", key="k", headers={"own": b"x"}, timestamp=1_500_000_000_000_000).result(60)
    shop.numbers(topic, 1, start=2)

    def never(message: Message[Any], attempt: int) -> None:
        if message.value == 1:
            raise RuntimeError("cannot be done")

    seen = Seen(never)
    with shop.consumer(topic, group, idle_timeout_s=0.5, decode=int) as consumer:
        run_until(lambda: seen.counts[2], consumer, seen, max_attempts=3, retry_delay_s=0.001)
    assert seen.counts == Counter({0: 1, 1: 3, 2: 1})
    assert shop.committed(group)[tp(topic)] == 3
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.5) as consumer:
        [letter] = all_of(consumer, 1)
    assert (letter.key, letter.value) == (b"k", b"1")
    assert {name: value for name, value in letter.headers.items() if name != "metamq-traceback"} == {
        "own": b"x",
        "metamq-topic": topic.encode(),
        "metamq-partition": b"0-0",
        "metamq-offset": b"1",
        "metamq-timestamp": b"1500000000000000",
        "metamq-attempts": b"3",
        "metamq-error": b"RuntimeError: cannot be done",
    }


def test_without_dead_letters_the_error_ends_it_and_the_message_comes_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)

    def third(message: Message[Any], attempt: int) -> None:
        if int(message.value) == 3 and attempt <= 2:
            raise RuntimeError("cannot be done")

    seen = Seen(third)
    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        with pytest.raises(RuntimeError, match="cannot be done"):
            run_until(lambda: seen.counts[3], consumer, seen, max_attempts=2, retry_delay_s=0, dead_letter=False)
        assert consumer.health().partitions[tp(topic)].done_offset == 3
        # It goes on with it, and with the rest of its batch.
        run_until(lambda: seen.counts[9], consumer, seen, dead_letter=False)
    assert seen.order["0-0"] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9]
    assert shop.committed(group)[tp(topic)] == 10


def test_one_failing_message_holds_up_its_partition_only(shop: Shop, group: str) -> None:
    # And it must not fill the buffer with what comes behind it.
    topic = shop.topic(2)
    shop.producer.send(topic, b"0", partition="0-0").result(60)
    shop.send(topic, [b"1" + b"." * 5_000] * 100, "0-0")
    enough = threading.Event()
    handled, held_up = [], []

    def listener(message: Message[Any]) -> None:
        if message.partition == "0-0":
            if not enough.is_set():
                raise Rollback(0.01)
            held_up.append(message.offset)
            return
        handled.append(message.offset)
        if len(handled) == 200:
            enough.set()

    with shop.consumer(
        topic, group, idle_timeout_s=1.0, prefetch_bytes=100_000, partition_fetch_max_bytes=20_000
    ) as consumer:
        thread = threading.Thread(target=run_until, args=(lambda: len(held_up) == 101, consumer, listener))
        thread.start()
        shop.until(lambda: consumer.health().buffered_bytes > 50_000)
        shop.send(topic, [b"2" + b"." * 5_000] * 200, "0-1")
        assert enough.wait(60), "the neighbour is starved"
        thread.join(60)
    assert handled == list(range(200))
    assert shop.committed(group) == {tp(topic, 0): 101, tp(topic, 1): 200}


@pytest.mark.slow
def test_a_slow_handler_keeps_its_partitions(shop: Shop, group: str) -> None:
    for turn in range(10):  # so short a session may end on a machine that is slow
        if keeps_its_partitions(shop, f"{group}-{turn}"):
            return
    raise AssertionError("no session lives for four seconds")


def keeps_its_partitions(shop: Shop, group: str) -> bool:
    """False: its session has ended."""
    # Far longer than the session's time-out; another member joins meanwhile and gets the partitions that are free.
    topic = shop.topic(2)
    shop.send(topic, [b"0", b"1"], "0-0")
    busy, go_on = threading.Event(), threading.Event()
    handled: list[tuple[str, int]] = []

    def slow(message: Message[Any]) -> None:
        busy.set()
        assert go_on.wait(120)
        handled.append((message.partition, message.offset))

    with shop.consumer(topic, group, consumer_id="a", session_timeout_ms=2_000, strategy="sticky") as consumer:
        thread = threading.Thread(target=consumer.run, args=(slow,))
        thread.start()
        assert busy.wait(60)
        start = time.monotonic()
        with shop.consumer(topic, group, consumer_id="b", session_timeout_ms=2_000, strategy="sticky") as other:
            shop.until(lambda: len(other.assignment) == 1)
            shop.until(lambda: time.monotonic() - start > 4.0)
            held = {
                each for member in shop.admin.describe_group(group).members
                for each in member.partitions if member.consumer_id == "a"
            }  # fmt: skip
            is_delivering, given = consumer.health().delivering, other.assignment
            go_on.set()
            shop.until(lambda: handled)
        session = consumer._core._session
        assert session is not None
        has_lived = session.generation == 1
        consumer.close()
        thread.join(60)
    assert handled[0] == ("0-0", 0)
    if has_lived:
        assert tp(topic, 0) in held
        assert is_delivering
        assert tp(topic, 0) not in given
        assert shop.committed(group)[tp(topic, 0)] in (1, 2)
    return has_lived


def test_a_partition_that_is_asked_for_is_not_waited_for_until_a_retry_is_due(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"0"], "0-0")
    shop.send(topic, [b"0"], "0-1")
    failed: set[str] = set()

    def fail(message: Message[Any]) -> None:
        failed.add(message.partition)
        raise Rollback(60)

    with shop.consumer(topic, group, consumer_id="a") as consumer:
        thread = threading.Thread(target=consumer.run, args=(fail,))
        thread.start()
        shop.until(lambda: len(failed) == 2)
        with shop.consumer(topic, group, consumer_id="b") as other:
            assert next(iter(other)).offset == 0
        consumer.close()
        thread.join(60)


def test_close_ends_it_at_once_while_a_handler_is_busy(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    busy, go_on = threading.Event(), threading.Event()

    def slow(message: Message[Any]) -> None:
        busy.set()
        go_on.wait(120)

    consumer = shop.consumer(topic, group)
    thread = threading.Thread(target=consumer.run, args=(slow,))
    thread.start()
    assert busy.wait(60)
    start = time.monotonic()
    consumer.close()
    assert time.monotonic() - start < 30
    # Whoever waits for that handler does not turn in circles meanwhile.
    before = time.process_time()
    assert not go_on.wait(0.3)
    assert time.process_time() - before < 0.2
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert shop.committed(group)[tp(topic)] == 0


def test_what_was_in_hand_in_a_loop_is_done_when_run_asks_for_the_next(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)
    seen = Seen()
    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        message = None
        while message is None:  # it may be idle before, on a slow machine
            message = next(iter(consumer), None)
        assert message.offset == 0
        run_until(lambda: seen.counts[9], consumer, seen)
    assert seen.order["0-0"] == list(range(1, 10))


@pytest.mark.slow
def test_filter_and_decode_errors(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1_000)
    seen = Seen()
    even = shop.consumer(topic, group, filter=lambda message: int(message.value) % 2 == 0, idle_timeout_s=0.3)
    with even as consumer:
        run_until(lambda: seen.counts[998] and consumer.lag() == {tp(topic): 0}, consumer, seen)
    assert seen.counts == Counter(range(0, 1_000, 2))
    assert shop.committed(group)[tp(topic)] == 1_000
    shop.send(topic, [b"no number"])
    with shop.consumer(topic, group, decode=int) as consumer, pytest.raises(DecodeError):
        consumer.run(seen, dead_letter=False, max_attempts=2, retry_delay_s=0.01)
    assert shop.committed(group)[tp(topic)] == 1_000


def test_a_filter_that_raises_ends_it_and_loses_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)

    def broken(message: Message[Any]) -> bool:
        if message.offset == 2:
            raise KeyError("broken")
        return True

    with shop.consumer(topic, group, filter=broken) as consumer, pytest.raises(KeyError):
        consumer.run(Seen())
    assert shop.committed(group)[tp(topic)] == 2
    with pytest.raises(KeyError), shop.consumer(topic, group, filter=broken) as consumer:
        list(consumer)
    assert shop.committed(group)[tp(topic)] == 2


def test_wrong_arguments(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    topic = shop.topic()
    with shop.consumer(topic, group) as consumer:
        with pytest.raises(ConfigError, match="concurrency"):
            consumer.run(print, concurrency=0)
        with pytest.raises(ConfigError, match="max_attempts"):
            consumer.run(print, max_attempts=0)
    with shop.consumer(topic) as consumer, pytest.raises(ConfigError, match="belongs to a group"):
        consumer.run(print)
    with shop.consumer(topic, idle_timeout_s=0.1) as consumer:
        consumer.run(print, dead_letter=False)


@pytest.mark.parametrize("order", ["partition", "key"])
def test_stop_finishes_the_messages_in_hand_and_no_others(shop: Shop, group: str, order: Any) -> None:
    topic = shop.topic(2)
    for index in range(2):
        values = [b"%d" % number for number in range(50)]
        shop.producer.send_many(topic, values, values, partition=f"0-{index}").result(60)
    busy, go_on = threading.Barrier(3), threading.Event()
    begun: Counter[tuple[str, int]] = Counter()

    def slow(message: Message[Any]) -> None:
        begun[message.partition, message.offset] += 1
        busy.wait(60)
        assert go_on.wait(60)

    with shop.consumer(topic, group) as consumer:
        thread = threading.Thread(target=consumer.run, args=(slow,), kwargs={"order": order, "concurrency": 2})
        thread.start()
        busy.wait(60)
        consumer.stop()
        shop.until(lambda: consumer._core.inbox.stopped)
        assert thread.is_alive()
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
        assert list(consumer) == [], "a loop after stop() ends at once"
    assert begun.total() == 2
    assert sum(offset or 0 for offset in shop.committed(group).values()) == 2, "what was in hand is done"


def test_a_signal_handler_stops_a_loop_after_its_message(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(1000)]).result(60)
    with shop.consumer(topic, group) as consumer:
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
        try:
            for message in consumer:
                if message.offset == 500:
                    signal.raise_signal(signal.SIGUSR1)
                    shop.until(lambda: consumer._core.inbox.stopped)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert message.offset == 500
    assert shop.committed(group)[tp(topic)] == 501
