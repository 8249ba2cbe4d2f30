"""The shape of a JSON Schema, as msgspec and pydantic write it."""

from __future__ import annotations

import json
from typing import Any

from metamq.client.schemas.shapes import ANY, Budget, Field, Kind, Shape
from metamq.errors import ConfigError

_ABOUT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
_STRUCTURE = {"$defs", "$ref", "$schema", "$id", "$comment", "type", "properties", "required", "additionalProperties"}
_STRUCTURE |= {"items", "anyOf", "oneOf", "enum", "const"}


def json_shape(document: Any) -> Shape:
    """Returns the shape of a JSON Schema. Raises ConfigError for one that is recursive, too large, or wrong."""
    definitions = document.get("$defs", {}) if isinstance(document, dict) else {}
    return _JsonReader(definitions).shape(document, ())


class _JsonReader:
    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._budget = Budget()

    def shape(self, node: Any, names: tuple[str, ...]) -> Shape:
        if node is True:
            return ANY
        if not isinstance(node, dict):
            raise _wrong(node)
        names = self._budget.take(names, "")
        if "$ref" in node:
            return self._referred(node["$ref"], names)
        for union in ("anyOf", "oneOf"):
            if union in node:
                return tuple(kind for one in node[union] for kind in self.shape(one, names))
        if "const" in node or "enum" in node:
            return self._values([node["const"]] if "const" in node else node["enum"])
        kinds = node.get("type")
        if kinds is None:
            unknown = node.keys() - _ABOUT - _STRUCTURE
            if unknown:
                raise _wrong(node)
            return ANY
        return tuple(self._kind(kind, node, names) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _referred(self, reference: Any, names: tuple[str, ...]) -> Shape:
        name = str(reference).removeprefix("#/$defs/")
        if name not in self._definitions:
            raise _wrong({"$ref": reference})
        return self.shape(self._definitions[name], self._budget.take(names, name))

    def _values(self, values: list[Any]) -> Shape:
        others = frozenset(json.dumps(value) for value in values if value is not None)
        null = (Kind("null"),) if None in values else ()
        kind = "enum" if all(isinstance(value, str) for value in values if value is not None) else "enum of values"
        return (*((Kind(kind, values=others),) if others else ()), *null)

    def _kind(self, kind: Any, node: dict[str, Any], names: tuple[str, ...]) -> Kind:
        limits = frozenset(
            f"{key}: {json.dumps(value, sort_keys=True)}"
            for key, value in node.items()
            if key not in _ABOUT and key not in _STRUCTURE
        )
        if kind == "object":
            more = node.get("additionalProperties", True)
            if "properties" not in node and more is not False:
                return Kind("map", item=self.shape(more, names), limits=limits)
            needed = node.get("required", [])
            fields = {
                name: Field(self.shape(one, names), name in needed, name in needed)
                for name, one in node.get("properties", {}).items()
            }
            return Kind("object", fields, limits=limits, is_closed=more is False)
        if kind == "array":
            return Kind("array", item=self.shape(node.get("items", True) or True, names), limits=limits)
        if kind not in ("null", "boolean", "integer", "number", "string"):
            raise _wrong({"type": kind})
        return Kind(kind, limits=limits)


def _wrong(node: Any) -> ConfigError:
    hint = "Give a JSON Schema as msgspec or pydantic writes it; references begin with '#/$defs/'."
    return ConfigError(f"the JSON Schema has a part that metamq does not know: {str(node)[:100]}", hint=hint)
