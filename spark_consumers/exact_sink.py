"""The sink that is exactly once, as Spark sees it: tasks prepare branches, the driver decides.

A streaming query and its batch are known to a task by what Spark has among its local properties; the driver is told of
them with the tasks' messages, since Spark tells it the batch alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from metamq.errors import ConfigError
from metamq.spark_consumers.decisions import BranchName, new_attempt, new_job
from metamq.spark_consumers.gathering import Gatherer
from metamq.spark_consumers.sink_client import sink_client
from metamq.spark_consumers.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_PROPERTY = "sql.streaming.queryId"
BATCH_PROPERTY = "streaming.sql.batchId"


@dataclass
class Prepared(WriterCommitMessage):
    """An attempt at a task whose branches are prepared."""

    sink: str
    identity: str
    """Of the query, by its checkpoint; empty where the task was not told."""
    batch_id: int
    attempt: str
    branches: dict[int, str] = field(default_factory=dict)
    """The history of each broker that it has a branch at."""


def write_branches(options: SinkOptions, sink: str, identity: str, batch_id: int, rows: Iterator[Any]) -> Prepared:
    """One attempt at a task. Returns once all it wrote is prepared; else nothing of it will be seen."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    client = sink_client(options)
    name = BranchName(sink, batch_id, new_attempt(context.partitionId(), context.attemptNumber()))
    branches = client.background.run(client.branches(name))
    gatherer = Gatherer(options.topic, client.topic)
    try:
        for some in rows:
            branches.add((one, client.topic(one.target.topic)) for one in gatherer.add(some))
        branches.add((one, client.topic(one.target.topic)) for one in gatherer.rest())
        histories = client.background.run(branches.prepare())
    except BaseException:
        client.background.run(branches.give_up())
        raise
    return Prepared(sink, identity, batch_id, name.attempt, histories)


def _attempts(messages: Sequence[Any]) -> dict[str, Mapping[int, str]]:
    return {one.attempt: one.branches for one in messages if isinstance(one, Prepared) and one.branches}


class ExactBatchWriter(DataSourceArrowWriter):
    """`df.write`, exactly once: a write that fails has written nothing."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = new_job()
        client = sink_client(options)
        client.background.run(client.committer(self._job, self._job).store.begin(self._job, self._job))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in an executor. Returns once all is prepared."""
        return write_branches(self._options, self._job, self._job, 0, iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """All is to be seen once it returns."""
        client = sink_client(self._options)
        committer = client.committer(self._job, self._job)
        client.background.run(committer.commit(0, _attempts(messages)))
        client.background.run(committer.finish_jobs())

    def abort(self, messages: Sequence[Any]) -> None:
        """Nothing will be, unless a commit() that failed has decided so."""
        client = sink_client(self._options)
        client.background.run(client.committer(self._job, self._job).abort(0, _attempts(messages)))


class ExactStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`, exactly once: each batch is written once, however often Spark runs it."""

    def __init__(self, options: SinkOptions, checkpoint: str | None) -> None:
        self._options = options
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in an executor. Returns once all is prepared."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(QUERY_PROPERTY), context.getLocalProperty(BATCH_PROPERTY)
        sink, batch_id = named(self._options.sink_id, query, batch)
        return write_branches(self._options, sink, query or "", batch_id, iterator)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """The batch is to be seen once it returns, as it was written first."""
        self._end(messages, batchId, is_commit=True)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Nothing of these attempts will be, unless a commit() that failed has decided so."""
        self._end(messages, batchId, is_commit=False)

    def _end(self, messages: Sequence[Any], batch_id: int, *, is_commit: bool) -> None:
        told = [one for one in messages if isinstance(one, Prepared)]
        if not told:  # no task came to its end
            return
        first = told[0]
        client = sink_client(self._options)
        committer = client.committer(first.sink, first.identity or checkpoint_id(self._checkpoint))
        end = committer.commit if is_commit else committer.abort
        client.background.run(end(batch_id, _attempts(messages)))


def named(sink_id: str | None, query: str | None, batch: str | None) -> tuple[str, int]:
    """The sink's name and the batch id, from what a task is told. Raises ConfigError."""
    sink = sink_id or query
    if sink is None:
        raise ConfigError("this Spark does not tell a task its query's id", hint="Name the sink: option 'sinkId'.")
    if batch is None:
        hint = "Use delivery=at_least_once."
        raise ConfigError("this Spark does not tell a task the id of its batch", hint=hint)
    return sink, int(batch)


def checkpoint_id(location: str | None) -> str:
    """The id that Spark has written into a query's checkpoint. Raises ConfigError."""
    from pyarrow import fs

    try:
        if location is None:
            raise OSError("its place is not among the sink's options")
        if "://" in location or location.startswith("file:"):
            system, path = fs.FileSystem.from_uri(location)
        else:
            system, path = fs.LocalFileSystem(), location
        with system.open_input_stream(f"{path}/metadata") as file:
            return str(json.loads(file.read())["id"])
    except (OSError, ValueError, KeyError) as error:
        hint = "Use delivery=at_least_once, or a checkpoint that the driver can read."
        raise ConfigError(f"the query's id is not in its checkpoint: {error}", hint=hint) from None
