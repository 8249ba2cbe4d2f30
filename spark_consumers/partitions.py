"""What Spark hands to a task, and how the task reads it; the same for batch and streaming queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.spark_consumers.fetch import FetchTask


class RangePartition(InputPartition):
    """One task's range."""

    def __init__(self, task: FetchTask) -> None:
        super().__init__(task)
        self.task = task


def read_partition(partition: object, schema: StructType) -> Iterator[Any]:
    """The Arrow batches of a task; none for the partition that Spark makes up when there is nothing to read."""
    if not isinstance(partition, RangePartition):
        return
    from pyspark.sql.pandas.types import to_arrow_schema

    from metamq.spark_consumers.arrow_batches import ArrowBatches
    from metamq.spark_consumers.fetch import fetch

    task = partition.task
    yield from ArrowBatches(task.wanted, to_arrow_schema(schema, timezone="UTC")).of(fetch(task))
