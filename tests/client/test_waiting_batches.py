"""Batches that wait for more messages, and poll(): a loop on a trickle gets control back."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from metamq import TopicPartition, aio
from metamq.client.fetch.inbox import Inbox, PartitionState
from metamq.errors import ClosedError, ConfigError, DecodeError
from tests.client.inbox_parts import OTHER, TP, batch, inbox_with

if TYPE_CHECKING:
    from tests.client.conftest import Shop

HOUR_S = 3600.0


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


def taken(inbox: Inbox, max_messages: int, within_s: float) -> range | None:
    with inbox.lock:
        found = inbox.take(whole=True, max_messages=max_messages, within_s=within_s)
    return None if found is None else found.batch.offsets


def test_a_batch_is_taken_when_it_is_full() -> None:
    states = [PartitionState(one, None, 0) for one in (TP, OTHER)]
    inbox = inbox_with(*states)
    inbox.put(states[0], [batch(TP, 0, 3)])
    inbox.put(states[1], [batch(OTHER, 0, 2)])
    assert taken(inbox, 5, HOUR_S) is None
    assert inbox.due_at is not None
    inbox.put(states[1], [batch(OTHER, 2, 3)])
    assert taken(inbox, 5, HOUR_S) == range(5), "of the second partition, although the first one waits longer"
    assert taken(inbox, 5, HOUR_S) is None
    states[0].buffered[0]._arrived_s -= HOUR_S
    assert taken(inbox, 5, HOUR_S) == range(3)
    assert taken(inbox, 5, HOUR_S) is inbox.due_at is None


def test_a_partition_that_gets_no_more_does_not_wait() -> None:
    state = PartitionState(TP, None, 0)
    inbox = inbox_with(state)
    inbox.put(state, [batch(TP, 0, 3)])
    inbox.may_grow = lambda state: False
    assert taken(inbox, 5, HOUR_S) == range(3)


def one_by_one(shop: Shop, topic: str, numbers: range) -> None:
    for number in numbers:
        shop.numbers(topic, 1, start=number)


def test_a_trickle_makes_full_batches_and_the_last_one_is_not_forgotten(shop: Shop, group: str) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group, idle_timeout_s=0.2) as consumer:
        batches: list[range] = []

        def read() -> None:
            batches.append(next(consumer.batches(max_messages=6, within_s=HOUR_S)).offsets)

        thread = threading.Thread(target=read)
        one_by_one(shop, topic, range(1))
        thread.start()
        one_by_one(shop, topic, range(1, 6))
        thread.join(60)
        assert batches == [range(6)]
        one_by_one(shop, topic, range(6, 9))
        while batches[-1].stop != 9:  # a short idle time may end it early
            batches += [one.offsets for one in consumer.batches(max_messages=6, within_s=0.5)]
    assert shop.committed(group)[tp(topic)] == 9


def test_asyncio_batches_wait_too(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group) as consumer:
            one_by_one(shop, topic, range(3))
            coming = asyncio.ensure_future(anext(consumer.batches(max_messages=6, within_s=HOUR_S)))
            while not consumer.health().buffered_bytes:
                assert not coming.done()
                await asyncio.sleep(0.01)
            one_by_one(shop, topic, range(3, 6))
            assert (await coming).offsets == range(6)

    asyncio.run(scenario())


def test_a_full_buffer_is_handed_over(shop: Shop, group: str) -> None:
    topic = shop.topic()
    one_by_one(shop, topic, range(4))
    with shop.consumer(topic, group, prefetch_bytes=1, partition_fetch_max_bytes=1) as consumer:
        for offset, found in zip(range(4), consumer.batches(max_messages=1000, within_s=HOUR_S), strict=False):
            assert found.offset == offset


def test_arguments_of_batches(shop: Shop) -> None:
    with shop.consumer(shop.topic()) as consumer:
        with pytest.raises(ConfigError, match="Give max_messages=, too"):
            next(consumer.batches(within_s=1))
        with pytest.raises(ConfigError, match="`within_s` must be"):
            next(consumer.batches(10, within_s=-1))
        with pytest.raises(ConfigError, match="`timeout_s` must be"):
            consumer.poll(-1)


def test_poll(shop: Shop, group: str) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group, decode=int, filter=lambda message: message.value != 1) as consumer:
        assert consumer.poll(0) is consumer.poll(0.1) is None
        shop.send(topic, [b"0", b"1", b"2", b"bad", b"3", b"4", b"5"], "0-0")
        assert [one.value for one in (consumer.poll(60), consumer.poll()) if one] == [0, 2]
        with pytest.raises(DecodeError) as rejected:
            consumer.poll()
        assert consumer.health().partitions[tp(topic)].done_offset == 3
        consumer.seek(tp(topic), rejected.value.offset + 1)
        found = consumer.poll()
        assert found is not None
        assert found.value == next(iter(consumer)).value - 1 == 3, "a loop continues after it"
        found = consumer.poll()
        assert found is not None
        assert (found.value, consumer.poll(0), consumer.stopped) == (5, None, False)
        assert consumer.health().partitions[tp(topic)].done_offset == 7
        consumer.stop()
        shop.until(lambda: consumer.stopped)
        assert consumer.poll() is None
    with pytest.raises(ClosedError):
        consumer.poll(0)


def test_one_thread_polls(shop: Shop, group: str) -> None:
    topic, results = shop.topic(), list[Any]()
    shop.numbers(topic, 2)

    def elsewhere() -> None:
        try:
            results.append(consumer.poll(0))
        except ConfigError as error:
            results.append(str(error))

    with shop.consumer(topic, group) as consumer:
        assert consumer.poll() is not None
        for timeout_s in (60, 0):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(60)
            while timeout_s and consumer.poll(0) is not None:
                pass
    assert "iterates this consumer already" in results[0]
    assert results[1] is None, "nothing of the first thread is in flight"


def test_poll_in_asyncio(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def scenario(consumer: aio.Consumer[Any]) -> None:
        assert await consumer.poll(0) is await consumer.poll(0.1) is None
        shop.numbers(topic, 3)
        found = await consumer.poll(60)
        assert found is not None
        task = asyncio.create_task(consumer.poll(0))
        with pytest.raises(ConfigError, match="iterates this consumer already"):
            await task
        assert (found.offset, (await anext(aiter(consumer))).offset) == (0, 1)
        task = asyncio.create_task(drained(consumer))
        await asyncio.to_thread(shop.until, lambda: consumer.health().partitions[tp(topic)].done_offset == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shop.numbers(topic, 1)
        found = await consumer.poll()
        assert (found and found.offset, consumer.stopped) == (3, False)
        consumer.stop()
        assert (await consumer.poll(), consumer.stopped) == (None, True)

    async def drained(consumer: aio.Consumer[Any]) -> None:
        while True:
            await consumer.poll()

    async def run() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group) as consumer:
            await scenario(consumer)

    asyncio.run(run())
