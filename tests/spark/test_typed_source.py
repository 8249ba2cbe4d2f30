"""Typed columns: `decode` makes `value` a struct, in batch and in streams, with the values that a scan has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.wrappers_pb2 import StringValue

import metamq
from metamq import Admin, Producer, Topic
from metamq.testing import Cluster
from metamq.zk.cluster.schemas import Schema
from tests.parts import wait_until
from tests.spark.conftest import new_topic


@dataclass
class Place:
    name: str


@dataclass
class Order:
    number: int


@dataclass
class NewOrder:
    number: int
    total: float = 0.0
    place: Place | None = None
    tags: list[str] = field(default_factory=list)


AT = datetime(2026, 1, 2, tzinfo=UTC)
TRIP: dict[str, Any] = {"type": "record", "name": "Trip", "fields": [{"name": "number", "type": "int"}]}
SEATS = {"name": "seats", "type": "long", "default": 4}
TIME = {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None}


@pytest.fixture(scope="module")
def producer(running: Cluster) -> Iterator[Producer[Any]]:
    with running.producer() as made:
        yield made


@pytest.fixture(scope="module")
def admin(running: Cluster) -> Iterator[Admin]:
    with running.admin() as made:
        yield made


def avro(name: str, *more: Any) -> Topic[Any]:
    return Topic.avro(name, json.dumps({**TRIP, "fields": [*TRIP["fields"], *more]}))


def reader(spark: Any, topic: str, face: str = "read", **options: str) -> Any:
    return getattr(spark, face).format("metamq").options(**{"subscribe": topic, "decode": "schema", **options})


def as_dicts(frame: Any) -> list[Any]:
    rows = frame.select("offset", "value").orderBy("partition", "offset").collect()
    return [row.value.asDict(recursive=True) for row in rows]


def scanned(running: Cluster, topic: str) -> list[Any]:
    found = pa.table(metamq.scan(topic, decode="schema", zookeeper=running.zookeeper, columns=["offset", "value"]))
    return list(found.sort_by("offset").column("value").to_pylist())


def send(producer: Producer[Any], topic: Topic[Any] | str, *values: Any) -> None:
    producer.send_many(topic, values, partition="0-0").result(60)


def run(frame: Any, place: Path) -> None:
    """Runs a batch query, or a stream up to its present end."""
    if not frame.isStreaming:
        frame.collect()
        return
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(place))
    writer.trigger(availableNow=True).start().awaitTermination(100)


def test_a_batch_has_the_fields_and_the_values_of_a_scan(
    spark: Any, running: Cluster, admin: Admin, producer: Producer[Any]
) -> None:
    name = new_topic(running, 1)
    old, new = Topic(name, Order), Topic(name, NewOrder)
    admin.register_schema(old)
    send(producer, old, *map(Order, range(3000)))
    before = reader(spark, name).load()
    admin.register_schema(new)
    send(producer, new, NewOrder(3000, 0.5, Place("Oslo"), ["a"]))
    frame = reader(spark, name).load()
    kinds = "struct<number:bigint,place:struct<name:string>,tags:array<string>,total:double>"
    assert dict(frame.dtypes)["value"] == kinds
    found = as_dicts(frame)
    assert len(found) == 3001
    assert found[-1] == {"number": 3000, "total": 0.5, "place": {"name": "Oslo"}, "tags": ["a"]}
    assert found == scanned(running, name)
    assert as_dicts(before)[-1] == {"number": 3000}, "a data frame keeps the schema of its load()"
    some = reader(spark, name).schema("value struct<place: struct<name: string>>, offset bigint").load()
    assert some.where("value.place.name = 'Oslo'").collect()[0].offset == 3000
    assert reader(spark, name).schema("offset bigint").load().count() == 3001


def test_a_table_keeps_the_fields(spark: Any, running: Cluster, admin: Admin, producer: Producer[Any]) -> None:
    topic = Topic(new_topic(running, 1), Order)
    admin.register_schema(topic)
    send(producer, topic, Order(7))
    options = f"subscribe '{topic.name}', decode 'schema', includeHeaders 'true'"
    try:
        spark.sql(f"CREATE TABLE typed USING metamq OPTIONS ({options})")
        assert [row.number for row in spark.sql("SELECT value.number FROM typed").collect()] == [7]
        assert spark.table("typed").columns[-1] == "headers"
    finally:
        spark.sql("DROP TABLE IF EXISTS typed")


def test_framed_json_is_read(spark: Any, running: Cluster, admin: Admin, producer: Producer[Any]) -> None:
    topic = Topic(new_topic(running, 1), Order, framing="confluent")
    admin.register_schema(topic)
    send(producer, topic, Order(1))
    send(producer, topic.name, b'{"number": 2}')
    assert as_dicts(reader(spark, topic.name).load()) == [{"number": 1}, {"number": 2}] == scanned(running, topic.name)


def test_rows_of_arrow_are_read_with_their_types(
    spark: Any, running: Cluster, admin: Admin, producer: Producer[Any]
) -> None:
    fields = [("number", pa.int32()), ("at", pa.timestamp("ns", tz="UTC")), ("price", pa.decimal128(9, 2))]
    topic = Topic.arrow(new_topic(running, 2), pa.schema(fields))
    admin.register_schema(topic)
    rows = [{"number": number, "at": AT, "price": Decimal("1.25")} for number in range(50_000)]
    producer.send_table(topic, pa.Table.from_pylist(rows, schema=pa.schema(fields))).result(60)
    wider = Topic.arrow(topic.name, pa.schema([("number", pa.int64()), *fields[1:], ("seats", pa.int8())]))
    admin.register_schema(wider)
    frame = reader(spark, topic.name).load()
    assert dict(frame.dtypes)["value"] == "struct<number:bigint,at:timestamp,price:decimal(9,2),seats:tinyint>"
    found = frame.selectExpr("sum(value.number)", "sum(value.price)", "count(value.seats)", "max(value.at)").collect()
    assert [*found[0]][:3] == [sum(range(50_000)), Decimal("62500.00"), 0]
    assert found[0][3].astimezone(UTC) == AT
    some = reader(spark, topic.name).schema("value struct<price: decimal(9,2)>").load()
    assert some.where("value.price = 1.25").count() == 50_000
    admin.register_schema(other := new_topic(running), Topic.arrow(other, pa.schema([("a", pa.uint64())])).schema)
    with pytest.raises(Exception, match=f"the schema of topic '{other}' has a type that Spark lacks"):
        reader(spark, other).load()


@pytest.mark.parametrize("face", ["read", "readStream"])
def test_a_wrong_value_is_named_by_its_place(
    spark: Any, running: Cluster, admin: Admin, producer: Producer[Any], tmp_path: Path, face: str
) -> None:
    topic = Topic(new_topic(running, 1), Order)
    admin.register_schema(topic)
    send(producer, topic.name, b'{"number": 1}', b'{"number": "x"}', b'{"number": 3}')
    frame = reader(spark, topic.name, face, startingOffsets="earliest").load()
    with pytest.raises(Exception, match=rf"rejects offset 1 of {topic.name}/0-0: .* read without `decode`"):
        run(frame, tmp_path)


def test_a_stream_reads_versions_that_are_registered_while_it_runs(
    spark: Any, running: Cluster, admin: Admin, producer: Producer[Any], tmp_path: Path
) -> None:
    name = new_topic(running, 1)
    old, new, newest = avro(name, TIME), avro(name, TIME, SEATS), avro(name, SEATS)
    admin.register_schema(old)
    seen: list[Any] = []
    frame = reader(spark, name, "readStream", startingOffsets="earliest").load()
    writer = frame.writeStream.foreachBatch(lambda batch, _id: seen.extend(as_dicts(batch)))
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    wanted = []
    try:
        for topic, value in ((old, {"at": AT}), (new, {"at": AT, "seats": 5}), (newest, {"seats": 6})):
            number = admin.register_schema(topic)
            send(producer, topic, {"number": number, **value})
            wanted.append({"number": number, "at": value.get("at")})
            wait_until(lambda: len(seen) == len(wanted) or query.exception() is not None, 60)
            assert query.exception() is None
    finally:
        query.stop()
    assert [{**one, "at": one["at"] and one["at"].astimezone(UTC)} for one in seen] == wanted
    assert as_dicts(reader(spark, name).load()) == [
        {"number": 1, "seats": 4}, {"number": 2, "seats": 5}, {"number": 3, "seats": 6},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        ("value binary", "the schema has the type binary for 'value'. With the option `decode` it has to be a struct"),
        (
            "value struct<numbre: bigint>",
            "the topic's schema has no field value.numbre. There are: number, place, tags, total",
        ),
        ("value struct<number: string>", "has the type string for value.number. It has to be bigint"),
        ("value struct<tags: array<int>>", r"has the type int for value.tags\[\]. It has to be string"),
        ("value struct<number: bigint NOT NULL>", "has NOT NULL for value.number"),
    ],
)
@pytest.mark.parametrize("face", ["read", "readStream"])
def test_a_schema_that_does_not_fit_is_named_by_its_field(
    spark: Any,
    running: Cluster,
    admin: Admin,
    producer: Producer[Any],
    tmp_path: Path,
    face: str,
    given: tuple[str, str],
) -> None:
    columns, problem = given
    topic = Topic(new_topic(running, 1), NewOrder)
    admin.register_schema(topic)
    send(producer, topic, NewOrder(1))
    frame = reader(spark, topic.name, face, startingOffsets="earliest").schema(columns).load()
    with pytest.raises(Exception, match=problem):
        run(frame, tmp_path)


def test_load_refuses_a_topic_without_columns(spark: Any, running: Cluster, admin: Admin) -> None:
    name = new_topic(running)
    with pytest.raises(Exception, match=f"topic '{name}' has no registered schema"):
        reader(spark, name).load()
    admin.register_schema(Topic(name, StringValue))
    with pytest.raises(Exception, match=f"topic '{name}' has Protobuf values"):
        reader(spark, name, "readStream").load()
    other = new_topic(running)
    admin.register_schema(other, Schema("json", '{"type": "object", "properties": {"a": {}}}'))
    with pytest.raises(Exception, match="field 'a' has no Arrow type"):
        reader(spark, other).load()
    with pytest.raises(Exception, match=r"value'. It has to be binary. For a struct, give the option `decode`"):
        spark.read.format("metamq").schema("value struct<a: int>").option("subscribe", other).load().collect()
