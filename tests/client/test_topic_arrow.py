"""Topics of Arrow: a message is a record batch, tables are sent by it, and a scan has their rows and types."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import metamq
from metamq import Topic, TopicPartition, aio
from metamq.client.schemas.arrow import is_compressed
from metamq.errors import ConfigError, DecodeError, SchemaIncompatible, WrongType
from metamq.zk.cluster.schemas import Schema
from tests.client.conftest import Shop

SCHEMA = pa.schema(
    [
        pa.field("sensor", pa.int32(), nullable=False),
        ("celsius", pa.float32()),
        ("at", pa.timestamp("ns", tz="UTC")),
        ("price", pa.decimal128(9, 2)),
        ("place", pa.struct([("name", pa.string())])),
        ("tags", pa.list_(pa.string())),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"sensor": 1, "celsius": 0.5, "at": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.20"),
     "place": {"name": "Oslo"}, "tags": ["a", None]},
    {"sensor": 2, "celsius": None, "at": None, "price": None, "place": None, "tags": []},
]  # fmt: skip
WIDER = pa.schema([("sensor", pa.int64()), ("celsius", pa.float64()), ("seats", pa.int8())])


@dataclass
class Row:
    sensor: int


def batch(rows: list[dict[str, Any]] = ROWS, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def scanned(shop: Shop, topic: Any, **settings: Any) -> pa.Table:
    return pa.table(metamq.scan(topic, zookeeper=shop.cluster.zookeeper, **settings))


def test_batches_come_back_equal_in_both_apis(shop: Shop) -> None:
    topic = Topic.arrow(shop.topic(), SCHEMA)
    assert shop.admin.register_schema(topic) == 1
    assert shop.admin.register_schema(topic) == 1, "the same schema has one version"
    shop.producer.send(topic, batch(), partition="0-0").result(60)

    async def again() -> list[Any]:
        there = Topic.arrow(topic.name, SCHEMA)
        async with aio.Admin(shop.cluster.zookeeper) as admin, aio.Producer(shop.cluster.zookeeper) as producer:
            await admin.load_schemas(there)
            await producer.send_many(there, [batch(ROWS[:1]), batch([])], partition="0-0")
        async with aio.Consumer(shop.cluster.zookeeper, topics=there, idle_timeout_s=1) as consumer:
            return [message.value async for message in consumer]

    assert asyncio.run(again()) == [batch(), batch(ROWS[:1]), batch([])]


def test_a_table_goes_and_comes_with_its_types(shop: Shop) -> None:
    topic = Topic.arrow(shop.topic(), SCHEMA)
    shop.admin.register_schema(topic)
    table = pa.table(batch([{**ROWS[0], "sensor": number} for number in range(100_000)]))
    shop.producer.send_table(topic, table).result(60)

    async def send_again() -> None:
        async with aio.Producer(shop.cluster.zookeeper) as producer, producer.transaction():
            await producer.send_table(topic, table.slice(0, 1))

    asyncio.run(send_again())
    for found in (scanned(shop, topic), scanned(shop, topic.name, decode="schema")):
        assert found.schema.field("value").type == pa.struct(list(SCHEMA))
        rows = pa.Table.from_struct_array(found.column("value")).sort_by("sensor")
        assert rows.equals(pa.concat_tables([table.slice(0, 1), table]))
        assert 10 < len(found.group_by(["partition", "offset"]).aggregate([])) < 1000, "many rows in a message"


def test_old_batches_have_the_fields_of_the_reader(shop: Shop) -> None:
    name = shop.topic()
    old, new = Topic.arrow(name, SCHEMA), Topic.arrow(name, WIDER)
    shop.admin.register_schema(old)
    shop.producer.send(old, batch(), "k", partition="0-0").result(60)
    assert shop.admin.register_schema(new) == 2
    shop.producer.send(new, batch([{"sensor": 2**40, "seats": 4}], WIDER), partition="0-0").result(60)
    wanted = [
        {"sensor": 1, "celsius": 0.5, "seats": None},
        {"sensor": 2, "celsius": None, "seats": None},
        {"sensor": 2**40, "celsius": None, "seats": 4},
    ]
    with shop.cluster.consumer(topics=new, idle_timeout_s=1) as consumer:
        assert [row for message in consumer for row in message.value.to_pylist()] == wanted
    found = scanned(shop, name, decode="schema", columns=["value", "offset", "key"])
    assert found.column("value").to_pylist() == wanted
    assert found.column("offset").to_pylist() == [0, 0, 1]
    assert found.column("key").to_pylist() == [b"k", b"k", None]
    one = {TopicPartition(name, "0-0"): 1}
    assert scanned(shop, old, end=one).column("value")[1].as_py() == ROWS[1]
    with pytest.raises(DecodeError, match=r"offset 1 of .*: Integer value 1099511627776 not in range"):
        list(metamq.scan(old, zookeeper=shop.cluster.zookeeper))


@pytest.mark.parametrize(
    ("new", "field", "was", "becomes"),
    [
        ([("sensor", pa.string())], "sensor", "int32", "string or null"),
        ([("sensor", pa.int16())], "sensor", "int32", "int16 or null"),
        ([pa.field("celsius", pa.float32(), nullable=False)], "celsius", "float or null", "float"),
        ([pa.field("seats", pa.int8(), nullable=False)], "seats", "absent", "required int8"),
        ([("place", pa.struct([("name", pa.int8())]))], "place.name", "string or null", "int8 or null"),
        ([("tags", pa.list_(pa.binary()))], "tags[]", "string or null", "binary or null"),
        ([("price", pa.decimal128(8, 2))], "price", "decimal128(9, 2) or null", "decimal128(8, 2) or null"),
    ],
)
def test_a_change_that_breaks_readers_is_named_by_its_field(
    shop: Shop, new: list[Any], field: str, was: str, becomes: str
) -> None:
    name = shop.topic()
    shop.admin.register_schema(Topic.arrow(name, SCHEMA))
    with pytest.raises(SchemaIncompatible) as raised:
        shop.admin.register_schema(Topic.arrow(name, pa.schema(new)))
    assert (raised.value.field, raised.value.old, raised.value.new) == (field, was, becomes)
    assert len(shop.admin.load_schemas(name).versions) == 1


def test_what_does_not_fit_the_schema_is_not_sent(shop: Shop) -> None:
    topic = Topic.arrow(shop.topic(), SCHEMA)
    shop.admin.register_schema(topic)
    with pytest.raises(WrongType, match="must be a RecordBatch"):
        shop.producer.send(topic, ROWS[0])
    with pytest.raises(ValueError, match="field names are not matching"):
        shop.producer.send(topic, batch([{"sensor": 1}], WIDER))
    with pytest.raises(ValueError, match="non-nullable"):
        shop.producer.send(topic, batch([{"celsius": 1.0}]))
    with pytest.raises(ValueError, match="field names are not matching"):
        shop.producer.send_table(topic, pa.table({"value": [b"a"]}))
    with pytest.raises(ConfigError, match=r"send_table\(\) does not encode the values of <Topic"):
        shop.producer.send_table(Topic(topic.name, Row), pa.table({"value": [b"a"]}))
    assert scanned(shop, topic).num_rows == 0


def compressed(rows: pa.RecordBatch, codec: str) -> bytes:
    """The message of a batch with compressed buffers, as a stream of Arrow has it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(rows)
    _schema, message = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))[:2]
    plain: bytes = message.serialize().to_pybytes()
    return plain


