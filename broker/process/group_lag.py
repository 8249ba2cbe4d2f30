"""The lag of groups at a master: in messages, and as the age of the oldest message that is not committed.

Offsets are in ZooKeeper. So a task reads them at intervals, and a scrape only gets the last figures. Each master reads
the offsets of its own partitions, at most READS_MAX of them in one round; the next round continues with the others. It
reads a batch's header from a log only if the offset before it has changed.

A partition that a group has claimed without a commit is read from its start: each other start is committed at once. If
the offset is kept elsewhere, for example in a database, the progress that the owner publishes stands for it; before the
first publication the lag is unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.log_once import LogOnce
from metamq.broker.roles.role import MasterRole
from metamq.errors import MetamqError
from metamq.wire.batch import HEADER_BYTES, read_header
from metamq.zk.groups.ownership import OffsetRecord, read_offsets
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
"""Offsets that one round reads."""
READS_AT_ONCE = 32
"""Offsets of one request to ZooKeeper: the loop checks them without a pause."""


@dataclass(slots=True)
class GroupLag:
    """The lag of one group in the partitions of one topic at this broker id."""

    messages: int | None = None
    """None: the lag of no partition is known."""
    oldest_s: float | None = None
    unknown_partitions: int = 0


@dataclass(frozen=True, slots=True)
class GroupLags:
    """The figures of the last rounds."""

    by_group_and_topic: dict[tuple[str, str], GroupLag]
    left_out: int
    """Partitions of groups that no round has read yet."""
    interval_s: float
    read_at_s: float
    """The time of the last round; before the first one, the time at which the reader found that this replica is the
    master, which may be an interval after it became the master (time.monotonic)."""


class Reading(NamedTuple):
    """One reading of a group's offset in one partition."""

    topic_id: str
    next_offset: int
    messages: int
    appended_us: int
    """The time at which the batch of the next offset was appended."""


UNKNOWN = Reading("", 0, -1, 0)
Place = tuple[str, TopicPartition]
"""A group and a partition."""


class GroupLagReader:
    """Reads the lags at intervals. Runs in the broker's loop; any thread may get `last`."""

    def __init__(self, session: Session, topics: Topics, status: ReplicaStatus, config: BrokerConfig) -> None:
        self._session = session
        self._topics = topics
        self._status = status
        self._config = config
        self._log_once = LogOnce()
        self._readings: dict[Place, Reading] = {}
        self._turn = 0
        """The place of the next round in the list of all offsets."""
        self._last: GroupLags | None = None
        self._role: object = None
        """The master's role to which `_last` belongs: a later one reads again."""

    @property
    def last(self) -> GroupLags | None:
        """The last figures; None: this replica is not a master, or reads none."""
        return self._last if self._status.role is self._role else None

    async def run(self) -> None:
        """Reads until cancelled."""
        while self._config.group_lag_s:
            role = self._status.role
            if isinstance(role, MasterRole):
                if role is not self._role:
                    self._role, self._last = role, self._figures({})
                try:
                    self._last = await self._round()
                    self._log_once.worked("the lags of groups are read again")
                except MetamqError as error:
                    self._log_once.failed("the lags of groups are not read now", error)
                except Exception:  # figures must not end a broker
                    log.exception("the lags of groups cannot be read")
            else:
                self._role, self._last, self._readings = None, None, {}
            await asyncio.sleep(self._config.group_lag_s)

    async def _round(self) -> GroupLags:
        places = {(group, tp): partition async for group, tp, partition in self._partitions_of_groups()}
        self._readings = {place: reading for place, reading in self._readings.items() if place in places}
        order = list(places)
        self._turn = self._turn if self._turn < len(order) else 0
        chosen = [*order[self._turn :], *order[: self._turn]][:READS_MAX]
        for at in range(0, len(chosen), READS_AT_ONCE):
            part = chosen[at : at + READS_AT_ONCE]
            records = await read_offsets(self._session, part, "its lag is not known")
            for place, record in zip(part, records, strict=True):
                self._readings[place] = self._reading(places[place], record, self._readings.get(place, UNKNOWN))
                await asyncio.sleep(0)
        self._turn += len(chosen)
        return self._figures(places)

    async def _partitions_of_groups(self) -> AsyncIterator[tuple[str, TopicPartition, Partition]]:
        """Yields each group with the open partitions of the topics that it has claimed."""
        paths = self._session.paths
        own = set(self._topics.counts())
        for group in sorted(await self._session.children_or_none(paths.groups()) or []):
            claimed = await self._session.children_or_none(paths.offset_topics(group)) or []
            for topic in sorted(own.intersection(claimed)):
                for index, partition in sorted(self._topics.open.get(topic, {}).items()):
                    yield group, TopicPartition(topic, partition_name(self._config.id, index)), partition

    def _reading(self, partition: Partition, record: OffsetRecord | None, before: Reading) -> Reading:
        if record is None:
            return UNKNOWN
        next_offset = partition.log.begin_offset
        place = record.published if record.kept_by else record.committed
        if place is not None and place.topic_id == partition.topic_id:
            next_offset = max(next_offset, place.offset)
        elif record.kept_by and partition.log.stable_offset > next_offset:
            return UNKNOWN
        messages = partition.log.stable_offset - next_offset
        if messages <= 0:
            return Reading(partition.topic_id, next_offset, 0, 0)
        appended_us = before.appended_us if before[:2] == (partition.topic_id, next_offset) else 0
        try:
            appended_us = appended_us or _appended_us(partition, next_offset)
        except (MetamqError, OSError):  # retention has removed it meanwhile, or it is damaged, which the log reports
            return UNKNOWN
        return Reading(partition.topic_id, next_offset, messages, appended_us)

    def _figures(self, places: Collection[Place]) -> GroupLags:
        lags: dict[tuple[str, str], GroupLag] = defaultdict(GroupLag)
        for (group, tp), reading in self._readings.items():
            lag = lags[group, tp.topic]
            if reading is UNKNOWN:
                lag.unknown_partitions += 1
                continue
            age_s = time.time() - reading.appended_us / 1e6 if reading.messages else 0.0
            lag.messages = (lag.messages or 0) + reading.messages
            lag.oldest_s = max(lag.oldest_s or 0.0, age_s)
        left_out = len(places) - len(self._readings)
        return GroupLags(dict(lags), left_out, self._config.group_lag_s, time.monotonic())


def _appended_us(partition: Partition, offset: int) -> int:
    """Returns the time at which the batch with this offset was appended. Raises MetamqError, OSError."""
    place = partition.log.locate(offset, 1)
    assert place is not None  # it is below the stable end
    with open(place.path, "rb") as file:
        file.seek(place.at)
        return read_header(file.read(HEADER_BYTES)).append_time_us
