"""The ceiling of bench/spark.py: a data source in Python that always yields the same Arrow batch.

It fetches nothing and makes nothing, so its time is Spark's own: from the Python worker into the JVM, and there through
the plan. It is a separate module, because Spark's workers import it. It has the schema of the format `metamq`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from metamq.spark_consumers.source.columns import full_schema


class CeilingSource(DataSource):
    """A source of `tasks` partitions with `rows` rows of `bytes` bytes each, in batches of `batch` rows."""

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return "ceiling"

    def schema(self) -> StructType:
        """Returns the source's schema."""
        return StructType.fromJson(full_schema(False))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns the reader of a batch query."""
        return _Reader({name: int(value) for name, value in self.options.items()}, schema)


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, int], schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._options["tasks"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        batch = self._batch(self._options["batch"])
        left = self._options["rows"]
        while left >= batch.num_rows:
            yield batch
            left -= batch.num_rows
        if left:
            yield batch.slice(0, left)

    def _batch(self, rows: int) -> pa.RecordBatch:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        made = {
            "key": pa.nulls(rows, pa.binary()),
            "value": pa.repeat(pa.scalar(os.urandom(self._options["bytes"])), rows),
            "offset": pa.arange(0, rows),
        }
        constants = {"topic": "bench", "partition": "0-0", "timestamp": 1_700_000_000_000_000, "timestampType": 0}
        arrays = [
            made[field.name] if field.name in made else pa.repeat(pa.scalar(constants[field.name], field.type), rows)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
