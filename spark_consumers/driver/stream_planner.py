"""Plans a streaming query in the driver: after each batch it gives the end of the next one, and its tasks.

It exists as long as the query. Its errors end the query, so it raises only lasting errors: wrong options, lost messages
with failOnDataLoss, and brokers that do not answer at the query's start. A broker that does not answer later counts as
having no new messages, unless "nothing new" would end the query.

If a step has nothing new, Spark assumes that the query has read everything: processAllAvailable() returns. So the
planner reports that only if every broker has nothing new. It waits for a silent broker until the warning about it is
due.
"""

from __future__ import annotations

import atexit
import logging
import math
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.client.scan import cluster_view
from metamq.client.scan.ranges import OffsetRange
from metamq.errors import MetamqError, OffsetDiverged, OffsetOutOfRange, TopicNotFound
from metamq.spark_consumers.driver import planning, progress
from metamq.spark_consumers.driver.progress import BatchLimits
from metamq.spark_consumers.driver.publishing import Publisher
from metamq.spark_consumers.driver.query_view import QueryView
from metamq.spark_consumers.driver.stream_offsets import (
    Places,
    StreamOffset,
    StreamPlace,
    first_places,
    from_json,
    to_json,
)
from metamq.spark_consumers.source.typed_value import planned_schema
from metamq.wire.commands import LATEST, OffsetsResult
from metamq.words import count
from metamq.zk.partitions import TopicPartition, partition_order

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from metamq.client.admin.admin_brokers import Found
    from metamq.client.scan.fetch import FetchTask
    from metamq.client.scan.typed_values import ValueSchema
    from metamq.spark_consumers.source.options import SourceOptions

log = logging.getLogger("metamq.spark")

PUBLISH_AT_END_S = 10.0
WARN_AFTER_S = 30.0


class StreamPlanner:
    """The planner of one query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._view: QueryView | None = None
        self._publisher: Publisher | None = None
        self._at_start: Mapping[TopicPartition, OffsetsResult] = {}
        """The brokers' answers when the target was fixed. They stand for brokers that are unreachable later."""
        self._target: dict[TopicPartition, StreamPlace] | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._last_batch_s = -math.inf
        """Time at which the last batch was planned. The first trigger does not wait for more messages."""
        self._unanswered = Unanswered(options.poll_timeout_s)
        self._warned: set[str] = set()

    def _opened(self) -> QueryView:
        if self._view is None:
            view = QueryView(self._options.access)
            if self._options.group is not None:
                view.check_group(self._options.group)
                self._publisher = Publisher(partial(view.publish_soon, self._options.group))
            self._view = view
            if self._options.access.security.is_on:
                atexit.register(self.close)
                exit_when_terminated()
        return self._view

    def fix_target(self) -> None:
        """Sets the end of the query to the present end of the logs."""
        view = self._opened()
        present = view.partitions(self._options.subscription, missing_ok=True)
        questions = {tp: (topic_id, LATEST) for tp, topic_id in present.items()}
        self._at_start = cluster_view.ask_until_answered(view, questions, self._options.poll_timeout_s)
        self._target = {
            tp: StreamPlace(present[tp], answer.stable_offset, answer.epoch) for tp, answer in self._at_start.items()
        }

    def next_offset(self, start: dict[str, Any], *, is_only_batch: bool) -> dict[str, Any]:
        """Returns the end of the next batch; `start` itself if there is no batch to run now."""
        before = from_json(start)
        view = self._opened()
        is_first = before is None
        done: Places = self._first_places(view) if before is None else before.reached
        none = to_json(StreamOffset(done, done)) if is_first else start
        while (offset := self._planned(view, done, is_only_batch)) is None:
            has_said_all = is_only_batch or self._target is not None
            if has_said_all or not self._unanswered.may_pass(time.monotonic()):
                return none
            time.sleep(cluster_view.ASK_AGAIN_S)
        return to_json(offset)

    def _planned(self, view: QueryView, done: Places, is_only_batch: bool) -> StreamOffset | None:
        """Plans the next batch from the brokers that answer. Returns None if there is no batch to run now."""
        try:
            present = view.partitions(self._options.subscription, missing_ok=True)
            answers = self._answers(view, done, present, is_only_batch)
        except MetamqError as error:
            if not error.retriable or is_only_batch or self._target is not None:
                raise
            log.info("the new messages are unknown at present: %s", error)
            self._unanswered.note(dict.fromkeys(done, error), time.monotonic())
            return None
        self._lost(progress.lost_partitions(done, present))
        begun = progress.begin(done, present, answers)
        step = progress.step(done, begun, answers, self._limits(is_only_batch))
        self._lost(step.losses)
        self._publish(done, is_end=step.offset is None and self._target is not None)
        if step.offset is not None or self._last_batch_s == -math.inf:
            self._last_batch_s = time.monotonic()
        return step.offset

    def _first_places(self, view: QueryView) -> dict[TopicPartition, StreamPlace]:
        """Returns the query's start, by its options."""
        present: cluster_view.Topics = view.partitions(self._options.subscription)
        starts = planning.find_starts(view, self._options, present)
        return {tp: StreamPlace(topic_id, *starts[tp]) for tp, topic_id in present.items()}

    def _answers(
        self, view: QueryView, done: Places, present: cluster_view.Topics, is_only_batch: bool
    ) -> dict[TopicPartition, Found]:
        questions = {tp: (topic_id, LATEST) for tp, topic_id in present.items()}
        read_to = {tp: place[1:] for tp, place in done.items() if present.get(tp) == place.topic_id}
        if is_only_batch:
            answers = cluster_view.ask_until_settled(view, questions, self._options.poll_timeout_s, read_to)
        else:
            answers = view.offsets(questions, read_to)
        self._unanswered.note(answers, time.monotonic())
        for tp, answer in answers.items():
            if isinstance(answer, OffsetsResult):
                self._ends[tp] = answer.stable_offset
            elif not isinstance(answer, OffsetDiverged) and self._is_of_target(tp, present[tp]):
                answers[tp] = self._at_start[tp]
        if self._target is not None:
            self._target = progress.reachable(self._target, done, answers)
        return answers

    def _is_of_target(self, tp: TopicPartition, topic_id: str) -> bool:
        return self._target is not None and tp in self._target and self._target[tp].topic_id == topic_id

    def _limits(self, is_only_batch: bool) -> BatchLimits:
        if is_only_batch:
            return BatchLimits(target=self._target)
        return BatchLimits(
            most=self._options.max_offsets_per_trigger,
            # With a target, later messages are not part of the query: there is nothing to wait for.
            least=self._options.min_offsets_per_trigger if self._target is None else None,
            waited_s=time.monotonic() - self._last_batch_s,
            delay_max_s=self._options.max_trigger_delay_s,
            target=self._target,
        )

    def _lost(self, losses: list[MetamqError]) -> None:
        if losses and self._options.fail_on_data_loss:
            kept = "" if isinstance(losses[0], OffsetOutOfRange) else f"{losses[0].hint} "  # that hint is for consumers
            losses[0].hint = f"{kept}To continue without the lost messages: failOnDataLoss=false."
            raise losses[0]
        for loss in losses:
            if str(loss) not in self._warned:
                self._warned.add(str(loss))
                log.warning("messages are left out, failOnDataLoss is false: %s", loss)

    def _publish(self, done: Places, *, is_end: bool) -> None:
        """Publishes the place from which Spark asks to continue: the query has read up to it."""
        if self._publisher is None:
            return
        if is_end:
            self._publisher.finish(done, PUBLISH_AT_END_S)
        else:
            self._publisher.offer(done)

    def ends(self) -> dict[str, dict[str, int]]:
        """Returns the known ends of the logs, by topic and partition."""
        found: dict[str, dict[str, int]] = {}
        for tp in sorted(self._ends, key=partition_order):
            found.setdefault(tp.topic, {})[tp.partition] = self._ends[tp]
        return found

    def tasks(self, start: dict[str, Any], end: dict[str, Any]) -> list[FetchTask]:
        """Returns a task for each range of the batch."""
        last = from_json(end)
        if last is None:
            return []
        first = first_places(from_json(start), last)
        ranges = [OffsetRange(tp, place.topic_id, first[tp].offset, place.offset) for tp, place in last.reached.items()]
        topics = {tp.topic for tp in last.reached}
        epochs = {tp: (first[tp].epoch, place.epoch) for tp, place in last.reached.items()}
        return planning.tasks(self._opened(), self._options, ranges, epochs, topics=topics, is_last=False)

    def value_schema(self, schema: StructType, before: ValueSchema | None) -> ValueSchema | None:
        """Returns the schema by which the tasks of a batch read values; None if they decode nothing. `before`: that of
        the last batch."""
        return planned_schema(self._opened(), self._options, schema, before)

    def close(self) -> None:
        """Disconnects."""
        if self._view is not None:
            self._view.close()
            self._view = None


