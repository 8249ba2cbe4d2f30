"""The batch source, with Spark, ZooKeeper and a broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.spark.conftest import new_topic, send


def load(spark: Any, running: Cluster, topic: str, **options: Any) -> Any:
    """A data frame of a topic."""
    reader = spark.read.format("metamq").option("zookeeper", running.zookeeper).option("subscribe", topic)
    return reader.options(**options).load()


def test_every_message_comes_once_with_its_columns(spark: Any, running: Cluster, topic: str) -> None:
    values = [b"%d" % number for number in range(5000)]
    keys = [None if number % 3 else b"key %d" % number for number in range(5000)]
    send(running, topic, values, keys=keys)
    rows = load(spark, running, topic).collect()
    assert sorted(bytes(row.value) for row in rows) == sorted(values)
    with running.consumer(topics=topic, start="earliest") as consumer:
        expected = []
        for message in consumer:
            expected.append((message.partition, message.offset, message.key, message.value, message.timestamp))
            if len(expected) == 5000:
                break
    found = [
        (row.partition, row.offset, None if row.key is None else bytes(row.key), bytes(row.value), row.topic)
        for row in rows
    ]
    assert sorted(found, key=lambda row: row[:2]) == sorted(
        [(*message[:4], topic) for message in expected], key=lambda row: row[:2]
    )
    assert {row.timestampType for row in rows} == {0}
    times = {(row.partition, row.offset): row.timestamp.timestamp() for row in rows}
    assert all(abs(times[message[:2]] - message[4] / 1e6) < 1e-5 for message in expected)


@pytest.mark.parametrize("columns", ["value binary", "offset bigint, topic string", "partition string"])
def test_a_schema_chooses_columns(spark: Any, running: Cluster, topic: str, columns: str) -> None:
    send(running, topic, [b"a", b"b", b"c"])
    reader = spark.read.format("metamq").options(zookeeper=running.zookeeper, subscribe=topic)
    frame = reader.schema(columns).load()
    assert frame.columns == [column.split()[0] for column in columns.split(", ")]
    assert len(frame.collect()) == 3


def values(frame: Any) -> list[bytes]:
    return sorted(bytes(row.value) for row in frame.select("value").collect())


def test_subscriptions_and_bounds(spark: Any, running: Cluster) -> None:
    first, second = new_topic(running, 1), new_topic(running, 2)
    send(running, first, [b"a0", b"a1", b"a2"])
    send(running, second, [b"b"] * 20)

    def reader() -> Any:
        return spark.read.format("metamq").option("zookeeper", running.zookeeper)

    assert reader().options(subscribe=f"{first},{second}").load().count() == 23
    assert reader().options(subscribePattern=f"{first}|{second}").load().count() == 23
    parts = reader().options(assign=json.dumps({first: ["0-0"], second: ["0-1"]})).load()
    assert {(row.topic, row.partition) for row in parts.select("topic", "partition").distinct().collect()} <= {
        (first, "0-0"),
        (second, "0-1"),
    }
    bounds = {
        "startingOffsets": json.dumps({first: {"0-0": 1}}),
        "endingOffsets": json.dumps({first: {"0-0": 2}}),
    }
    assert values(load(spark, running, first, **bounds)) == [b"a1"]
    pieces = load(spark, running, second, minPartitions=6)
    assert pieces.rdd.getNumPartitions() >= 6
    assert pieces.count() == 20


def test_a_query_from_a_time_to_a_time(spark: Any, running: Cluster) -> None:
    topic = new_topic(running, 1)
    with running.producer() as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, timestamp=datetime.fromtimestamp(1000 + number, UTC)).result()
    times = {"startingTimestamp": 1_003_000, "endingTimestamp": 1_006_000}
    assert values(load(spark, running, topic, **times)) == [b"3", b"4", b"5"]


@pytest.mark.parametrize("face", ["read", "readStream"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffset": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"startingOffsets": "first"}, "option 'startingOffsets' is not JSON"),
        ({"failOnDataLoss": "perhaps"}, "option 'failOnDataLoss' is 'perhaps'"),
        ({"assign": '{"a": ["0-0"]}'}, "the options 'subscribe' and 'assign' are given"),
        ({"maxOffsetsPerTrigger": "0"}, "option 'maxOffsetsPerTrigger' is '0'"),
        ({"endingOffsets": "latest", "groupId": "g"}, "this is a (batch|streaming) query"),
        ({"pushdown": "true"}, "Spark mixes up the filters"),
    ],
)
def test_a_wrong_option_is_told_by_load(spark: Any, face: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        getattr(spark, face).format("metamq").options(subscribe="a", **options).load()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffsets": "latest"}, "option 'startingOffsets' is 'latest'"),
        ({"groupId": "g"}, "option 'groupId' is for streaming queries"),
        ({"startingOffsets": '{"%s": {"0-0": 0}}'}, "'startingOffsets' lacks %s/0-1"),
        ({"startingOffsets": '{"%s": {"0-0": 0, "0-1": 7}}'}, "has the offsets 0 to 0, not 7"),
        ({"startingTimestamp": "99999999999999"}, "no message at or after the time"),
    ],
)
def test_a_wrong_option_is_told_before_any_task_starts(
    spark: Any, running: Cluster, topic: str, options: dict[str, str], words: str
) -> None:
    given = {name: text.replace("%s", topic) for name, text in options.items()}
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup(topic, "none is to run")
    with pytest.raises(Exception, match=words.replace("%s", topic)):
        load(spark, running, topic, **given).collect()
    assert list(tracker.getJobIdsForGroup(topic)) == []


def test_a_task_that_fails_is_run_again_and_nothing_comes_twice(spark: Any, running: Cluster, tmp_path: Any) -> None:
    topic = new_topic(running, 2)
    send(running, topic, [b"%d" % number for number in range(4000)])
    marks = str(tmp_path)
    frame = load(spark, running, topic, maxRecordsPerPartition=1500)
    found = frame.select("value").rdd.mapPartitionsWithIndex(_failing_once(marks)).collect()
    assert sorted(map(int, found)) == list(range(4000))
    assert len(list(tmp_path.iterdir())) >= 3


def _failing_once(marks: str) -> Callable[[int, Any], Any]:
    def each(index: int, rows: Any) -> Any:
        import os

        taken = [bytes(row.value) for row in rows]
        try:
            os.close(os.open(f"{marks}/{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return taken
        raise RuntimeError("the first attempt fails")

    return each
