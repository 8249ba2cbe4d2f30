"""The partition that Spark gives to a task, and its reading; the same for batch and streaming queries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.client.scan.fetch import FetchTask


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
    """The range of one task."""

    def __init__(self, task: FetchTask) -> None:
        super().__init__(task)
        self.task = task


def read_partition(partition: object, schema: StructType) -> Iterator[Any]:
    """Yields the Arrow batches of a task; none for the partition that Spark makes if there is nothing to read."""
    if not isinstance(partition, RangePartition):
        return
    from metamq.client.scan.arrow_batches import ArrowBatches
    from metamq.client.scan.fetch import fetch
    from metamq.spark_consumers.source.spark_versions import arrow_schema

    task = partition.task
    try:
        yield from ArrowBatches(task.wanted, arrow_schema(schema)).of(fetch(task))
    finally:
        freeze_loaded_objects()
