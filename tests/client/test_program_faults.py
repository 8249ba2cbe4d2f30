"""A fault of the program, not of the message, ends `run()` in both APIs and both orders: nothing is given up."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Message, aio
from metamq.client.handling import current as client_handling
from metamq.errors import ConfigError, TopicNotFound, WrongType

if TYPE_CHECKING:
    from tests.client.conftest import Shop

BOTH_APIS = pytest.mark.parametrize("is_aio", [False, True])
ORDERS = pytest.mark.parametrize("order", ["partition", "key"])

Listener = Callable[[Any, Message[Any]], object]


def run(shop: Shop, topic: str, group: str, listener: Listener, *, is_aio: bool, **settings: Any) -> None:
    """Calls `run()` with a listener that gets the consumer, too."""
    run_plainly(shop, topic, group, lambda consumer: partial(listener, consumer), is_aio=is_aio, **settings)


def run_plainly(
    shop: Shop, topic: str, group: str, listener_of: Callable[[Any], Any], *, is_aio: bool, **settings: Any
) -> None:
    """Calls `run()` with the listener that `listener_of(consumer)` returns."""

    async def run_aio() -> None:
        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, idle_timeout_s=60) as consumer:
            await consumer.run(listener_of(consumer), **settings)

    if is_aio:
        asyncio.run(run_aio())
        return
    with shop.consumer(topic, group, idle_timeout_s=60) as consumer:
        consumer.run(listener_of(consumer), **settings)


@ORDERS
@BOTH_APIS
@pytest.mark.parametrize("attempts_before", [0, 1])
def test_a_commit_with_wrong_settings_ends_run(
    shop: Shop, group: str, order: Any, is_aio: bool, attempts_before: int
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    calls = []

    def commit(consumer: Any, message: Message[Any]) -> object:
        calls.append(message)
        if len(calls) <= attempts_before:
            raise ValueError("the first attempt")
        return consumer.commit(message, connection=object())

    with pytest.raises(ConfigError, match=r"needs offsets in a database.*--offsets"):
        run(shop, topic, group, commit, is_aio=is_aio, order=order, retry_delay_s=0.0, concurrency=1)
    assert len({message.offset for message in calls}) == 1
    with pytest.raises(TopicNotFound), shop.consumer(f"{group}.dead-letter"):
        pass


def test_another_config_error_is_one_of_the_message(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    def refuse(consumer: Any, _message: Message[Any]) -> object:
        consumer.stop()
        raise WrongType("of the handler itself")

    run(shop, topic, group, refuse, is_aio=False, max_attempts=1)
    with shop.consumer(f"{group}.dead-letter") as letters:
        assert b"of the handler itself" in next(iter(letters)).headers["metamq-error"]


def plain(_message: Message[Any]) -> Iterator[int]:
    yield 1


async def asynchronous(_message: Message[Any]) -> AsyncIterator[int]:
    yield 1


class Method:
    def __call__(self, _message: Message[Any]) -> Iterator[int]:
        yield 1


@BOTH_APIS
@pytest.mark.parametrize("generator", [plain, asynchronous, Method(), partial(plain)])
def test_a_generator_is_refused_at_the_start(shop: Shop, group: str, is_aio: bool, generator: Any) -> None:
    topic = shop.topic()

    with pytest.raises(WrongType, match="without `yield`"):
        run_plainly(shop, topic, group, lambda _consumer: generator, is_aio=is_aio)


@ORDERS
@BOTH_APIS
def test_an_outage_of_a_handler_is_one_warning_and_one_line_at_its_end(
    shop: Shop,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    order: Any,
    is_aio: bool,
) -> None:
    monkeypatch.setattr(client_handling, "WARN_AFTER_S", 0.0)
    caplog.set_level(logging.INFO, "metamq.client")
    topic = shop.topic(2)
    for partition in ("0-0", "0-1"):
        shop.send(topic, [b"1"], partition)
    calls: Counter[str] = Counter()

    def handle(consumer: Any, message: Message[Any]) -> None:
        calls[message.partition] += 1
        if min(calls["0-0"], calls["0-1"]) < 5:
            raise ConnectionError("the database is down")
        if {"0-0", "0-1"} == ended | {message.partition}:
            consumer.stop()
        ended.add(message.partition)

    ended: set[str] = set()
    run(shop, topic, group, handle, is_aio=is_aio, order=order, retry_on=ConnectionError, retry_delay_s=0.001)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("handlers ")]
    assert len(lines) == 2, lines
    assert "the database is down" in lines[0]
    assert lines[1].startswith("handlers do not fail any more")
    assert [record.levelname for record in caplog.records if record.getMessage() in lines] == ["WARNING", "INFO"]


def test_a_short_outage_is_no_warning(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    calls = []

    def handle(consumer: Any, message: Message[Any]) -> None:
        calls.append(message)
        if len(calls) < 3:
            raise ConnectionError("the database is down")
        consumer.stop()

    run(shop, topic, group, handle, is_aio=False, retry_on=ConnectionError, retry_delay_s=0.001)
    assert "handlers" not in caplog.text


def test_the_record_of_a_given_up_message_names_it(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic()
    shop.producer.send(topic, b"1", key=b"customer-7").result(60)

    def refuse(consumer: Any, _message: Message[Any]) -> object:
        consumer.stop()
        raise ValueError("no such customer")

    run(shop, topic, group, refuse, is_aio=False, max_attempts=1)
    (record,) = [record for record in caplog.records if "given up" in record.getMessage()]
    assert record.getMessage() == f"{topic}/0-0 offset 0 given up after 1 attempt: ValueError('no such customer')"
    fields = {name: getattr(record, name) for name in ("topic", "partition", "offset", "key", "error")}
    error = "ValueError: no such customer"
    assert fields == {"topic": topic, "partition": "0-0", "offset": 0, "key": "customer-7", "error": error}
    assert record.exc_info is not None
