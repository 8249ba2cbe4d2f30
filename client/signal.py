"""Means to wait that take little memory. asyncio.Event and threading.Condition have a queue of waiters each, of 760
bytes, also while nothing waits."""

from __future__ import annotations

import asyncio
import threading


class Signal:
    """An asyncio.Event for one waiting task and one loop."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """True between set() and clear()."""
        return self._is_set

    def set(self) -> None:
        """Ends the wait."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Makes the next wait() wait."""
        self._is_set = False

    async def wait(self) -> None:
        """Waits for set()."""
        if self._is_set:
            return
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:  # otherwise another task waits since this one was cancelled
                self._waiter = None


class LateCondition:
    """A threading.Condition that is made by the first wait. The caller holds the lock."""

    __slots__ = ("_condition", "_lock")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._condition: threading.Condition | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for notify_all(), without the lock. Returns False after the time-out."""
        if self._condition is None:
            self._condition = threading.Condition(self._lock)
        return self._condition.wait(timeout_s)

    def notify_all(self) -> None:
        """Ends the waits."""
        if self._condition is not None:
            self._condition.notify_all()
