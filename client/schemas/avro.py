"""Avro: records as dicts, by fastavro. A reader needs the writer's schema, so each message names its version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from metamq.client.schemas.frame import SchemaFrame, parsed_versions
from metamq.client.schemas.shapes import ANY, Budget, Field, Kind, Shape
from metamq.client.schemas.value_codec import ValueCodec, library
from metamq.errors import ConfigError
from metamq.zk.documents import parse

_PLAIN = {"null": "null", "boolean": "boolean", "int": "int", "long": "long", "float": "float", "double": "double"}
_PLAIN |= {"bytes": "bytes", "string": "text"}


def avro_codec(topic: str, definition: str) -> ValueCodec:
    """Returns the codec of an Avro schema. Raises ConfigError."""
    fastavro = library("fastavro", "avro")
    own = avro_text(definition)
    avro_shape(own)
    read = fastavro.schemaless_reader
    write = fastavro.schemaless_writer
    reader = _parsed(own)
    writers: dict[int, Any] = {}
    frame = SchemaFrame(topic, own)

    def learn(versions: Mapping[int, str]) -> None:
        found = parsed_versions(topic, versions, lambda one: (text := avro_text(one), _parsed(text)))
        writers.update({version: parsed for version, (_text, parsed) in found.items()})
        frame.learn({version: text for version, (text, _parsed) in found.items()})

    def encode(value: Any) -> bytes:
        out = BytesIO()
        out.write(frame.head())
        write(out, reader, value, strict=True)
        return out.getvalue()

    def decode(data: bytes) -> Any:
        version = frame.version_of(data)
        body = BytesIO(data)
        body.seek(SchemaFrame.BYTES)
        return read(body, writers[version], reader)

    return ValueCodec("avro", encode, decode, lambda: own, learn)


def avro_text(definition: str) -> str:
    """Returns the definition without its layout. Raises ConfigError unless it is a record's schema in JSON."""
    try:
        document = parse(definition.encode())
        if document.get("type") != "record":
            raise ValueError("it is not a record")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the Avro schema is wrong: {error}", hint="Give the text of an .avsc file.") from None
    return json.dumps(document, sort_keys=True)


def _parsed(definition: str) -> Any:
    fastavro = library("fastavro", "avro")
    try:
        return fastavro.parse_schema(parse(definition.encode()))
    except Exception as error:  # fastavro raises errors of many kinds
        problem = f"the Avro schema is wrong: {type(error).__name__}: {error}"
        raise ConfigError(problem, hint="Correct the .avsc file.") from None


def avro_shape(definition: str) -> Shape:
    """Returns the shape of an Avro schema. Raises ConfigError for one that is recursive, too large, or wrong, and
    without fastavro."""
    text = avro_text(definition)
    try:
        shape = _AvroReader().shape(parse(text.encode()), (), "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the Avro schema is wrong: {error!r}", hint="Correct the .avsc file.") from None
    _parsed(text)  # finds more, as a wrong default
    return shape


class _AvroReader:
    def __init__(self) -> None:
        self._named: dict[str, tuple[Any, str]] = {}
        """The definition of a type, and the namespace in it, by full name."""
        self._budget = Budget()

    def shape(self, node: Any, names: tuple[str, ...], namespace: str) -> Shape:
        self._budget.take(names, "")
        if isinstance(node, list):
            return tuple(kind for one in node for kind in self.shape(one, names, namespace))
        if isinstance(node, str):
            if node in _PLAIN:
                return (Kind(_PLAIN[node]),)
            name = _full(node, namespace)
            if name not in self._named:
                raise ConfigError(f"the Avro schema names an unknown type {node!r}", hint="Correct the .avsc file.")
            known, inside = self._named[name]
            return (self._record_or(known, names, inside),)
        if isinstance(node["type"], dict | list):
            return self.shape(node["type"], names, namespace)
        if "name" in node:
            name = _full(str(node["name"]), node.get("namespace", namespace))
            namespace = name.rpartition(".")[0]
            self._named[name] = node, namespace
        return (self._record_or(node, names, namespace),)

    def _record_or(self, node: dict[str, Any], names: tuple[str, ...], namespace: str) -> Kind:
        kind = node["type"]
        if kind == "record":
            return self._record(node, self._budget.take(names, _full(str(node["name"]), namespace)), namespace)
        if kind == "array":
            return Kind("array", item=self.shape(node["items"], names, namespace))
        if kind == "map":
            return Kind("map", item=self.shape(node["values"], names, namespace))
        if kind == "enum":
            # fastavro accepts no unknown value, even if the enumeration has a default.
            return Kind("enum", values=frozenset(node["symbols"]), type_name=_short(node))
        if kind == "fixed":
            return Kind(f"fixed of {node['size']} bytes", type_name=_short(node))
        if kind in _PLAIN:
            logical = {key: node[key] for key in ("logicalType", "precision", "scale") if key in node}
            return Kind(_PLAIN[kind], limits=frozenset(f"{key}: {value}" for key, value in logical.items()))
        raise ConfigError(f"the Avro schema has an unknown type {kind!r}", hint="Correct the .avsc file.")

    def _record(self, node: dict[str, Any], names: tuple[str, ...], namespace: str) -> Kind:
        fields = {
            str(one["name"]): Field(
                self.shape(one["type"], names, namespace) or ANY,
                "default" not in one,
                is_certain=True,
                aliases=tuple(one.get("aliases", ())),
            )
            for one in node["fields"]
        }
        return Kind("record", fields, type_name=_short(node))


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _short(node: dict[str, Any]) -> str:
    """Returns the name by which readers and writers know a type: the one without its namespace."""
    return str(node["name"]).rpartition(".")[2]
