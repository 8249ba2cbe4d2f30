"""The place where a member began is committed, so the lag of a stopped group is known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from metamq import TopicPartition
from metamq.client.fetch.inbox import PartitionState
from tests.client.idle import all_of
from tests.client.inbox_parts import TP

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


def test_what_the_release_commits() -> None:
    begun = PartitionState(TP, None, 4, start=(4, 1), epoch=1)
    assert begun.due_commit() == begun.last_commit(auto_commit=False) == (4, 1)
    begun.next_offset = 7
    assert begun.last_commit(auto_commit=True) == (7, 1)
    assert begun.last_commit(auto_commit=False) == (4, 1)
    begun.start, begun.committed_offset = None, 7
    assert begun.due_commit() is begun.last_commit(auto_commit=False) is None
    assert PartitionState(TP, None, -1).due_commit() is None, "its place is not found yet"


def test_the_lag_of_a_stopped_group_is_known_where_partitions_were_empty(shop: Shop, group: str) -> None:
    topic = shop.topic(3)
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        assert len(all_of(consumer, 5)) == 5
    assert shop.committed(group) == {tp(topic): 5, tp(topic, 1): 0, tp(topic, 2): 0}
    shop.send(topic, [b"later"], "0-1")
    described = shop.admin.describe_group(group)
    assert [one.lag for one in described.partitions] == [0, 1, 0]
    assert described.lag == 1
    with shop.consumer(topic, group, start="latest", idle_timeout_s=0.3) as consumer:
        assert [message.value for message in all_of(consumer, 1)] == [b"later"]


def test_the_next_commit_has_the_place_where_the_member_began(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    with shop.consumer(topic, group, commit_interval_ms=20):
        shop.until(lambda: shop.committed(group) == {tp(topic): 0, tp(topic, 1): 0})


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_after_a_trim_it_is_where_the_log_begins(shop: Shop, group: str, start: Any) -> None:
    topic = shop.topic()
    shop.numbers(topic, 6)
    shop.admin.trim(topic, 4)
    with shop.consumer(topic, group, start=start, auto_commit=False) as consumer:
        shop.until(lambda: [one.next_offset for one in consumer.health().partitions.values()] > [-1])
    assert shop.committed(group)[tp(topic)] == {"earliest": 4, "latest": 6}[start]


def test_without_auto_commit_commit_includes_it_and_nothing_is_set_back(shop: Shop, group: str) -> None:
    topic = shop.topic(3)
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, auto_commit=False, idle_timeout_s=0.3) as consumer:
        assert len(all_of(consumer, 5)) == 5
        consumer.commit({tp(topic): 3})
        assert shop.committed(group) == {tp(topic): 3, tp(topic, 1): None, tp(topic, 2): None}
        consumer.commit()
        assert shop.committed(group) == {tp(topic): 5, tp(topic, 1): 0, tp(topic, 2): 0}
        consumer.commit({tp(topic): 2})
    assert shop.committed(group) == {tp(topic): 2, tp(topic, 1): 0, tp(topic, 2): 0}


def test_asyncio_does_the_same(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.numbers(topic, 5)

    async def commit_one() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group, auto_commit=False) as consumer:
            await anext(aiter(consumer))
            await consumer.commit({tp(topic): 1})

    asyncio.run(commit_one())
    assert shop.committed(group) == {tp(topic): 1, tp(topic, 1): 0}
