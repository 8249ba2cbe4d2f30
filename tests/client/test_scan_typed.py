"""Scans of typed topics: `value` as a struct, of old and new versions, and errors that name the message."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from google.protobuf.wrappers_pb2 import StringValue

import metamq
from metamq import Topic
from metamq.errors import ConfigError, DecodeError
from metamq.zk.cluster.schemas import Schema
from tests.client.conftest import Shop


class Place(msgspec.Struct):
    name: str


class Order(msgspec.Struct):
    number: int


class NewOrder(msgspec.Struct):
    number: float
    place: Place | None = None
    tags: list[str] = []


def table(shop: Shop, topic: Any, **settings: Any) -> Any:
    return pa.table(metamq.scan(topic, zookeeper=shop.cluster.zookeeper, **settings))


def test_old_and_new_messages_have_the_columns_of_the_newest_schema(shop: Shop) -> None:
    name = shop.topic()
    old, new = Topic(name, Order), Topic(name, NewOrder)
    shop.admin.register_schema(old)
    shop.producer.send_many(old, [Order(number) for number in range(3000)], partition="0-0").result(60)
    shop.admin.register_schema(new)
    shop.producer.send(new, NewOrder(0.5, Place("Oslo"), ["a"]), "k", partition="0-0").result(60)
    for found in (table(shop, new), table(shop, name, decode="schema")):
        assert found.schema.names == ["topic", "partition", "offset", "key", "value", "headers", "timestamp"]
        values = found.column("value").to_pylist()
        assert values[:2] == [
            {"number": 0.0, "place": None, "tags": None},
            {"number": 1.0, "place": None, "tags": None},
        ]
        assert values[3000] == {"number": 0.5, "place": {"name": "Oslo"}, "tags": ["a"]}
        assert found.column("offset").to_pylist() == [*range(3001)]
    orders = metamq.scan(new, zookeeper=shop.cluster.zookeeper, columns=["value"])  # noqa: F841, DuckDB reads it
    found = duckdb.sql("SELECT sum(value.number), max(value.place.name) FROM orders")
    assert found is not None
    assert found.fetchall() == [(4498500.5, "Oslo")]
    assert table(shop, new, columns=["key", "offset"]).schema.names == ["key", "offset"]
    before = {metamq.TopicPartition(name, "0-0"): 3000}
    assert table(shop, old, end=before).column("value")[3].as_py() == {"number": 3}
    with pytest.raises(DecodeError, match="offset 3000"):  # 0.5 is no int
        list(metamq.scan(old, zookeeper=shop.cluster.zookeeper))


def test_avro_has_defaults_and_times(shop: Shop) -> None:
    name = shop.topic()
    fields: list[Any] = [{"name": "number", "type": "int"}]
    more = [
        {"name": "seats", "type": "int", "default": 4},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
    ]
    old = Topic.avro(name, json.dumps({"type": "record", "name": "Trip", "fields": fields}))
    new = Topic.avro(name, json.dumps({"type": "record", "name": "Trip", "fields": [*fields, *more]}))
    shop.admin.register_schema(old)
    shop.admin.register_schema(new)
    at = datetime(2026, 1, 2, tzinfo=UTC)
    shop.producer.send(old, {"number": 1}, partition="0-0").result(60)
    shop.producer.send(new, {"number": 2, "seats": 5, "at": at}, partition="0-0").result(60)
    wanted = [{"number": 1, "seats": 4, "at": None}, {"number": 2, "seats": 5, "at": at}]
    assert table(shop, name, decode="schema").column("value").to_pylist() == wanted
    stranger = Topic.avro(name, new.schema.definition)
    assert table(shop, stranger).column("value").to_pylist() == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        [b'{"number": "x"}'],
        [b"not json"],
        [b"", b'{"number": 1}\n{"number": 2}'],
        [b'{"number": 1}}\n{"i":5,"v":{"number": 2}', b'{"number": 3}'],
        [b'{"number": 99999999999999999999}'],
        [b'{"number": 1'],
    ],
)
def test_a_wrong_value_is_named_and_moves_no_other(shop: Shop, wrong: list[bytes]) -> None:
    topic = Topic(shop.topic(), Order)
    shop.producer.send_many(topic.name, [b'{"number": 0}', *wrong, b'{"number": 9}'], partition="0-0").result(60)
    with pytest.raises(DecodeError) as raised:
        list(metamq.scan(topic, zookeeper=shop.cluster.zookeeper))
    assert (raised.value.partition, raised.value.offset, raised.value.value) == ("0-0", 1, wrong[0])
    assert "scan the topic's name" in str(raised.value)


def test_text_that_is_not_utf8_is_a_wrong_value(shop: Shop) -> None:
    topic = Topic(shop.topic(), Place)
    shop.producer.send_many(topic.name, [b'{"name": "a"}', b'{"name": "caf\xe9"}'], partition="0-0").result(60)
    with pytest.raises(DecodeError) as raised:
        list(metamq.scan(topic, zookeeper=shop.cluster.zookeeper))
    assert raised.value.offset == 1


def test_what_has_no_columns_is_refused(shop: Shop) -> None:
    name, zookeeper = shop.topic(), shop.cluster.zookeeper
    with pytest.raises(ConfigError, match="has no registered schema"):
        metamq.scan(name, decode="schema", zookeeper=zookeeper)
    with pytest.raises(ConfigError, match="`decode` is 'json'"):
        metamq.scan(name, decode="json", zookeeper=zookeeper)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`decode` is 'schema'"):
        metamq.scan([name, name + "2"], decode="schema", zookeeper=zookeeper)
    with pytest.raises(ConfigError, match="Protobuf values"):
        metamq.scan(Topic(name, StringValue), zookeeper=zookeeper)
    text = '{"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}'
    shop.admin.register_schema(name, Schema("json", text))
    with pytest.raises(ConfigError, match=r"field 'a\.b' has no Arrow type: it is any"):
        metamq.scan(name, decode="schema", zookeeper=zookeeper)


def test_framed_json_has_the_same_columns(shop: Shop) -> None:
    topic = Topic(shop.topic(), Order, framing="confluent")
    shop.admin.register_schema(topic)
    shop.producer.send_many(topic, [Order(1), Order(2)], partition="0-0").result(60)
    assert table(shop, topic).column("value").to_pylist() == [{"number": 1}, {"number": 2}]
    shop.producer.send(topic.name, b'{"number": 3}', partition="0-0").result(60)
    by_name = table(shop, topic.name, decode="schema").column("value").to_pylist()
    assert by_name == [{"number": 1}, {"number": 2}, {"number": 3}]
    with pytest.raises(DecodeError, match=r"offset 2 .*does not begin with a zero byte"):
        list(metamq.scan(topic, zookeeper=shop.cluster.zookeeper))
