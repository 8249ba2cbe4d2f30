"""The compatibility of a topic's schemas.

A topic keeps messages of all versions, so a new schema is checked against every version, not only the last one.
"""

from __future__ import annotations

import json
from dataclasses import replace

from metamq.client.schemas.arrow import arrow_schema, arrow_shape, arrow_text
from metamq.client.schemas.avro import avro_shape, avro_text
from metamq.client.schemas.json_shape import json_shape
from metamq.client.schemas.protobuf import protobuf_shape
from metamq.client.schemas.shapes import ANY, Mismatch, Shape, mismatches
from metamq.errors import ConfigError, SchemaIncompatible
from metamq.zk.cluster.schemas import Schema, TopicSchemas
from metamq.zk.documents import parse

_DIRECTIONS = {"backward": ("backward",), "forward": ("forward",), "full": ("backward", "forward"), "none": ()}
_HINTS = {
    "backward": "Give the field a default or a wider type, or send the new values to a new topic.",
    "forward": "Keep the field and its type as they are, or send the new values to a new topic.",
}


def shape_of(topic: str, schema: Schema) -> Shape:
    """Returns the shape of a schema. Raises ConfigError for one that is wrong or too large."""
    TopicSchemas((schema,)).validate(topic)
    if schema.format == "avro":
        return avro_shape(schema.definition)
    if schema.format == "protobuf":
        return protobuf_shape(schema.definition)
    if schema.format == "arrow":
        return arrow_shape(schema.definition)
    try:
        shape = json_shape(parse(schema.definition.encode()))
    except (ValueError, TypeError, AttributeError) as error:
        raise _wrong_json(error) from None
    if shape == ANY:  # no later version with a needed field could follow it
        raise ConfigError("the JSON Schema says nothing: it has no type", hint='Begin with {"type": "object"}.')
    return shape


def without_layout(topic: str, schema: Schema) -> Schema:
    """Returns the schema without the layout of its text, so that files of the same content are equal. Raises
    ConfigError."""
    TopicSchemas((schema,)).validate(topic)
    if schema.format == "avro":
        return replace(schema, definition=avro_text(schema.definition))
    if schema.format == "arrow":
        return replace(schema, definition=arrow_text(arrow_schema(schema.definition)))
    if schema.format != "json":
        return schema
    try:
        return replace(schema, definition=json.dumps(parse(schema.definition.encode()), sort_keys=True))
    except ValueError as error:
        raise _wrong_json(error) from None


def _wrong_json(error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(f"the JSON Schema is wrong: {error}", hint="Correct it, and register it again.")


def check_compatible(topic: str, schemas: TopicSchemas, new: Schema) -> None:
    """Raises SchemaIncompatible for the first field that breaks the topic's rule, and ConfigError for a wrong schema or
    another format."""
    shape = shape_of(topic, new)
    for old in schemas.versions:
        if old.format != new.format:
            raise ConfigError(
                f"topic {topic!r} has messages in {old.format}, and the new schema is {new.format}",
                hint="Make a new topic for the other format.",
            )
    for direction in _DIRECTIONS[schemas.compatibility]:
        for version in range(len(schemas.versions), 0, -1):
            old = schemas.versions[version - 1]
            written, read = (shape_of(topic, old), shape) if direction == "backward" else (shape, shape_of(topic, old))
            for found in mismatches(written, read):
                raise _incompatible(topic, version, found, direction)


def _incompatible(topic: str, version: int, found: Mismatch, direction: str) -> SchemaIncompatible:
    old, new = (found.written, found.read) if direction == "backward" else (found.read, found.written)
    path = found.path or "(the whole value)"
    return SchemaIncompatible(topic, version, path, old, new, found.reason, direction, _HINTS[direction])
