"""FetchRequestQueue: which partition is to be asked for data next, and when.

One FetchRequest a partition goes round: queue → runner → broker → consumer → queue. So a partition has at most one
fetch under way, and its messages stay in order. The queue is a heap by due time for each source, since a runner asks
one replica for all that is due there in one request. Time comes in as an argument; nothing here waits.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from itertools import count

from metamq.client.net.cluster import Source
from metamq.errors import CorruptData, MetamqError
from metamq.zk.partitions import TopicPartition

DELAY_FIRST_S = 0.05
DELAY_MAX_S = 5.0
DAMAGED_FETCHES_MAX = 5
"""So often the same bytes come damaged before that is raised."""


class FetchRequest:
    """The next fetch of one partition. Replaced by a new one when the partition is rewound."""

    __slots__ = (
        "cancelled",
        "damaged_fetches",
        "delay_s",
        "due",
        "epoch",
        "error",
        "index",
        "offset",
        "opened",
        "source",
        "topic_id",
        "tp",
    )

    def __init__(
        self, tp: TopicPartition, topic_id: str, source: Source, index: int, offset: int, epoch: int = -1
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        self.source = source
        self.index = index
        self.offset = offset
        self.epoch = epoch
        """Of the message before `offset`; -1: not known."""
        self.due = 0.0
        self.delay_s = 0.0
        """The delay after the last error, 0 after data."""
        self.damaged_fetches = 0
        """How many answers in a row were damaged at `offset`."""
        self.error: MetamqError | None = None
        """What is to be raised once all messages before `offset` are done."""
        self.cancelled = False
        """Nobody wants the answer any more."""
        self.opened: tuple[object, int] | None = None
        """The fetch session that knows it, and its handle there."""

    def came_damaged(self, damage: CorruptData) -> CorruptData | None:
        """The bytes at `offset` came damaged once more. What is to be raised, once that has come often enough."""
        self.damaged_fetches += 1
        if self.damaged_fetches < DAMAGED_FETCHES_MAX:
            return None
        return CorruptData(
            f"{self.tp} at offset {self.offset}",
            damage.reason,
            hint=f"`metamq ha status` says what makes the log of broker {self.source.broker_id} sound again. Without "
            "another replica, seek to a later offset to go on.",
        )

    def grow_delay(self) -> float:
        """The delay after one more error: doubled, capped, and spread so that consumers do not come back as one."""
        self.delay_s = min(max(self.delay_s * 2, DELAY_FIRST_S), DELAY_MAX_S)
        return self.delay_s * random.uniform(0.8, 1.2)


class FetchRequestQueue:
    """Requests by source and due time. `wake(source)` is called when one is put in that may be due first."""

    def __init__(self, wake: Callable[[Source], None]) -> None:
        self._wake = wake
        self._heaps: dict[Source, list[tuple[float, int, FetchRequest]]] = {}
        self._numbers = count()

    def put(self, request: FetchRequest, due: float) -> None:
        """Queues a request; those due at the same time keep their order."""
        request.due = due
        heapq.heappush(self._heaps.setdefault(request.source, []), (due, next(self._numbers), request))
        self._wake(request.source)

    def take(self, source: Source, now: float, most: int = sys.maxsize) -> list[FetchRequest]:
        """The requests to a source that are due, `most` at most, the longest due first; the cancelled are dropped."""
        heap = self._heaps.get(source, [])
        due: list[FetchRequest] = []
        while heap and heap[0][0] <= now and len(due) < most:
            request = heapq.heappop(heap)[2]
            if not request.cancelled:
                due.append(request)
        return due

    def next_due(self, source: Source) -> float | None:
        """When the next request to a source is due, None when there is none."""
        heap = self._heaps.get(source, [])
        while heap and heap[0][2].cancelled:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def hurry(self, source: Source, now: float) -> None:
        """Everything queued for a source is due now, as when it is back; delays go on growing from where they are."""
        heap = self._heaps.get(source, [])
        heap[:] = [(min(due, now), number, request) for due, number, request in heap if not request.cancelled]
        heapq.heapify(heap)
        if heap:
            self._wake(source)
