"""The start offset of a partition: the committed offset, or the consumer's `start`, read from the partition's broker.

A consumer starts with thousands of partitions at once, each by itself. Their requests in one turn of the loop are sent
to the broker as one; each partition gets its own answer, or its own error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.model import requested_time_us
from metamq.client.net.cluster import MASTER, ClusterClient
from metamq.client.net.paged_requests import ask_offsets
from metamq.errors import ConnectError, MetamqError, OffsetOutOfRange
from metamq.wire import status
from metamq.wire.commands import EARLIEST, LATEST, OffsetsEntry, OffsetsResult
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.fetch.consumer_options import Start
    from metamq.client.group.assignment import AssignedPartition
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")


class FirstOffset(NamedTuple):
    """A start offset, the epoch of the message before it, and True if it was committed rather than found by `start`."""

    offset: int
    epoch: int
    is_committed: bool


class _Question(NamedTuple):
    """The key of requests that are sent together."""

    broker_id: int
    topic: str
    topic_id: str
    what: int
    """The requested place: a time, EARLIEST or LATEST."""
    master_only: bool


class OffsetFinder:
    """Finds offsets. `start` applies to partitions without a committed offset, except for those of `retry_topic`: each
    message there is one that the group still has to process."""

    def __init__(self, cluster: ClusterClient, start: Start, retry_topic: str | None = None) -> None:
        self._cluster = cluster
        self._start: Start = start
        self._retry_topic = retry_topic
        self._recreated: set[tuple[str, str]] = set()
        """The (topic, topic id) of topics that were logged, once and not for each partition."""
        self._waiting: dict[_Question, dict[TopicPartition, list[asyncio.Future[OffsetsResult]]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancels the unanswered requests: their callers are gone."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def first_offset(self, assigned: AssignedPartition) -> FirstOffset:
        """Returns the start offset of a partition. Raises the broker's error, or ConnectError.

        A new partition begins at its first message also with "latest": the consumer is older than all of them.
        """
        committed = assigned.committed
        if committed is not None and committed.topic_id == assigned.claim.topic_id:
            return FirstOffset(committed.offset, committed.epoch, is_committed=True)
        start = self._start
        if (assigned.is_new and start == "latest") or assigned.tp.topic == self._retry_topic:
            start = "earliest"
        topic = assigned.tp.topic, assigned.claim.topic_id
        if committed is not None and topic not in self._recreated:
            self._recreated.add(topic)
            log.warning(
                "topic %r was deleted and created again since offsets in it were committed: beginning at %s",
                assigned.tp.topic, start,
            )  # fmt: skip
        found = await self._find(assigned.tp, assigned.claim.topic_id, start)
        return FirstOffset(found.offset, found.epoch, is_committed=False)

    async def find(self, tp: TopicPartition, topic_id: str, where: Start) -> int:
        """Returns the offset of "earliest", "latest", or the first message at a time; without such a message the
        end."""
        return (await self._find(tp, topic_id, where)).offset

    async def _find(
        self, tp: TopicPartition, topic_id: str, where: Start, *, master_only: bool = False
    ) -> OffsetsResult:
        named = EARLIEST if where == "earliest" else LATEST
        wanted = requested_time_us(where) if isinstance(where, datetime) else named
        question = _Question(parse_partition(tp.partition)[0], tp.topic, topic_id, wanted, master_only)
        answer: asyncio.Future[OffsetsResult] = asyncio.get_running_loop().create_future()
        if question not in self._waiting:
            self._waiting[question] = {}
            task = asyncio.ensure_future(self._ask_together(question))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        self._waiting[question].setdefault(tp, []).append(answer)
        return await answer

    async def _ask_together(self, question: _Question) -> None:
        await asyncio.sleep(0)  # lets the other requests of this turn join
        waiting = self._waiting.pop(question)
        partitions = list(waiting)
        topic_ids = dict.fromkeys(partitions, question.topic_id)
        results: Sequence[OffsetsResult | Exception]
        try:
            results = await self._ask_broker(
                question.broker_id, partitions, topic_ids, question.what, master_only=question.master_only
            )
        except Exception as error:  # also a bug in metamq: otherwise the callers would wait without end
            results = [error] * len(partitions)
        for tp, result in zip(partitions, results, strict=True):
            for answer in waiting[tp]:
                if answer.done():  # the caller was cancelled
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    async def ends(
        self, topic_ids: Mapping[TopicPartition, str], *, master_only: bool = False
    ) -> dict[TopicPartition, int]:
        """Returns the ends of the readable data. Raises the first error."""
        found = await self.ask(topic_ids, LATEST, master_only=master_only)
        return {tp: result.offset for tp, result in found.items()}

    async def check_not_beyond_end(
        self, topic_ids: Mapping[TopicPartition, str], offsets: Mapping[TopicPartition, int], hint: str
    ) -> None:
        """Raises OffsetOutOfRange, with the hint, for the first offset beyond its partition's end.

        If the brokers do not answer, the offsets pass unchecked: `on_data_loss` decides later.
        """
        try:
            # A slave's end may be before the real one. The requests of other seeks in this turn are joined.
            asked = (self._find(tp, topic_id, "latest", master_only=True) for tp, topic_id in topic_ids.items())
            found = await asyncio.gather(*asked)
        except MetamqError as error:
            log.info("the end of %s is not known at present: %s", ", ".join(map(str, topic_ids)), error)
            return
        for tp, result in zip(topic_ids, found, strict=True):
            if offsets[tp] > result.stable_offset:
                beyond = OffsetOutOfRange(str(tp), offsets[tp], result.start_offset, result.stable_offset)
                beyond.hint = hint
                raise beyond

    async def ask(
        self, topic_ids: Mapping[TopicPartition, str], what: int, *, master_only: bool = False
    ) -> dict[TopicPartition, OffsetsResult]:
        """Sends OFFSETS to each partition's broker. Raises the first error."""
        by_broker: dict[int, list[TopicPartition]] = defaultdict(list)
        for tp in topic_ids:
            by_broker[parse_partition(tp.partition)[0]].append(tp)
        found: dict[TopicPartition, OffsetsResult] = {}
        for broker_id, partitions in by_broker.items():
            results = await self._ask_broker(broker_id, partitions, topic_ids, what, master_only=master_only)
            for tp, result in zip(partitions, results, strict=True):
                if isinstance(result, MetamqError):
                    raise result
                found[tp] = result
        return found

    async def _ask_broker(
        self,
        broker_id: int,
        partitions: Sequence[TopicPartition],
        topic_ids: Mapping[TopicPartition, str],
        what: int,
        *,
        master_only: bool = False,
    ) -> list[OffsetsResult | MetamqError]:
        """Returns the result of each partition, or its error. Raises the errors that concern all of them."""
        entries = [OffsetsEntry(tp.topic, topic_ids[tp], parse_partition(tp.partition)[1], what) for tp in partitions]
        replica = MASTER
        if master_only:
            connection = await self._cluster.connection(broker_id)
        else:
            topics = {tp.topic for tp in partitions}
            connection, replica = await self._cluster.reading_connection(broker_id, topics)
        results: list[OffsetsResult | MetamqError] = []
        for tp, result in zip(partitions, await ask_offsets(connection, entries), strict=True):
            if result.status != status.OK:
                results.append(status.decode_error(result.status, result.error))
            elif replica != MASTER and what != LATEST and 0 < result.offset == result.start_offset:
                results.append(_only_the_master_knows(tp, result))
            else:
                results.append(result)
        return results


def _only_the_master_knows(tp: TopicPartition, result: OffsetsResult) -> ConnectError:
    """Returns the error for a start that only the master knows: a slave may have removed messages that the master still
    has."""
    return ConnectError(
        f"the master of {tp}", f"a slave is there, but begins at {result.start_offset}, where the master may have more"
    )
