"""The at-least-once sink in the form that Spark calls: the writers for tasks and for the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from metamq.client.producer.batching import Batcher
from metamq.errors import ConfigError
from metamq.spark_consumers.sink.checkpoint import is_ending_a_batch, local_folder, newest_finished
from metamq.spark_consumers.sink.sink_client import for_tasks, sink_client
from metamq.spark_consumers.sink.sink_options import SinkOptions, check_sink_columns, parse_sink_options
from metamq.spark_consumers.source.spark_versions import stream_arrow_writer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

StreamArrowWriter: Any = stream_arrow_writer()


def sink_options(given: dict[str, str], schema: StructType, overwrite: bool, *, streaming: bool) -> SinkOptions:
    """Checks the options, in the driver. Raises ConfigError, TopicNotFound, ConnectError, before any task starts."""
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
    """True if a streaming query has ended a batch before, or if that is unknown."""
    folder = local_folder(checkpoint)
    return folder is None or newest_finished(folder) != -1


@dataclass
class Stored(WriterCommitMessage):
    """The message of a task whose messages are in their partitions."""


class AtLeastOnce:
    """The common part of both writers: the task stores the messages, and the driver decides nothing."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = for_tasks(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Writes rows, in an executor. Returns once all of them are stored."""
        client = sink_client(self._options)
        shipment = client.shipment()
        batcher = Batcher(self._options.topic, client.topic)
        for rows in iterator:
            shipment.send([one.outgoing() for one in batcher.add(rows)])
        shipment.send([one.outgoing() for one in batcher.rest()])
        shipment.wait()
        return Stored()


class BatchWriter(AtLeastOnce, DataSourceArrowWriter):
    """`df.write`, at least once."""

    def commit(self, messages: Sequence[Any]) -> None:
        """Does nothing: all messages are stored."""

    def abort(self, messages: Sequence[Any]) -> None:
        """Does nothing: stored messages stay."""


class StreamWriter(AtLeastOnce, StreamArrowWriter):
    """`df.writeStream`, at least once."""

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Does nothing: all messages are stored."""

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Does nothing: stored messages stay, and Spark writes them again with the batch."""
