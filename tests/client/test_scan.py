"""A topic read as a table: its rows are what was sent, between fixed places, for every library that reads Arrow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import metamq
from metamq import Message, TopicPartition
from metamq.client.scan import arrow_batches, side_by_side
from metamq.errors import (
    ConfigError,
    ConnectError,
    CorruptData,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
    WrongType,
)
from metamq.testing import Cluster
from metamq.wire import columns
from tests.client.conftest import Shop
from tests.one_zookeeper import cluster
from tests.parts import wait_until


def scan(shop: Shop, topics: Any, **options: Any) -> metamq.Scan:
    return metamq.scan(topics, zookeeper=shop.cluster.zookeeper, **options)


def rows(table: Any) -> list[dict[str, Any]]:
    return sorted(pa.table(table).to_pylist(), key=lambda row: (row["partition"], row["offset"]))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_rows_are_what_was_sent(shop: Shop, compression: str | None) -> None:
    topic = shop.topic(3)
    sent = {}
    with shop.cluster.producer(compression=compression) as producer:
        for number in range(3000):
            value, key = b"%d" % number, None if number % 2 else b"k%d" % number
            headers = {"n": value, "m": b""} if number % 3 else None
            when = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(microseconds=number)
            delivery = producer.send(topic, value, key, headers, timestamp=when)
            sent[value] = key, list(headers.items()) if headers else None, when, delivery
    table = scan(shop, topic)
    assert table.schema.names == list(Message._fields)
    found = rows(table)
    assert {row["value"] for row in found} == sent.keys()
    assert len(found) == 3000
    for row in found:
        key, headers, when, delivery = sent[row["value"]]
        receipt = delivery.result()
        assert (row["topic"], row["partition"], row["offset"]) == receipt[:3]
        assert (row["key"], row["headers"], row["timestamp"]) == (key, headers, when)


def numbered(count: int, first: int = 0, size: int = 0) -> list[bytes]:
    return [b"%d" % number + bytes(size) for number in range(first, first + count)]


def test_every_library_reads_it_and_reads_it_again(shop: Shop) -> None:
    topic = shop.topic(3)
    with shop.cluster.producer() as producer:
        producer.send_many(topic, numbered(1000), keys=[b"k%d" % (number % 5) for number in range(1000)])
    flights = scan(shop, topic)
    counted = duckdb.execute("SELECT key, count(*), sum(decode(value)::INT) FROM flights GROUP BY key ORDER BY key")
    assert counted.fetchall() == [(b"k%d" % n, 200, sum(range(n, 1000, 5))) for n in range(5)]
    assert pl.DataFrame(flights).height == 1000
    lazy = pl.scan_arrow_c_stream(flights).filter(pl.col("key") == b"k1").select(pl.len()).collect()
    assert lazy.item() == 200
    for _ in range(2):
        assert pa.table(flights).num_rows == 1000
    assert flights.end.keys() == {TopicPartition(topic, f"0-{n}") for n in range(3)}
    assert sum(flights.end.values()) == 1000
    assert f"<Scan of {topic}: 1,000 messages" in repr(flights)


def test_it_ends_where_the_topic_ended_while_a_producer_goes_on(shop: Shop) -> None:
    topic = shop.topic(2)
    shop.send(topic, numbered(500))
    stop = threading.Event()
    sent = 500

    def send_on() -> None:
        nonlocal sent
        with shop.cluster.producer() as producer:
            while not stop.is_set():
                producer.send_many(topic, numbered(100)).result(60)
                sent += 100

    thread = threading.Thread(target=send_on)
    thread.start()
    try:
        wait_until(lambda: sent > 1000)
        before = sent
        table = scan(shop, topic)
        fixed = sum(table.end.values())
        assert before <= fixed <= sent + 100
        for _ in range(3):
            found = rows(table)
            assert len(found) == fixed
            ends = {TopicPartition(topic, row["partition"]): row["offset"] + 1 for row in found}
            assert ends == table.end
        wait_until(lambda: sent > before + 1000)
    finally:
        stop.set()
        thread.join()
    rest = scan(shop, topic, start=table.end)
    assert rest.start == table.end
    assert len(rows(rest)) == sent - fixed, "a later scan continues the former one"


def test_rows_of_a_partition_come_in_order(shop: Shop) -> None:
    topic = shop.topic(4)
    for partition in range(4):
        with shop.cluster.producer(batch_bytes=10_000) as producer:
            producer.send_many(topic, numbered(5000), partition=f"0-{partition}")
    last = dict.fromkeys((f"0-{n}" for n in range(4)), -1)
    for batch in scan(shop, topic, columns=["partition", "offset"]):
        for partition, offset in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            assert offset == last[partition] + 1
            last[partition] = offset
    assert set(last.values()) == {4999}


def test_places_by_offset_and_time(shop: Shop) -> None:
    topic = shop.topic(2)
    first, second = TopicPartition(topic, "0-0"), TopicPartition(topic, "0-1")
    noon = datetime(2024, 2, 29, 12, tzinfo=UTC)
    with shop.cluster.producer(linger_ms=0) as producer:
        for tp in (first, second):
            for minute in range(10):
                when = noon + timedelta(minutes=minute)
                producer.send(topic, b"%d" % minute, partition=tp.partition, timestamp=when).result(60)

    def offsets(**options: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"0-0": [], "0-1": []}
        for row in rows(scan(shop, topic, columns=["partition", "offset"], **options)):
            found[row["partition"]].append(row["offset"])
        return found

    whole = list(range(10))
    assert offsets(start={first: 3}) == {"0-0": whole[3:], "0-1": whole}
    assert offsets(end={(topic, "0-1"): 4}) == {"0-0": whole, "0-1": whole[:4]}
    assert offsets(start={first: 2, second: 5}, end={first: 2, second: 6}) == {"0-0": [], "0-1": [5]}
    assert offsets(start=noon + timedelta(minutes=7)) == {"0-0": whole[7:], "0-1": whole[7:]}
    assert offsets(start=noon + timedelta(minutes=2), end=noon + timedelta(minutes=4)) == {"0-0": [2, 3], "0-1": [2, 3]}
    assert offsets(start=datetime(1960, 1, 1, tzinfo=UTC), end=datetime(2100, 1, 1, tzinfo=UTC))["0-0"] == whole
    assert offsets(start="latest") == {"0-0": [], "0-1": []}


def test_empty_topics_and_several_topics(shop: Shop) -> None:
    empty, one, two = shop.topic(3), shop.topic(1), shop.topic(2)
    shop.send(one, [b"1"])
    shop.send(two, [b"2"])
    table = pa.table(scan(shop, empty))
    assert (table.num_rows, table.schema.names) == (0, list(Message._fields))
    nothing = scan(shop, empty)  # noqa: F841, DuckDB looks for the name
    assert duckdb.execute("SELECT count(*) FROM nothing").fetchall() == [(0,)]
    found = [(row["topic"], row["value"]) for row in pa.table(scan(shop, [empty, one, two])).to_pylist()]
    assert sorted(found) == sorted([(one, b"1"), (two, b"2")])


def test_committed_transactions_are_there_and_others_are_not(shop: Shop) -> None:
    topic = shop.topic(1)
    with shop.cluster.producer() as producer:
        with producer.transaction():
            producer.send_many(topic, numbered(10))
        with pytest.raises(ZeroDivisionError), producer.transaction():  # noqa: PT012
            producer.send_many(topic, numbered(10, 100))
            _ = 1 / 0
        with producer.transaction():
            producer.send_many(topic, numbered(10, 200))
            assert [row["value"] for row in rows(scan(shop, topic))] == numbered(10)
    assert [row["value"] for row in rows(scan(shop, topic))] == numbered(10) + numbered(10, 200)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_only_the_wanted_columns_are_decoded(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    topic = shop.topic(1)
    with shop.cluster.producer(compression=compression) as producer:
        producer.send_many(topic, numbered(5000, size=100), keys=[b"k%d" % number for number in range(5000)])
    before = pa.total_allocated_bytes()
    table = pa.table(scan(shop, topic, columns=["timestamp", "key"]))
    assert table.schema.names == ["timestamp", "key"]
    assert table["key"].to_pylist() == [b"k%d" % number for number in range(5000)]
    assert pa.total_allocated_bytes() - before >= table.nbytes, "a view would keep the values in memory, too"
    asked: list[str] = []
    real_column, real_decode = arrow_batches.column, columns.decode
    monkeypatch.setattr(arrow_batches, "column", lambda name, *rest: asked.append(name) or real_column(name, *rest))
    monkeypatch.setattr(columns, "decode", lambda *rest: asked.append("body") or real_decode(*rest))
    assert pa.table(scan(shop, topic, columns=["offset", "topic", "partition"])).num_rows == 5000
    assert asked == []
    assert pa.table(scan(shop, topic, columns=["value"])).num_rows == 5000
    assert set(asked) == {"body", "value"}


def test_a_scan_that_is_left_early_leaves_no_thread(shop: Shop) -> None:
    topic = shop.topic(4)
    with shop.cluster.producer() as producer:
        for _ in range(20):
            producer.send_many(topic, numbered(2000, size=1000))
    table = scan(shop, topic)

    def limited_query() -> None:
        messages = table  # noqa: F841, DuckDB looks for the name
        assert len(duckdb.execute("SELECT * FROM messages LIMIT 3").fetchall()) == 3

    for use in (
        lambda: next(iter(table)),
        lambda: pa.RecordBatchReader.from_stream(table).read_next_batch(),
        limited_query,
    ):
        use()
        wait_until(lambda: not scanning(), what="the end of the threads")


def scanning() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "metamq-scan"]


def test_it_reads_no_more_ahead_than_it_has_memory_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = shop.topic(4)
    with shop.cluster.producer() as producer:
        for _ in range(40):
            producer.send_many(topic, numbered(2000, size=1000))
    monkeypatch.setattr(side_by_side, "LOOK_AHEAD_BYTES", 4_000_000)
    table = scan(shop, topic)
    reading = side_by_side._Reading([task for task in table._tasks if task.wanted.size], table.schema)
    reading.start(2)
    wait_until(lambda: reading._ready_bytes >= 4_000_000)
    largest, found = 0, 0
    while (batch := reading.take()) is not None:
        found += batch.num_rows
        largest = max(largest, reading._ready_bytes)
    assert found == 80_000
    assert largest < 4_000_000 + 2 * 2_200_000


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that a test may hurt."""
    with cluster(folder=tmp_path / "cluster", retention_check_s=0.1) as running:
        yield running


