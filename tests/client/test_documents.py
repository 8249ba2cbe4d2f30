"""Values of typed topics as JSON documents, by stored schemas."""

from __future__ import annotations

import base64
import json
import math
import re
from decimal import Context, Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import struct_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet, MessageOptions
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq import Topic
from metamq.client.schemas.documents import TopicDocuments
from metamq.errors import ConfigError
from metamq.zk.cluster.schemas import Schema, TopicSchemas
from tests.examples import examples

UNION = ["null", "string", {"type": "record", "name": "Stop", "fields": [{"name": "at", "type": "long"}]}]
TRIP: dict[str, Any] = {
    "type": "record",
    "name": "Trip",
    "namespace": "shop",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "place", "type": ["null", "string"], "default": None},
        {"name": "photo", "type": "bytes", "default": ""},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "on", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "stops", "type": {"type": "array", "items": UNION}},
        {"name": "colour", "type": {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}},
        {"name": "weight", "type": "double"},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
    ],
}
DOCUMENT: dict[str, Any] = {
    "number": 9007199254740993,
    "place": "Oslo\u202e",
    "photo": "AP8=",
    "price": "12.50",
    "on": "2026-11-01",
    "at": "2026-11-01T13:30:00+00:00",
    "stops": [None, "Bergen", {"at": 7}],
    "colour": "BLUE",
    "weight": "NaN",
    "counts": {"a": 1},
}


def documents_of(kind: str, *definitions: str) -> TopicDocuments:
    return TopicDocuments("t", TopicSchemas(tuple(Schema(kind, one) for one in definitions)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"number": "x"}, "field 'number': 'x' is no long"),
        ({"number": 1 << 63}, "is no long"),
        ({"place": 5}, "field 'place': 5 is no text"),
        ({"stops": [None, 5]}, "field 'stops[1]': 5 is none of null, string, shop.Stop"),
        ({"price": "12.555"}, "more than 2 after the point"),
        ({"at": "2026-11-01T13:30"}, "it names no zone"),
        ({"on": "today"}, "'today' is no date"),
        ({"colour": "GREEN"}, "'GREEN' is none of RED, BLUE"),
        ({"photo": "*"}, "field 'photo': '*' is not base64"),
        ({"counts": {"a": 1.5}}, "field 'counts.a': 1.5 is no int"),
        ({"weight": True}, "field 'weight': True is no double"),
        ({"totl": 1}, "field 'totl': the schema has no such field"),
    ],
)
def test_an_error_of_avro_names_the_field(change: dict[str, Any], problem: str) -> None:
    encode = documents_of("avro", json.dumps(TRIP)).encoder()
    with pytest.raises(ValueError, match=re.escape(problem)):
        encode(DOCUMENT | change)


def test_a_default_and_a_named_type_of_a_union() -> None:
    values = documents_of("avro", json.dumps(TRIP))
    encode = values.encoder()
    less = {name: one for name, one in DOCUMENT.items() if name not in ("place", "photo")}
    assert values.decode(encode(less)) == {**DOCUMENT, "place": None, "photo": ""}
    named = values.decode(encode({**DOCUMENT, "place": {"string": "Oslo"}, "stops": [{"shop.Stop": {"at": 1}}]}))
    assert (named["place"], named["stops"]) == ("Oslo", [{"at": 1}])
    with pytest.raises(ValueError, match="field 'number': it is missing, and has no default"):
        encode({"place": "Oslo"})


KINDS: dict[str, Any] = {
    "numbers": ["int", "long", "float", "double", "null"],
    "mixed": ["boolean", "bytes", "string", "double", "long"],
    "records": [
        {"type": "record", "name": "A", "fields": [{"name": "n", "type": "int"}]},
        {
            "type": "record",
            "name": "B",
            "fields": [{"name": "n", "type": "long"}, {"name": "m", "type": "int", "default": 0}],
        },
        {"type": "record", "name": "C", "fields": [{"name": "shop.C", "type": ["null", "A", "C"], "default": None}]},
        {"type": "map", "values": ["int", "string", "B"]},
        {"type": "array", "items": ["A", "B", "C"]},
    ],
    "texts": [
        {"type": "int", "logicalType": "date"},
        {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]},
        {"type": "fixed", "name": "Two", "size": 2},
        {"type": "bytes", "logicalType": "decimal", "precision": 60, "scale": 20},
        {"type": "string", "logicalType": "uuid"},
    ],
    "maps": ["null", {"type": "map", "values": ["null", "Colour", {"type": "map", "values": "int"}]}],
}  # fmt: skip
UNIONS: dict[str, Any] = {
    "type": "record",
    "name": "Unions",
    "namespace": "shop",
    "fields": [{"name": name, "type": one} for name, one in KINDS.items()],
}


