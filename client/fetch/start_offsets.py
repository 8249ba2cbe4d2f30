"""Where to begin: the committed offset, or where the consumer's `start` says; asked of the partition's broker.

A consumer begins with thousands of partitions at once, each for itself. What they ask in one turn of the loop goes to
the broker as one question; each gets its own answer, or its own error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from metamq.client.fetch.consumer_options import Start
from metamq.client.group.assignment import AssignedPartition
from metamq.client.net.cluster import MASTER, ClusterClient
from metamq.client.net.paged_requests import ask_offsets
from metamq.client.producer.producer_api import requested_time_us
from metamq.errors import ConnectError, MetamqError, OffsetOutOfRange
from metamq.wire import status
from metamq.wire.commands import EARLIEST, LATEST, OffsetsEntry, OffsetsResult
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")


class FirstOffset(NamedTuple):
    """Where to begin, under which master's term, and whether that was committed or is what `start` says."""

    offset: int
    epoch: int
    is_committed: bool


class _Question(NamedTuple):
    """What can be asked as one."""

    broker_id: int
    topic: str
    topic_id: str
    what: int
    """A time, EARLIEST or LATEST."""


class OffsetFinder:
    """Finds offsets; `start` is for partitions without a committed one."""

    def __init__(self, cluster: ClusterClient, start: Start) -> None:
        self._cluster = cluster
        self._start = start
        self._recreated: set[tuple[str, str]] = set()
        """(topic, topic id): said once, not for each partition."""
        self._waiting: dict[_Question, dict[TopicPartition, list[asyncio.Future[OffsetsResult]]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the questions that are under way: those who asked are gone."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def first_offset(self, assigned: AssignedPartition) -> FirstOffset:
        """Where to begin with a partition. Raises the broker's error, or ConnectError."""
        committed = assigned.committed
        if committed is not None and committed.topic_id == assigned.claim.topic_id:
            return FirstOffset(committed.offset, committed.epoch, is_committed=True)
        topic = assigned.tp.topic, assigned.claim.topic_id
        if committed is not None and topic not in self._recreated:
            self._recreated.add(topic)
            log.warning(
                "topic %r was deleted and made anew since offsets in it were committed: beginning at %s",
                assigned.tp.topic, self._start,
            )  # fmt: skip
        found = await self._find(assigned.tp, assigned.claim.topic_id, self._start)
        return FirstOffset(found.offset, found.epoch, is_committed=False)

    async def find(self, tp: TopicPartition, topic_id: str, where: Start) -> int:
        """The offset of "earliest", "latest", or of the first message at a time; the end when there is none."""
        return (await self._find(tp, topic_id, where)).offset

    async def _find(self, tp: TopicPartition, topic_id: str, where: Start) -> OffsetsResult:
        named = EARLIEST if where == "earliest" else LATEST
        asked = requested_time_us(where) if isinstance(where, datetime) else named
        question = _Question(parse_partition(tp.partition)[0], tp.topic, topic_id, asked)
        answer: asyncio.Future[OffsetsResult] = asyncio.get_running_loop().create_future()
        if question not in self._waiting:
            self._waiting[question] = {}
            task = asyncio.ensure_future(self._ask_together(question))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        self._waiting[question].setdefault(tp, []).append(answer)
        return await answer

    async def _ask_together(self, question: _Question) -> None:
        await asyncio.sleep(0)  # the others of this turn come in
        waiting = self._waiting.pop(question)
        partitions = list(waiting)
        topic_ids = dict.fromkeys(partitions, question.topic_id)
        results: Sequence[OffsetsResult | Exception]
        try:
            results = await self._ask_broker(question.broker_id, partitions, topic_ids, question.what)
        except Exception as error:  # also a bug of ours: they would wait for ever
            results = [error] * len(partitions)
        for tp, result in zip(partitions, results, strict=True):
            for answer in waiting[tp]:
                if answer.done():  # whoever asked was cancelled
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    async def ends(
        self, topic_ids: Mapping[TopicPartition, str], *, master_only: bool = False
    ) -> dict[TopicPartition, int]:
        """The ends of what can be read. Raises the first error."""
        found = await self.ask(topic_ids, LATEST, master_only=master_only)
        return {tp: result.offset for tp, result in found.items()}

    async def check_not_beyond_end(
        self, topic_ids: Mapping[TopicPartition, str], offsets: Mapping[TopicPartition, int], hint: str
    ) -> None:
        """Raises OffsetOutOfRange, with the hint, for the first offset beyond its partition's end.

        While the brokers do not tell where that is, it is left at that: `on_data_loss` goes on from there.
        """
        try:
            found = await self.ask(topic_ids, LATEST, master_only=True)  # a slave's end is not the last word
        except MetamqError as error:
            log.info("where %s ends is not known at present: %s", ", ".join(map(str, topic_ids)), error)
            return
        for tp, result in found.items():
            if offsets[tp] > result.stable_offset:
                beyond = OffsetOutOfRange(str(tp), offsets[tp], result.start_offset, result.stable_offset)
                beyond.hint = hint
                raise beyond

    async def ask(
        self, topic_ids: Mapping[TopicPartition, str], what: int, *, master_only: bool = False
    ) -> dict[TopicPartition, OffsetsResult]:
        """OFFSETS of each partition's broker. Raises the first error."""
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
        """The result of each partition, or its error. Raises what concerns all of them."""
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
    """A slave's retention is its own: what comes before its first message, the master may have."""
    return ConnectError(
        f"the master of {tp}", f"a slave is there, but begins at {result.start_offset}, where the master may have more"
    )
