"""The figures of the handlers of `run()`, and their time limit, in both APIs and both orders."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from metamq import Message, aio
from metamq.errors import ConfigError, HandlerTimeout, MetamqError
from metamq.prometheus import ClientCollector
from metamq.types import HandlerHealth
from tests.client.idle import all_of, run_until
from tests.client.test_otel import Seen, seen

if TYPE_CHECKING:
    from tests.client.conftest import Shop

__all__ = ["seen"]
ORDERS = pytest.mark.parametrize("order", ["partition", "key"])


def run_aio(shop: Shop, topic: str, group: str, handler: Any, done: Callable[[], bool], **settings: Any) -> Any:
    """Runs an asyncio consumer until `done()`; returns its health, and what ClientCollector makes of it."""

    async def run() -> Any:
        async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, idle_timeout_s=0.3) as consumer:
            while not done():
                await consumer.run(handler, **settings)
            registry = CollectorRegistry()
            registry.register(ClientCollector(consumer))
            return consumer.health(), registry

    return asyncio.run(asyncio.wait_for(run(), 120))


def letters(shop: Shop, group: str) -> list[Message[Any]]:
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.5) as consumer:
        return all_of(consumer, 1)


@ORDERS
@pytest.mark.parametrize("is_aio", [False, True])
def test_failed_attempts_dead_letters_and_times_are_counted(shop: Shop, group: str, order: Any, is_aio: bool) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    handled = []

    def handle(message: Message[bytes]) -> None:
        handled.append(message.value)
        if message.value == b"1":
            raise RuntimeError("cannot be done")

    async def handle_aio(message: Message[bytes]) -> None:
        await asyncio.sleep(0)
        handle(message)

    def done() -> bool:
        return b"4" in handled

    settings: dict[str, Any] = {"order": order, "max_attempts": 3, "retry_delay_s": 0.001}
    if is_aio:
        health, registry = run_aio(shop, topic, group, handle_aio, done, **settings)
    else:
        registry = CollectorRegistry()
        with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
            run_until(done, consumer, handle, **settings)
            registry.register(ClientCollector(consumer))
            health = consumer.health()
            found = {metric.name: metric for metric in registry.collect()}
            assert "metamq_consumer_oldest_running_seconds" in found
    one: HandlerHealth = health.handlers[topic]
    assert (sum(one.calls), one.failed_attempts, one.given_up) == (7, 3, 1)
    assert 0 < one.seconds < 60

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"metamq_consumer_{name}", {"group": group, "topic": topic, **labels})

    assert (value("failed_attempts_total"), value("dead_letters_total")) == (3, 1)
    assert (value("handler_seconds_count"), value("handler_seconds_bucket", le="+Inf")) == (7, 7)
    assert value("handler_seconds_sum") == one.seconds
    assert len(letters(shop, group)) == 1


@ORDERS
def test_a_handler_that_takes_too_long_is_cancelled_and_its_attempt_has_failed(
    shop: Shop, group: str, order: Any
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 4)
    attempts, cancelled = [], []

    async def handle(message: Message[bytes]) -> None:
        attempts.append(message.value)
        if message.value == b"1":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.offset)
                raise

    settings: dict[str, Any] = {"order": order, "max_attempts": 2, "retry_delay_s": 0, "retry_on": TimeoutError}
    health, _ = run_aio(shop, topic, group, handle, lambda: b"3" in attempts, handler_timeout_s=0.05, **settings)
    assert sorted(attempts) == [b"0", b"1", b"1", b"2", b"3"]
    assert cancelled == [1, 1]
    assert (health.handlers[topic].failed_attempts, health.handlers[topic].given_up) == (2, 1)
    (letter,) = letters(shop, group)
    assert letter.value == b"1"
    error = f"HandlerTimeout: the handler of {topic}/0-0 offset 1 took longer than 0.05 s. Raise `handler_timeout_s`"
    assert letter.headers["metamq-error"].decode().startswith(error)
    assert letter.headers["metamq-attempts"] == b"2"


def test_a_handler_that_catches_its_cancellation_has_failed_too(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    async def handle(_message: Message[bytes]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    with pytest.raises(HandlerTimeout) as raised:
        run_aio(shop, topic, group, handle, lambda: False, handler_timeout_s=0.05, max_attempts=1, dead_letter=False)
    assert (raised.value.topic, raised.value.offset, raised.value.timeout_s) == (topic, 0, 0.05)
    assert not isinstance(raised.value, TimeoutError)
    assert isinstance(raised.value, MetamqError)


def test_a_time_out_of_the_handler_itself_is_its_own_error(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    async def handle(_message: Message[bytes]) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_aio(shop, topic, group, handle, lambda: False, handler_timeout_s=100, max_attempts=1, dead_letter=False)


def test_the_blocking_run_refuses_a_limit_and_names_the_message_that_runs(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    busy, go_on = threading.Event(), threading.Event()

    def slow(message: Message[bytes]) -> None:
        if message.value == b"1":
            busy.set()
            go_on.wait(120)

    with shop.consumer(topic, group) as consumer:
        with pytest.raises(ConfigError, match=r"Python cannot stop .*\. Use metamq\.aio\.Consumer"):
            consumer.run(slow, handler_timeout_s=1)  # type: ignore[arg-type]
        thread = threading.Thread(target=consumer.run, args=(slow,))
        thread.start()
        assert busy.wait(60)
        registry = CollectorRegistry()
        registry.register(ClientCollector(consumer))
        (running,) = consumer.health().partitions[next(iter(consumer.assignment))].running
        assert (running.offset, running.key) == (1, None)
        assert running.running_s > 0
        labels = {"group": group, "topic": topic}
        seconds = registry.get_sample_value("metamq_consumer_oldest_running_seconds", labels)
        assert seconds is not None
        assert seconds >= running.running_s
        consumer.stop()
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
        assert consumer.health().partitions[next(iter(consumer.assignment))].running == ()


@pytest.mark.parametrize("limit", [0, -1, "1"])
def test_a_limit_that_cannot_be(shop: Shop, group: str, limit: Any) -> None:
    topic = shop.topic()
    with pytest.raises(ConfigError, match="handler_timeout_s"):
        run_aio(shop, topic, group, print, lambda: False, handler_timeout_s=limit)


def test_opentelemetry_has_the_time_of_each_call(shop: Shop, group: str, seen: Seen) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    handled = []

    def handle(message: Message[bytes]) -> None:
        handled.append(message)
        if message.value == b"1":
            raise RuntimeError("cannot be done")

    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        run_until(lambda: len(handled) >= 6, consumer, handle, max_attempts=2, retry_delay_s=0)
    points = seen.points("messaging.process.duration")
    found = {point.attributes.get("error.type"): point.count for point in points}
    assert found == {None: 4, "RuntimeError": 2}
    assert {point.attributes["messaging.consumer.group.name"] for point in points} == {group}