def of_one_nan(floats: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    """Floats with one NaN: a document does not have the bits of the others."""
    return floats.map(lambda number: math.nan if math.isnan(number) else number)


VALUES = st.fixed_dictionaries({
    "numbers": st.one_of(
        st.none(),
        st.tuples(st.just("int"), st.integers(-(2**31), 2**31 - 1)),
        st.tuples(st.just("long"), st.one_of(st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1))),
        st.tuples(st.just("float"), of_one_nan(st.floats(width=32))),
        st.tuples(st.just("double"), st.one_of(of_one_nan(st.floats()), st.integers(-9, 9).map(float))),
    ),
    "mixed": st.one_of(
        st.tuples(st.just("boolean"), st.booleans()), st.tuples(st.just("bytes"), st.binary(max_size=6)),
        st.tuples(st.just("string"), st.sampled_from(["", "AAE=", "NaN", "x"])),
        st.tuples(st.just("double"), of_one_nan(st.floats())), st.tuples(st.just("long"), st.integers(-9, 9)),
    ),
    "records": st.deferred(lambda: st.one_of(
        RECORDS, st.tuples(st.just("array"), st.lists(RECORDS, max_size=3)),
        st.tuples(st.just("map"), st.dictionaries(st.sampled_from(["shop.A", "shop.C", "map", "n"]), st.one_of(
            st.tuples(st.just("int"), st.integers(0, 9)), st.tuples(st.just("string"), st.text(max_size=3)), B_RECORDS,
        ), max_size=2)),
    )),
    "texts": st.one_of(
        st.tuples(st.just("int"), st.dates()), st.tuples(st.just("shop.Colour"), st.sampled_from(["RED", "BLUE"])),
        st.tuples(st.just("shop.Two"), st.binary(min_size=2, max_size=2)), st.tuples(st.just("string"), st.uuids()),
        st.tuples(st.just("bytes"), st.integers(-(10**60) + 1, 10**60 - 1).map(
            lambda number: Decimal(number).scaleb(-20, Context(prec=60))
        )),
    ),
    "maps": st.one_of(st.none(), st.tuples(st.just("map"), st.dictionaries(
        st.sampled_from(["map", "shop.Colour"]), st.one_of(
            st.none(), st.tuples(st.just("shop.Colour"), st.just("RED")),
            st.tuples(st.just("map"), st.dictionaries(st.sampled_from(["map", "RED"]), st.integers(0, 9), max_size=2)),
        ), max_size=2,
    ))),
})  # fmt: skip
A_RECORDS = st.tuples(st.just("shop.A"), st.fixed_dictionaries({"n": st.integers(0, 9)}))
B_RECORDS = st.tuples(st.just("shop.B"), st.fixed_dictionaries({"n": st.integers(0, 9), "m": st.integers(0, 9)}))
RECORDS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        A_RECORDS,
        B_RECORDS,
        st.tuples(st.just("shop.C"), st.fixed_dictionaries({"shop.C": st.one_of(st.none(), A_RECORDS, C_RECORDS)})),
    )
)
C_RECORDS = st.deferred(lambda: RECORDS.filter(lambda one: one[0] == "shop.C"))


OF_UNIONS = documents_of("avro", json.dumps(UNIONS))


@pytest.mark.slow
@settings(max_examples=examples(400))
@given(VALUES)
def test_the_document_of_an_avro_value_makes_the_same_value(value: Any) -> None:
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(UNIONS), value)
    document = json.loads(json.dumps(OF_UNIONS.decode(b"\0\0\0\0\1" + out.getvalue())))
    assert OF_UNIONS.encoder()(document)[5:] == out.getvalue(), document


