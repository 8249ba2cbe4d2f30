"""The framing of a message that names the version of its schema: the bytes that Confluent's serializers write.

byte 0       0
bytes 1-4    the id of the schema, big-endian; in metamq the version in the topic
then         the value; for Protobuf first the indexes of the message type in its file
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from metamq.errors import ConfigError


class SchemaFrame:
    """The framing of one topic."""

    BYTES: ClassVar[int] = 5

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

    def version_of(self, data: bytes) -> int:
        """Returns the version of a message. Raises ValueError."""
        if len(data) < self.BYTES or data[0] != 0:
            raise ValueError("it does not begin with a zero byte and the id of a schema")
        version = int.from_bytes(data[1 : self.BYTES], "big")
        if version not in self._known:
            raise ValueError(f"its schema has the version {version}, which is not known here: call load_schemas(topic)")
        return version
