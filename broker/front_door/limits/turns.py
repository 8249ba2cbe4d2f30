"""Runs many small pieces of work in turns of the loop.

So a message that wakes thousands of readers delays no other client. A turn works for TURN_S at most. If work is
left, the loop has as much time for its connections, among them the readers that ask again at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.002


class Turns:
    """The waiting pieces of work, in their order. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, work: Callable[[], None]) -> None:
        """Does the work in one of the next turns."""
        self._waiting.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        began = now = time.perf_counter()
        try:
            while self._waiting and now < began + TURN_S:
                self._waiting.popleft()()
                now = time.perf_counter()
        finally:  # an error in one piece must not stop the others
            self._is_due = bool(self._waiting)
            if self._is_due:
                asyncio.get_running_loop().call_later(now - began, self._turn)