def test_a_union_names_its_type_only_if_the_value_would_have_another_one() -> None:
    values, encode = OF_UNIONS, OF_UNIONS.encoder()
    plain = {"numbers": 5, "mixed": "AAE=", "records": {"n": 5}, "texts": "2026-11-01", "maps": {"a": "RED"}}
    assert values.decode(encode(plain)) == plain
    named = {
        "numbers": {"long": 5}, "mixed": {"bytes": "AAE="}, "records": {"shop.B": {"n": 5, "m": 0}},
        "texts": {"bytes": "2026.50000000000000000000"}, "maps": {"map": {"map": {"RED": 1}}},
    }  # fmt: skip
    clear = {"records": {"n": 5, "m": 0}, "texts": "2026.50000000000000000000"}
    assert values.decode(encode(named)) == named | clear
    assert values.decode(encode({**plain, "numbers": 1 << 40}))["numbers"] == 1 << 40
    assert values.decode(encode({**plain, "records": {"n": 5, "m": 1}}))["records"] == {"n": 5, "m": 1}


def test_a_long_chain_of_records_is_a_document_in_little_time() -> None:
    """Each record nearly fits another type: to try that one with all records inside would take days."""
    longer = {"type": "record", "name": "Y", "fields": [{"name": "next", "type": "X"}, {"name": "z", "type": "int"}]}
    chain = {"type": "record", "name": "X", "fields": [{"name": "next", "type": ["null", longer, "X"]}]}
    value: dict[str, Any] = {"next": None}
    for number in range(100):
        value = {"next": ("Y", {"next": value, "z": number}) if number % 2 else ("X", value)}
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(chain), value)
    values = documents_of("avro", json.dumps(chain))
    assert values.encoder()(values.decode(b"\0\0\0\0\1" + out.getvalue()))[5:] == out.getvalue()


@pytest.mark.parametrize("value", [b"", b"text", b"\0\0\0\0\1", b"\0\0\0\0\7x", b"\0\0\0\0\1" + b"\xff" * 20])
@pytest.mark.parametrize("kind", ["avro", "arrow"])
def test_a_value_that_does_not_decode_has_a_reason(kind: str, value: bytes) -> None:
    schema = base64.b64encode(pa.schema([("number", pa.int64())]).serialize()).decode()
    with pytest.raises(ValueError, match=r".{3}"):
        documents_of(kind, json.dumps(TRIP) if kind == "avro" else schema).decode(value)


def test_arrow_rows() -> None:
    schema = pa.schema([("number", pa.int64()), ("none", pa.null())])
    topic = Topic.arrow("t", schema)
    definition = topic.schema.definition
    topic.learn({1: definition})
    rows = [{"number": 1, "none": None}, {"number": None, "none": None}]
    values = documents_of("arrow", definition)
    assert values.decode(topic.encode(pa.RecordBatch.from_pylist(rows, schema=schema))) == rows
    with pytest.raises(ConfigError, match="a line of JSON does not make"):
        values.encoder()
    nulls = pa.schema([("none", pa.null())])
    topic = Topic.arrow("t", nulls)
    topic.learn({1: topic.schema.definition})
    many = topic.encode(pa.RecordBatch.from_arrays([pa.nulls(1_000_000)], schema=nulls))
    with pytest.raises(ValueError, match="it has 1,000,000 rows in"):
        documents_of("arrow", topic.schema.definition).decode(many)


