"""The counters of a broker, and StatsProcessor: it carries out STATS, and gives the same figures to metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import metamq
from metamq.wire.commands import Stats
from metamq.wire.headers import unpack
from metamq.wire.limits import STATS_PARTITIONS_MAX
from metamq.zk.names import OWN

if TYPE_CHECKING:
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.partition import BatchIds, Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.delays.forwarder import DelayFigures
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.broker.transactions.term import Figures
    from metamq.wire.commands import GetResult
    from metamq.wire.connection import Request

DAMAGED_MAX = 10
"""Partitions whose damage one answer describes."""
PRINCIPALS_MAX = 1000
OTHERS = "(others)"


class Counters:
    """Totals since the start of the broker, which only grow. They count per batch and answer, never per message."""

    def __init__(self) -> None:
        self.messages_in: dict[str, int] = defaultdict(int)
        self.bytes_in: dict[str, int] = defaultdict(int)
        self.batches_in: dict[str, int] = defaultdict(int)
        self.bytes_out = 0
        self.fetches = 0
        self.repeats = 0
        self.refusals = 0
        """Requests and entries for which a right was missing."""
        self.failed_logins = 0
        self.delays: dict[str, int] = defaultdict(int)
        self.delayed_ms: dict[str, int] = defaultdict(int)
        """By principal: the waits of its connections for its quota."""

    def appended(self, topic: str, batches: int, messages: int, size: int) -> None:
        """Counts stored batches, and their messages and bytes."""
        self.messages_in[topic] += messages
        self.bytes_in[topic] += size
        self.batches_in[topic] += batches

    def fetched(self, results: list[GetResult]) -> None:
        """Counts an answered GET."""
        self.fetches += 1
        self.bytes_out += sum(result.size for result in results if result.file is None)

    def delayed(self, principal: str, wait_s: float) -> None:
        """Counts a wait for a quota. Principals above PRINCIPALS_MAX are counted together."""
        name = principal if principal in self.delays or len(self.delays) < PRINCIPALS_MAX else OTHERS
        self.delays[name] += 1
        self.delayed_ms[name] += round(wait_s * 1000)

    def snapshot(self, topics: Collection[str] | None = None) -> dict[str, Any]:
        """Returns all counters as plain values, for these topics only if `topics` is given."""

        def of(counts: Mapping[str, int]) -> dict[str, int]:
            return dict(counts) if topics is None else {t: counts[t] for t in topics if t in counts}

        return {
            "messages_in": of(self.messages_in),
            "bytes_in": of(self.bytes_in),
            "batches_in": of(self.batches_in),
            "bytes_out": self.bytes_out,
            "fetches": self.fetches,
            "repeats": self.repeats,
            "refusals": self.refusals,
            "failed_logins": self.failed_logins,
            "delays": dict(self.delays),
            "delayed_ms": dict(self.delayed_ms),
        }


@dataclass(eq=False)
class StatsProcessor:
    """The figures of a broker. statistics() may be called from any thread."""

    status: ReplicaStatus
    folder: DataFolder
    topics: Topics
    ids: BatchIds
    counters: Counters
    _: KW_ONLY
    replication: Callable[[], dict[str, Any]]
    transactions: Callable[[], Figures]
    scrub: Callable[[], dict[str, Any]]
    delayed: Callable[[], DelayFigures]
    """`replication`, `transactions`, `scrub` and `delayed` return the figures of these parts."""

    def stats(self, request: Request, connection: BrokerProtocol) -> None:
        """Answers a STATS with one page of partitions. Raises ProtocolError."""
        start = Stats("", 0) if request.header is None else unpack(Stats, request.header)
        page, following = page_of(self.topics.open, start, STATS_PARTITIONS_MAX)
        counters = self.counters.snapshot({partition.topic for partition in page})
        connection.answer(request, {**self._statistics(page), "counters": counters, "next": following})

    def statistics(self) -> dict[str, Any]:
        """Returns the fields of an answer to STATS, for all topics and partitions at once."""
        return {**self._statistics(self.topics.partitions()), "counters": self.counters.snapshot()}

    def _statistics(self, partitions: Iterable[Partition]) -> dict[str, Any]:
        damage = self.topics.damage()
        refused = self.status.writes_refused
        return {
            "broker_id": self.folder.broker_id,
            "replica": self.folder.replica,
            "incarnation": self.folder.incarnation,
            "epoch": self.ids.epoch,
            "version": metamq.__version__,
            "time_ms": time.time_ns() // 1_000_000,
            "writes_refused": str(refused) if refused else None,
            "replication": self.replication(),
            "transactions": self.transactions()._asdict(),
            "scrub": self.scrub(),
            "delayed": self.delayed()._asdict(),
            "unlisted": [str(error) for error in list(self.topics.unlisted.values())[:DAMAGED_MAX]],
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
        "trimmed": log.trimmed,
    }
