"""The options of a table: `CREATE TABLE … USING metamq OPTIONS (…)`.

Spark 4.3 gives them to a Python source only when it asks for the table's columns. For a query the source gets only the
options of its own `WITH (…)`, and the table's schema. So the options are stored in the schema: in the metadata of the
first column, which the catalog keeps. A view, or a data frame, has its own options.
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
    """Returns the user's options in a CREATE TABLE, None if these are not a table's options."""
    if "provider" not in options:
        return None
    return {key[len(_PREFIX) :]: text for key, text in options.items() if key.startswith(_PREFIX)}


def schema_with_options(include_headers: bool, options: Mapping[str, str]) -> StructType:
    """Returns all columns, with the options in them."""
    from pyspark.sql.types import StructType

    document = full_schema(include_headers)
    document["fields"][0]["metadata"] = {METADATA: json.dumps(dict(options))}
    return StructType.fromJson(document)


def of_query(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Returns the options of a query: its own, and those in its table's schema."""
    noted = next((field.metadata[METADATA] for field in schema.fields if METADATA in field.metadata), None)
    return {**({} if noted is None else json.loads(noted)), **options}