def exit_when_terminated() -> None:
    """Makes SIGTERM end this process cleanly, together with its token. Spark ends a query by SIGTERM, and calls stop()
    only after an error."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


class Unanswered:
    """The partitions whose broker does not answer, since when, and the warnings about them.

    `patience_s`: seconds in which a broker may not yet know a new topic.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[TopicPartition, float] = {}
        self._warned: set[TopicPartition] = set()

    def may_pass(self, now_s: float) -> bool:
        """True if a partition is silent, and no warning about it is due yet."""
        return any(now_s - since_s < WARN_AFTER_S for since_s in self._since.values())

    def note(self, answers: Mapping[TopicPartition, Found], now_s: float) -> None:
        """Raises a lasting error. Warns once about a partition that is silent for too long."""
        silent: dict[str, list[TopicPartition]] = defaultdict(list)
        for tp in [tp for tp in self._since if tp not in answers]:
            del self._since[tp]
            self._warned.discard(tp)
        for tp, answer in answers.items():
            if isinstance(answer, OffsetsResult | OffsetDiverged):
                self._since.pop(tp, None)
                self._warned.discard(tp)
                continue
            since_s = self._since.setdefault(tp, now_s)
            if not answer.retriable:
                may_be_new = isinstance(answer, TopicNotFound) and now_s - since_s <= self._patience_s
                if not may_be_new:
                    raise answer
            if now_s - since_s >= WARN_AFTER_S and tp not in self._warned:
                self._warned.add(tp)
                silent[str(answer)].append(tp)
        for reason, tps in silent.items():
            what = f"{tps[0]} and {count(len(tps) - 1, 'other partition')}" if len(tps) > 1 else str(tps[0])
            log.warning("the new messages of %s have been unknown for %d s: %s", what, WARN_AFTER_S, reason)
