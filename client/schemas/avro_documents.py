"""Avro values as JSON documents: fields by name, bytes in base64, logical types as text.

A union takes a document by its first type that fits, numbers and texts first. {"bytes": "AAE="} names the type, as in
Avro's own JSON. A decoded union has its value alone, or names the type if the value alone would get another one. So a
document makes the value of which it was made.

fastavro does not return the type that a union has. So values are read by another schema: each type of a union is there
a record of one field, whose name is the type's index. The bytes of such a record are those of its field.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Context, Decimal, Inexact, InvalidOperation
from io import BytesIO
from typing import Any
from uuid import UUID

from metamq.client.schemas.avro import avro_text
from metamq.client.schemas.value_codec import DocumentCodec, library, plain, wrong_field
from metamq.zk.documents import parse

_INTEGERS = {"int": 1 << 31, "long": 1 << 63}
_INFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RANKS = {str: {"string": 0}, int: {"int": 0, "long": 0, "double": 1}, float: {"double": 0}}
"""The order in which the types of a union are tried, by the type of the document; others come later."""
_LAST = 2


def avro_documents(definition: str) -> DocumentCodec:
    """Returns the codec of an Avro schema. Raises ConfigError for a wrong one, and without fastavro."""
    fastavro = library("fastavro", "avro")
    names: dict[str, Any] = {}
    node = fastavro.parse_schema(parse(avro_text(definition).encode()), named_schemas=names)
    with_types = fastavro.parse_schema(_with_types(node, itertools.count()))
    writer = _AvroWriter(names)

    def decode(body: bytes) -> Any:
        return writer.document(node, fastavro.schemaless_reader(BytesIO(body), with_types, None))

    def encode(document: Any) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, node, writer.value(node, document, ""))
        return out.getvalue()

    return DocumentCodec(decode, encode)


def _with_types(node: Any, numbers: Iterator[int]) -> Any:
    """Returns the schema that reads the same bytes, and returns which type a union has: see the module."""
    if isinstance(node, list):
        fields = [[{"name": f"_{at}", "type": _with_types(one, numbers)}] for at, one in enumerate(node)]
        return [{"type": "record", "name": f"metamq_{next(numbers)}", "fields": one} for one in fields]
    if isinstance(node, str):
        return node
    made = {name: one for name, one in node.items() if not name.startswith("__") and name != "default"}
    if "fields" in made:
        made["fields"] = [_with_types(one, numbers) for one in made["fields"]]
    for name in ("type", "items", "values"):
        if isinstance(made.get(name), dict | list | str):
            made[name] = _with_types(made[name], numbers)
    return made


class _AvroWriter:
    """Makes the values that fastavro writes of documents, and the reverse. Raises ValueError."""

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
        node = self._resolved(node)
        if isinstance(node["type"], dict | list):
            return self.value(node["type"], document, path)
        logical = _LOGICAL.get(f"{node['type']}-{node.get('logicalType')}")
        if logical is not None and isinstance(document, str):
            try:
                return logical(document, node)
            except (ValueError, InvalidOperation) as error:
                raise wrong_field(path, f"{document!r:.60} is no {node['logicalType']}: {error}") from None
        return self._by_kind[node["type"]](node, document, path)

    def document(self, node: Any, value: Any) -> Any:
        """Returns the document of a value that was read with the types of unions."""
        if isinstance(node, list):
            ((index, inner),) = value.items()
            chosen = node[int(index[1:])]
            found = self.document(chosen, inner)
            is_clear = _named(node, found) is None and self._taking(node, found) is chosen
            return found if is_clear else {_type_name(chosen): found}
        node = self._resolved(node)
        kind = node["type"]
        if isinstance(kind, dict | list):
            return self.document(kind, value)
        if kind == "record":
            return {one["name"]: self.document(one["type"], value[one["name"]]) for one in node["fields"]}
        if kind == "array":
            return [self.document(node["items"], one) for one in value]
        if kind == "map":
            return {name: self.document(node["values"], one) for name, one in value.items()}
        return plain(value)

    def _resolved(self, node: Any) -> Any:
        return self._names.get(node, {"type": node}) if isinstance(node, str) else node

    def _taking(self, nodes: list[Any], document: Any) -> Any:
        """Returns the first type of a union that may take a document. It looks into no object and no list: to try types
        with all that is inside takes long."""
        return next((one for one in _ranked(nodes, document) if self._may_fit(one, document)), None)

    def _may_fit(self, node: Any, document: Any) -> bool:
        node = self._resolved(node)
        if isinstance(document, dict) and node["type"] in ("record", "map"):
            return node["type"] == "map" or not list(_missing(node, document))
        if isinstance(document, list) and node["type"] == "array":
            return True
        try:
            self.value(node, document, "")
        except ValueError:
            return False
        return True

    def _union(self, nodes: list[Any], document: Any, path: str) -> Any:
        problems = []
        named = _named(nodes, document)
        for node, inner in [
            *([] if named is None else [named]),
            *((one, document) for one in _ranked(nodes, document)),
        ]:
            try:
                return _type_name(node), self.value(node, inner, path)
            except ValueError as error:
                problems += [] if _type_name(node) == "null" else [error]
        if len(problems) == 1 or named is not None:
            raise problems[0]
        raise wrong_field(path, f"{document!r:.60} is none of {', '.join(map(_type_name, nodes))}")

    def _record(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, dict):
            raise wrong_field(path, f"{document!r:.60} is no object")
        for name, problem in _missing(node, document):  # first, without a look at the values
            raise wrong_field(_below(path, name), problem)
        fields = {one["name"]: one for one in node["fields"]}
        found = {name: self.value(fields[name]["type"], one, _below(path, name)) for name, one in document.items()}
        for name, one in fields.items():
            if name not in document:
                found |= _default(one)
        return found

    def _array(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, list):
            raise wrong_field(path, f"{document!r:.60} is no list")
        return [self.value(node["items"], one, f"{path}[{at}]") for at, one in enumerate(document)]

    def _map(self, node: Any, document: Any, path: str) -> Any:
        if not isinstance(document, dict):
            raise wrong_field(path, f"{document!r:.60} is no object")
        return {name: self.value(node["values"], one, _below(path, name)) for name, one in document.items()}


def _ranked(nodes: list[Any], document: Any) -> list[Any]:
    ranks = _RANKS.get(type(document), {})
    return sorted(nodes, key=lambda one: ranks.get(_type_name(one), _LAST))


def _named(nodes: list[Any], document: Any) -> tuple[Any, Any] | None:
    """Returns the type of a union that a document names, and its document."""
    if not isinstance(document, dict) or len(document) != 1:
        return None
    ((name, inner),) = document.items()
    return next(((one, inner) for one in nodes if _type_name(one) == name), None)


def _missing(node: Any, document: Any) -> Iterator[tuple[str, str]]:
    """Yields the names of fields that make a document no record of this type, each with the problem."""
    fields = {one["name"]: one for one in node["fields"]}
    for name in document.keys() - fields.keys():
        yield name, f"the schema has no such field; it has {', '.join(fields)}"
    for name, one in fields.items():
        if name not in document and "default" not in one:
            yield name, "it is missing, and has no default"


def _default(field: Any) -> dict[str, Any]:
    """Returns the default of a missing field if fastavro cannot write it: that of bytes, which a schema has as text."""
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
    number, scale = Decimal(text), node.get("scale", 0)
    try:
        return number.quantize(
            Decimal(1).scaleb(-scale), context=Context(node["precision"], traps=[InvalidOperation, Inexact])
        )
    except (InvalidOperation, Inexact):
        raise ValueError(f"it has more than {node['precision']} digits, or more than {scale} after the point") from None


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
