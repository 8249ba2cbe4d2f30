"""The columns of the source: names, order and types of Spark's Kafka source, but for `partition`.

A partition of metamq is called "0-3", after its broker id and its index there, wherever one is named: in the options of
a query, by the command line, in a Consumer's messages. So that column is a string. A number would have to be made up,
and could not be found again anywhere.
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
        "elementType": {
            "type": "struct",
            "fields": [{**field, "nullable": True, "metadata": {}} for field in _HEADER],
        },
    },
}
"""The types that a schema's JSON calls by other names."""

CREATE_TIME = 0
"""The type of each timestamp: it is the producer's."""


def full_schema(include_headers: bool) -> dict[str, Any]:
    """The columns of a query that asks for none in particular, as the JSON of Spark's StructType.

    Not as DDL: that needs a session, and with `spark.sql.timestampType=TIMESTAMP_NTZ` its `timestamp` is another type.
    """
    fields = [
        {"name": name, "type": _JSON_TYPES.get(kind, kind), "nullable": True, "metadata": {}}
        for name, kind in TYPES.items()
        if include_headers or name != "headers"
    ]
    return {"type": "struct", "fields": fields}


def check_columns(wanted: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The names of the columns that a schema of the user's own asks for, given (name, type) of each.

    Raises ConfigError unless they are some of TYPES.
    """
    for name, kind in wanted:
        expected = TYPES.get(name)
        if expected is None:
            raise ConfigError(f"the schema has a column {name!r}", hint=f"There are: {', '.join(TYPES)}.")
        if kind.replace(" ", "").lower() != expected:
            hint = f"It has to be {expected}."
            if kind == "timestamp_ntz":
                hint = "Write `timestamp timestamp_ltz`: here `spark.sql.timestampType` gives `timestamp` another type."
            raise ConfigError(f"the schema has the type {kind} for {name!r}", hint=hint)
    if not wanted:
        raise ConfigError("the schema has no columns", hint=f"Choose some of: {', '.join(TYPES)}.")
    names = tuple(name for name, _kind in wanted)
    if len(set(names)) < len(names):
        raise ConfigError(f"the schema has a column twice: {', '.join(names)}", hint="Name each once.")
    return names
