"""A batch that its producer has made so that nobody can read it: brokers refuse it where they see that, and where one
is stored all the same, consumers name it and can pass it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from metamq import TopicPartition
from metamq.client.net.transport import BrokerConnection
from metamq.errors import CorruptData, UndecodableBatch
from metamq.testing import Cluster
from metamq.wire import batch as layout
from metamq.wire import columns, status
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.compression import Codec, compress
from metamq.wire.headers import unpack_list
from tests.one_zookeeper import cluster

COUNT = 5
TP = TopicPartition("poisoned", "0-0")
GOOD = [b"before", b"after 1", b"after 2"]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        made.create_topic("poisoned", partitions=1)
        results = put(made, [good(GOOD[:1]), poison(Codec.NONE), poison(Codec.ZSTD), good(GOOD[1:])])
        assert [result.status == status.OK for result in results] == [True, False, True, True]
        refused = status.decode_error(results[1].status, results[1].error)
        assert isinstance(refused, CorruptData)
        assert "a column of 24 bytes at 0 does not fit 16" in str(refused)
        assert not refused.retriable
        yield made


def good(values: list[bytes]) -> bytes:
    return bytes(columns.encode(values, base_timestamp_us=1))


def poison(codec: Codec) -> bytes:
    """Right checksums, and a body that has no columns."""
    body = bytes(16) if codec is Codec.NONE else compress(codec, bytes(16))
    batch = bytearray(layout.HEADER_BYTES) + body + bytes(layout.padded(len(body)) - len(body))
    layout.seal(
        batch, codec=codec, flags=0, count=COUNT, producer_id=0, sequence=0, plain_size=16, base_timestamp_us=1,
        max_timestamp_us=1, body_size=len(body),
    )  # fmt: skip
    return bytes(batch)


def put(running: Cluster, batches: list[bytes], topic: str = "poisoned") -> list[PutResult]:
    with running.admin() as admin:
        topic_id = admin.topics()[topic].id

    async def send() -> Any:
        connection = await BrokerConnection.open("127.0.0.1", running.broker.port)
        entries = [PutEntry(topic, topic_id, 0, len(batch)) for batch in batches]
        try:
            return await connection.request(Command.PUT, entries, list(batches), timeout_s=60)
        finally:
            await connection.close()

    return unpack_list(PutResult, asyncio.run(send()))


@pytest.mark.parametrize("group", [None, "seeks"])
def test_a_consumer_names_the_batch_and_a_seek_passes_it(running: Cluster, group: str | None) -> None:
    with running.consumer(group=group, topics=["poisoned"], start="earliest", idle_timeout_s=5) as consumer:
        found = []
        with pytest.raises(UndecodableBatch) as caught:
            found += [message.value for message in iter_into(consumer, found)]
        error = caught.value
        assert (error.topic, error.partition, error.offset, error.end_offset) == (*TP, 1, 1 + COUNT)
        assert "the batch of poisoned/0-0 with the offsets 1 to 5 is damaged" in str(error)
        assert "metamq group reset GROUP poisoned --partition 0-0=6" in str(error)
        assert pickle.loads(pickle.dumps(error)).end_offset == 1 + COUNT
        with pytest.raises(UndecodableBatch):  # it is not passed over in silence
            next(iter(consumer))
        consumer.seek((error.topic, error.partition), error.end_offset)
        for message in consumer:
            found.append(message.value)
            if found == GOOD:
                break
    assert found == GOOD


def iter_into(consumer: Any, found: list[bytes]) -> Iterator[Any]:
    for message in consumer:
        found.append(message.value)
        yield from ()


def test_a_group_that_has_met_it_goes_on_after_a_reset(running: Cluster) -> None:
    """Each start fails at the same batch, and says the command that passes it."""
    for _ in range(2):
        with (
            running.consumer(group="resets", topics=["poisoned"], start="earliest", idle_timeout_s=5) as consumer,
            pytest.raises(UndecodableBatch) as caught,
        ):
            for _message in consumer:
                pass
    with running.admin() as admin:
        admin.reset_offsets("resets", "poisoned", {TP: caught.value.end_offset})
    with running.consumer(group="resets", topics=["poisoned"], idle_timeout_s=5) as consumer:
        assert [next(iter(consumer)).value, next(iter(consumer)).value] == GOOD[1:]


def test_columns_of_batches_name_it_too(running: Cluster) -> None:
    with running.consumer(topics=["poisoned"], start="earliest", idle_timeout_s=5) as consumer:
        batches = consumer.batches()
        assert next(batches).values == GOOD[:1]
        broken = next(batches)
        for use in (
            lambda: broken.values, lambda: broken.keys, lambda: broken.timestamps, lambda: broken.headers,
            broken.to_arrow, lambda: list(broken),
        ):  # fmt: skip
            with pytest.raises(UndecodableBatch, match="offsets 1 to 5"):
                use()
        assert list(next(batches).values) == GOOD[1:]


@pytest.mark.slow
@pytest.mark.parametrize("group", [None, "bombed"])
def test_small_batches_that_are_large_in_plain_cost_a_consumer_one_at_a_time(
    running: Cluster, group: str | None
) -> None:
    """More than a gigabyte in plain, of which all fits into what a consumer fetches ahead."""
    topic = f"bombs-of-{group}"
    running.create_topic(topic, partitions=1)
    bomb = bytes(columns.encode([bytes(1_000_000)] * 15, base_timestamp_us=1, codec=Codec.ZSTD))
    assert len(bomb) < 4096
    assert all(result.status == status.OK for result in put(running, [bomb] * 100, topic))
    process, largest, read = psutil.Process(), 0, 0
    before = process.memory_info().rss
    with running.consumer(topics=[topic], group=group, start="earliest", idle_timeout_s=1) as consumer:
        for message in consumer:
            read += len(message.value)
            if message.offset % 15 == 0:
                largest = max(largest, process.memory_info().rss)
    assert read == 1_500_000_000
    assert largest - before < 200_000_000
