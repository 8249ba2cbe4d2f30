"""Tables that are sent by one call: each row is the message that `send` would make of it, in both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import metamq
from metamq.client.producer import tables
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import ConfigError, MessageTooLarge, PartitionNotFound, TopicNotFound, WrongType
from tests.client.conftest import Shop

NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]


def stored(shop: Shop, topic: str) -> Rows:
    found = pa.table(metamq.scan(topic, zookeeper=shop.cluster.zookeeper)).to_pylist()
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def send_blocking(shop: Shop, topic: str, table: Any, **settings: Any) -> None:
    with shop.cluster.producer(**settings) as producer:
        producer.send_table(topic, table)


def send_aio(shop: Shop, topic: str, table: Any, **settings: Any) -> None:
    async def run() -> None:
        async with metamq.aio.Producer(shop.cluster.zookeeper, **settings) as producer:
            await producer.send_table(topic, table)

    asyncio.run(run())


def send_in_a_transaction(shop: Shop, topic: str, table: Any, **settings: Any) -> None:
    with shop.cluster.producer(**settings) as producer, producer.transaction():
        producer.send_table(topic, table)


def send_in_an_aio_transaction(shop: Shop, topic: str, table: Any, **settings: Any) -> None:
    async def run() -> None:
        async with metamq.aio.Producer(shop.cluster.zookeeper, **settings) as producer, producer.transaction():
            await producer.send_table(topic, table)

    asyncio.run(run())


WAYS = pytest.mark.parametrize("send", [send_blocking, send_aio, send_in_a_transaction, send_in_an_aio_transaction])


@WAYS
def test_each_row_is_a_message(shop: Shop, send: Callable[..., None]) -> None:
    topic = shop.topic(4)
    rows = [
        {
            "value": b"%d" % number,
            "key": b"k%d" % (number % 50) if number % 2 else None,
            "headers": [("n", b"%d" % number), ("m", b"")] if number % 3 else None,
            "timestamp": NOON if number % 5 else None,
            "partition": "0-3" if number % 7 == 0 else None,
        }
        for number in range(2000)
    ]
    before = datetime.now(UTC)
    send(shop, topic, pa.Table.from_pylist(rows, schema=SCHEMA))
    found = stored(shop, topic)
    assert len(found) == 2000
    last: dict[tuple[bytes, str], int] = {}
    for row in found:
        number = int(row["value"])
        sent = rows[number]
        assert (row["key"], row["headers"]) == (sent["key"], sent["headers"])
        assert row["timestamp"] == NOON if sent["timestamp"] else before <= row["timestamp"] <= datetime.now(UTC)
        if sent["partition"] or sent["key"]:
            by_key = f"0-{by_key_hash(topic, sent['key'] or b'', 4)}"
            assert row["partition"] == (sent["partition"] or by_key)
            stream = (sent["key"] or b"", row["partition"])
            assert last.get(stream, -1) < number, "a key keeps its order"
            last[stream] = number


SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("partition", pa.string()),
    ]
)


def test_the_tables_of_other_libraries(shop: Shop) -> None:
    topic = shop.topic(1)
    keys = pl.Series(["a", None, "b"], dtype=pl.Categorical)
    headers = [[{"key": "h", "value": b"1"}], [], None]
    send_blocking(shop, topic, pl.DataFrame({"value": ["1", "2", "3"], "key": keys, "headers": headers}))
    send_blocking(shop, topic, duckdb.sql("SELECT '4' AS value, TIMESTAMPTZ '2024-02-29 12:00:00+00' AS timestamp"))
    with shop.cluster.consumer(topics=topic, idle_timeout_s=0.2) as consumer:
        batch = next(consumer.batches())
        send_blocking(shop, topic, batch.to_arrow())
    found = stored(shop, topic)
    again = [dict(row, offset=0) for row in found[4:]]
    assert again == [dict(row, offset=0) for row in found[: len(again)]], "a batch comes again as it was"
    found = sorted(found[:4], key=lambda row: row["value"])
    assert [row["value"] for row in found] == [b"1", b"2", b"3", b"4"]
    assert [row["key"] for row in found] == [b"a", None, b"b", None]
    assert [row["headers"] for row in found] == [[("h", b"1")], None, None, None]
    assert found[3]["timestamp"] == NOON


@pytest.mark.slow
def test_a_scan_is_sent_as_it_comes_with_more_than_the_buffer_holds(shop: Shop) -> None:
    first, second = shop.topic(3), shop.topic(3)
    values = [b"%d" % number + bytes(1000) for number in range(30_000)]
    with shop.cluster.producer() as producer:
        producer.send_many(first, values, keys=[b"k%d" % (number % 100) for number in range(len(values))])
    for send in (send_blocking, send_aio):
        source = metamq.scan(first, zookeeper=shop.cluster.zookeeper)
        send(shop, second, source, buffer_bytes=4 * 1024 * 1024)
    found = stored(shop, second)
    expected = [row["value"] for row in stored(shop, first)]
    assert sorted(row["value"] for row in found) == sorted(expected * 2)


def test_rows_come_after_the_messages_that_were_sent_before(shop: Shop) -> None:
    topic = shop.topic(2)
    table = pa.table({"value": ["2", "3"], "key": ["k", "k"]})
    with shop.cluster.producer(linger_ms=5000) as producer:
        producer.send(topic, b"1", key="k")  # its partition is not known yet
        delivery = producer.send_table(topic, table)
        producer.send(topic, b"4", key="k")
        producer.send_table(topic, table)
        producer.flush()
        assert [(one.offset, one.count) for one in delivery.result()] == [(1, 2)]
    assert [row["value"] for row in stored(shop, topic)] == [b"1", b"2", b"3", b"4", b"2", b"3"]


def test_a_table_without_rows(shop: Shop) -> None:
    topic = shop.topic(1)
    empty = pa.table({"value": pa.array([], pa.string())})
    for send in (send_blocking, send_aio, send_in_a_transaction):
        send(shop, topic, empty)
    with shop.cluster.producer() as producer:
        assert producer.send_table(topic, empty).result() == []
    assert stored(shop, topic) == []


def test_a_table_that_is_rolled_back(shop: Shop) -> None:
    topic = shop.topic(1)
    with pytest.raises(ZeroDivisionError), shop.cluster.producer() as producer, producer.transaction():  # noqa: PT012
        producer.send_table(topic, pa.table({"value": ["1"]}))
        _ = 1 / 0
    assert stored(shop, topic) == []


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ([b"1"], WrongType, "__arrow_c_stream__"),
        (pa.table({"key": ["1"]}), ConfigError, "no column 'value'"),
        (pa.table({"value": ["1"], "keys": ["1"]}), ConfigError, "has a column 'keys'.*leave them out"),
        (pa.table({"value": [1]}), ConfigError, "'value' is of type int64.*bytes or text"),
        (pa.table({"value": ["1", None]}), ConfigError, "'value' has nulls"),
        (pa.table({"value": ["1"], "timestamp": [datetime(2024, 1, 1)]}), ConfigError, "with a time zone"),
        (pa.table({"value": ["1"], "timestamp": [datetime(1969, 1, 1, tzinfo=UTC)]}), ConfigError, "before 1970"),
        (pa.table({"value": ["1"], "partition": ["0-9"]}), PartitionNotFound, "0-9"),
        (pa.table({"value": ["1"], "partition": ["zero"]}), ConfigError, "zero"),
        (pa.table({"value": ["1"], "headers": [{"a": 1}]}), ConfigError, "map of text to bytes"),
        (pa.table({"value": [bytes(5_000_000)]}), MessageTooLarge, "5,000,008"),
        (pa.table([["1"], ["1"]], names=["value", "value"]), ConfigError, "twice"),
    ],
)
def test_wrong_tables_are_refused(shop: Shop, table: Any, error: type[Exception], words: str) -> None:
    topic = shop.topic(1)
    with pytest.raises(error, match=words):
        send_blocking(shop, topic, table)
    with pytest.raises(error, match=words):
        send_aio(shop, topic, table)
    assert stored(shop, topic) == []


def test_a_topic_that_does_not_exist(shop: Shop) -> None:
    with pytest.raises(TopicNotFound):
        send_blocking(shop, "nowhere", pa.table({"value": ["1"]}))


def test_a_partitioner_of_the_user_and_what_it_may_not_return(shop: Shop) -> None:
    topic = shop.topic(3)
    table = pa.table({"value": ["1", "2"], "key": ["a", "b"]})
    send_blocking(shop, topic, table, partitioner=lambda _topic, key, _count: 2 if key == b"a" else 1)
    assert [(row["value"], row["partition"]) for row in stored(shop, topic)] == [(b"2", "0-1"), (b"1", "0-2")]
    with pytest.raises(ConfigError, match="the partitioner returned 3"):
        send_blocking(shop, topic, table, partitioner=lambda _topic, _key, count: count)


def test_without_pyarrow_the_error_names_the_extra(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "metamq.client.producer.tables", None)
    monkeypatch.delattr("metamq.client.producer.tables")
    with pytest.raises(ConfigError, match=r"metamq\[arrow\]"):
        send_blocking(shop, "any", pa.table({"value": ["1"]}))


def test_large_rows_are_taken_a_piece_at_a_time() -> None:
    table = pa.table({"value": pa.array([bytes(1_000_000)] * 40, pa.large_binary())})
    pieces = list(tables.rows_of("orders", table)[1])
    assert sum(piece.num_rows for piece in pieces) == 40
    assert max(piece.nbytes for piece in pieces) <= tables.PIECE_BYTES


@pytest.mark.parametrize("known", [True, False])
def test_send_many_to_one_partition(shop: Shop, known: bool) -> None:
    topic = shop.topic(4)
    with shop.cluster.producer() as producer:
        if known:
            producer.send(topic, b"before", partition="0-0").result()
        delivery = producer.send_many(topic, [b"1", b"2"], partition="0-2")
        keyed = producer.send_many(topic, [b"3", b"4"], keys=["k", None], partition="0-2")
        assert [one.partition for one in delivery.result() + keyed.result()] == ["0-2", "0-2"]
        assert producer.send_many(topic, [], partition="0-2").result() == []
        with producer.transaction():
            producer.send_many(topic, [b"5"], ["k"], partition="0-2")
        found = [row for row in stored(shop, topic) if row["partition"] == "0-2"]
        assert [(row["value"], row["key"]) for row in found] == [
            (b"1", None), (b"2", None), (b"3", b"k"), (b"4", None), (b"5", b"k"),
        ]  # fmt: skip
        with pytest.raises(ConfigError):
            producer.send_many(topic, [b"6"], partition="two")
        with pytest.raises(PartitionNotFound):
            producer.send_many(topic, [b"6"], partition="0-9").result()
