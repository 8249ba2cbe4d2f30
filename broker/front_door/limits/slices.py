"""Runs the work of long requests in slices, so that no request blocks the loop.

Work is a generator that yields between its steps. A step takes a few milliseconds at most. Connections take turns, so a
connection with much work delays only itself. The work of one connection is done in the order of its requests. A slice
ends after SLICE_S; then the loop has the same time for other work. So slices take at most half of its time.

Work may pause until a thread has read something for it. The later work of its connection then waits, too.

Work that begins while no other work waits gets its first slice at once, and is mostly finished by it. If a step made
the last slice longer than SLICE_S, new work waits as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import Protocol

SLICE_S = 0.005


class SliceOwner(Protocol):
    """A connection with work in slices."""

    def has_less_to_do(self) -> None:
        """Continues, because one piece of its work is done."""


class SlicedWork:
    """The work of one request. `used_s` is the loop's time that it has used so far.

    A step that sets `is_paused` is the last one until Slices.resume().
    """

    __slots__ = ("is_paused", "steps", "used_s")

    def __init__(self) -> None:
        self.used_s = 0.0
        self.is_paused = False
        self.steps: Generator[None, None, None] = _nothing()


class Slices:
    """The work of all connections. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._queues: dict[SliceOwner, deque[SlicedWork]] = {}
        """The work by connection. The first connection has the next turn."""
        self._paused: dict[SliceOwner, deque[SlicedWork]] = {}
        """The work of connections whose first piece is paused."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_slicing = False

    @property
    def waiting(self) -> int:
        """The number of unfinished requests."""
        return sum(map(len, (*self._queues.values(), *self._paused.values())))

    def of(self, owner: SliceOwner) -> int:
        """Returns the number of unfinished requests of one connection."""
        if not self._queues and not self._paused:
            return 0
        return len(self._queues.get(owner, ())) + len(self._paused.get(owner, ()))

    def add(self, owner: SliceOwner, work: SlicedWork) -> None:
        """Runs the steps of `work`, now or later, to their end. Steps raise nothing."""
        if owner in self._paused:
            self._paused[owner].append(work)
            return
        self._queues.setdefault(owner, deque()).append(work)
        self._start()

    def resume(self, owner: SliceOwner, work: SlicedWork) -> None:
        """Continues work that was paused; does nothing if it was dropped."""
        queue = self._paused.get(owner)
        if queue and queue[0] is work:
            work.is_paused = False
            self._queues[owner] = self._paused.pop(owner)
            self._start()

    def drop(self, owner: SliceOwner) -> None:
        """Drops the work of a connection that is closed."""
        for queues in (self._queues, self._paused):
            for work in queues.pop(owner, ()):
                work.steps.close()

    def close(self) -> None:
        """Drops all work."""
        for owner in [*self._queues, *self._paused]:
            self.drop(owner)
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is None and not self._is_slicing:
            self._slice()

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
                if self._queues.pop(owner, None) is None:  # the connection was dropped in a step
                    continue
                if is_done:
                    queue.popleft()
                elif queue[0].is_paused:
                    self._paused[owner] = queue
                    continue
                if queue:
                    self._queues[owner] = queue  # at the end of the queue
                if is_done:
                    owner.has_less_to_do()
        finally:  # an error in one request must not stop the others
            self._is_slicing = False
            if self._queues or worked_s > SLICE_S:
                self._timer = asyncio.get_running_loop().call_later(worked_s, self._slice)


def _is_done(work: SlicedWork, until: float) -> bool:
    now = time.perf_counter()
    while now < until and not work.is_paused:
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
