"""StatsProcessor: carries out STATS, and gives the same figures to metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import metamq
from metamq.broker.data.topics import OWN, Topics
from metamq.wire.commands import Stats, unpack
from metamq.wire.limits import STATS_PARTITIONS_MAX

if TYPE_CHECKING:
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.partition import BatchIds, Partition
    from metamq.broker.front_door.counters import Counters
    from metamq.broker.front_door.puts import Answering
    from metamq.broker.ha.role import ReplicaStatus
    from metamq.broker.transactions.term import Figures
    from metamq.wire.connection import Request

DAMAGED_MAX = 10
"""Partitions whose damage one answer describes."""


class StatsProcessor:
    """The figures of a broker. statistics() may be called from any thread."""

    def __init__(
        self,
        status: ReplicaStatus,
        folder: DataFolder,
        topics: Topics,
        ids: BatchIds,
        counters: Counters,
        *,
        replication: Callable[[], dict[str, Any]],
        transactions: Callable[[], Figures],
        scrub: Callable[[], dict[str, Any]],
    ) -> None:
        """`replication`, `transactions` and `scrub` return the figures of these parts."""
        self._status = status
        self._folder = folder
        self._topics = topics
        self._ids = ids
        self._counters = counters
        self._replication = replication
        self._transactions = transactions
        self._scrub = scrub

    def stats(self, request: Request, connection: Answering) -> None:
        """Answers a STATS with one page of partitions. Raises ProtocolError."""
        start = Stats("", 0) if request.header is None else unpack(Stats, request.header)
        page, following = page_of(self._topics.open, start, STATS_PARTITIONS_MAX)
        counters = self._counters.snapshot({partition.topic for partition in page})
        connection.answer(request, {**self._statistics(page), "counters": counters, "next": following})

    def statistics(self) -> dict[str, Any]:
        """Returns the fields of an answer to STATS, for all topics and partitions at once."""
        return {**self._statistics(self._topics.partitions()), "counters": self._counters.snapshot()}

    def _statistics(self, partitions: Iterable[Partition]) -> dict[str, Any]:
        damage = self._topics.damage()
        refused = self._status.writes_refused
        return {
            "broker_id": self._folder.broker_id,
            "replica": self._folder.replica,
            "incarnation": self._folder.incarnation,
            "epoch": self._ids.epoch,
            "version": metamq.__version__,
            "time_ms": time.time_ns() // 1_000_000,
            "writes_refused": str(refused) if refused else None,
            "replication": self._replication(),
            "transactions": self._transactions()._asdict(),
            "scrub": self._scrub(),
            "unlisted": [str(error) for error in list(self._topics.unlisted.values())[:DAMAGED_MAX]],
            "damaged_count": len(damage),
            "damaged": [str(error) for error in list(damage.values())[:DAMAGED_MAX]],
            "partitions": [_partition_statistics(one) for one in partitions if not one.topic.startswith(OWN)],
        }


def page_of(
    topics: Mapping[str, Mapping[int, Partition]], start: Stats, size: int
) -> tuple[list[Partition], Stats | None]:
    """Returns at most `size` partitions from `start` on, in order, and the start of the next page; None at the end.

    A partition that is made or removed between two pages moves no other partition from one page to the next.
    """
    page: list[Partition] = []
    for topic in sorted(name for name in topics if name >= start.topic):
        first = start.partition if topic == start.topic else 0
        for index in sorted(index for index in topics[topic] if index >= first):
            if len(page) == size:
                return page, Stats(topic, index)
            page.append(topics[topic][index])
    return page, None


def _partition_statistics(partition: Partition) -> dict[str, Any]:
    log = partition.log
    return {
        "topic": partition.topic,
        "partition": partition.index,
        "start_offset": log.start_offset,
        "stable_offset": log.stable_offset,
        "end_offset": log.end_offset,
        "size_bytes": log.size_bytes,
        "last_append_us": log.last_append_us,
    }
