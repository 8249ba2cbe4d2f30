"""The exactly-once sink in the form that Spark calls: tasks prepare branches, the driver decides.

A task reads the ids of its streaming query, run and batch from Spark's local properties. Spark gives the driver only
the batch, so the tasks' messages report the other ids to the driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from metamq.client.producer.batching import Batcher
from metamq.errors import ConfigError
from metamq.spark_consumers.sink.checkpoint import (
    checkpoint_id,
    content,
    is_ending_a_batch,
    is_just_planned,
    known_id,
    local_folder,
    named,
    newest_finished,
)
from metamq.spark_consumers.sink.decision_store import SinkOwner
from metamq.spark_consumers.sink.decisions import BranchName, new_attempt, new_job
from metamq.spark_consumers.sink.sink_client import sink_client
from metamq.spark_consumers.source.spark_versions import stream_arrow_writer

if TYPE_CHECKING:
    import pyarrow as pa

    from metamq.client.settings import ClusterAccess
    from metamq.spark_consumers.sink.sink_options import SinkOptions

StreamArrowWriter: Any = stream_arrow_writer()

QUERY_PROPERTY = "sql.streaming.queryId"
BATCH_PROPERTY = "streaming.sql.batchId"
RUN_PROPERTY = "spark.jobGroup.id"
"""The job group of a streaming query's jobs: its name is the run's id."""
TOUCH_S = 600.0
"""The least seconds between two reports of a worker that a batch write is alive."""


@dataclass
class Prepared(WriterCommitMessage):
    """The message of a task attempt whose branches are prepared."""

    sink: str
    identity: str
    """The id of the query, by its checkpoint; empty if Spark did not give it to the task."""
    batch_id: int
    attempt: str
    run: str = ""
    """The id of the query's run; empty if Spark did not give it to the task."""
    branches: dict[int, str] = field(default_factory=dict)
    """The history of each broker that has a branch of the attempt."""


_claimed: set[tuple[ClusterAccess, str, SinkOwner]] = set()
_touched_s: dict[str, float] = {}
"""The claims of this process, each for a cluster; and the last report of each batch write."""
_not_exact: set[tuple[ClusterAccess, str]] = set()
"""Queries, each at a cluster, that had no decision when this process looked."""


def claim(options: SinkOptions, sink: str | None, owner: SinkOwner) -> None:
    """Claims the sink for a run of a query, and the name in the option `sinkId` for the query, before the run writes.

    Raises NotOurs.
    """
    client = sink_client(options)
    wanted = [(options.sink_id, SinkOwner(owner.identity)), (sink, owner)]
    for name, by in wanted:
        if name is None or (said := (options.access, name, by)) in _claimed:
            continue
        client.background.run(client.committer(name, by).claim())
        _claimed.add(said)


def refuse_half_done(options: SinkOptions, location: str | None) -> None:
    """Refuses an at-least-once write of a batch that is decided exactly once: its messages would be stored twice.

    Raises ConfigError; ConnectError. If the checkpoint cannot be read, does nothing. If the batch may run again, asks
    even if this process has asked before: an exactly-once run may have come in between.
    """
    folder = local_folder(location)
    query = known_id(folder)
    if folder is None or query is None or is_ending_a_batch():
        return
    seen = options.access, query
    if seen in _not_exact and is_just_planned(folder):
        return
    client = sink_client(options)
    decided = client.background.run(client.committer(query, SinkOwner(query)).newest_decided())
    if decided is None:
        _not_exact.add(seen)
    elif decided > newest_finished(folder):
        raise ConfigError(
            f"batch {decided} of this query was written exactly once, and Spark is about to write it again",
            hint="Start the query once with delivery=exactly_once and trigger(availableNow=True): that ends the batch.",
        )


