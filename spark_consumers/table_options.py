"""The options of a table: `CREATE TABLE … USING metamq OPTIONS (…)`.

Spark 4.3 shows them to a Python source when it asks for the table's columns, and never again: a query gets only what
stands in its own `WITH (…)`. What it does get is the table's schema. So the options are put there, into the metadata of
the first column, which the catalog keeps. A view, or a data frame, has its options with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from metamq.spark_consumers.columns import TYPES

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

METADATA = "metamq"
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
"""How a schema's JSON has the types that it calls by other names: DDL is parsed only where a session is."""
_PREFIX = "option."


def given_for_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """What the user wrote in a CREATE TABLE, None when these are no table's options."""
    if "provider" not in options:
        return None
    return {key[len(_PREFIX) :]: text for key, text in options.items() if key.startswith(_PREFIX)}


def schema_with_options(include_headers: bool, options: Mapping[str, str]) -> StructType:
    """All columns, with the options in them."""
    from pyspark.sql.types import StructType

    fields: list[dict[str, Any]] = [
        {"name": name, "type": _JSON_TYPES.get(kind, kind), "nullable": True, "metadata": {}}
        for name, kind in TYPES.items()
        if include_headers or name != "headers"
    ]
    fields[0]["metadata"] = {METADATA: json.dumps(dict(options))}
    return StructType.fromJson({"type": "struct", "fields": fields})


def of_query(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options of a query: its own, and those in its table's schema."""
    noted = next((field.metadata[METADATA] for field in schema.fields if METADATA in field.metadata), None)
    return {**({} if noted is None else json.loads(noted)), **options}
