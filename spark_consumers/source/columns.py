"""The columns of the source: names, order and types of Spark's Kafka source, except for `partition`.

A partition of metamq is called "0-3", after its broker id and its index there: in the options of a query, on the
command line, in a Consumer's messages. So that column is a string. A number would mean nothing anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metamq.errors import ConfigError

TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "string",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Spark's type of each column, in the order of the columns."""

_HEADER = [{"name": "key", "type": "string"}, {"name": "value", "type": "binary"}]
_JSON_TYPES: dict[str, Any] = {
    "bigint": "long",
    "int": "integer",
    TYPES["headers"]: {
        "type": "array",
        "containsNull": True,
        "elementType": {"type": "struct", "fields": [{**field, "nullable": True, "metadata": {}} for field in _HEADER]},
    },
}
"""Types that have other names in a schema's JSON."""


def full_schema(include_headers: bool, value: Any = None) -> dict[str, Any]:
    """Returns the columns of a query without a schema, as the JSON of Spark's StructType. `value`: that of a struct.

    It is JSON because DDL needs a session, and `spark.sql.timestampType=TIMESTAMP_NTZ` changes its `timestamp`.
    """
    fields = [
        {"name": name, "type": _JSON_TYPES.get(kind, kind), "nullable": True, "metadata": {}}
        for name, kind in TYPES.items()
        if include_headers or name != "headers"
    ]
    if value is not None:
        fields[list(TYPES).index("value")]["type"] = value
    return {"type": "struct", "fields": fields}


def check_columns(wanted: Sequence[tuple[str, str]], *, is_decoded: bool = False) -> tuple[str, ...]:
    """Returns the names of the columns in a schema of the user, given (name, type) of each.

    Raises ConfigError unless they are some of TYPES. `is_decoded`: `value` is a struct, whose fields are checked later.
    """
    for name, kind in wanted:
        expected = TYPES.get(name)
        if expected is None:
            raise ConfigError(f"the schema has a column {name!r}", hint=f"There are: {', '.join(TYPES)}.")
        if name == "value" and is_decoded:
            if not kind.startswith("struct<"):
                hint = "With the option `decode` it has to be a struct."
                raise ConfigError(f"the schema has the type {kind} for {name!r}", hint=hint)
        elif kind.replace(" ", "").lower() != expected:
            hint = f"It has to be {expected}."
            if name == "value" and kind.startswith("struct<"):
                hint += " For a struct, give the option `decode`."
            if kind == "timestamp_ntz":
                hint = "Write `timestamp timestamp_ltz`: here `spark.sql.timestampType` gives `timestamp` another type."
            raise ConfigError(f"the schema has the type {kind} for {name!r}", hint=hint)
    if not wanted:
        raise ConfigError("the schema has no columns", hint=f"Choose some of: {', '.join(TYPES)}.")
    names = tuple(name for name, _kind in wanted)
    if len(set(names)) < len(names):
        raise ConfigError(f"the schema has a column twice: {', '.join(names)}", hint="Name each once.")
    return names
