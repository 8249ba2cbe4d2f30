"""When a slave tries to link up with its master: pauses that grow while it fails, unless somebody is in a hurry."""

from __future__ import annotations

import asyncio
import contextlib
import enum

from metamq.errors import ConnectError, MetamqError

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0


class HAState(enum.Enum):
    """Where the slave's end of the link is in its life."""

    READY = "ready"
    HANDSHAKE = "handshake"
    TRANSFER = "transfer"
    SHUTDOWN = "shutdown"


class LinkAttempts:
    """The attempts of one slave. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_FIRST_S
        self._hurried = asyncio.Event()
        self._decided = asyncio.Event()

    def begin(self) -> None:
        """One begins."""
        self._hurried.clear()

    def linked(self) -> None:
        """There is a link."""
        self._pause_s = PAUSE_FIRST_S
        self._decided.set()

    def failed(self, error: MetamqError) -> None:
        """There is none; perhaps since nobody is there."""
        if isinstance(error, ConnectError):
            self._decided.set()

    def hurry(self) -> None:
        """The next one begins without a pause."""
        self._hurried.set()

    async def pause(self) -> None:
        """Between two of them."""
        try:
            async with asyncio.timeout(self._pause_s):  # wait_for() of Python 3.11 may lose a cancellation
                await self._hurried.wait()
        except TimeoutError:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def outcome(self, wait_s: float) -> None:
        """Hurries, and returns as soon as there is a link or nobody to link with; after this time in any case."""
        self._decided.clear()
        self.hurry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._decided.wait()
