"""FetchRequestQueue: decides which partition is fetched next, and when.

One FetchRequest per partition circulates: queue → runner → broker → consumer → queue. So a partition has at most one
unanswered fetch, and its messages stay in order. The queue is a heap by due time per source, because a runner asks one
replica for all its due partitions in one request. The time is an argument; nothing here waits.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from metamq.errors import CorruptData, MetamqError

if TYPE_CHECKING:
    from metamq.client.net.cluster import Source
    from metamq.zk.partitions import TopicPartition

DELAY_FIRST_S = 0.05
DELAY_MAX_S = 5.0
DAMAGED_FETCHES_MAX = 5
"""The number of times that the same bytes arrive damaged before the damage is raised."""


@dataclass(eq=False, slots=True)
class FetchRequest:
    """The next fetch of one partition. A new one replaces it when the partition is rewound."""

    tp: TopicPartition
    topic_id: str
    source: Source
    index: int
    offset: int
    epoch: int = -1
    """The epoch of the message before `offset`; -1: not known."""
    due: float = 0.0
    delay_s: float = 0.0
    """Seconds of delay after the last error; 0 after data."""
    damaged_fetches: int = 0
    """The number of consecutive answers that were damaged at `offset`."""
    error: MetamqError | None = None
    """The error to raise once all messages before `offset` are done."""
    cancelled: bool = False
    """True if the answer is not needed any more."""
    opened: tuple[object, int] | None = None
    """The fetch session that knows the request, and its handle there."""

    def came_damaged(self, damage: CorruptData) -> CorruptData | None:
        """Counts one more damaged answer at `offset`. From DAMAGED_FETCHES_MAX on, returns the error to raise."""
        self.damaged_fetches += 1
        if self.damaged_fetches < DAMAGED_FETCHES_MAX:
            return None
        return CorruptData(
            f"{self.tp} at offset {self.offset}",
            damage.reason,
            hint=f"`metamq ha status` shows the repair of the log of broker {self.source.broker_id}. Without "
            "another replica, seek to a later offset to continue.",
        )

    def grow_delay(self) -> float:
        """Returns the seconds of delay after one more error: doubled, limited, and random, to spread the consumers."""
        self.delay_s = min(max(self.delay_s * 2, DELAY_FIRST_S), DELAY_MAX_S)
        return self.delay_s * random.uniform(0.8, 1.2)


class FetchRequestQueue:
    """Requests by source and due time. `wake(source)` is called for a new request that may be due first."""

    def __init__(self, wake: Callable[[Source], None]) -> None:
        self._wake = wake
        self._heaps: dict[Source, list[tuple[float, int, FetchRequest]]] = {}
        self._numbers = count()

    def put(self, request: FetchRequest, due: float) -> None:
        """Queues a request. Requests that are due at the same time keep their order."""
        request.due = due
        heapq.heappush(self._heaps.setdefault(request.source, []), (due, next(self._numbers), request))
        self._wake(request.source)

    def take(self, source: Source, now: float, most: int = sys.maxsize) -> list[FetchRequest]:
        """Takes at most `most` due requests to a source, the longest due first. Drops the cancelled ones."""
        heap = self._heaps.get(source, [])
        due: list[FetchRequest] = []
        while heap and heap[0][0] <= now and len(due) < most:
            request = heapq.heappop(heap)[2]
            if not request.cancelled:
                due.append(request)
        return due

    def next_due(self, source: Source) -> float | None:
        """Returns the time at which the next request to a source is due, or None."""
        heap = self._heaps.get(source, [])
        while heap and heap[0][2].cancelled:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def hurry(self, source: Source, now: float) -> None:
        """Makes all requests to a source due now, for example when it is back. Their delays continue to grow."""
        heap = self._heaps.get(source, [])
        heap[:] = [(min(due, now), number, request) for due, number, request in heap if not request.cancelled]
        heapq.heapify(heap)
        if heap:
            self._wake(source)
