"""The streaming source as Spark asks for it; what it answers comes from stream_planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from metamq.spark_consumers.driver.stream_offsets import START
from metamq.spark_consumers.driver.stream_planner import StreamPlanner
from metamq.spark_consumers.source.options import SourceOptions
from metamq.spark_consumers.source.partitions import RangePartition, read_partition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OURS = ReadMaxRows(2**63 - 1)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """For one query. Spark pickles a new one for the executors, which only read()."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._schema = schema
        self._planner = StreamPlanner(options)

    def initialOffset(self) -> dict[str, Any]:
        """A mark: see metamq.spark_consumers.driver.stream_offsets."""
        return START

    def getDefaultReadLimit(self) -> ReadLimit:
        """Only carried back to latestOffset(), since the options say what bounds a batch.

        That it is not ReadAllAvailable tells it from Trigger.Once, which asks one time and takes "nothing new" for an
        end.
        """
        return OURS

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of the query at what there is now."""
        self._planner.fix_target()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next batch ends; `start` itself when there is none to be run now."""
        return self._planner.next_offset(start, is_only_batch=isinstance(limit, ReadAllAvailable))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends as of the last look, for the query's progress."""
        return self._planner.ends() or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for each range of the batch."""
        return [RangePartition(task) for task in self._planner.tasks(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs in an executor."""
        return read_partition(partition, self._schema)

    def stop(self) -> None:
        """Spark calls it after an error only."""
        self._planner.close()
