"""A topic read as a table: its rows are what was sent, between fixed places, for every library that reads Arrow."""

from __future__ import annotations

import threading
import time
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
from metamq.client.scan import side_by_side
from metamq.errors import ConfigError, ConnectError, OffsetOutOfRange, PartitionNotFound, TopicNotFound, WrongType
from metamq.testing import Cluster
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
