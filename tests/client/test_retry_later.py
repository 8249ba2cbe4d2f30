"""`RetryLater` and `retry_later_s`: the message waits in the group's retry topic, and those behind it go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from metamq import GiveUp, Message, RetryLater, Rollback, attempt
from metamq.client.handling.dead_letters import DeadLetters
from metamq.client.handling.retry_policy import RetryPolicy
from metamq.client.subscriptions import selected
from metamq.errors import ConfigError, MessageTooLarge

if TYPE_CHECKING:
    from tests.client.conftest import Shop

Listener = Callable[[Message[Any]], None]
Run = Callable[..., None]


@pytest.fixture(params=["threads", "tasks"])
def run(request: pytest.FixtureRequest, shop: Shop) -> Run:
    """Runs a listener with a consumer that reads the retry topic, until the listener calls `stop`."""

    def in_threads(
        make: Callable[[Callable[[], None]], Listener], settings: dict[str, Any], how: dict[str, Any]
    ) -> None:
        with shop.cluster.consumer(**settings) as consumer:
            consumer.run(make(consumer.stop), **how)

    async def in_tasks(make: Callable[[Callable[[], None]], Listener], settings: dict[str, Any], how: Any) -> None:
        async with shop.cluster.aio_consumer(**settings) as consumer:
            await consumer.run(make(consumer.stop), **how)

    def either(make: Any, topic: str, group: str, *, retry_topic: bool = True, decode: Any = None, **how: Any) -> None:
        settings = {"topics": topic, "group": group, "retry_topic": retry_topic, "decode": decode}
        if request.param == "threads":
            in_threads(make, settings, how)
        else:
            asyncio.run(in_tasks(make, settings, how))

    return either


def test_the_rules_of_attempts_and_delays() -> None:
    policy = RetryPolicy(3, 0.1, retry_on=OSError, give_up_on=KeyError, retry_later_s=60)
    assert [policy.pause_after(ValueError(), failed) for failed in (1, 2, 3)] == [60, 120, None]
    assert [policy.is_later(one) for one in (ValueError(), OSError(), Rollback())] == [True, False, False]
    assert policy.pause_after(KeyError(), 1) is None
    assert policy.pause_after(RetryLater(5), 2) == 5
    assert RetryPolicy(99, 0.1, retry_later_s=60).pause_after(ValueError(), 50) == 3600
    for_all = RetryPolicy(3, 0.1, retry_on=Exception, give_up_on=Exception)
    assert (for_all.counts(RetryLater(5)), for_all.pause_after(RetryLater(5), 1)) == (True, 5)
    with pytest.raises(ConfigError):
        RetryLater(-1)


@pytest.mark.parametrize("order", ["partition", "key"])
def test_the_messages_behind_it_go_on_and_it_comes_again(shop: Shop, group: str, run: Run, order: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 4)
    seen: list[tuple[str, bytes]] = []

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            seen.append((message.topic, message.value))
            if len(seen) == 1:
                raise RetryLater(0.3, "no stock")
            if message.topic != topic:
                assert message.headers["metamq-origin-topic"] == topic.encode()
                assert message.headers["metamq-error"] == b"RetryLater: no stock"
                stop()

        return listener

    run(make, topic, group, order=order, concurrency=1)
    assert sorted({value for _topic, value in seen}) == sorted(value for name, value in seen if name == topic)
    assert seen[-1] == (f"{group}.retry", seen[0][1]), "the others came before it"
    assert len(seen) == 5


def test_attempts_count_over_both_topics_until_it_is_a_dead_letter(shop: Shop, group: str, run: Run) -> None:
    topic, calls = shop.topic(), Counter[str]()
    shop.numbers(topic, 2)

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            calls[message.topic] += 1
            if message.headers.get("metamq-origin-offset", b"%d" % message.offset) == b"0":
                if message.headers.get("metamq-attempts") == b"2":
                    stop()  # the last attempt
                raise ValueError("bad")

        return listener

    run(make, topic, group, retry_later_s=0.01, max_attempts=3)
    assert calls == {topic: 2, f"{group}.retry": 2}
    with shop.cluster.consumer(topics=f"{group}.dead-letter") as consumer:
        letter = next(iter(consumer))
    found = {name: letter.headers[f"metamq-{name}"] for name in ("topic", "offset", "attempts", "error")}
    assert found == {"topic": topic.encode(), "offset": b"0", "attempts": b"3", "error": b"ValueError: bad"}
    assert b"raise ValueError" in letter.headers["metamq-traceback"]


def test_a_message_that_decode_rejects_waits_as_it_is_stored(shop: Shop, group: str, run: Run) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    rejected: list[bytes] = []

    def decode(value: bytes) -> bytes:
        if not rejected:
            rejected.append(value)
            raise ValueError("not yet")
        return b"decoded " + value

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            assert (message.topic, message.value) == (f"{group}.retry", b"decoded " + rejected[0])
            stop()

        return listener

    run(make, topic, group, decode=decode, retry_later_s=0.01)


CRASH = """
import os, sys
from metamq import Consumer, RetryLater
from metamq.client.consumer.listener import ListenerPool

