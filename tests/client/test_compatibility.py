"""The rules of compatibility: what they accept is decoded by the real libraries, and what they refuse is named."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal, Optional

import msgspec
import pyarrow as pa
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq import Topic
from metamq.client.schemas.compatibility import check_compatible
from metamq.errors import SchemaIncompatible
from metamq.zk.cluster.schemas import Compatibility, Schema, TopicSchemas

NUMBERS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
WORDS = st.text(max_size=3)
PYTHON: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, NUMBERS),
    "float": (float, FLOATS),
    "str": (str, WORDS),
    "bool": (bool, st.booleans()),
    "int or null": (Optional[int], st.none() | NUMBERS),  # noqa: UP045, a type made at run time
    "str or null": (Optional[str], st.none() | WORDS),  # noqa: UP045
    "list of int": (list[int], st.lists(NUMBERS, max_size=2)),
    "map of str": (dict[str, str], st.dictionaries(WORDS, WORDS, max_size=2)),
    "a or b": (Literal["a", "b"], st.sampled_from("ab")),
    "a": (Literal["a"], st.just("a")),
}
AVRO: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": ("int", NUMBERS),
    "long": ("long", NUMBERS),
    "double": ("double", FLOATS),
    "string": ("string", WORDS),
    "bytes": ("bytes", st.binary(max_size=3)),
    "null or int": (["null", "int"], st.none() | NUMBERS),
    "null or string": (["null", "string"], st.none() | WORDS),
    "array": ({"type": "array", "items": "int"}, st.lists(NUMBERS, max_size=2)),
    "enum": ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, st.sampled_from("ab")),
    "smaller enum": ({"type": "enum", "name": "E", "symbols": ["a"]}, st.just("a")),
}
ARROW: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int32": (pa.int32(), st.none() | NUMBERS),
    "int64": (pa.int64(), st.none() | NUMBERS),
    "float": (pa.float32(), st.none() | FLOATS),
    "double": (pa.float64(), st.none() | FLOATS),
    "string": (pa.string(), st.none() | WORDS),
    "binary": (pa.binary(), st.none() | st.binary(max_size=3)),
    "bool": (pa.bool_(), st.none() | st.booleans()),
    "null": (pa.null(), st.none()),
    "date": (pa.date32(), st.none() | st.dates()),
    "list": (pa.list_(pa.int32()), st.none() | st.lists(st.none() | NUMBERS, max_size=2)),
    "longer list": (pa.list_(pa.int64()), st.none() | st.lists(st.none() | NUMBERS, max_size=2)),
    "struct": (pa.struct([("x", pa.int32())]), st.none() | st.fixed_dictionaries({"x": st.none() | NUMBERS})),
    "longer struct": (
        pa.struct([("y", pa.string()), ("x", pa.int64())]),
        st.none() | st.fixed_dictionaries({"x": st.none() | NUMBERS, "y": st.none() | WORDS}),
    ),
}
Fields = dict[str, tuple[str, bool]]
"""The kind of each field, and if it has a default."""


def fields(kinds: dict[str, Any]) -> st.SearchStrategy[Fields]:
    one = st.tuples(st.sampled_from(sorted(kinds)), st.booleans())
    return st.dictionaries(st.sampled_from("pqr"), one, max_size=3)


def values(data: st.DataObject, kinds: dict[str, Any], wanted: Fields) -> dict[str, Any]:
    return {name: data.draw(kinds[kind][1]) for name, (kind, _) in wanted.items()}


def made_by_msgspec(wanted: Fields) -> Any:
    needed = [(name, PYTHON[kind][0]) for name, (kind, default) in wanted.items() if not default]
    others = [
        (name, PYTHON[kind][0], msgspec.field(default_factory=partial(EXAMPLES.__getitem__, kind)))
        for name, (kind, default) in wanted.items()
        if default
    ]
    return msgspec.defstruct("Made", [*needed, *others])


def made_by_pydantic(wanted: Fields) -> Any:
    listed: dict[str, Any] = {
        name: (PYTHON[kind][0], EXAMPLES[kind] if default else ...) for name, (kind, default) in wanted.items()
    }
    return pydantic.create_model("Made", **listed)


EXAMPLES: dict[str, Any] = {
    "int": 0, "float": 0.5, "str": "", "bool": False, "int or null": None, "str or null": None, "list of int": [],
    "map of str": {}, "a or b": "b", "a": "a",
}  # fmt: skip
AVRO_EXAMPLES: dict[str, Any] = {
    "int": 0, "long": 0, "double": 0.5, "string": "", "bytes": "", "null or int": None, "null or string": None,
    "array": [], "enum": "b", "smaller enum": "a",
}  # fmt: skip


def is_compatible(old: Schema, new: Schema, rule: Compatibility) -> bool:
    try:
        check_compatible("orders", TopicSchemas((old,), rule), new)
    except SchemaIncompatible as error:
        return bool(not error.field or not error.hint)  # a refusal names both
    return True


@pytest.mark.parametrize("make", [made_by_msgspec, made_by_pydantic])
@given(data=st.data(), old=fields(PYTHON), new=fields(PYTHON))
def test_json_that_the_rules_accept_is_decoded(make: Any, data: st.DataObject, old: Fields, new: Fields) -> None:
    first, second = Topic[Any]("orders", make(old)), Topic[Any]("orders", make(new))
    for writer, reader, wanted, rule in (
        (first, second, old, "backward"),
        (second, first, new, "forward"),
    ):
        if is_compatible(first.schema, second.schema, rule):  # type: ignore[arg-type]
            sent = values(data, PYTHON, wanted)
            value = reader.decode(writer.encode(writer._kind(**sent)))
            for name in old.keys() & new.keys():
                assert getattr(value, name) == sent[name]


def avsc(wanted: Fields) -> str:
    listed = [
        {"name": name, "type": AVRO[kind][0], **({"default": AVRO_EXAMPLES[kind]} if default else {})}
        for name, (kind, default) in wanted.items()
    ]
    for one in listed:  # Avro names a type once: each field has an enumeration of its own
        if isinstance(one["type"], dict) and "symbols" in one["type"]:
            one["type"] = {**one["type"], "name": f"E{one['name']}"}
    return json.dumps({"type": "record", "name": "Made", "fields": listed})


@given(data=st.data(), old=fields(AVRO), new=fields(AVRO))
def test_avro_that_the_rules_accept_is_decoded(data: st.DataObject, old: Fields, new: Fields) -> None:
    first, second = Topic.avro("orders", avsc(old)), Topic.avro("orders", avsc(new))
    versions = {1: first.schema.definition, 2: second.schema.definition}
    for topic in (first, second):
        topic.learn(versions)
    for writer, reader, wanted, rule in ((first, second, old, "backward"), (second, first, new, "forward")):
        if is_compatible(first.schema, second.schema, rule):  # type: ignore[arg-type]
            sent = values(data, AVRO, wanted)
            value = reader.decode(writer.encode(sent))
            for name in old.keys() & new.keys():
                is_text_as_bytes = isinstance(sent[name], str) and isinstance(value[name], bytes)
                assert value[name] == (sent[name].encode() if is_text_as_bytes else sent[name])


def arrow(wanted: Fields) -> Topic[Any]:
    """A field without a default is never null, unless it is always null."""
    made = pa.schema(
        [pa.field(name, ARROW[kind][0], nullable=default or kind == "null") for name, (kind, default) in wanted.items()]
    )
    return Topic.arrow("orders", made)


@given(data=st.data(), old=fields(ARROW).filter(bool), new=fields(ARROW).filter(bool))
def test_arrow_that_the_rules_accept_is_decoded(data: st.DataObject, old: Fields, new: Fields) -> None:
    first, second = arrow(old), arrow(new)
    for writer, reader, wanted, read, rule in (
        (first, second, old, new, "backward"),
        (second, first, new, old, "forward"),
    ):
        if is_compatible(first.schema, second.schema, rule):  # type: ignore[arg-type]
            check_that_arrow_is_read(data, writer, reader, wanted, read)


def check_that_arrow_is_read(data: st.DataObject, writer: Any, reader: Any, wanted: Fields, read: Fields) -> None:
    for topic in (writer, reader):
        topic.learn({1: writer.schema.definition, 2: reader.schema.definition})
    values = {
        name: data.draw(ARROW[kind][1].filter(lambda value, may=default or kind == "null": may or value is not None))
        for name, (kind, default) in wanted.items()
    }
    made = pa.schema([(name, ARROW[kind][0]) for name, (kind, _) in wanted.items()])
    (row,) = reader.decode(writer.encode(pa.RecordBatch.from_pylist([values], schema=made))).to_pylist()
    assert list(row) == list(read)
    for name in row:
        sent = values.get(name)
        assert (
            all(row[name][one] == sent[one] for one in row[name] if one in sent)
            if isinstance(sent, dict)
            else (row[name] == sent)
        )


class Base(msgspec.Struct):
    number: int
    place: str | None = None


@pytest.mark.parametrize(
    ("backward", "forward", "new"),
    [
        # A new field with a default, and one without.
        (True, True, [("number", int), ("place", str | None, None), ("seats", int, 0)]),
        (False, True, [("number", int), ("place", str | None, None), ("seats", int, msgspec.NODEFAULT)]),
        # A field less: a reader of the old schema needs only those without a default.
        (True, True, [("number", int)]),
        (True, False, [("place", str | None, None)]),
        # A wider type, and a narrower one.
        (True, False, [("number", float), ("place", str | None, None)]),
        (True, False, [("number", int | str), ("place", str | None, None)]),
        (False, True, [("number", int), ("place", str, "")]),
    ],
)
def test_the_table_of_rules(backward: bool, forward: bool, new: list[Any]) -> None:
    ordered = sorted(new, key=lambda one: len(one) > 2 and one[2] is not msgspec.NODEFAULT)
    listed = [one[:2] if len(one) > 2 and one[2] is msgspec.NODEFAULT else one for one in ordered]
    first, second = Topic("orders", Base).schema, Topic[Any]("orders", msgspec.defstruct("Base", listed)).schema
    assert is_compatible(first, second, "backward") == backward
    assert is_compatible(first, second, "forward") == forward
    assert is_compatible(first, second, "full") == (backward and forward)
    assert is_compatible(first, second, "none")


def test_a_condition_may_be_dropped_but_not_added() -> None:
    class Free(pydantic.BaseModel):
        number: int

    class Bound(pydantic.BaseModel):
        number: int = pydantic.Field(ge=0)

    class Closed(pydantic.BaseModel, extra="forbid"):
        number: int

    class More(pydantic.BaseModel):
        number: int
        place: str = ""

    free, bound, closed, more = (Topic[Any]("orders", kind).schema for kind in (Free, Bound, Closed, More))
    assert is_compatible(bound, free, "backward")
    assert not is_compatible(free, bound, "backward")
    assert is_compatible(more, free, "backward")
    assert not is_compatible(more, closed, "backward"), "its readers refuse unknown fields"


def test_a_schema_is_checked_against_all_versions() -> None:
    class First(msgspec.Struct):
        number: int

    class Second(msgspec.Struct):
        place: str = ""

    class Third(msgspec.Struct):
        number: str = ""

    versions = tuple(Topic[Any]("orders", kind).schema for kind in (First, Second))
    with pytest.raises(SchemaIncompatible, match="version 1 of topic 'orders': field 'number' is integer"):
        check_compatible("orders", TopicSchemas(versions), Topic("orders", Third).schema)


def protobuf(*listed: tuple[int, str, str]) -> Any:
    """A message type with these fields: number, name, type."""
    file = descriptor_pb2.FileDescriptorProto(name="made.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Made")
    for number, name, kind in listed:
        message.field.add(name=name, number=number, type=f"TYPE_{kind.upper()}", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Made"))


def test_protobuf_goes_by_numbers() -> None:
    old = protobuf((1, "number", "int32"), (2, "place", "string"))
    renamed = protobuf((1, "id", "int64"), (3, "seats", "int32"))
    other = protobuf((1, "number", "string"))
    first, second, third = (Topic[Any]("orders", kind) for kind in (old, renamed, other))
    assert is_compatible(first.schema, second.schema, "backward")
    assert second.decode(first.encode(old(number=7, place="Oslo"))).id == 7
    with pytest.raises(SchemaIncompatible) as raised:
        check_compatible("orders", TopicSchemas((first.schema,)), third.schema)
    assert (raised.value.field, raised.value.old, raised.value.new) == ("number = 1", "int32", "text")


def accepted(make: Any, kinds: dict[str, Any]) -> list[tuple[str, Topic[Any], Topic[Any]]]:
    """Each pair of types that the rules accept: the writer's kind, its topic, and the reader's."""
    topics = {kind: make(kind) for kind in kinds}
    return [
        (written, topics[written], topics[read])
        for written in kinds
        for read in kinds
        if is_compatible(topics[written].schema, topics[read].schema, "backward")
    ]


def topic_of_avro(kind: str) -> Topic[Any]:
    return Topic.avro("orders", avsc({"p": (kind, False)}))


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda kind: Topic("orders", made_by_msgspec({"p": (kind, False)})), PYTHON),
        (lambda kind: Topic("orders", made_by_pydantic({"p": (kind, False)})), PYTHON),
        (topic_of_avro, AVRO),
        (lambda kind: arrow({"p": (kind, True)}), ARROW),
    ],
    ids=["msgspec", "pydantic", "avro", "arrow"],
)
def test_each_pair_of_types_that_the_rules_accept_is_decoded(make: Any, kinds: dict[str, Any]) -> None:
    pairs = accepted(make, kinds)
    assert len(kinds) < len(pairs) < len(kinds) ** 2 / 2

    @settings(max_examples=25)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        for kind, writer, reader in pairs:
            value = data.draw(kinds[kind][1])
            versions = {1: writer.schema.definition, 2: reader.schema.definition}
            writer.learn(versions)
            reader.learn(versions)
            reader.decode(writer.encode(one_of(writer, kind, value)))

    check()


def one_of(writer: Topic[Any], kind: str, value: Any) -> Any:
    if writer._kind is pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"p": value}], schema=pa.schema([("p", ARROW[kind][0])]))
    return {"p": value} if writer._kind is dict else writer._kind(p=value)


def record(name: str, *fields: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": one, "type": kind} for one, kind in fields], **more}


INNER = record("Inner", ("x", "int"))
TWO_SPACES = [("a", record("I", ("x", "int"), namespace="p")), ("b", record("I", ("y", "string"), namespace="q"))]
EMPTY = {"type": "record", "name": "Other", "fields": [{"name": "y", "type": "int", "default": 9}]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (record("A", ("a", "int")), record("B", ("a", "int"))),
        (record("A", ("a", INNER)), record("A", ("a", {**INNER, "name": "Other"}))),
        (record("A", ("a", {"type": "enum", "name": "E", "symbols": ["a"]})),
         record("A", ("a", {"type": "enum", "name": "F", "symbols": ["a"]}))),
        (record("A", ("a", {"type": "fixed", "name": "E", "size": 2})),
         record("A", ("a", {"type": "fixed", "name": "F", "size": 2}))),
        (record("A", *TWO_SPACES, ("c", "p.I")), record("A", *TWO_SPACES, ("c", "q.I"))),
        (record("A", ("a", [INNER, EMPTY])), record("A", ("a", [EMPTY, "string"]))),
        (record("A", ("a", "string")),
         {"type": "record", "name": "A", "fields": [{"name": "z", "type": "int", "aliases": ["a"], "default": 0}]}),
    ],
)  # fmt: skip
def test_avros_names_count(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.raises(SchemaIncompatible):
        check_compatible("t", TopicSchemas((Schema("avro", json.dumps(old)),)), Schema("avro", json.dumps(new)))


def test_avros_namespaces_and_aliases_are_followed() -> None:
    old = record("A", ("a", record("I", ("x", "int"))), ("b", "I"), namespace="p")
    new = {**old, "namespace": "q", "fields": [*old["fields"][:1], {"name": "z", "type": "I", "aliases": ["b"]}]}
    schemas = [Schema("avro", json.dumps(one)) for one in (old, new)]
    check_compatible("t", TopicSchemas((schemas[0],)), schemas[1])
    writer, reader = (Topic.avro("t", one.definition) for one in schemas)
    writer.learn({1: schemas[0].definition})
    reader.learn({1: schemas[0].definition})
    assert reader.decode(writer.encode({"a": {"x": 1}, "b": {"x": 2}})) == {"a": {"x": 1}, "z": {"x": 2}}
