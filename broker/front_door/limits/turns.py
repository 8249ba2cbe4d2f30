"""Runs many small pieces of work in turns of the loop.

So a message that wakes thousands of readers delays no other client. A turn works for TURN_S at most. Then the loop
looks at its connections, and the next turn follows.
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
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        until = time.perf_counter() + TURN_S
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.perf_counter() >= until:
                    break
        finally:  # an error in one piece must not stop the others
            self._go_on()
