"""The at-least-once sink in the form that Spark calls: the writers for tasks and for the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from metamq.client.fetch.columnar import ColumnarBatch
from metamq.client.net.delegating import RENEWALS_A_LIFETIME, DelegatedToken
from metamq.errors import ConfigError, MetamqError
from metamq.security.config import DelegatedConfig
from metamq.security.rights import ANY_TOPIC, WRITE
from metamq.spark_consumers.sink.batching import Batcher, TargetBatch
from metamq.spark_consumers.sink.checkpoint import is_ending_a_batch, local_folder, newest_finished
from metamq.spark_consumers.sink.sink_client import sink_client
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


_renewed: dict[str, float] = {}
"""The time at which this process renewed a token last, by its id."""


class SinkToken:
    """The token by which the tasks of one query write, in the place of the driver's files, if they have one.

    The driver makes it when the query begins. A batch query's commit or abort ends it; each commit of a streaming query
    renews it, and it ends some time after the query. Each of these calls may run in another process of the driver:
    Spark pickles the token with the writer.
    """

    def __init__(self, options: SinkOptions) -> None:
        """Makes the token. Raises ConnectError, NotAuthorized, ConfigError."""
        self._options = options
        self.task_options = options
        """The options of tasks."""
        security = options.access.security
        if security.is_on and options.token_lifetime_s:
            cluster = sink_client(options).cluster
            token = DelegatedToken.new(cluster, security, self._rights(), options.token_lifetime_s)
            sink_client(options).background.run(token.renew())
            self.task_options = replace(options, access=options.access._replace(security=token.config))

    def _rights(self) -> frozenset[tuple[str, str]]:
        return frozenset({(WRITE, self._options.topic or ANY_TOPIC)})

    def _token(self) -> DelegatedToken | None:
        config = self.task_options.access.security
        if not isinstance(config, DelegatedConfig):
            return None
        cluster = sink_client(self._options).cluster
        return DelegatedToken(cluster, config, self._rights(), self._options.token_lifetime_s)

    def renew(self) -> None:
        """Renews the token if it is time. Raises nothing: the token is still good."""
        token = self._token()
        if token is None:
            return
        due_s = self._options.token_lifetime_s / RENEWALS_A_LIFETIME
        if time.monotonic() - _renewed.get(token.config.token_id, -due_s) >= due_s:
            with contextlib.suppress(MetamqError):
                sink_client(self._options).background.run(token.renew())
                _renewed[token.config.token_id] = time.monotonic()

    def end(self) -> None:
        """Ends the token. Raises nothing: it ends by itself after its lifetime."""
        token = self._token()
        if token is not None:
            with contextlib.suppress(MetamqError):
                sink_client(self._options).background.run(token.end())


class AtLeastOnce:
    """The common part of both writers: the task stores the messages, and the driver decides nothing."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._token = SinkToken(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Writes rows, in an executor. Returns once all of them are stored."""
        client = sink_client(self._token.task_options)
        shipment = client.shipment()
        batcher = Batcher(self._options.topic, client.topic)
        for rows in iterator:
            shipment.send([_batch(one) for one in batcher.add(rows)])
        shipment.send([_batch(one) for one in batcher.rest()])
        shipment.wait()
        return Stored()


def _batch(batch: TargetBatch) -> ColumnarBatch:
    return ColumnarBatch(batch.target.topic, batch.columns, batch.size, batch.target.place)


class BatchWriter(AtLeastOnce, DataSourceArrowWriter):
    """`df.write`, at least once."""

    def commit(self, messages: Sequence[Any]) -> None:
        """Ends the tasks' token: all messages are stored."""
        self._token.end()

    def abort(self, messages: Sequence[Any]) -> None:
        """Ends the tasks' token: stored messages stay."""
        self._token.end()


class StreamWriter(AtLeastOnce, StreamArrowWriter):
    """`df.writeStream`, at least once."""

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Renews the tasks' token: all messages are stored."""
        self._token.renew()

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Renews the tasks' token: stored messages stay, and Spark writes them again with the batch."""
        self._token.renew()
