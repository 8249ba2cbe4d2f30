"""Work of requests that may take long, done in slices: the loop is not held up, whatever is asked for.

Work is a generator that yields between two bits of it, each of a few milliseconds at most. Connections take turns, so
that who asks for much waits for itself; each one's work is done in the order in which it came. A slice ends after
SLICE_S, and then the loop has as long for all else: work takes half of the loop's time at most.

What begins while nothing else is under way gets its first slice at once: most is done then. After a slice that took
longer, since a bit of work did, what begins waits, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import Protocol

SLICE_S = 0.005


class SliceOwner(Protocol):
    """A connection."""

    def has_less_to_do(self) -> None:
        """One of its requests is done."""


class SlicedWork:
    """One request's. `used_s` is the loop's time that it has taken so far."""

    __slots__ = ("steps", "used_s")

    def __init__(self) -> None:
        self.used_s = 0.0
        self.steps: Generator[None, None, None] = _nothing()


class Slices:
    """Does the work of all connections. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._queues: dict[SliceOwner, deque[SlicedWork]] = {}
        """By connection; the first one's turn is next."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_slicing = False

    @property
    def waiting(self) -> int:
        """How many requests are under way."""
        return sum(map(len, self._queues.values()))

    def of(self, owner: SliceOwner) -> int:
        """How many requests of one connection are under way."""
        return len(self._queues.get(owner, ()))

    def add(self, owner: SliceOwner, work: SlicedWork) -> None:
        """Does it, now or later, until its steps are at an end: they raise nothing."""
        self._queues.setdefault(owner, deque()).append(work)
        if self._timer is None and not self._is_slicing:
            self._slice()

    def drop(self, owner: SliceOwner) -> None:
        """Gives up what a connection asked for: it is gone."""
        for work in self._queues.pop(owner, ()):
            work.steps.close()

    def close(self) -> None:
        """Gives up everything."""
        for owner in list(self._queues):
            self.drop(owner)
        if self._timer is not None:
            self._timer.cancel()

    def _slice(self) -> None:
        self._timer = None
        self._is_slicing = True
        worked_s = 0.0
        until = time.perf_counter() + SLICE_S
        try:
            while self._queues and time.perf_counter() < until:
                owner = next(iter(self._queues))
                queue = self._queues[owner]
                used_s = queue[0].used_s
                is_done = _is_done(queue[0], until)
                worked_s += queue[0].used_s - used_s
                if self._queues.pop(owner, None) is None:  # it was dropped
                    continue
                if is_done:
                    queue.popleft()
                if queue:
                    self._queues[owner] = queue  # at the back
                if is_done:
                    owner.has_less_to_do()
        finally:  # an error in one request must not stop the others
            self._is_slicing = False
            if self._queues or worked_s > SLICE_S:
                self._timer = asyncio.get_running_loop().call_later(worked_s, self._slice)


def _is_done(work: SlicedWork, until: float) -> bool:
    now = time.perf_counter()
    while now < until:
        began = now
        try:
            next(work.steps)
        except StopIteration:
            return True
        finally:
            now = time.perf_counter()
            work.used_s += now - began
    return False


def _nothing() -> Generator[None, None, None]:
    yield from ()
