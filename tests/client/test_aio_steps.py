"""Steps of an asyncio loop that time-outs cancel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from metamq import TopicPartition
from metamq.errors import ConfigError
from tests.client.idle import LIMIT_S

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def tp(topic: str) -> TopicPartition:
    return TopicPartition(topic, "0-0")


def test_a_step_that_is_cancelled_ends_no_loop_and_loses_no_message(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def some(messages: Any, count: int) -> list[Any]:
        found: list[Any] = []
        cancelled = 0
        async with asyncio.timeout(LIMIT_S):
            while len(found) < count:
                try:
                    found.append(await asyncio.wait_for(anext(messages), 0.01))
                except TimeoutError:
                    cancelled += 1
                    if cancelled == 3:
                        shop.producer.send_many(topic, [b"%d" % number for number in range(count)])
        return found

    async def scenario() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group) as consumer:
            messages = aiter(consumer)
            assert [message.offset for message in await some(messages, 20)] == list(range(20))
            assert consumer.health().partitions[tp(topic)].done_offset == 19
            batches = consumer.batches(max_messages=10)
            found = await some(batches, 1)
            assert found[0].offsets == range(20, 21)
            await batches.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(batches)

    asyncio.run(scenario())


def test_time_outs_do_not_hide_the_end_of_the_data(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)

    async def scenario() -> None:
        settings = {"topics": topic, "group": group, "idle_timeout_s": 0.5}
        async with shop.cluster.aio_consumer(**settings) as consumer, asyncio.timeout(LIMIT_S):
            messages, found = aiter(consumer), list[int]()
            while True:
                try:
                    found.append((await asyncio.wait_for(anext(messages), 0.05)).offset)
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    break
            assert found == [0, 1, 2]

    asyncio.run(scenario())


def test_a_second_task_in_one_loop_is_refused_and_takes_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group) as consumer, asyncio.timeout(LIMIT_S):
            messages = aiter(consumer)
            first = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="another task waits for the next item"):
                await anext(messages)
            shop.numbers(topic, 2)
            assert [(await first).offset, (await anext(messages)).offset] == [0, 1]

    asyncio.run(scenario())


def test_a_poll_whose_filter_rejects_all_ends_in_time(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 50)

    async def scenario() -> None:
        settings: dict[str, Any] = {"topics": topic, "group": group, "filter": lambda message: message.offset == 49}
        async with shop.cluster.aio_consumer(**settings) as consumer, asyncio.timeout(LIMIT_S):
            while (message := await consumer.poll(0.05)) is None:
                pass
            assert message.offset == 49

    asyncio.run(scenario())
