"""Topic: a topic's name with the type of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, is_typeddict

from metamq.client.checks import wrong_type
from metamq.client.schemas.arrow import arrow_codec
from metamq.client.schemas.avro import avro_codec
from metamq.client.schemas.codecs import codec_of
from metamq.client.schemas.frame import framed
from metamq.client.schemas.value_codec import library
from metamq.errors import ConfigError
from metamq.zk.cluster.schemas import Schema
from metamq.zk.names import check_topic

if TYPE_CHECKING:
    from metamq.client.schemas.value_codec import ValueCodec
    from metamq.errors import WrongType

V = TypeVar("V")


class Topic(Generic[V]):
    """A topic whose values have one type: `producer.send(orders, Order(...))`, `Consumer(topics=orders)`. Thread-safe.

        orders = Topic("orders", Order)

    kind:  a msgspec.Struct, a dataclass or another class that msgspec knows: the messages are JSON. A pydantic model:
           JSON by pydantic. A class that protoc made: Protobuf. For Avro see Topic.avro(), for Arrow Topic.arrow().
    framing: "confluent" begins each message as Confluent's serializers do, with the version of its schema; to send,
           call Admin.register_schema(topic) once in each process. None stores only the value.

    It makes no request, and several clients may share it. `encode` and `decode` convert one value, also as
    `Producer(encode=orders.encode)` and `Consumer(decode=orders.decode)`. A message that `decode` rejects is treated
    as with `decode=`: the loop raises DecodeError, and run() sends it to the dead-letter topic.

    Raises ConfigError for a type that has no encoding, and if a library is missing: the hint names its pip extra.
    """

    def __init__(self, name: str, kind: type[V], *, framing: Literal["confluent"] | None = None) -> None:
        if framing not in (None, "confluent"):
            raise ConfigError(f"`framing` is {framing!r}", hint="Choose 'confluent' or None.")
        codec = codec_of(kind)
        self._set(name, codec if framing is None else framed(name, codec), kind)

    def _set(self, name: str, codec: ValueCodec, kind: type[Any]) -> None:
        self.name: str = check_topic(name)
        """The name of the topic."""
        self._kind = dict if is_typeddict(kind) else kind
        self._codec = codec
        self.decode: Callable[[bytes], V] = codec.decode
        """Returns the value of a message. Raises the library's error."""

    @classmethod
    def avro(cls, name: str, definition: str) -> Topic[dict[str, Any]]:
        """Returns a topic of Avro records, as dicts. `definition` is the text of an .avsc file.

        Each message begins with 5 bytes, as Confluent's serializers write them: a zero byte, and the version of the
        writer's schema in 4 bytes. So messages need a registered schema: call Admin.register_schema(topic) once in
        each process that sends. A Consumer of the topic follows its schemas by itself.
        Raises ConfigError for a wrong definition, and without fastavro.
        """
        topic: Topic[dict[str, Any]] = Topic.__new__(Topic)
        topic._set(name, avro_codec(name, definition), dict)
        return topic

    @classmethod
    def arrow(cls, name: str, schema: Any) -> Topic[Any]:
        """Returns a topic of Arrow record batches: a message has the rows of one, without its schema.

        `schema` is a pyarrow.Schema; `encode` casts batches to it. Each message begins with the version of its
        writer's schema, as with `avro`: call Admin.register_schema(topic) once in each process that sends. Reading
        gives batches with the fields of this schema: a field that a message lacks is null.
        Raises ConfigError for a type that needs a dictionary or an extension, and without pyarrow.
        """
        topic: Topic[Any] = Topic.__new__(Topic)
        topic._set(name, arrow_codec(name, schema), library("pyarrow", "arrow").RecordBatch)
        return topic

    @property
    def schema(self) -> Schema:
        """The format and the definition of the values, as Admin.register_schema() stores them."""
        return Schema(self._codec.format, self._codec.definition())

    def encode(self, value: V) -> bytes:
        """Returns the bytes of a value. Raises WrongType for a value of another type, and the library's error."""
        if not isinstance(value, self._kind):
            raise self._mismatch(value)
        return self._codec.encode(value)

    def encode_many(self, values: Iterable[V]) -> list[bytes]:
        """Returns the bytes of each value, in one pass. Raises as `encode`."""
        values = list(values)
        for kind in set(map(type, values)):
            if not issubclass(kind, self._kind):
                raise self._mismatch(next(value for value in values if type(value) is kind))
        return list(map(self._codec.encode, values))

    @property
    def has_versions(self) -> bool:
        """True if messages name the version of their schema: with Avro, Arrow, and with a framing."""
        return self._codec.learn is not None

    def learn(self, versions: dict[int, str]) -> None:
        """Takes registered definitions, by version; the Admin calls it."""
        if self._codec.learn is not None:
            self._codec.learn(versions)

    def _mismatch(self, value: object) -> WrongType:
        return wrong_type(f"a value of topic {self.name!r}", f"a {self._kind.__qualname__}", value)

    def __repr__(self) -> str:
        return f"<Topic {self.name} of {self._kind.__qualname__}, {self._codec.format}>"
