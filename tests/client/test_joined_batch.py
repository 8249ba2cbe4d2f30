"""batches(max_messages=...): small stored batches of a partition come as one, and offsets mean the same."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import TopicPartition, aio
from metamq.client.fetch.joined_batch import JoinedBatch, joinable
from metamq.errors import ConfigError, DecodeError, WrongType
from tests.database_offsets import offsets_in
from tests.parts import wait_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop


class Part:
    """What joinable() looks at."""

    def __init__(self, offset: int, count: int, epoch: int = 1) -> None:
        self.offset, self.end_offset, self.epoch = offset, offset + count, epoch

    def __len__(self) -> int:
        return self.end_offset - self.offset


@pytest.mark.parametrize(
    ("parts", "max_messages", "joined"),
    [
        ([Part(0, 5), Part(5, 5), Part(10, 5)], 10, 2),
        ([Part(0, 5), Part(5, 5), Part(10, 5)], 14, 2),
        ([Part(0, 5), Part(5, 5), Part(10, 5)], 15, 3),
        ([Part(0, 50), Part(50, 5)], 10, 1),  # no stored batch is split
        ([Part(0, 5), Part(5, 5)], 0, 1),
        ([Part(0, 5), Part(6, 5)], 100, 1),  # retention left a hole
        ([Part(0, 5), Part(5, 5, epoch=2)], 100, 1),
    ],
)
def test_what_is_joined(parts: list[Any], max_messages: int, joined: int) -> None:
    assert len(joinable(parts, max_messages)) == joined


def small_batches(shop: Shop, topic: str, count: int) -> None:
    """A stored batch for each message."""
    for number in range(count):
        key = f"k{number}" if number % 3 == 0 else None
        headers = {"h": b"%d" % number} if number % 5 == 0 else None
        shop.producer.send(topic, b"%d" % number, key, headers).result(60)


def test_small_batches_come_as_one_with_all_their_columns(shop: Shop, group: str) -> None:
    topic = shop.topic()
    small_batches(shop, topic, 40)
    with shop.consumer(topic, group) as consumer:
        wait_until(lambda: len(buffered(consumer)) == 40)
        batches = consumer.batches(max_messages=30)
        first, second = next(batches), next(batches)
        assert isinstance(first, JoinedBatch)
        assert (len(first), first.offset, first.end_offset) == (30, 0, 30)
        assert (len(second), second.offset, second.end_offset) == (10, 30, 40)
        assert list(first.offsets) == list(range(30))
        assert first.values == [b"%d" % number for number in range(30)]
        assert first.keys == [f"k{number}".encode() if number % 3 == 0 else None for number in range(30)]
        assert first.headers == [{"h": b"%d" % number} if number % 5 == 0 else {} for number in range(30)]
        assert len(first.timestamps) == 30
        assert [message.offset for message in first] == list(first.offsets)
        assert first.plain_value(17) == b"17"
        table = first.to_arrow()
        assert table.column("value").to_pylist() == first.values
        assert table.column("offset").to_pylist() == list(first.offsets)
        shop.until(lambda: shop.committed(group)[TopicPartition(first.topic, first.partition)] == 30)
    assert consumer._core.inbox.buffered_bytes == 0


def buffered(consumer: Any) -> list[Any]:
    return [batch for state in list(consumer._core.inbox.states.values()) for batch in list(state.buffered)]


def test_a_joined_batch_that_is_not_done_comes_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    small_batches(shop, topic, 20)
    with pytest.raises(KeyError), shop.consumer(topic, group) as consumer:  # noqa: PT012
        wait_until(lambda: len(buffered(consumer)) == 20)
        for batch in consumer.batches(max_messages=12):
            if batch.offset:
                raise KeyError
    with shop.consumer(topic, group) as consumer:
        assert next(iter(consumer)).value == b"12"


def test_what_decode_rejects_in_a_joined_batch_is_named_and_comes_again(shop: Shop, group: str) -> None:
    def decode(value: bytes) -> int:
        if value == b"13":
            raise ValueError("unlucky")
        return int(value)

    topic = shop.topic()
    small_batches(shop, topic, 20)
    for _ in range(2):
        with pytest.raises(DecodeError) as raised, shop.consumer(topic, group, decode=decode) as consumer:  # noqa: PT012
            wait_until(lambda consumer=consumer: len(buffered(consumer)) == 20)
            batch = next(consumer.batches(max_messages=100))
            assert len(batch) == 20
            assert batch.undecoded(13).value == b"13"
            assert batch.decoded_message(14).value == 14
            list(batch.values)
        assert (raised.value.partition, raised.value.offset) == ("0-0", 13)


def test_results_and_offsets_of_a_joined_batch_are_one_transaction(shop: Shop, group: str, tmp_path: Path) -> None:
    topic = shop.topic()
    small_batches(shop, topic, 30)

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "db", timeout=60)

    async def scenario() -> int:
        offsets, transactions = offsets_in(connect), 0
        async with aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, auto_commit=False, offsets=offsets
        ) as consumer:
            with closing(connect()) as database:
                database.execute("CREATE TABLE seen (value INTEGER)")
                await asyncio.to_thread(wait_until, lambda: len(buffered(consumer)) == 30)
                async for batch in consumer.batches(max_messages=1000):
                    with database:
                        database.executemany("INSERT INTO seen VALUES (?)", [(int(value),) for value in batch.values])
                        await consumer.commit(batch, connection=database)
                    transactions += 1
                    if batch.end_offset == 30:
                        return transactions
        raise AssertionError

    assert asyncio.run(scenario()) == 1
    with closing(connect()) as database:
        assert [value for (value,) in database.execute("SELECT value FROM seen")] == list(range(30))
        assert database.execute("SELECT next_offset FROM metamq_offsets").fetchall() == [(30,)]


def test_a_limit_that_is_none_is_refused(shop: Shop) -> None:
    with shop.consumer(shop.topic()) as consumer:
        for wrong in (0, -1, "10"):
            with pytest.raises((ConfigError, WrongType), match="max_messages"):
                next(consumer.batches(max_messages=wrong))  # type: ignore[arg-type]