COMPRESSED = b"\0\0\0\0\1" + compressed(batch(), "zstd")


@pytest.mark.parametrize(
    "broken", [b"", b"\0\0\0\0\1", b"\0\0\0\0\1" + b"\xff" * 64, b"\0\0\0\0\2" + b"x" * 64, COMPRESSED]
)
def test_a_broken_batch_is_named(shop: Shop, broken: bytes) -> None:
    topic = Topic.arrow(shop.topic(), SCHEMA)
    shop.admin.register_schema(topic)
    shop.producer.send_many(topic.name, [topic.encode(batch()), broken], partition="0-0").result(60)
    with pytest.raises(DecodeError) as raised:
        list(metamq.scan(topic, zookeeper=shop.cluster.zookeeper))
    assert raised.value.offset == 1


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused_before_it_fills_the_memory(codec: str) -> None:
    for schema in (SCHEMA, pa.schema([("a", pa.int8())]), pa.schema([pa.field("a", pa.list_(pa.string()))])):
        rows = pa.RecordBatch.from_arrays([pa.nulls(100_000, one.type) for one in schema], schema=schema)
        assert not is_compressed(rows.serialize())
        assert is_compressed(compressed(rows, codec))
    for size in range(200):
        with contextlib.suppress(ValueError):
            is_compressed(b"\xff\xff\xff\xff" + b"\x08\0\0\0" * size)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (pa.schema([]), "has no fields"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "the field 'a' twice"),
        (pa.schema([("a", pa.list_(pa.dictionary(pa.int8(), pa.string())))]), r"field 'a\[\]' .* is dictionary"),
        (pa.schema([("a", pa.map_(pa.string(), pa.uuid()))]), r"field 'a\.value' .* is extension<arrow.uuid>"),
        ("sensor: int32", "`schema` must be a pyarrow.Schema"),
    ],
)
def test_a_schema_that_a_batch_cannot_have_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises((ConfigError, WrongType), match=problem) as raised:
        Topic.arrow("readings", schema)
    assert raised.value.hint or isinstance(raised.value, WrongType)


@pytest.mark.parametrize("definition", ["?", "", base64.b64encode(b"\xff\xff\xff\xff" + b"\x10\0\0\0" * 8).decode()])
def test_a_definition_that_is_no_schema_is_refused(shop: Shop, definition: str) -> None:
    name = shop.topic()
    with pytest.raises(ConfigError, match="the Arrow schema is wrong"):
        shop.admin.register_schema(name, Schema("arrow", definition))
    text = base64.b64encode(SCHEMA.with_metadata({"made": "elsewhere"}).serialize()).decode()
    assert shop.admin.register_schema(name, Schema("arrow", text)) == 1
    assert shop.admin.register_schema(Topic.arrow(name, SCHEMA)) == 1