def through_the_broker(table: metamq.Scan) -> metamq.Scan:
    """The same scan as on another machine: it reads no files of the broker."""
    return metamq.Scan([task._replace(in_place=False) for task in table._tasks], table.schema)


@pytest.mark.parametrize("local", [True, False])
def test_a_broker_that_is_killed_meanwhile_is_waited_for(
    own: Cluster, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    own.create_topic("t", partitions=2)
    with own.producer() as producer:
        for first in range(0, 40_000, 2000):
            producer.send_many("t", numbered(2000, first, 1000))
    monkeypatch.setattr(side_by_side, "LOOK_AHEAD_BYTES", 4_000_000)
    table = metamq.scan("t", zookeeper=own.zookeeper)
    reading = iter(table if local else through_the_broker(table))
    found = next(reading)["value"].to_pylist()
    own.broker.kill()
    back = threading.Timer(1.0, own.broker.start)
    back.start()
    for batch in reading:
        found += batch["value"].to_pylist()
    back.join()
    assert sorted(found) == sorted(numbered(40_000, 0, 1000))


def test_a_scan_that_is_left_while_a_broker_is_away_leaves_no_thread(
    own: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own.create_topic("t", partitions=2)
    with own.producer() as producer:
        for first in range(0, 40_000, 2000):
            producer.send_many("t", numbered(2000, first, 1000))
    monkeypatch.setattr(side_by_side, "LOOK_AHEAD_BYTES", 2_000_000)
    caplog.set_level("INFO", "metamq.client")
    table = through_the_broker(metamq.scan("t", zookeeper=own.zookeeper, timeout_s=3600))
    reading = side_by_side._Reading(table._tasks, table.schema)
    reading.start(2)
    reading.take()
    own.broker.kill()
    while "is tried again" not in caplog.text:
        if reading._ready:
            reading.take()
    reading.stop()
    wait_until(lambda: not scanning(), what="the end of the threads")


def test_one_time_out_is_for_the_start_and_the_end(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    own.create_topic("t", partitions=1)
    granted: list[float] = []
    ask = metamq.client.scan.scan.ask_until_answered

    def noted(view: Any, questions: Any, timeout_s: float) -> Any:
        granted.append(timeout_s)
        return ask(view, questions, timeout_s)

    monkeypatch.setattr("metamq.client.scan.scan.ask_until_answered", noted)
    metamq.scan("t", zookeeper=own.zookeeper, timeout_s=30)
    assert granted[1] < granted[0] <= 30, "the second question has what the first has left"


@pytest.mark.slow
def test_a_broker_that_stays_away_is_an_error_and_never_the_end(own: Cluster) -> None:
    own.create_topic("t", partitions=2)
    with own.producer() as producer:
        producer.send_many("t", numbered(1000))
    table = metamq.scan("t", zookeeper=own.zookeeper, timeout_s=0.5)
    own.broker.kill()
    with pytest.raises(ConnectError):
        list(table)
    with pytest.raises(pa.ArrowInvalid, match="no connection to"):
        pa.table(table)
    with pytest.raises(pl.exceptions.ComputeError, match="no connection to"):
        pl.DataFrame(table)
    with pytest.raises(duckdb.Error, match="no connection to"):
        duckdb.execute('SELECT count(*) FROM "table"').fetchall()
    with pytest.raises(ConnectError):
        metamq.scan("t", zookeeper=own.zookeeper, timeout_s=0.5)


def test_messages_that_retention_has_removed(own: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    own.create_topic("t", partitions=1, segment_bytes=1024)
    tp = TopicPartition("t", "0-0")
    with own.producer() as producer:
        for number in range(100):
            producer.send("t", b"%d" % number + bytes(200)).result(60)
    made = {
        choice: metamq.scan("t", zookeeper=own.zookeeper, on_data_loss=choice)  # type: ignore[arg-type]
        for choice in ("fail", "earliest")
    }
    with own.admin() as admin:
        admin.alter("t", retention_bytes=4096)
        wait_until(lambda: admin.describe_topic("t").partitions[0].start_offset)
        wait_until(lambda: (admin.describe_topic("t").partitions[0].size_bytes or 0) <= 6000)
        first = admin.describe_topic("t").partitions[0].start_offset or 0
    with pytest.raises(
        OffsetOutOfRange, match=rf"t/0-0 has the offsets {first} to 100, not 0\..*on_data_loss='earliest'"
    ):
        list(made["fail"])
    assert [row["offset"] for row in rows(made["earliest"])] == list(range(first, 100))
    assert f"t/0-0: offsets 0 to {first} are left out" in caplog.text
    with pytest.raises(OffsetOutOfRange, match=f"{first} to 100, not 0.*Correct `start`"):
        metamq.scan("t", zookeeper=own.zookeeper, start={tp: 0})
    nearest = metamq.scan("t", zookeeper=own.zookeeper, start={tp: 0}, end={tp: 999}, on_data_loss="earliest")
    assert (nearest.start, nearest.end) == ({tp: first}, {tp: 100})


def test_a_damaged_range_is_an_error_that_names_it(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    with own.producer() as producer:
        for value in (b"before", b"flip this", b"behind"):
            producer.send("t", value).result(20)
    table = metamq.scan("t", zookeeper=own.zookeeper)
    assert own.broker.stop() == 0
    (segment,) = (own.broker.data / "topics").glob("t@*/0/*.log")
    segment.write_bytes(segment.read_bytes().replace(b"flip this", b"flip that"))
    own.broker.start()
    with pytest.raises(CorruptData, match="the batch of t/0-0 with offset 1 is damaged"):
        list(table)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"columns": ["values"]}, ConfigError, "'values'.*There are: topic, partition, offset"),
        ({"columns": "value"}, WrongType, "a list of names"),
        ({"columns": []}, ConfigError, "one column or more"),
        ({"columns": ["key", "key"]}, ConfigError, "each once"),
        ({"start": "first"}, ConfigError, "`start` is 'first'.*aware datetime"),
        ({"end": datetime(2024, 1, 1)}, ConfigError, "`end` is .*aware datetime"),
        ({"start": {("t", "0-0"): -1}}, WrongType, "an offset, 0 or more"),
        ({"start": {"0-0": 1}}, WrongType, "TopicPartition"),
        ({"start": {("t", "0-7"): 1}}, PartitionNotFound, "0-7"),
        ({"start": {("t", "0-0"): 999}}, OffsetOutOfRange, "999"),
        ({"start": {("t", "0-0"): 5}, "end": {("t", "0-0"): 2}}, ConfigError, "begins t/0-0 at offset 5.*ends it at 2"),
        ({"on_data_loss": "latest"}, ConfigError, "'fail' or 'earliest'"),
        ({"read_from": "slave"}, ConfigError, "'any' or 'master'"),
        ({"timeout_s": -1}, ConfigError, "timeout_s"),
    ],
)
def test_wrong_arguments(shop: Shop, options: dict[str, Any], error: type[Exception], words: str) -> None:
    if "t" not in shop.admin.topics():
        shop.admin.create_topic("t", 1)
        shop.send("t", numbered(10))
    with pytest.raises(error, match=words):
        scan(shop, "t", **options)


def test_wrong_topics(shop: Shop) -> None:
    for topics, error in (
        ("nowhere", TopicNotFound),
        ([], ConfigError),
        ("a b", ConfigError),
        (7, WrongType),
        (b"t", WrongType),
    ):
        with pytest.raises(error):
            scan(shop, topics)


def test_without_pyarrow_the_error_names_the_extra(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"metamq\[arrow\]"):
        scan(shop, "any")


SCAN_IN_LITTLE_MEMORY = """
import resource, sys, metamq
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
table = metamq.scan("large", zookeeper=sys.argv[1])
before, found = peak_bytes(), 0
for batch in table:
    found += batch.num_rows
print(found, peak_bytes() - before)
"""


@pytest.mark.slow
def test_a_scan_needs_the_same_memory_for_any_topic(shop: Shop) -> None:
    shop.admin.create_topic("large", 4)
    with shop.cluster.producer() as producer:
        values = [os.urandom(1000) for _ in range(10_000)]
        for _ in range(50):
            producer.send_many("large", values)
    command = [sys.executable, "-c", SCAN_IN_LITTLE_MEMORY, shop.cluster.zookeeper]
    found, more_bytes = map(int, subprocess.run(command, capture_output=True, check=True, timeout=250).stdout.split())
    assert found == 500_000
    assert more_bytes < 150_000_000