def touch(options: SinkOptions, job: str) -> None:
    """Reports that a batch write is alive, before one of its tasks begins. Raises NotOurs."""
    now_s = time.monotonic()
    if now_s - _touched_s.get(job, -TOUCH_S) >= TOUCH_S:
        client = sink_client(options)
        client.background.run(client.committer(job, SinkOwner(job)).touch())
        _touched_s[job] = now_s


def write_branches(options: SinkOptions, sink: str, owner: SinkOwner, batch_id: int, rows: Iterator[Any]) -> Prepared:
    """Writes one attempt at a task. Returns once all of it is prepared; after an error readers never see any of it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    client = sink_client(options)
    name = BranchName(sink, batch_id, new_attempt(context.partitionId(), context.attemptNumber()))
    branches = client.background.run(client.branches(name))
    batcher = Batcher(options.topic, client.topic)
    try:
        for some in rows:
            branches.add((one, client.topic(one.target.topic)) for one in batcher.add(some))
        branches.add((one, client.topic(one.target.topic)) for one in batcher.rest())
        histories = client.background.run(branches.prepare())
    except BaseException:
        client.background.run(branches.give_up())
        raise
    return Prepared(sink, owner.identity, batch_id, name.attempt, owner.run, histories)


def _attempts(messages: Sequence[Any]) -> dict[str, Mapping[int, str]]:
    return {one.attempt: one.branches for one in messages if isinstance(one, Prepared) and one.branches}


class ExactBatchWriter(DataSourceArrowWriter):
    """`df.write`, exactly once: a write that fails has written nothing."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = new_job()
        client = sink_client(options)
        client.background.run(client.committer(self._job, SinkOwner(self._job)).begin_job())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Writes rows, in an executor. Returns once all of them are prepared."""
        touch(self._options, self._job)
        return write_branches(self._options, self._job, SinkOwner(self._job), 0, iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """Commits: readers see all rows once it returns."""
        client = sink_client(self._options)
        client.background.run(client.committer(self._job, SinkOwner(self._job)).commit(0, _attempts(messages)))

    def abort(self, messages: Sequence[Any]) -> None:
        """Makes sure that readers see nothing, unless a commit() that failed has decided."""
        client = sink_client(self._options)
        client.background.run(client.committer(self._job, SinkOwner(self._job)).abort(0, _attempts(messages)))


class ExactStreamWriter(StreamArrowWriter):
    """`df.writeStream`, exactly once: each batch is written once, also if Spark runs it again."""

    def __init__(self, options: SinkOptions, checkpoint: str | None) -> None:
        self._options = options
        self._checkpoint = checkpoint
        query = None if options.sink_id is None else known_id(local_folder(checkpoint))
        if query is not None:
            claim(options, None, SinkOwner(query))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Writes rows, in an executor. Returns once all of them are prepared."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(QUERY_PROPERTY), context.getLocalProperty(BATCH_PROPERTY)
        sink, batch_id = named(self._options.sink_id, query, batch)
        owner = SinkOwner(query or "", context.getLocalProperty(RUN_PROPERTY) or "" if query else "")
        if query:
            claim(self._options, sink, owner)
        return write_branches(self._options, sink, owner, batch_id, iterator)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Commits: readers see the batch once it returns, as it was written first."""
        self._end(messages, batchId, is_commit=True)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Makes sure that readers see nothing of these attempts, unless a commit() that failed has decided."""
        self._end(messages, batchId, is_commit=False)

    def _end(self, messages: Sequence[Any], batch_id: int, *, is_commit: bool) -> None:
        prepared = [one for one in messages if isinstance(one, Prepared)]
        if not prepared:  # no task has ended
            return
        first = prepared[0]
        identity = first.identity or checkpoint_id(self._checkpoint)
        client = sink_client(self._options)
        committer = client.committer(first.sink, SinkOwner(identity, first.run))
        attempts = _attempts(messages)
        if is_commit:
            made_from = content(self._checkpoint, identity, batch_id)
            client.background.run(committer.commit(batch_id, attempts, made_from))
        else:
            client.background.run(committer.abort(batch_id, attempts))
