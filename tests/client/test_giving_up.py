"""Messages that get no further attempt: GiveUp, `give_up_on`; their tracebacks. With threads and in asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from metamq import GiveUp, Message, Rollback, TopicPartition, attempt
from metamq.client.handling.retry_policy import RetryPolicy
from metamq.errors import ConfigError, DecodeError, WrongType
from metamq.wire.limits import MESSAGE_BYTES_MAX
from tests.client.idle import all_of

if TYPE_CHECKING:
    from tests.client.conftest import Shop

Run = Callable[..., None]


@pytest.fixture(params=["threads", "tasks"])
def run(request: pytest.FixtureRequest, shop: Shop) -> Run:
    """Handles `count` messages of a topic by `run()` of one API."""

    def in_threads(listener: Any, topic: str, group: str, settings: dict[str, Any], **how: Any) -> None:
        with shop.consumer(topic, group, idle_timeout_s=0.3, **settings) as consumer:
            while not shop.committed(group).get(TopicPartition(topic, "0-0")):  # a short idle time may end it early
                consumer.run(listener, **how)
                consumer.commit()

    async def in_tasks(listener: Any, topic: str, group: str, settings: dict[str, Any], **how: Any) -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group, idle_timeout_s=0.3, **settings) as consumer:
            while not shop.committed(group).get(TopicPartition(topic, "0-0")):
                await consumer.run(listener, **how)
                await consumer.commit()

    if request.param == "threads":
        return lambda listener, topic, group, **how: in_threads(listener, topic, group, how.pop("settings", {}), **how)
    return lambda listener, topic, group, **how: asyncio.run(
        in_tasks(listener, topic, group, how.pop("settings", {}), **how)
    )


def letters(shop: Shop, group: str, count: int) -> list[Message[Any]]:
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.5) as consumer:
        return sorted(all_of(consumer, count), key=lambda letter: int(letter.headers["metamq-offset"]))


def test_no_pause_after_an_error_that_no_attempt_mends() -> None:
    policy = RetryPolicy(5, 0.1, retry_on=OSError, give_up_on=(KeyError, FileNotFoundError))
    assert [policy.pause_after(error, 1) for error in (GiveUp("no"), KeyError(), ValueError())] == [None, None, 0.1]
    assert policy.pause_after(FileNotFoundError(), 1, 0) is None, "also of retry_on"
    assert policy.counts(FileNotFoundError())
    assert policy.pause_after(OSError(), 0, 1) == 0.1
    assert RetryPolicy(1, 0.1, give_up_on=Exception).pause_after(Rollback(7.0), 1) == 7.0
    with pytest.raises(WrongType, match="give_up_on"):
        RetryPolicy(1, 0.1, give_up_on=("KeyError",))  # type: ignore[arg-type]


def test_the_pauses() -> None:
    error = ValueError()
    policy = RetryPolicy(9, 1.0, retry_delay_max_s=3.0)
    assert [policy.pause_after(error, failed) for failed in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 3.0]
    shortened = RetryPolicy(9, 1.0, jitter=0.25)
    pauses = [shortened.pause_after(error, 2) or 0.0 for _ in range(100)]
    assert 1.5 <= min(pauses) < max(pauses) <= 2.0
    for jitter in (-0.1, 1.1, "half"):
        with pytest.raises(ConfigError, match="`jitter` must be a number from 0 to 1"):
            RetryPolicy(9, 1.0, jitter=jitter)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["partition", "key"])
def test_the_listener_knows_its_attempt(shop: Shop, group: str, run: Run, order: str) -> None:
    topic, attempts = shop.topic(), defaultdict[int, list[int]](list)
    shop.numbers(topic, 3)

    def listener(message: Message[Any]) -> None:
        attempts[message.offset].append(attempt())
        if message.offset == 1:
            raise OSError if len(attempts[1]) == 2 else ValueError

    run(listener, topic, group, order=order, max_attempts=3, retry_on=OSError, retry_delay_s=0.001)
    assert attempts == {0: [1], 1: [1, 2, 2, 3], 2: [1]}
    assert attempt() == 1


@pytest.mark.parametrize("order", ["partition", "key"])
def test_they_go_to_the_dead_letters_at_once(shop: Shop, group: str, run: Run, order: str) -> None:
    topic, calls = shop.topic(), Counter[int]()
    shop.numbers(topic, 4)

    def listener(message: Message[Any]) -> None:
        calls[message.offset] += 1
        if message.offset == 1:
            raise GiveUp("a negative total")
        if message.offset == 2:
            raise KeyError("total")
        if message.offset == 3 and calls[3] < 3:
            raise ValueError

    run(listener, topic, group, order=order, give_up_on=KeyError, retry_delay_s=0.001)
    assert calls == {0: 1, 1: 1, 2: 1, 3: 3}
    found = letters(shop, group, 2)
    assert [letter.headers["metamq-error"] for letter in found] == [b"GiveUp: a negative total", b"KeyError: 'total'"]
    assert {letter.headers["metamq-attempts"] for letter in found} == {b"1"}


def test_a_message_that_decode_rejects_may_be_one_of_them(shop: Shop, group: str, run: Run) -> None:
    topic, rejected = shop.topic(), Counter[bytes]()
    shop.send(topic, [b"none", b"1"], "0-0")

    def decode(value: bytes) -> int:
        rejected[value] += not value.isdigit()
        return int(value)

    run(lambda message: None, topic, group, settings={"decode": decode}, give_up_on=DecodeError)
    assert len(letters(shop, group, 1)) == 1
    assert rejected[b"none"] == 1


@pytest.mark.parametrize("order", ["partition", "key"])
def test_the_letter_and_the_log_have_the_traceback_of_the_last_error_only(
    shop: Shop, group: str, run: Run, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = shop.topic()
    shop.send(topic, [b"0", b"none"], "0-0")

    def deep(message: Message[Any]) -> None:
        raise ValueError("cannot be done")

    caplog.set_level(logging.WARNING, "metamq.client")
    run(deep, topic, group, settings={"decode": int}, order=order, max_attempts=2, retry_delay_s=0.001)
    failed, rejected = [letter.headers["metamq-traceback"].decode() for letter in letters(shop, group, 2)]
    assert failed.count("Traceback (most recent call last)") == failed.count("in deep\n") == 1
    assert failed.endswith("ValueError: cannot be done\n")
    assert "ValueError: invalid literal for int()" in rejected
    assert "During handling of the above exception" not in caplog.text + failed + rejected


def test_a_message_without_room_for_the_traceback_is_kept(shop: Shop, group: str, run: Run) -> None:
    topic = shop.topic(max_message_bytes=MESSAGE_BYTES_MAX)
    value = b"." * (MESSAGE_BYTES_MAX - 1_000)
    shop.send(topic, [value], "0-0")

    def fail(message: Message[Any]) -> None:
        raise ValueError("x" * 500)

    run(fail, topic, group, give_up_on=ValueError)
    [letter] = letters(shop, group, 1)
    assert (letter.value, "metamq-traceback" in letter.headers) == (value, False)
