"""Durations of fsyncs, for the metrics: a broker waits mostly for the disk, and no other metric shows it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import Sync

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram(NamedTuple):
    """Totals since the start. `counts`: number of fsyncs between each of BOUNDS_S and the bound before it."""

    counts: tuple[int, ...]
    """One more than the bounds: the last counts the fsyncs longer than all of them."""
    sum_s: float


class SyncTimes:
    """Measures every fsync of a broker. They run in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def timed(self, sync: Sync) -> Sync:
        """Wraps `sync` so that it is measured; a failed call counts too."""

        def measured(fd: int) -> None:
            begun = time.perf_counter()
            try:
                sync(fd)
            finally:
                self._add(time.perf_counter() - begun)

        return measured

    def _add(self, took_s: float) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, took_s)] += 1
            self._sum_s += took_s

    def snapshot(self) -> Histogram:
        """The measurements up to now."""
        with self._lock:
            return Histogram(tuple(self._counts), self._sum_s)
