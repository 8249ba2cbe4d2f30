"""The options of a table: `CREATE TABLE … USING metamq OPTIONS (…)`.

Spark 4.3 shows them to a Python source when it asks for the table's columns, and never again: a query gets only what
stands in its own `WITH (…)`. What it does get is the table's schema. So the options are put there, into the metadata of
the first column, which the catalog keeps. A view, or a data frame, has its options with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metamq.spark_consumers.source.columns import full_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

METADATA = "metamq"
_PREFIX = "option."


def given_for_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """What the user wrote in a CREATE TABLE, None when these are no table's options."""
    if "provider" not in options:
        return None
    return {key[len(_PREFIX) :]: text for key, text in options.items() if key.startswith(_PREFIX)}


def schema_with_options(include_headers: bool, options: Mapping[str, str]) -> StructType:
    """All columns, with the options in them."""
    from pyspark.sql.types import StructType

    document = full_schema(include_headers)
    document["fields"][0]["metadata"] = {METADATA: json.dumps(dict(options))}
    return StructType.fromJson(document)


def of_query(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options of a query: its own, and those in its table's schema."""
    noted = next((field.metadata[METADATA] for field in schema.fields if METADATA in field.metadata), None)
    return {**({} if noted is None else json.loads(noted)), **options}