async def store_and_die(self, storing):
    self.background.run(storing)
    os._exit(7)

def later(message):
    raise RetryLater(0.01)

ListenerPool._give_up = store_and_die
zookeeper, topic, group = sys.argv[1:]
with Consumer(zookeeper, topics=topic, group=group, retry_topic=True) as consumer:
    consumer.run(later)
"""


@pytest.mark.slow
def test_a_crash_after_it_was_stored_repeats_it_and_loses_none(shop: Shop, group: str, run: Run) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    crash = [sys.executable, "-c", CRASH, shop.cluster.zookeeper, topic, group]
    assert subprocess.run(crash, check=False).returncode == 7
    seen = Counter[str]()

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            seen[message.topic] += 1
            if len(seen) == 2:
                stop()

        return listener

    run(make, topic, group, concurrency=1)
    assert seen == {topic: 1, f"{group}.retry": 1}


def test_without_the_retry_topic_it_is_refused_and_nothing_is_given_up(shop: Shop, group: str, run: Run) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    def make(_stop: Callable[[], None]) -> Listener:
        def listener(_message: Message[Any]) -> None:
            raise RetryLater(1)

        return listener

    with pytest.raises(ConfigError, match="RetryLater needs the retry topic"):
        run(make, topic, group, retry_topic=False)
    with pytest.raises(ConfigError, match="`retry_later_s` needs the retry topic"):
        run(make, topic, group, retry_topic=False, retry_later_s=1)
    with pytest.raises(ConfigError, match="`retry_later_s` needs the retry topic of the group, and dead letters"):
        run(make, topic, group, dead_letter=False, retry_later_s=1)
    with pytest.raises(ConfigError, match="`dead_letter=False`, and the consumer reads the retry topic"):
        run(make, topic, group, dead_letter=False)
    with pytest.raises(ConfigError, match="366 days"):
        RetryLater(400 * 86_400)
    with shop.cluster.admin() as admin:
        assert not {f"{group}.dead-letter"} & admin.topics().keys()


def test_the_retry_topic_is_read_from_its_beginning_whatever_the_start_is(shop: Shop, group: str) -> None:
    """Another member may have stored a message there before this one has found where to begin."""
    topic, seen = shop.topic(), list[str]()
    with shop.consumer(topic, group, retry_topic=True):
        pass
    shop.send(f"{group}.retry", [b"stored"])
    shop.admin.delete_offsets(group, f"{group}.retry")
    settings = {"topics": topic, "group": group, "retry_topic": True, "start": "latest"}
    with shop.cluster.consumer(**settings) as consumer:
        consumer.run(lambda message: (seen.append(message.topic), consumer.stop()))
    assert seen == [f"{group}.retry"]


def test_attempt_counts_over_both_topics(shop: Shop, group: str, run: Run) -> None:
    topic, attempts = shop.topic(), list[int]()
    shop.numbers(topic, 1)

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            attempts.append(attempt())
            if len(attempts) == 1:
                raise RetryLater(0.01)
            if len(attempts) == 2:
                raise Rollback(0.01)
            if len(attempts) < 5:
                raise ValueError
            stop()

        return listener

    run(make, topic, group, retry_delay_s=0.01)
    assert attempts == [1, 2, 2, 3, 4]


def test_one_that_is_too_large_for_the_retry_topic_is_a_dead_letter(
    shop: Shop, group: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    async def too_large(*_: object) -> None:
        raise MessageTooLarge("a message", 2, 1)

    monkeypatch.setattr(DeadLetters, "send_later", too_large)

    def make(stop: Callable[[], None]) -> Listener:
        def listener(_message: Message[Any]) -> None:
            stop()
            raise RetryLater(1)

        return listener

    run(make, topic, group)
    with shop.consumer(f"{group}.dead-letter") as letters:
        letter = next(iter(letters))
    assert (letter.value, letter.headers["metamq-error"].startswith(b"MessageTooLarge")) == (b"0", True)


def test_a_pattern_selects_no_retry_topic() -> None:
    assert selected(["*"], ["orders", "billing.retry", "billing.dead-letter"]) == {"orders"}


def test_the_retry_topic_belongs_to_a_group(shop: Shop) -> None:
    with pytest.raises(ConfigError, match="the retry topic belongs to a group"):
        shop.cluster.consumer(topics=shop.topic(), retry_topic=True)


def test_a_resent_dead_letter_begins_with_no_attempt(shop: Shop, group: str, run: Run) -> None:
    """Its headers of attempts count in the retry topic only."""
    topic, calls = shop.topic(), Counter[str]()
    with shop.cluster.producer() as producer:
        producer.send(topic, b"17", headers={"metamq-attempts": b"9", "metamq-partition": b"0-7"}).result()

    def make(stop: Callable[[], None]) -> Listener:
        def listener(message: Message[Any]) -> None:
            calls[message.topic] += 1
            if calls.total() == 2:
                stop()
                raise GiveUp
            raise ValueError("bad")

        return listener

    run(make, topic, group, retry_later_s=0.01)
    assert calls == {topic: 1, f"{group}.retry": 1}
