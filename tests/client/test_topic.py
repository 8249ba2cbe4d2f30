"""Typed topics: values of dataclasses, msgspec, pydantic, Protobuf and Avro, through a real broker, in both APIs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.wrappers_pb2 import DoubleValue, StringValue

from metamq import Message, Topic, aio
from metamq.errors import ConfigError, DecodeError, SchemaIncompatible, TopicNotFound, WrongType
from metamq.zk.cluster.schemas import NO_SCHEMAS, SCHEMAS_BYTES_MAX, Schema
from metamq.zk.errors import ConnectionLost
from tests.client.conftest import Shop
from tests.zk.conftest import take_over


@dataclass
class Parcel:
    number: int
    tags: list[str]
    weight: float | None = None


class Order(msgspec.Struct):
    number: int
    total: float = 0.0


class Invoice(pydantic.BaseModel):
    number: int = pydantic.Field(alias="invoice-number")
    paid: bool = False


AVSC: dict[str, Any] = {
    "type": "record",
    "name": "Trip",
    "fields": [{"name": "number", "type": "int"}, {"name": "place", "type": ["null", "string"], "default": None}],
}
VALUES: dict[str, tuple[Callable[[str], Topic[Any]], list[Any]]] = {
    "dataclass": (lambda name: Topic(name, Parcel), [Parcel(1, ["a"]), Parcel(2, [], 0.5)]),
    "msgspec": (lambda name: Topic(name, Order), [Order(1), Order(2, 7.5)]),
    "pydantic": (
        lambda name: Topic(name, Invoice),
        [Invoice.model_validate({"invoice-number": 1}), Invoice.model_validate({"invoice-number": 2, "paid": True})],
    ),
    "protobuf": (lambda name: Topic(name, StringValue), [StringValue(value="one"), StringValue(value="")]),
    "framed json": (lambda name: Topic(name, Order, framing="confluent"), [Order(1), Order(2, 7.5)]),
    "framed pydantic": (
        lambda name: Topic(name, Invoice, framing="confluent"),
        [Invoice.model_validate({"invoice-number": 1}), Invoice.model_validate({"invoice-number": 2})],
    ),
    "framed protobuf": (
        lambda name: Topic(name, StringValue, framing="confluent"),
        [StringValue(value="one"), StringValue(value="two")],
    ),
    "avro": (
        lambda name: Topic.avro(name, json.dumps(AVSC)),
        [{"number": 1, "place": "Oslo"}, {"number": 2, "place": None}],
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back_equal_in_both_apis(shop: Shop, kind: str) -> None:
    make, values = VALUES[kind]
    topic = make(shop.topic())
    assert shop.admin.register_schema(topic) == 1
    assert shop.admin.register_schema(topic) == 1, "the same schema has one version"
    shop.producer.send(topic, values[0], partition="0-0").result(60)
    shop.producer.send_many(topic, values[1:], partition="0-0").result(60)

    async def again() -> list[Any]:
        there = make(topic.name)
        async with aio.Admin(shop.cluster.zookeeper) as admin, aio.Producer(shop.cluster.zookeeper) as producer:
            await admin.load_schemas(there)
            await producer.send(there, values[0], partition="0-0")
            await producer.send_many(there, values[1:], partition="0-0")
        async with aio.Consumer(shop.cluster.zookeeper, topics=there, idle_timeout_s=0.3) as consumer:
            return [message.value async for message in consumer]

    assert asyncio.run(again()) == values * 2
    with shop.cluster.consumer(topics=topic, idle_timeout_s=0.3) as consumer:
        assert [message.value for message in consumer] == values * 2
    with shop.producer.transaction():
        shop.producer.send(topic, values[0], partition="0-0")
        shop.producer.send_many(topic, values[1:], partition="0-0")
    with shop.cluster.consumer(topics=topic, idle_timeout_s=0.3) as consumer:
        assert [value for batch in consumer.batches() for value in batch.values] == values * 3


def test_a_value_of_another_type_is_refused_before_it_is_sent(shop: Shop) -> None:
    topic: Topic[Any] = Topic(shop.topic(), Order)
    for wrong in (Parcel(1, []), b'{"number": 1}', None):
        with pytest.raises(WrongType, match=f"a value of topic '{topic.name}' must be a Order"):
            shop.producer.send(topic, wrong)
        with pytest.raises(WrongType, match="must be a Order"):
            shop.producer.send_many(topic, [Order(1), wrong])
    with shop.cluster.producer(encode=str.encode) as producer, pytest.raises(ConfigError, match="has `encode=`"):
        producer.send(topic, Order(1))
    with pytest.raises(ConfigError, match="there is `decode=`"):
        shop.cluster.consumer(topics=topic, decode=json.loads)
    with pytest.raises(ConfigError, match="a Topic decodes the values of one topic only") as raised:
        shop.cluster.consumer(topics=[topic, "parcels"])
    assert "topics=<the Topic>" in str(raised.value)
    with pytest.raises(ConfigError, match=f"Give its `name`, '{topic.name}'"):
        shop.admin.create_topic(topic)  # type: ignore[arg-type]
    with shop.cluster.consumer(topics=topic.name, idle_timeout_s=0.1) as consumer:
        assert [*consumer] == []


def test_a_body_that_does_not_decode_goes_the_way_of_decode(shop: Shop, group: str) -> None:
    shop.admin.create_topic(f"{group}.dead-letter", 1)
    topic = Topic(shop.topic(), Order)
    shop.send(topic.name, [b'{"number": 1}', b'{"number": "x"}', b'{"number": 3}'], "0-0")
    with shop.cluster.consumer(topics=topic, idle_timeout_s=0.3) as consumer, pytest.raises(DecodeError) as raised:
        for _ in consumer:
            pass
    assert raised.value.offset == 1
    assert isinstance(raised.value.__cause__, msgspec.ValidationError)
    seen: list[int] = []

    def listen(message: Message[Order]) -> None:
        seen.append(message.value.number)

    with shop.cluster.consumer(topics=topic, group=group, idle_timeout_s=0.3) as consumer:
        consumer.run(listen, max_attempts=2, retry_delay_s=0.01)
    assert seen == [1, 3]
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.3) as dead:
        assert [message.value for message in dead] == [b'{"number": "x"}']


def test_a_type_without_an_encoding_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(msgspec.Struct):
        made: Callable[[], int]

    with pytest.raises(ConfigError, match="Odd has no encoding"):
        Topic("orders", Odd)
    with pytest.raises(ConfigError, match="bytes is no type of a typed topic"):
        Topic("orders", bytes)
    with pytest.raises(WrongType, match="must be a class"):
        Topic("orders", 5)  # type: ignore[arg-type]
    for module, extra in (("msgspec", "msgspec"), ("fastavro", "avro")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"metamq\[{extra}\]"):
            Topic("orders", Parcel) if module == "msgspec" else Topic.avro("orders", json.dumps(AVSC))


class WiderOrder(msgspec.Struct):
    number: float
    total: float = 0.0
    place: str | None = None


class WrongOrder(msgspec.Struct):
    number: str
    total: float = 0.0


def test_an_incompatible_schema_is_refused_with_field_types_and_next_step(shop: Shop) -> None:
    name = shop.topic()
    assert shop.admin.register_schema(Topic(name, Order)) == 1
    wrong = Topic(name, WrongOrder)
    for refused in (shop.admin.check_schema, shop.admin.register_schema):
        with pytest.raises(SchemaIncompatible) as raised:
            refused(wrong)
        error = raised.value
        assert (error.topic, error.version, error.field, error.old, error.new, error.rule) == (
            name, 1, "number", "integer", "string", "backward",
        )  # fmt: skip
        assert "Give the field a default or a wider type" in str(error.hint)
    assert shop.admin.register_schema(Topic(name, WiderOrder)) == 2
    with pytest.raises(SchemaIncompatible, match="not forward compatible"):
        shop.admin.register_schema(Topic(name, WrongOrder), compatibility="forward")
    assert shop.admin.load_schemas(name).compatibility == "backward", "a refused registration changes nothing"
    assert shop.admin.register_schema(Topic(name, WrongOrder), compatibility="none") == 3
    assert [one.format for one in shop.admin.load_schemas(name).versions] == ["json"] * 3
    with pytest.raises(ConfigError, match="compatibility is 'sideways'"):
        shop.admin.register_schema(Topic(name, Order), compatibility="sideways")  # type: ignore[arg-type]


def test_a_new_consumer_reads_old_messages_and_an_avro_reader_fills_in_defaults(shop: Shop) -> None:
    name = shop.topic()
    old = Topic.avro(name, json.dumps(AVSC))
    longer = [{"name": "number", "type": "long"}, {"name": "seats", "type": "int", "default": 4}]
    new = Topic.avro(name, json.dumps({**AVSC, "fields": longer}))
    with pytest.raises(ConfigError, match=r"version of this schema of topic .* is not known here"):
        shop.producer.send(old, {"number": 1})
    shop.admin.register_schema(old)
    shop.producer.send(old, {"number": 1, "place": "Oslo"}, partition="0-0").result(60)
    assert shop.admin.register_schema(new) == 2
    shop.producer.send(new, {"number": 2, "seats": 5}, partition="0-0").result(60)
    with shop.cluster.consumer(topics=new, idle_timeout_s=0.3) as consumer:
        messages = [*consumer]
    assert [message.value for message in messages] == [{"number": 1, "seats": 4}, {"number": 2, "seats": 5}]
    with shop.consumer(name, idle_timeout_s=0.3) as consumer:
        assert [message.value[:5] for message in consumer] == [b"\0\0\0\0\x01", b"\0\0\0\0\x02"]
    stranger = Topic.avro(name, json.dumps(AVSC))
    stranger.learn({})
    with pytest.raises(ValueError, match=r"version 2, which is not known here: call load_schemas\(topic\)"):
        stranger.decode(messages_of_version(2))
    with pytest.raises(ValueError, match="does not begin with a zero byte"):
        stranger.decode(b"{}")


def messages_of_version(version: int) -> bytes:
    return b"\0" + version.to_bytes(4, "big") + b"\2"


@pytest.mark.parametrize("grouped", [False, True])
def test_a_running_consumer_reads_versions_that_are_registered_later(shop: Shop, group: str, grouped: bool) -> None:
    name = shop.topic()
    old = Topic.avro(name, json.dumps(AVSC))
    longer = [*AVSC["fields"], {"name": "seats", "type": "int", "default": 4}]
    new = Topic.avro(name, json.dumps({**AVSC, "fields": longer}))
    shop.admin.register_schema(old)
    shop.producer.send(old, {"number": 1, "place": None}).result(60)
    reader = Topic.avro(name, json.dumps(AVSC))
    with shop.cluster.consumer(topics=reader, group=group if grouped else None, idle_timeout_s=30) as consumer:
        messages = iter(consumer)
        assert next(messages).value == {"number": 1, "place": None}
        assert shop.admin.register_schema(new) == 2
        data = new.encode({"number": 2, "place": "Oslo", "seats": 5})
        shop.until(lambda: can_decode(reader, data))
        shop.producer.send(new, {"number": 2, "place": "Oslo", "seats": 5})
        assert next(messages).value == {"number": 2, "place": "Oslo"}


def can_decode(topic: Topic[Any], data: bytes) -> bool:
    try:
        topic.decode(data)
    except ValueError:
        return False
    return True


def test_registered_versions_cannot_be_changed(shop: Shop) -> None:
    topic = Topic(shop.topic(), Order)
    shop.admin.register_schema(topic)

    async def rewrite() -> None:
        async with aio.Admin(shop.cluster.zookeeper) as admin:
            await admin._core.cluster.topics.alter(topic.name, lambda config: replace(config, schemas=NO_SCHEMAS))

    with pytest.raises(ConfigError, match="its registered schemas cannot change"):
        asyncio.run(rewrite())


def test_a_deleted_topic_has_no_schemas_and_settings_keep_them(shop: Shop) -> None:
    topic = Topic(shop.topic(), Order)
    shop.admin.register_schema(topic)
    shop.admin.alter(topic.name, retention_ms=60_000)
    assert len(shop.admin.load_schemas(topic).versions) == 1
    shop.admin.delete(topic.name)
    with pytest.raises(TopicNotFound):
        shop.admin.load_schemas(topic)
    shop.admin.create_topic(topic.name, 1)
    assert shop.admin.load_schemas(topic).versions == ()


def test_of_registrations_at_once_each_has_a_version_of_its_own(shop: Shop) -> None:
    name, writers = shop.topic(), 8
    kinds = [msgspec.defstruct("Made", [(f"field{number}", int, 0)]) for number in range(writers)]
    admins = [shop.cluster.admin() for _ in range(writers)]
    try:
        with ThreadPoolExecutor(writers) as pool:
            found = [
                *pool.map(lambda one: one[0].register_schema(Topic(name, one[1])), zip(admins, kinds, strict=True))
            ]
    finally:
        for admin in admins:
            admin.close()
    assert sorted(found) == [*range(1, writers + 1)]
    versions = shop.admin.load_schemas(name).versions
    assert [versions[version - 1] for version in found] == [Topic(name, kind).schema for kind in kinds]


def test_a_registration_lasts_through_the_end_of_its_session(shop: Shop) -> None:
    topic = Topic(shop.topic(), Order)

    async def run() -> int:
        async with aio.Admin(shop.cluster.zookeeper) as admin:
            session = admin._core.cluster.session
            real, calls = session.set, 0

            async def lost_answer(path: str, data: bytes, version: int) -> Any:
                nonlocal calls
                calls += 1
                stored = await real(path, data, version)
                if calls == 1:
                    await asyncio.to_thread(take_over, session)
                    raise ConnectionLost(session.servers, "the session is over")
                return stored

            session.set = lost_answer  # type: ignore[method-assign]
            return await admin.register_schema(topic)

    assert asyncio.run(run()) == 1
    assert len(shop.admin.load_schemas(topic).versions) == 1


def recursive() -> Schema:
    class Node(pydantic.BaseModel):
        inner: Node | None = None

    Node.model_rebuild(_types_namespace={"Node": Node})
    return Schema("json", json.dumps(Node.model_json_schema()))


def multiplied() -> Schema:
    levels = {
        f"L{n}": {"type": "object", "properties": {f: {"$ref": f"#/$defs/L{n + 1}"} for f in "abcdefghij"}}
        for n in range(9)
    }
    return Schema("json", json.dumps({"$defs": {**levels, "L9": {"type": "string"}}, "$ref": "#/$defs/L0"}))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (recursive, "the schema is recursive: 'Node' contains itself"),
        (multiplied, "more than 10,000 parts"),
        (lambda: Schema("json", '{"title": "%s"}' % ("x" * SCHEMAS_BYTES_MAX)), "the limit is 256 KiB"),
        (lambda: Schema("json", '{"a": ' * 5000 + "1" + "}" * 5000), "nested deeper than 16"),
        (lambda: Schema("json", "[]"), "not an object"),
        (lambda: Schema("json", '{"type": "strnig"}'), "that metamq does not know"),
        (lambda: Schema("json", '{"type": "object", "properties": 5}'), "the JSON Schema is wrong"),
        (lambda: Schema("json", "{}"), "says nothing"),
        (lambda: Schema("avro", '{"type": "record", "name": "A"}'), "the Avro schema is wrong"),
        (
            lambda: Schema("avro", avro_record("A", {"name": "a", "type": "int", "default": "x"})),
            "Avro schema is wrong",
        ),
        (
            lambda: Schema("avro", '{"type":"record","name":"A","fields":[{"name":"a","type":["null","A"]}]}'),
            "the schema is recursive: 'A'",
        ),
        (lambda: Schema("protobuf", "A AAAA"), "the Protobuf schema"),
        (lambda: Schema("xml", "<a/>"), "the format of a schema is 'xml'"),
    ],
)
def test_a_hostile_schema_is_refused(shop: Shop, schema: Callable[[], Schema], problem: str) -> None:
    name = shop.topic()
    with pytest.raises(ConfigError, match=problem) as raised:
        shop.admin.register_schema(name, schema())
    assert raised.value.hint
    assert shop.admin.load_schemas(name).versions == ()


def avro_record(name: str, *fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": name, "fields": fields})


def test_a_version_that_cannot_be_read_spoils_only_its_own_messages(caplog: pytest.LogCaptureFixture) -> None:
    own = avro_record("A", {"name": "a", "type": "int"})
    topic = Topic.avro("orders", own)
    topic.learn({1: own, 2: avro_record("A", {"name": "a", "type": "int", "default": "x"})})
    data = topic.encode({"a": 5})
    assert topic.decode(data) == {"a": 5}
    with pytest.raises(ValueError, match="version 2, which is not known"):
        topic.decode(data[:4] + b"\2" + data[5:])
    assert "version 2 of the schemas of topic 'orders' is left out" in caplog.text


def test_without_a_rule_the_format_stays(shop: Shop) -> None:
    name = shop.topic()
    shop.admin.register_schema(name, Schema("json", '{"type": "object"}'), compatibility="none")
    with pytest.raises(ConfigError, match="has messages in json, and the new schema is avro"):
        shop.admin.register_schema(name, Schema("avro", avro_record("A")))


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(validation_alias="in", serialization_alias="out")


class Excluded(pydantic.BaseModel):
    number: int = pydantic.Field(exclude=True)


class Computed(pydantic.BaseModel, extra="forbid"):
    number: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.number


class Serialized(pydantic.BaseModel):
    number: int

    @pydantic.field_serializer("number")
    def text(self, number: int) -> str:
        return f"n{number}"


class Secret(pydantic.BaseModel):
    card: pydantic.SecretStr


@pytest.mark.parametrize("model", [Aliased, Excluded, Computed, Serialized, Secret])
def test_a_model_that_cannot_read_what_it_writes_is_refused(model: type[pydantic.BaseModel]) -> None:
    with pytest.raises(ConfigError, match=rf"{model.__name__} (cannot read what it writes|has a secret)"):
        Topic("orders", model)


class Plain(pydantic.BaseModel):
    number: Annotated[int, pydantic.PlainValidator(int)]


def test_a_model_without_a_json_schema_can_be_sent() -> None:
    topic = Topic("orders", Plain)
    assert topic.decode(topic.encode(Plain(number=1))) == Plain(number=1)


class Row(TypedDict):
    number: int


def test_a_typed_dict() -> None:
    topic: Topic[Row] = Topic("orders", Row)
    assert topic.decode(topic.encode({"number": 1})) == {"number": 1}
    assert topic.encode_many([{"number": 1}]) == [b'{"number":1}']
    with pytest.raises(WrongType):
        topic.encode([1])  # type: ignore[arg-type]


def test_all_schemas_of_a_topic_have_a_limit(shop: Shop) -> None:
    name, part = shop.topic(), SCHEMAS_BYTES_MAX // 4
    with pytest.raises(ConfigError, match="its schemas would have"):  # noqa: PT012
        for number in range(5):
            document = {"title": f"{number}{'x' * part}", "type": "object"}
            shop.admin.register_schema(name, Schema("json", json.dumps(document)))
    assert len(shop.admin.load_schemas(name).versions) == 3


def test_the_bytes_of_confluents_framing() -> None:
    def head_of(kind: Any) -> bytes:
        topic: Topic[Any] = Topic("orders", kind, framing="confluent")
        topic.learn({100042: topic.schema.definition})
        data = topic.encode(kind())
        assert topic.decode(data) == kind()
        assert topic.decode(b"\0\xff\xff\xff\xff" + data[5:]) == kind(), "a reader needs no version"
        for wrong in (b"", b"\1" + data[1:], data[:4]):
            with pytest.raises(ValueError, match="does not begin with a zero byte"):
                topic.decode(wrong)
        return data

    # StringValue is the eighth type of its file; DescriptorProto.ExtensionRange is the first type in the third.
    assert head_of(StringValue) == bytes.fromhex("00 00 01 86 ca 02 0e")
    assert head_of(DescriptorProto.ExtensionRange) == bytes.fromhex("00 00 01 86 ca 04 04 00")
    assert head_of(DoubleValue) == bytes.fromhex("00 00 01 86 ca 00")
    topic = Topic("orders", StringValue, framing="confluent")
    with pytest.raises(ValueError, match="list of message indexes is wrong"):
        topic.decode(b"\0\0\0\0\1\x08\x02")
    with pytest.raises(ConfigError, match="`framing` is 'kafka'"):
        Topic("orders", Order, framing="kafka")  # type: ignore[arg-type]