def made_class() -> Any:
    """A class as protoc makes it, with maps, lists, and types that Protobuf brings."""
    file = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/struct.proto", "google/protobuf/wrappers.proto"])
    entry = DescriptorProto(name="CountsEntry", options=MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    entry.field.add(name="value", number=2, type="TYPE_INT64", label="LABEL_OPTIONAL")
    order = DescriptorProto(name="Order", nested_type=[entry])
    order.field.add(name="order_number", number=1, type="TYPE_INT64", label="LABEL_OPTIONAL")
    order.field.add(name="parts", number=2, type="TYPE_UINT64", label="LABEL_REPEATED")
    more = {"counts": ".shop.Order.CountsEntry", "extra": ".google.protobuf.Struct"}
    more |= {"limit": ".google.protobuf.Int64Value", "inner": ".shop.Part"}
    for number, (name, kind) in enumerate(more.items(), 3):
        label = "LABEL_REPEATED" if name == "counts" else "LABEL_OPTIONAL"
        order.field.add(name=name, number=number, type="TYPE_MESSAGE", type_name=kind, label=label)
    part = DescriptorProto(name="Part")
    part.field.add(name="photo", number=1, type="TYPE_BYTES", label="LABEL_OPTIONAL")
    file.message_type.extend([part, order])
    pool = DescriptorPool()
    for one in (struct_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR):
        pool.AddSerializedFile(one.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def test_protobuf() -> None:
    values = documents_of("protobuf", Topic("t", made_class()).schema.definition)
    document = {
        "order_number": 9007199254740993, "parts": [1, 1 << 60], "counts": {"a": 1 << 60},
        "extra": {"fields": {"order_number": "1"}}, "limit": 5, "inner": {"photo": "AP8="},
    }  # fmt: skip
    encode = values.encoder()
    assert values.decode(encode(document)) == document
    assert values.decode(b"") == {"order_number": 0, "parts": [], "counts": {}}
    assert values.decode(encode({"orderNumber": "7"}))["order_number"] == 7
    framed = values.encoder(framing="confluent")(document)
    assert (framed[:8], framed[8:]) == (b"\0\0\0\0\1\2\2" + encode(document)[:1], encode(document)[1:])
    assert values.decode(framed) == document
    for wrong, problem in (({"totl": 1}, 'has no field named "totl"'), ({"parts": ["x"]}, "parts"), ([1], "no object")):
        with pytest.raises(ValueError, match=problem):
            encode(wrong)
    with pytest.raises(ValueError, match="DecodeError"):
        values.decode(b"\xff")


def test_a_wrong_protobuf_schema() -> None:
    order = made_class()
    files = FileDescriptorSet()
    order.DESCRIPTOR.file.CopyToProto(files.file.add())  # without its imports
    definition = f"shop.Order {base64.b64encode(files.SerializeToString()).decode()}"
    with pytest.raises(ConfigError, match="the Protobuf schema is wrong"):
        documents_of("protobuf", definition)


ORDER = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 1},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
    },
    "required": ["number"],
    "$defs": {"Line": {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}},
}


def test_json_is_checked_and_keeps_its_text() -> None:
    values = documents_of("json", json.dumps(ORDER))
    encode = values.encoder()
    assert encode({"number": 1, "note": "é"}) == '{"number":1,"note":"é"}'.encode()
    assert encode({"number": 1}, b'{"number": 1.00}') == b'{"number": 1.00}'
    framed = values.encoder(framing="confluent")({"number": 1})
    assert (framed[:5], values.decode(framed)) == (b"\0\0\0\0\1", {"number": 1})
    for wrong, problem in (
        ({"number": 0}, "field 'number': 0 is less than the minimum of 1"),
        ({"number": 1, "lines": [{"sku": 5}]}, "field 'lines[0].sku': 5 is not of type 'string'"),
        ({}, "'number' is a required property"),
        ({"number": 1, "note": float("nan")}, "not JSON compliant"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            encode(wrong)
    assert values.decode(b'{"a": [NaN, -1e999]}') == {"a": ["NaN", "-Infinity"]}
    with pytest.raises(ValueError, match="JSONDecodeError"):
        values.decode(b"no JSON")
    with pytest.raises(ValueError, match="RecursionError"):
        values.decode(b"[" * 100_000)


def test_a_json_schema_asks_no_other_host() -> None:
    far = {**ORDER, "not": {"$ref": "http://127.0.0.1:1/schema.json"}}
    with pytest.raises(ConfigError, match="the JSON Schema checks no value"):
        documents_of("json", json.dumps(far)).encoder()({"number": 1})


def test_versions() -> None:
    newer = {**TRIP, "fields": [*TRIP["fields"], {"name": "note", "type": "string", "default": "-"}]}
    values = documents_of("avro", json.dumps(TRIP), json.dumps(newer))
    first, second = values.encoder(1)(DOCUMENT), values.encoder()(DOCUMENT)
    assert (first[:5], second[:5]) == (b"\0\0\0\0\1", b"\0\0\0\0\2")
    assert (values.decode(first), values.decode(second)) == (DOCUMENT, {**DOCUMENT, "note": "-"})
    assert [values.knows_version(b"\0\0\0\0" + bytes([one])) for one in range(4)] == [False, True, True, False]
    with pytest.raises(ConfigError, match="does not have version 3"):
        values.encoder(3)
    with pytest.raises(ConfigError, match="topic 't' has no registered schema"):
        documents_of("avro")
