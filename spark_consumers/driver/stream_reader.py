"""The streaming source in the form that Spark calls; stream_planner gives its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from metamq.spark_consumers.driver.stream_offsets import START
from metamq.spark_consumers.driver.stream_planner import StreamPlanner
from metamq.spark_consumers.source.partitions import RangePartition, read_partition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.client.scan.typed_values import ValueSchema
    from metamq.spark_consumers.source.options import SourceOptions

OURS = ReadMaxRows(2**63 - 1)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one query. Spark pickles a new one for the executors, which only call read()."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._schema = schema
        self._planner = StreamPlanner(options)
        self._values: ValueSchema | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Returns a mark: see metamq.spark_consumers.driver.stream_offsets."""
        return START

    def getDefaultReadLimit(self) -> ReadLimit:
        """Returns a limit that Spark only passes back to latestOffset(): the options limit a batch.

        The limit is not ReadAllAvailable, the limit of Trigger.Once. Trigger.Once asks only once, and takes "nothing
        new" as the end.
        """
        return OURS

    def prepareForTriggerAvailableNow(self) -> None:
        """Sets the end of the query to the present end of the logs."""
        self._planner.fix_target()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Returns the end of the next batch; `start` itself if there is no batch to run now."""
        return self._planner.next_offset(start, is_only_batch=isinstance(limit, ReadAllAvailable))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Returns the known ends of the logs, for the query's progress."""
        return self._planner.ends() or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns a task for each range of the batch."""
        tasks = self._planner.tasks(start, end)
        self._values = self._planner.value_schema(self._schema, self._values)
        return [RangePartition(task, self._values) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Reads a range, in an executor."""
        return read_partition(partition, self._schema)

    def stop(self) -> None:
        """Disconnects. Spark calls this only after an error."""
        self._planner.close()
