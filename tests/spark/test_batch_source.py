"""The batch source, with Spark, ZooKeeper and a broker."""

from __future__ import annotations

from typing import Any

import pytest

from metamq.testing import Cluster
from tests.spark.conftest import send


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
