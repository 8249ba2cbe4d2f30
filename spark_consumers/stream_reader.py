"""The streaming source in the driver: Spark asks it after each batch how far the next one goes.

It lives as long as the query. Whatever it raises ends the query, so it raises only what no waiting helps against: wrong
options, lost messages with failOnDataLoss, and what cannot be asked at all at the query's start. A broker that is away
has nothing new meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from metamq.client.admin_brokers import Found
from metamq.errors import MetamqError
from metamq.spark_consumers import planning, progress
from metamq.spark_consumers.cluster_view import ClusterView, Topics
from metamq.spark_consumers.options import SourceOptions
from metamq.spark_consumers.partitions import RangePartition, read_partition
from metamq.spark_consumers.progress import Limits
from metamq.spark_consumers.ranges import OffsetRange
from metamq.spark_consumers.stream_offsets import (
    START,
    StreamOffset,
    StreamPlace,
    first_places,
    from_json,
    to_json,
)
from metamq.wire.commands import LATEST, OffsetsResult
from metamq.zk.partitions import TopicPartition, partition_order

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("metamq.spark")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """For one query. Spark pickles a new one for the executors, which only read()."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._view: ClusterView | None = None
        self._target: dict[TopicPartition, StreamPlace] | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._last_batch_s = time.monotonic()
        self._told: set[str] = set()

    def _opened(self) -> ClusterView:
        if self._view is None:
            view = ClusterView(self._options.zookeeper, self._options.root)
            if self._options.group is not None:
                view.check_group(self._options.group)
            self._view = view
        return self._view

    def initialOffset(self) -> dict[str, Any]:
        """A mark: see metamq.spark_consumers.stream_offsets."""
        return START

    def getDefaultReadLimit(self) -> ReadLimit:
        """Carried back to latestOffset(); that it is not ReadAllAvailable tells it from Trigger.Once."""
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of the query at what there is now."""
        view = self._opened()
        present = view.partitions(self._options.subscription, missing_ok=True)
        questions = {tp: (topic_id, LATEST) for tp, topic_id in present.items()}
        answers = planning.ask_until_answered(view, questions, self._options.poll_timeout_s)
        self._target = {
            tp: StreamPlace(present[tp], answer.stable_offset, answer.epoch) for tp, answer in answers.items()
        }

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next batch ends; `start` itself when there is none to be run now."""
        before = from_json(start)
        view = self._opened()
        if before is None:
            before = StreamOffset({}, self._first_places(view))
            is_first = True
        else:
            is_first = False
        try:
            present = view.partitions(self._options.subscription, missing_ok=True)
            answers = view.offsets({tp: (topic_id, LATEST) for tp, topic_id in present.items()})
        except MetamqError as error:
            if not error.retriable:
                raise
            log.info("what is new is not known at present: %s", error)
            return to_json(StreamOffset(before.reached, before.reached)) if is_first else start
        self._lost(progress.lost_partitions(before.reached, present))
        self._note(answers)
        begun = progress.begin(before.reached, present, answers)
        step = progress.step(before.reached, begun, answers, self._limits(limit))
        self._lost(step.losses)
        if step.offset is None:
            return to_json(StreamOffset(before.reached, before.reached)) if is_first else start
        self._last_batch_s = time.monotonic()
        return to_json(step.offset)

    def _first_places(self, view: ClusterView) -> dict[TopicPartition, StreamPlace]:
        """Where the query begins, by its options."""
        present: Topics = view.partitions(self._options.subscription)
        starts = planning.find_starts(view, self._options, present)
        return {tp: StreamPlace(topic_id, starts[tp]) for tp, topic_id in present.items()}

    def _limits(self, limit: ReadLimit) -> Limits:
        if isinstance(limit, ReadAllAvailable):  # Trigger.Once, or nothing bounds a batch
            return Limits(target=self._target)
        return Limits(
            most=self._options.max_offsets_per_trigger,
            # What comes later is not of this query: nothing to wait for.
            least=self._options.min_offsets_per_trigger if self._target is None else None,
            waited_s=time.monotonic() - self._last_batch_s,
            delay_max_s=self._options.max_trigger_delay_s,
            target=self._target,
        )

    def _note(self, answers: dict[TopicPartition, Found]) -> None:
        for tp, answer in answers.items():
            if isinstance(answer, OffsetsResult):
                self._ends[tp] = answer.stable_offset
            else:
                log.info("what is new in %s is not known at present: %s", tp, answer)

    def _lost(self, losses: list[MetamqError]) -> None:
        if losses and self._options.fail_on_data_loss:
            losses[0].hint += " To go on without what is gone: failOnDataLoss=false."
            raise losses[0]
        for loss in losses:
            if str(loss) not in self._told:
                self._told.add(str(loss))
                log.warning("messages are left out, failOnDataLoss is false: %s", loss)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends as of the last look, for the query's progress."""
        report: dict[str, Any] = {}
        for tp in sorted(self._ends, key=partition_order):
            report.setdefault(tp.topic, {})[tp.partition] = self._ends[tp]
        return report or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for each range of the batch."""
        last = from_json(end)
        if last is None:
            return []
        first = first_places(from_json(start), last)
        ranges = [OffsetRange(tp, place.topic_id, first[tp].offset, place.offset) for tp, place in last.reached.items()]
        epochs = {tp: place.epoch for tp, place in first.items()}
        return [RangePartition(task) for task in planning.tasks(self._opened(), self._options, ranges, epochs)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs in an executor."""
        return read_partition(partition, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Publishes how far the query is as the group's offsets; nothing depends on it."""
        done = from_json(end)
        if self._options.group is None or done is None:
            return
        try:
            self._opened().publish(self._options.group, done.reached)
        except MetamqError as error:
            log.warning("the query's progress is not published: %s", error)

    def stop(self) -> None:
        """Spark calls it after an error only."""
        if self._view is not None:
            self._view.close()
            self._view = None
