"""The partition that Spark gives to a task, and its reading; the same for batch and streaming queries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.client.scan.fetch import FetchTask
    from metamq.client.scan.typed_values import ValueSchema


_is_frozen = False


def freeze_loaded_objects() -> None:
    """Takes all loaded objects out of garbage collection, once in a worker's life.

    Spark's workers collect garbage after each task. For the modules alone that takes 50 ms of a core. A task of a
    streaming query may take less, and the next one waits.
    """
    global _is_frozen
    if not _is_frozen:
        _is_frozen = True
        gc.collect()
        gc.freeze()


class RangePartition(InputPartition):
    """The range of one task, and the schema by which it reads values; None: they stay bytes."""

    def __init__(self, task: FetchTask, values: ValueSchema | None = None) -> None:
        super().__init__(task)
        self.task = task
        self.values = values


def read_partition(partition: object, schema: StructType) -> Iterator[Any]:
    """Yields the Arrow batches of a task; none for the partition that Spark makes if there is nothing to read."""
    if not isinstance(partition, RangePartition):
        return
    from metamq.client.scan.arrow_batches import ArrowBatches
    from metamq.client.scan.fetch import fetch
    from metamq.spark_consumers.source.spark_versions import arrow_schema

    task, columns = partition.task, arrow_schema(schema)
    try:
        if partition.values is None:
            yield from ArrowBatches(task.wanted, columns).of(fetch(task))
        else:
            yield from _typed(task, columns, partition.values)
    finally:
        freeze_loaded_objects()


def _typed(task: FetchTask, columns: Any, values: ValueSchema) -> Iterator[Any]:
    from metamq.client.scan.arrow_batches import ArrowBatches
    from metamq.client.scan.fetch import fetch
    from metamq.client.scan.typed_values import place_and
    from metamq.spark_consumers.source.typed_value import HINT

    reader = values.reader(columns.field("value").type, HINT)
    return reader.typed_batches(ArrowBatches(task.wanted, place_and(columns)).of(fetch(task)), columns)
