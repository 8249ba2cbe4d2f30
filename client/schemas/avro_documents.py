"""Avro values as JSON documents: fields by name, bytes in base64, logical types as text.

A union takes a document by its first type that fits, numbers and texts first. {"bytes": "AAE="} names the type, as in
Avro's own JSON.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation
from io import BytesIO
from typing import Any
from uuid import UUID

from metamq.client.schemas.avro import avro_text
from metamq.client.schemas.value_codec import DocumentCodec, library, wrong_field
from metamq.zk.documents import parse

_INTEGERS = {"int": 1 << 31, "long": 1 << 63}
_INFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FIRST = {str: ("string",), int: ("int", "long")}
"""The types of a union that are tried first, by the type of the document."""


def avro_documents(definition: str) -> DocumentCodec:
    """Returns the codec of an Avro schema. Raises ConfigError for a wrong one, and without fastavro."""
    fastavro = library("fastavro", "avro")
    names: dict[str, Any] = {}
    node = fastavro.parse_schema(parse(avro_text(definition).encode()), named_schemas=names)
    writer = _AvroWriter(names)

    def decode(body: bytes) -> Any:
        return fastavro.schemaless_reader(BytesIO(body), node, node)

    def encode(document: Any) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, node, writer.value(node, document, ""))
        return out.getvalue()

    return DocumentCodec(decode, encode)


class _AvroWriter:
    """Makes the values that fastavro writes of documents. Raises ValueError."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._by_kind: dict[str, Callable[[Any, Any, str], Any]] = {
            "record": self._record, "array": self._array, "map": self._map, "enum": _enum, "null": _null,
            "boolean": _boolean, "string": _string, "bytes": _bytes, "fixed": _bytes, "int": _integer,
            "long": _integer, "float": _float, "double": _float,
        }  # fmt: skip

    def value(self, node: Any, document: Any, path: str) -> Any:
        """Returns the value of a document by its schema."""
        if isinstance(node, list):
            return self._union(node, document, path)
        if isinstance(node, str):
            node = self._names.get(node, {"type": node})
        if isinstance(node["type"], dict | list):
            return self.value(node["type"], document, path)
        logical = _LOGICAL.get(f"{node['type']}-{node.get('logicalType')}")
        if logical is not None and isinstance(document, str):
            try:
                return logical(document, node)
            except (ValueError, InvalidOperation) as error:
                raise wrong_field(path, f"{document!r:.60} is no {node['logicalType']}: {error}") from None
        return self._by_kind[node["type"]](node, document, path)

    def _union(self, nodes: list[Any], document: Any, path: str) -> Any:
        first = _FIRST.get(type(document), ())
        problems = []
        for node in sorted(nodes, key=lambda one: _type_name(one) not in first):
            try:
                return _type_name(node), self.value(node, document, path)
            except ValueError as error:
                problems += [] if _type_name(node) == "null" else [error]
        if isinstance(document, dict) and len(document) == 1:
            ((name, inner),) = document.items()
            for node in nodes:
                if _type_name(node) == name:
                    return name, self.value(node, inner, path)
        if len(problems) == 1:
            raise problems[0]
        raise wrong_field(path, f"{document!r:.60} is none of {', '.join(map(_type_name, nodes))}")

    def _record(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, dict):
            raise wrong_field(path, f"{document!r:.60} is no object")
        fields = {one["name"]: one for one in node["fields"]}
        for name in document:
            if name not in fields:
                raise wrong_field(_below(path, name), f"the schema has no such field; it has {', '.join(fields)}")
        found = {name: self.value(fields[name]["type"], one, _below(path, name)) for name, one in document.items()}
        for name, one in fields.items():
            if name not in document:
                found |= _default(one, _below(path, name))
        return found

    def _array(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, list):
            raise wrong_field(path, f"{document!r:.60} is no list")
        return [self.value(node["items"], one, f"{path}[{at}]") for at, one in enumerate(document)]

    def _map(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, dict):
            raise wrong_field(path, f"{document!r:.60} is no object")
        return {name: self.value(node["values"], one, _below(path, name)) for name, one in document.items()}


def _default(field: Any, path: str) -> dict[str, Any]:
    """Returns the default of a missing field if fastavro cannot write it: that of bytes, which a schema has as text."""
    if "default" not in field:
        raise wrong_field(path, "it is missing, and has no default")
    first = field["type"][0] if isinstance(field["type"], list) else field["type"]
    is_bytes = (first if isinstance(first, str) else first["type"]) in ("bytes", "fixed")
    return {field["name"]: field["default"].encode("latin-1")} if is_bytes else {}


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _type_name(node: Any) -> str:
    """Returns the name by which fastavro knows a type of a union."""
    if isinstance(node, str):
        return node
    return str(node["name"] if "name" in node else node["type"])


def _null(_node: Any, document: Any, path: str) -> None:
    if document is not None:
        raise wrong_field(path, f"{document!r:.60} is not null")


def _boolean(_node: Any, document: Any, path: str) -> bool:
    if not isinstance(document, bool):
        raise wrong_field(path, f"{document!r:.60} is no boolean")
    return document


def _string(_node: Any, document: Any, path: str) -> str:
    if not isinstance(document, str):
        raise wrong_field(path, f"{document!r:.60} is no text")
    return document


def _integer(node: Any, document: Any, path: str) -> int:
    limit = _INTEGERS[node["type"]]
    if type(document) is not int or not -limit <= document < limit:
        raise wrong_field(path, f"{document!r:.60} is no {node['type']}")
    return document


def _float(node: Any, document: Any, path: str) -> float:
    if isinstance(document, str) and document in _INFINITE:
        return _INFINITE[document]
    if isinstance(document, bool) or not isinstance(document, int | float):
        raise wrong_field(path, f"{document!r:.60} is no {node['type']}")
    return float(document)


def _enum(node: Any, document: Any, path: str) -> str:
    if document not in node["symbols"]:
        raise wrong_field(path, f"{document!r:.60} is none of {', '.join(node['symbols'])}")
    return str(document)


def _bytes(node: Any, document: Any, path: str) -> bytes:
    try:
        data = base64.b64decode(_string(node, document, path), validate=True)
    except ValueError as error:
        raise wrong_field(path, f"{document!r:.60} is not base64: {error}") from None
    if node["type"] == "fixed" and len(data) != node["size"]:
        raise wrong_field(path, f"it has {len(data):,} bytes, and not {node['size']:,}")
    return data


def _moment(text: str, _node: Any) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("it names no zone, as 2026-11-01T13:30Z does")
    return found.astimezone(UTC)


def _local(text: str, _node: Any) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=None)


def _decimal(text: str, node: Any) -> Decimal:
    number = Decimal(text)
    scale = node.get("scale", 0)
    if not number.is_finite() or number != round(number, scale) or abs(number).adjusted() >= node["precision"] - scale:
        raise ValueError(f"it has more than {node['precision']} digits, or more than {scale} after the point")
    return number


_LOGICAL: dict[str, Callable[[str, Any], Any]] = {
    "int-date": lambda text, _node: date.fromisoformat(text),
    "int-time-millis": lambda text, _node: time.fromisoformat(text),
    "long-time-micros": lambda text, _node: time.fromisoformat(text),
    "long-timestamp-millis": _moment,
    "long-timestamp-micros": _moment,
    "long-local-timestamp-millis": _local,
    "long-local-timestamp-micros": _local,
    "bytes-decimal": _decimal,
    "fixed-decimal": _decimal,
    "string-uuid": lambda text, _node: UUID(text),
}
"""Texts of the logical types that fastavro knows; others are as their plain type."""
