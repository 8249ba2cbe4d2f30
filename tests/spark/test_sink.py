"""The sink, with Spark, ZooKeeper and brokers: what is written is there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from metamq.spark_consumers.sink.sink import has_run
from metamq.testing import Cluster
from tests.parts import read_to_end, wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.test_stream_source import numbers


def write(frame: Any, running: Cluster, **options: Any) -> None:
    frame.write.format("metamq").options(zookeeper=running.zookeeper, **options).mode("append").save()


def stored(running: Cluster, *topics: str) -> list[Any]:
    """Every message of the topics, by partition."""
    with running.consumer(topics=list(topics), start="earliest", idle_timeout_s=0.1) as consumer:
        return read_to_end(consumer)


def values(running: Cluster, *topics: str) -> Counter[bytes]:
    return Counter(message.value for message in stored(running, *topics))


def test_all_columns_arrive_where_they_are_to(spark: Any, running: Cluster) -> None:
    first, second = new_topic(running), new_topic(running)
    rows = [
        ("plain", None, None, first, None),
        ("keyed", "k1", None, second, None),
        ("placed", "k1", [("h", bytearray(b"1")), ("i", bytearray(b""))], first, "0-1"),
    ]
    schema = "value string, key string, headers array<struct<key string, value binary>>, topic string, partition string"
    write(spark.createDataFrame(rows, schema), running)
    found = {
        (one.topic, one.value, one.key, tuple(sorted(one.headers.items()))): one.partition
        for one in stored(running, first, second)
    }
    assert found.keys() == {
        (first, b"plain", None, ()),
        (second, b"keyed", b"k1", ()),
        (first, b"placed", b"k1", (("h", b"1"), ("i", b""))),
    }
    assert found[first, b"placed", b"k1", (("h", b"1"), ("i", b""))] == "0-1"
    with running.producer() as producer:
        assert producer.send(second, b"x", key=b"k1").result().partition == found[second, b"keyed", b"k1", ()]


def test_the_option_outranks_the_column_and_keys_keep_their_order(spark: Any, running: Cluster) -> None:
    topic = new_topic(running, 3)
    frame = spark.range(0, 30_000, 1, 2).selectExpr("cast(id as string) value", "id % 7 key", "'elsewhere' topic")
    write(frame.selectExpr("value", "cast(key as string) key", "topic").coalesce(1), running, topic=topic)
    by_key: dict[bytes, list[int]] = {}
    places: dict[bytes, set[str]] = {}
    for one in stored(running, topic):
        by_key.setdefault(one.key, []).append(int(one.value))
        places.setdefault(one.key, set()).add(one.partition)
    assert by_key == {b"%d" % key: list(range(key, 30_000, 7)) for key in range(7)}
    with running.producer() as producer:
        for key, found in places.items():
            assert found == {producer.send(topic, b"", key=key).result().partition}


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("id value", {"topic": "t"}, "the column 'value' is of type bigint"),
        ("cast(id as string) Value", {"topic": "t"}, "the query has a column 'Value'. Call it 'value'"),
        ("cast(id as string) value", {"topic": "no-such-topic"}, "topic 'no-such-topic' does not exist"),
        ("cast(id as string) value", {}, "the rows have no topic"),
        ("cast(id as string) value", {"topic": "t", "acks": "all"}, "unknown option 'acks'"),
    ],
)
def test_what_is_wrong_is_told_before_any_task_starts(
    spark: Any, running: Cluster, tmp_path: Path, columns: str, options: dict[str, str], said: str
) -> None:
    mark = str(tmp_path / "ran")
    frame = spark.range(1).mapInArrow(_marking(mark), "id long").selectExpr(*columns.split(", "))
    with pytest.raises(Exception, match=said):
        write(frame, running, **options)
    assert not Path(mark).exists()


def _marking(mark: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def each(batches: Iterator[Any]) -> Iterator[Any]:
        from pathlib import Path

        Path(mark).touch()
        yield from batches

    return each


def test_a_query_has_run_once_its_checkpoint_has_a_batch(tmp_path: Path) -> None:
    """Its driver then waits for ZooKeeper; before, an address that is wrong is told."""
    assert not has_run(f"file://{tmp_path}/new")
    (tmp_path / "commits").mkdir()
    assert not has_run(str(tmp_path))
    (tmp_path / "commits" / "0").touch()
    assert has_run(str(tmp_path))
    assert has_run(f"file://{tmp_path}")
    for unseen in ("s3a://not/to/be/seen", None):
        assert has_run(unseen)


def test_a_topic_is_not_overwritten(spark: Any, running: Cluster, topic: str) -> None:
    frame = spark.range(1).selectExpr("cast(id as string) value")
    with pytest.raises(Exception, match="a topic cannot be overwritten"):
        frame.write.format("metamq").options(zookeeper=running.zookeeper, topic=topic).mode("overwrite").save()


def test_a_stream_from_topic_to_topic(spark: Any, running: Cluster, topic: str, tmp_path: Path) -> None:
    send(running, topic, numbers(0, 500), keys=numbers(0, 500))
    to = new_topic(running, 3)
    source = spark.readStream.format("metamq").options(
        zookeeper=running.zookeeper, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=300
    )
    writer = source.load().select("key", "value").writeStream.format("metamq")
    writer = writer.options(zookeeper=running.zookeeper, topic=to, checkpointLocation=str(tmp_path / "checkpoint"))
    assert writer.trigger(availableNow=True).start().awaitTermination(100)
    assert Counter((one.key, one.value) for one in stored(running, to)) == Counter(
        zip(numbers(0, 500), numbers(0, 500), strict=True)
    )


def test_at_least_once_only_what_a_retried_task_wrote_is_there_twice(
    spark: Any, running: Cluster, topic: str, tmp_path: Path
) -> None:
    frame = spark.range(0, 40_000, 1, 2).mapInArrow(_failing_once(str(tmp_path / "mark"), 1), "id long")
    write(frame.selectExpr("cast(id as string) value"), running, topic=topic)
    found = values(running, topic)
    assert found.keys() == set(numbers(0, 40_000))
    twice = {int(value) for value, times in found.items() if times > 1}
    assert twice
    assert twice <= set(range(20_000, 40_000)), "the other task did it once"
    assert max(found.values()) == 2


def _failing_once(mark: str, partition: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Fails in one partition, after its rows were handed on."""

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import time

        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().partitionId() == partition:  # type: ignore[union-attr]
            time.sleep(1)  # what the writer took is on its way
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            raise RuntimeError("as if by a fault")

    return each


