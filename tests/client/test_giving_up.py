"""Messages that get no further attempt: GiveUp, `give_up_on`. The same with threads and in asyncio."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from metamq import GiveUp, Message, Rollback, TopicPartition
from metamq.client.handling.retry_policy import RetryPolicy
from metamq.errors import DecodeError, WrongType
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
    assert RetryPolicy(1, 0.1, give_up_on=Exception).pause_after(Rollback(), 1) is None
    with pytest.raises(WrongType, match="give_up_on"):
        RetryPolicy(1, 0.1, give_up_on=("KeyError",))  # type: ignore[arg-type]


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
