"""The typed column `value`, with the option `decode`: a struct with the fields of the topic's registered schema.

A query has the schema that is the newest one when load() is called. A stream keeps it while it runs, and gets the
definitions of versions that are registered later: an Avro value is read by the definition of its writer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from metamq.client.scan.cluster_view import ClusterView
from metamq.errors import ConfigError, TopicNotFound

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from metamq.client.scan.typed_values import ValueSchema
    from metamq.spark_consumers.source.options import SourceOptions

HINT = "Give starting and ending offsets around it, or read without `decode` and decode the values yourself."


def value_type(options: SourceOptions) -> DataType | None:
    """Returns Spark's type of `value` by the newest schema; None without `decode`. Raises ConfigError,
    TopicNotFound, ConnectError."""
    from metamq.client.scan.typed_values import newest_schema

    if options.decoded is None:
        return None
    with ClusterView(options.access) as view:
        schemas = view.topic(options.decoded).schemas
    return _type_of(newest_schema(options.decoded, schemas))


def planned_schema(
    view: ClusterView, options: SourceOptions, schema: StructType, before: ValueSchema | None = None
) -> ValueSchema | None:
    """Returns the schema by which tasks read values; None if they decode nothing. `before`: that of the last batch.

    Raises ConfigError if the query's schema has other fields than the topic's.
    """
    from metamq.client.scan.typed_values import newest_schema

    if options.decoded is None or "value" not in schema.names:
        return None
    if before is not None:
        with contextlib.suppress(TopicNotFound):  # it is lost, which is handled elsewhere
            return before._replace(versions=view.topic(options.decoded).schemas.by_version)
        return before
    newest = newest_schema(options.decoded, view.topic(options.decoded).schemas)
    _check_fields(schema["value"].dataType, _type_of(newest), "value")
    return newest


def _type_of(schema: ValueSchema) -> DataType:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return from_arrow_type(schema.reader().type)
    except PySparkException as error:
        problem = f"the schema of topic {schema.topic!r} has a type that Spark lacks: {error}"
        raise ConfigError(problem, hint="Read without `decode`, and decode the column `value` yourself.") from None


def _check_fields(wanted: Any, known: Any, path: str) -> None:
    """Raises ConfigError unless all fields of the wanted type are in the known type."""
    if hasattr(wanted, "fields") and hasattr(known, "fields"):
        for field in wanted.fields:
            if field.name not in known.names:
                hint = f"There are: {', '.join(known.names)}. Call load() again if the schema has changed."
                raise ConfigError(f"the topic's schema has no field {path}.{field.name}", hint=hint)
            there = known[field.name]
            if there.nullable and not field.nullable:
                problem = f"the query's schema has NOT NULL for {path}.{field.name}"
                raise ConfigError(problem, hint="Remove it: a field that a message lacks is null.")
            _check_fields(field.dataType, there.dataType, f"{path}.{field.name}")
    elif hasattr(wanted, "elementType") and hasattr(known, "elementType"):
        _check_fields(wanted.elementType, known.elementType, f"{path}[]")
    elif wanted != known:
        hint = f"It has to be {known.simpleString()}. Call load() again if the topic's schema has changed."
        raise ConfigError(f"the query's schema has the type {wanted.simpleString()} for {path}", hint=hint)
