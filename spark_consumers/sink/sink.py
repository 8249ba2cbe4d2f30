"""The sink as Spark sees it: what a task writes, and what the driver makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from metamq.client.fetch.columnar import ColumnarBatch
from metamq.errors import ConfigError
from metamq.spark_consumers.sink.checkpoint import is_ending_a_batch, local_folder, newest_finished
from metamq.spark_consumers.sink.gathering import Gathered, Gatherer
from metamq.spark_consumers.sink.sink_client import sink_client
from metamq.spark_consumers.sink.sink_options import SinkOptions, check_sink_columns, parse_sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

StreamArrowWriter: Any = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)
"""What writers for streaming queries are; before Spark 4.1 no query comes to use them."""


def sink_options(given: dict[str, str], schema: StructType, overwrite: bool, *, streaming: bool) -> SinkOptions:
    """In the driver. Raises ConfigError, TopicNotFound, ConnectError, before any task starts."""
    options = parse_sink_options(given, streaming=streaming)
    if overwrite:
        hint = "Use outputMode('append')." if streaming else "Use mode('append')."
        raise ConfigError("a topic cannot be overwritten: messages are added to it", hint=hint)
    check_sink_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options.topic)
    is_known = streaming and (is_ending_a_batch() or has_run(given.get("checkpointLocation")))
    client = sink_client(options, is_first=not is_known)
    if options.topic is not None:
        client.topic(options.topic)
    return options


def has_run(checkpoint: str | None) -> bool:
    """Whether a streaming query has ended a batch before; also where that cannot be seen."""
    folder = local_folder(checkpoint)
    return folder is None or newest_finished(folder) != -1


@dataclass
class Stored(WriterCommitMessage):
    """A task's messages are in their partitions."""


class AtLeastOnce:
    """What both writers do: the messages are stored by the task, and the driver has nothing to decide."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in an executor. Returns once all is stored."""
        client = sink_client(self._options)
        shipment = client.shipment()
        gatherer = Gatherer(self._options.topic, client.topic)
        for rows in iterator:
            shipment.send([_batch(one) for one in gatherer.add(rows)])
        shipment.send([_batch(one) for one in gatherer.rest()])
        shipment.wait()
        return Stored()


def _batch(gathered: Gathered) -> ColumnarBatch:
    return ColumnarBatch(gathered.target.topic, gathered.columns, gathered.size, gathered.target.place)


class BatchWriter(AtLeastOnce, DataSourceArrowWriter):
    """`df.write`, at least once."""

    def commit(self, messages: Sequence[Any]) -> None:
        """All is there."""

    def abort(self, messages: Sequence[Any]) -> None:
        """What is stored stays."""


class StreamWriter(AtLeastOnce, StreamArrowWriter):
    """`df.writeStream`, at least once."""

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """All is there."""

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """What is stored stays: it comes again with the batch."""