@pytest.fixture
def small_batches(spark: Any) -> Iterator[None]:
    """Spark hands few rows at a time to the sink."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, 500)
    yield
    spark.conf.set(name, before)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_write_outlives_a_broker_a_master_and_zookeeper(
    spark: Any, small_batches: None, own: Cluster, tmp_path: Path, delivery: str
) -> None:
    """Each task writes, waits for the fault, and writes on: nothing is lost, nothing doubled."""
    own.add_slave(0)
    own.create_topic("t", partitions=2, replication="sync")
    with own.admin() as admin:
        wait_until(lambda: sum(one.holds_all for one in admin.replicas()[0].replicas) == 2, 60, "the slave in sync")
    faults = {
        "a broker is killed": lambda: (own.brokers[1].kill(), own.brokers[1].start()),
        "zookeeper is away": lambda: (own.zookeeper_server.freeze(),),
        "a slave is promoted": lambda: (own.brokers[0].kill(), _promote(own)),
    }
    for number, (what, fault) in enumerate(faults.items()):
        place = tmp_path / f"fault-{number}"
        place.mkdir()
        first = 10_000 * number
        rows = spark.range(first, first + 10_000, 1, 2)
        frame = rows.mapInArrow(_waiting(str(place)), "value string, key string")
        with ThreadPoolExecutor() as pool:
            # Without ZooKeeper nothing is decided, so nothing ends that is exactly once.
            away_s = 5 if delivery == "exactly_once" and what == "zookeeper is away" else None
            happening = pool.submit(_strike, own, first, place, fault, away_s)
            try:
                write(frame, own, topic="t", delivery=delivery)
            finally:
                own.zookeeper_server.thaw()
                happening.result()
        found = Counter(one.value.rstrip() for one in stored(own, "t"))
        assert found == Counter(numbers(0, first + 10_000)), what


def _strike(running: Cluster, before: int, place: Path, fault: Callable[[], object], away_s: float | None) -> None:
    """Once both tasks have written some of their rows, and wait with the rest."""
    try:
        wait_until(lambda: len(list(place.glob("waits-*"))) == 2, 60, "both tasks")
        wait_until(lambda: len(stored(running, "t")) > before or _branches(running), 60, "some rows")
        fault()
    finally:
        (place / "go").touch()
    if away_s is not None:
        time.sleep(away_s)
        running.zookeeper_server.thaw()


def _branches(running: Cluster) -> int:
    """Messages in branches that are not committed."""
    with running.admin() as admin:
        return sum(one.messages for one in admin.transactions().branches)


def _promote(running: Cluster) -> None:
    with running.admin() as admin:
        admin.promote(0, 1)


def _waiting(place: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Makes rows of two kilobytes; waits in the middle for the file `go`."""

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        import time
        from pathlib import Path

        import pyarrow as pa
        from pyspark import TaskContext

        for number, batch in enumerate(batches):
            if number == 5:  # what came before is on its way, but for the last of it
                (Path(place) / f"waits-{TaskContext.get().partitionId()}").touch()  # type: ignore[union-attr]
                while not (Path(place) / "go").exists():
                    time.sleep(0.01)
            keys = [str(number) for number in batch.column(0).to_pylist()]
            yield pa.record_batch({"value": [key.ljust(2000) for key in keys], "key": keys})

    return each
