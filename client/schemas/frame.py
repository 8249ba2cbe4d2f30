"""The framing of a message that names the version of its schema: the bytes that Confluent's serializers write.

byte 0       0
bytes 1-4    the id of the schema, big-endian; in metamq the version in the topic
then         the value; for Protobuf first the indexes of the message type in its file
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.client.schemas.value_codec import ValueCodec

T = TypeVar("T")

log = logging.getLogger("metamq.client")


class SchemaFrame:
    """The framing of one topic."""

    BYTES: ClassVar[int] = 5
    PROBLEM: ClassVar[str] = "it does not begin with a zero byte and the id of a schema"

    def __init__(self, topic: str, definition: str) -> None:
        """`definition` is the schema that this process writes."""
        self._topic = topic
        self._definition = definition
        self._head: bytes | None = None
        self._known: set[int] = set()

    def learn(self, versions: Mapping[int, str]) -> None:
        """Takes registered definitions, by version."""
        self._known.update(versions)
        for version, definition in versions.items():
            if definition == self._definition:
                self._head = b"\0" + version.to_bytes(4, "big")

    def head(self) -> bytes:
        """Returns the bytes before a value. Raises ConfigError while the version of the schema is not known."""
        if self._head is None:
            raise ConfigError(
                f"the version of this schema of topic {self._topic!r} is not known here",
                hint="Call register_schema(topic) of an Admin once, before you send.",
            )
        return self._head

    @classmethod
    def body(cls, data: bytes, *, has_indexes: bool) -> bytes:
        """Returns the value of a message of any version. Raises ValueError."""
        if len(data) < cls.BYTES or data[0] != 0:
            raise ValueError(cls.PROBLEM)
        if not has_indexes:
            return data[cls.BYTES :]
        count, at = _varint(data, cls.BYTES)
        for _ in range(count):
            _, at = _varint(data, at)
        return data[at:]

    def version_of(self, data: bytes) -> int:
        """Returns the version of a message. Raises ValueError."""
        if len(data) < self.BYTES or data[0] != 0:
            raise ValueError(self.PROBLEM)
        version = int.from_bytes(data[1 : self.BYTES], "big")
        if version not in self._known:
            raise ValueError(f"its schema has the version {version}, which is not known here: call load_schemas(topic)")
        return version


def parsed_versions(topic: str, versions: Mapping[int, str], parse: Callable[[str], T]) -> dict[int, T]:
    """Returns the parsed definitions. One that is wrong is left out, with a warning: only messages of that version
    cannot be read."""
    found = dict[int, T]()
    for version, one in versions.items():
        try:
            found[version] = parse(one)
        except ConfigError as error:
            log.warning("version %d of the schemas of topic %r is left out: %s", version, topic, error)
    return found


def framed(topic: str, codec: ValueCodec) -> ValueCodec:
    """Returns the codec with the framing of its messages. It reads messages of every version."""
    frame = SchemaFrame(topic, codec.definition())

    def encode(value: Any) -> bytes:
        return frame.head() + codec.indexes + codec.encode(value)

    def decode(data: bytes) -> Any:
        return codec.decode(frame.body(data, has_indexes=bool(codec.indexes)))

    return codec._replace(encode=encode, decode=decode, learn=frame.learn)


def index_list(indexes: Sequence[int]) -> bytes:
    """Returns the indexes of a Protobuf message type: their number, then each, as zigzag varints; one byte for [0]."""
    if list(indexes) == [0]:
        return b"\0"
    out = bytearray()
    for number in (len(indexes), *indexes):
        rest = number << 1
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a zigzag varint that is not negative, and the place after it. Raises ValueError."""
    number = shift = 0
    while at < len(data) and shift < 35:
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return number >> 1, at
        shift += 7
    raise ValueError("its list of message indexes is wrong")
