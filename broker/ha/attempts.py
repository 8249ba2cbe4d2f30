"""The attempts of a slave to link to its master. The pause grows after each failure and each short link; hurry() skips
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math

from metamq.errors import ConnectError, MetamqError

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0


class HAState(enum.Enum):
    """The state of the slave's end of the link."""

    READY = "ready"
    HANDSHAKE = "handshake"
    TRANSFER = "transfer"
    SHUTDOWN = "shutdown"


class LinkAttempts:
    """The attempts of one slave. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_FIRST_S
        self._linked_at_s = math.inf
        self._hurried = asyncio.Event()
        self._decided = asyncio.Event()

    def begin(self) -> None:
        """Notes that an attempt begins."""
        self._hurried.clear()

    def linked(self) -> None:
        """Notes that there is a link."""
        self._linked_at_s = asyncio.get_running_loop().time()
        self._decided.set()

    def failed(self, error: MetamqError) -> None:
        """Notes a failed attempt. A ConnectError ends outcome(): no process is at the address."""
        if isinstance(error, ConnectError):
            self._decided.set()

    def hurry(self) -> None:
        """Lets the next attempt begin without a pause."""
        self._hurried.set()

    async def pause(self) -> None:
        """Waits between two attempts."""
        if asyncio.get_running_loop().time() - self._linked_at_s > PAUSE_MAX_S:
            self._pause_s = PAUSE_FIRST_S
        self._linked_at_s = math.inf
        try:
            async with asyncio.timeout(self._pause_s):  # wait_for() of Python 3.11 may lose a cancellation
                await self._hurried.wait()
        except TimeoutError:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def outcome(self, wait_s: float) -> None:
        """Hurries, and waits for a link or a ConnectError, at most `wait_s`."""
        self._decided.clear()
        self.hurry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._decided.wait()
