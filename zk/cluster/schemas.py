"""The schemas of a topic, in its configuration: so they have its rights, are exported with it, and end with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from metamq.errors import ConfigError
from metamq.words import size
from metamq.zk.documents import items, text

Format = Literal["json", "avro", "protobuf", "arrow"]
Compatibility = Literal["backward", "forward", "full", "none"]
"""The readers that a new schema must allow: "backward", readers with the new schema read all older messages;
"forward", readers with older schemas read new messages; "full", both; "none", any schema is accepted."""

FORMATS: tuple[str, ...] = get_args(Format)
COMPATIBILITIES: tuple[str, ...] = get_args(Compatibility)
SCHEMAS_BYTES_MAX = 256 * 1024
"""All definitions of one topic: a node holds less than 1 MiB, and each client of the topic reads it."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The definition of a topic's values: a JSON Schema, an Avro schema; a Protobuf descriptor or an Arrow schema, in
    base64."""

    format: str
    definition: str


@dataclass(frozen=True, slots=True)
class TopicSchemas:
    """The schemas of one topic: `versions[0]` is version 1. Versions are only added."""

    versions: tuple[Schema, ...] = ()
    compatibility: Compatibility = "backward"

    @property
    def by_version(self) -> dict[int, str]:
        """The definitions, by version."""
        return {number: one.definition for number, one in enumerate(self.versions, 1)}

    def validate(self, topic: str) -> None:
        """Raises ConfigError, with the limit, unless the schemas can be stored."""
        if self.compatibility not in COMPATIBILITIES:
            hint = f"Choose {', '.join(map(repr, COMPATIBILITIES))}."
            raise ConfigError(f"topic {topic!r}: compatibility is {self.compatibility!r}", hint=hint)
        for one in self.versions:
            if one.format not in FORMATS:
                hint = f"It has to be {' or '.join(map(repr, FORMATS))}."
                raise ConfigError(f"topic {topic!r}: the format of a schema is {one.format!r}", hint=hint)
        total = sum(len(one.definition.encode()) for one in self.versions)
        if total > SCHEMAS_BYTES_MAX:
            raise ConfigError(
                f"topic {topic!r}: its schemas would have {size(total)}, the limit is {size(SCHEMAS_BYTES_MAX)}",
                hint="Remove descriptions from the schema, or make a new topic for it.",
            )

    def check_successor(self, topic: str, after: TopicSchemas) -> None:
        """Raises ConfigError if a version would change or disappear: messages refer to it."""
        if after.versions[: len(self.versions)] != self.versions:
            hint = "Register a new version, or make a new topic."
            raise ConfigError(f"topic {topic!r}: its registered schemas cannot change", hint=hint)

    def to_document(self) -> dict[str, Any]:
        """The part of the topic's document."""
        versions = [{"format": one.format, "definition": one.definition} for one in self.versions]
        return {"compatibility": self.compatibility, "versions": versions}


NO_SCHEMAS = TopicSchemas()


def schemas_of(document: Mapping[str, Any]) -> TopicSchemas:
    """Reads that part. Raises ValueError, KeyError, TypeError."""
    versions = [
        Schema(text(one["format"]), text(one["definition"], SCHEMAS_BYTES_MAX)) for one in items(document["versions"])
    ]
    return TopicSchemas(tuple(versions), cast(Compatibility, text(document["compatibility"])))
