"""The format `metamq` for Spark. Fast to import: Spark imports it whenever it looks for a format of any name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from metamq.errors import MetamqError
from metamq.spark_consumers.source.columns import check_columns, full_schema
from metamq.spark_consumers.source.partitions import RangePartition, read_partition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.spark_consumers.source.options import SourceOptions


class DefaultSource(DataSource):
    """`spark.read.format("metamq")`, and `readStream`, `write`, `writeStream`."""

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return "metamq"

    def schema(self) -> StructType:
        """Returns all columns; a user's own schema may have some of them. Raises ConfigError for a wrong option; with
        `decode` also if the topic has no schema, and ConnectError."""
        from metamq.spark_consumers.source.options import check_options, parse_options

        of_table = _given_for_table(self.options)
        if of_table is None:  # load() asks for the schema; readers are made only when a query is planned
            return _schema(check_options(self.options), None)
        return _schema(parse_options(of_table, streaming=False), of_table)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns the reader of a batch query. Raises ConfigError for a wrong option or column."""
        from metamq.spark_consumers.source.options import parse_options

        options = parse_options(_of_query(self.options, schema), streaming=False)
        _check(schema, options)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Returns the reader of a streaming query. For a wrong option or column the reader raises in its first call."""
        from metamq.spark_consumers.source.options import parse_options
        from metamq.spark_consumers.source.spark_versions import STREAM_READS, check_is_there

        try:
            check_is_there("readStream", STREAM_READS, "Read in batches: spark.read, from offsets that you keep.")
            options = parse_options(_of_query(self.options, schema), streaming=True)
            _check(schema, options)
        except MetamqError as error:
            return RefusedReader(error)
        from metamq.spark_consumers.driver.stream_reader import StreamReader

        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Returns the writer of a batch query. Raises ConfigError for a wrong option or column."""
        from metamq.spark_consumers.sink.exact_sink import ExactBatchWriter
        from metamq.spark_consumers.sink.sink import BatchWriter, sink_options

        options = sink_options(self.options, schema, overwrite, streaming=False)
        return ExactBatchWriter(options) if options.delivery == "exactly_once" else BatchWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Returns the writer of a streaming query. Raises ConfigError for a wrong option or column."""
        from metamq.spark_consumers.sink.exact_sink import ExactStreamWriter, refuse_half_done
        from metamq.spark_consumers.sink.sink import StreamWriter, sink_options
        from metamq.spark_consumers.source.spark_versions import STREAM_WRITES, check_is_there

        check_is_there("writeStream", STREAM_WRITES, "Write in foreachBatch: batch.write.format('metamq').")
        options = sink_options(self.options, schema, overwrite, streaming=True)
        checkpoint = self.options.get("checkpointLocation")
        if options.delivery == "at_least_once":
            refuse_half_done(options, checkpoint)
            return StreamWriter(options)
        return ExactStreamWriter(options, checkpoint)


def _check(schema: StructType, options: SourceOptions) -> None:
    columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    check_columns(columns, is_decoded=options.decoded is not None)


class BatchReader(DataSourceReader):
    """Reads the messages that exist when the query is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[RangePartition]:
        """Returns a task for each range."""
        from metamq.spark_consumers.driver.planning import batch_ranges, tasks
        from metamq.spark_consumers.driver.query_view import QueryView
        from metamq.spark_consumers.source.typed_value import planned_schema

        with QueryView(self._options.access) as view:
            ranges = batch_ranges(view, self._options)
            topics = {one.tp.topic for one in ranges}
            values = planned_schema(view, self._options, self._schema)
            return [RangePartition(task, values) for task in tasks(view, self._options, ranges, topics=topics)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Reads a range, in an executor."""
        return read_partition(partition, self._schema)


class RefusedReader(DataSourceStreamReader):
    """The reader of a streaming query that cannot run: it raises the error when Spark first calls it.

    If streamReader() itself raises, Spark 4.3 hides that behind an error of its own.
    """

    def __init__(self, error: MetamqError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        """Raises the error, as all methods do."""
        raise self._error

    def latestOffset(self, *_args: Any) -> dict[str, Any]:
        """Raises the error. Spark calls this first for a query that continues."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raises the error. Spark calls this first if a batch was planned before."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Raises the error. Spark does not call this."""
        raise self._error


# -- the options of a table: `CREATE TABLE … USING metamq OPTIONS (…)`
#
# Spark 4.3 gives them to a Python source only when it asks for the table's columns. For a query the source gets only
# the options of its own `WITH (…)`, and the table's schema. So the options are stored in the schema: in the metadata of
# the first column, which the catalog keeps. A view, or a data frame, has its own options.

METADATA = "metamq"
_PREFIX = "option."


def _given_for_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the user's options in a CREATE TABLE, or None if these are not a table's options."""
    if "provider" not in options:
        return None
    return {key[len(_PREFIX) :]: text for key, text in options.items() if key.startswith(_PREFIX)}


def _schema(options: SourceOptions, of_table: Mapping[str, str] | None) -> StructType:
    """Returns all columns; those of a table have its options."""
    from pyspark.sql.types import StructType

    from metamq.spark_consumers.source.typed_value import value_type

    value = value_type(options)
    document = full_schema(options.include_headers, value and value.jsonValue())
    if of_table is not None:
        document["fields"][0]["metadata"] = {METADATA: json.dumps(dict(of_table))}
    return StructType.fromJson(document)


def _of_query(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Returns the options of a query: its own, and those in its table's schema."""
    noted = next((field.metadata[METADATA] for field in schema.fields if METADATA in field.metadata), None)
    return {**({} if noted is None else json.loads(noted)), **options}
