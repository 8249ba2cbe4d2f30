"""The lag of groups at a master: in messages, and as the age of the oldest message that is not committed.

Offsets are in ZooKeeper. So a task reads them at intervals, and a scrape only gets the last figures. Each master reads
the offsets of its own partitions, at most READS_MAX of them in one round, and reads a batch of a log only if the offset
before it has changed.

A partition that a group has claimed without a commit is read from its start: each other start is committed at once. An
offset that is kept elsewhere, for example in a database, is not known here, and counts as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metamq.broker.log_once import LogOnce
from metamq.broker.roles.role import MasterRole
from metamq.errors import MetamqError
from metamq.wire.batch import read_header
from metamq.zk.documents import skip_unreadable
from metamq.zk.groups.ownership import OffsetRecord, read_offset
from metamq.zk.names import partition_name
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

READS_MAX = 5000
"""Offsets that one round reads. It also limits the number of groups and topics in the metrics."""
READS_AT_ONCE = 64


@dataclass(slots=True)
class GroupLag:
    """The lag of one group in the partitions of one topic at this broker id."""

    messages: int = 0
    oldest_s: float = 0.0
    unknown_partitions: int = 0


@dataclass(frozen=True, slots=True)
class GroupLags:
    """The figures of one round."""

    by_group_and_topic: dict[tuple[str, str], GroupLag]
    left_out: int
    """Partitions of groups that were not read, because there are more than READS_MAX."""
    read_at_s: float
    """The time of the round (time.monotonic)."""


class GroupLagReader:
    """Reads the lags at intervals. Runs in the broker's loop; any thread may get `last`."""

    def __init__(self, session: Session, topics: Topics, status: ReplicaStatus, config: BrokerConfig) -> None:
        self._session = session
        self._topics = topics
        self._status = status
        self._config = config
        self._log_once = LogOnce()
        self._appended_us: dict[tuple[TopicPartition, str, int], int] = {}
        """The time at which the batch of an uncommitted offset was appended, by partition, topic id and offset."""
        self.last: GroupLags | None = None
        """None: this replica is not a master, or has read nothing yet."""

    async def run(self) -> None:
        """Reads until cancelled."""
        while self._config.group_lag_s:
            if isinstance(self._status.role, MasterRole):
                try:
                    self.last = await self._round()
                    self._log_once.worked("the lags of groups are read again")
                except MetamqError as error:
                    self._log_once.failed("the lags of groups are not read now", error)
                except Exception:  # figures must not end a broker
                    log.exception("the lags of groups cannot be read")
            else:
                self.last = None
            await asyncio.sleep(self._config.group_lag_s)

    async def _round(self) -> GroupLags:
        lags: dict[tuple[str, str], GroupLag] = defaultdict(GroupLag)
        wanted = [each async for each in self._partitions_of_groups()]
        known, self._appended_us = self._appended_us, {}
        for at in range(0, min(len(wanted), READS_MAX), READS_AT_ONCE):
            part = wanted[at : min(at + READS_AT_ONCE, READS_MAX)]
            records = await asyncio.gather(*(self._record(group, tp) for group, tp, _partition in part))
            for (group, tp, partition), record in zip(part, records, strict=True):
                self._add(lags[group, tp.topic], tp, partition, record, known)
                await asyncio.sleep(0)
        return GroupLags(dict(lags), max(len(wanted) - READS_MAX, 0), time.monotonic())

    async def _partitions_of_groups(self) -> AsyncIterator[tuple[str, TopicPartition, Partition]]:
        """Yields each group with the open partitions of the topics that it has claimed."""
        paths = self._session.paths
        own = set(self._topics.counts())
        for group in sorted(await self._session.children_or_none(paths.groups()) or []):
            claimed = await self._session.children_or_none(paths.offset_topics(group)) or []
            for topic in sorted(own.intersection(claimed)):
                for index, partition in sorted(self._topics.open.get(topic, {}).items()):
                    yield group, TopicPartition(topic, partition_name(self._config.id, index)), partition

    async def _record(self, group: str, tp: TopicPartition) -> OffsetRecord | None:
        with skip_unreadable("its lag is not known"):
            stored = await read_offset(self._session, group, tp)
            return None if stored is None else stored[0]
        return None

    def _add(
        self,
        lag: GroupLag,
        tp: TopicPartition,
        partition: Partition,
        record: OffsetRecord | None,
        known: dict[tuple[TopicPartition, str, int], int],
    ) -> None:
        if record is None or record.kept_by:
            lag.unknown_partitions += 1
            return
        committed = record.committed
        next_offset = partition.log.start_offset
        if committed is not None and committed.topic_id == partition.topic_id:
            next_offset = max(next_offset, committed.offset)
        messages = partition.log.stable_offset - next_offset
        if messages <= 0:
            return
        place = tp, partition.topic_id, next_offset
        try:
            appended_us = known.get(place) or self._appended_us.get(place) or _appended_us(partition, next_offset)
        except MetamqError:  # retention has removed it meanwhile, or it is damaged, which the log reports
            lag.unknown_partitions += 1
            return
        self._appended_us[place] = appended_us
        lag.messages += messages
        lag.oldest_s = max(lag.oldest_s, time.time() - appended_us / 1e6)


def _appended_us(partition: Partition, offset: int) -> int:
    """Returns the time at which the batch with this offset was appended."""
    return read_header(partition.log.read(offset, 1).data).append_time_us
