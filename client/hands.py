"""How handlers get batches out of the inbox and let go of them: threads wait for one, tasks of the loop await one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from metamq.client import outages
from metamq.client.background import BackgroundLoop
from metamq.client.consumer_core import ConsumerCore
from metamq.client.inbox import Hand

START_GRACE_S = 5.0
"""How long a consumer may take to join its group and begin to fetch before that counts as idle."""


def left_s(idle_timeout_s: float | None, began_at: float, core: ConsumerCore) -> float | None:
    """How long to wait yet for a batch that was asked for at `began_at`; None: for ever.

    Before the first fetch nothing can come: a consumer that is slow to join is not idle. Nor is one that cannot fetch
    some partition; when that lasts it raises what keeps it from it.
    """
    if idle_timeout_s is None:
        return None
    now, outage_began_at = time.monotonic(), core.outages.began_at()
    if outage_began_at is not None:
        wait_s = max(began_at + idle_timeout_s, outage_began_at + outages.PATIENCE_S) - now
        if wait_s <= 0:
            raise core.outages.error()
        return wait_s
    if core.fetching_since is None:
        return began_at + max(idle_timeout_s, START_GRACE_S) - now
    return max(began_at, core.fetching_since) + idle_timeout_s - now


class ThreadHands:
    """For any thread, beside the core's loop. `idle_timeout_s`: how long to wait for a batch, None for ever."""

    def __init__(self, core: ConsumerCore, background: BackgroundLoop, idle_timeout_s: float | None) -> None:
        self._core = core
        self._background = background
        self._idle_timeout_s = idle_timeout_s

    def take(self, stop: threading.Event | None = None, *, whole: bool = False) -> Hand | None:
        """Waits for a batch; None when it was closed or idle, or when `stop` is set and poke() was called."""
        taken: list[Hand] = []
        try:
            return self._take(stop, whole, taken)
        except BaseException:  # a Ctrl-C, perhaps after it was taken: the caller does not have it
            for hand in taken:
                self.release(hand, in_hand=False)
            raise

    def _take(self, stop: threading.Event | None, whole: bool, taken: list[Hand]) -> Hand | None:
        inbox = self._core.inbox
        began_at = time.monotonic()
        with inbox.lock:
            while not inbox.closed and not (stop is not None and stop.is_set()):
                hand = inbox.take(whole=whole, taken=taken)
                if hand is not None:
                    return hand
                wait_s = left_s(self._idle_timeout_s, began_at, self._core)
                if wait_s is not None and wait_s <= 0:
                    return None
                inbox.filled.wait(wait_s)
        return None

    def release(self, hand: Hand, *, in_hand: bool) -> None:
        """A handler has finished a batch; `in_hand`: the last message it was given is done."""
        if self._core.inbox.finish(hand, in_hand=in_hand):
            self._background.call_soon(self._core.refetch, hand.state)
        if self._core.wants_room():
            self._background.call_soon(self._core.consumed)

    def poke(self) -> None:
        """Lets those who wait look at their stop events."""
        self._core.inbox.poke()

    @property
    def closed(self) -> bool:
        """Whether nothing is to come any more."""
        return self._core.inbox.closed


class TaskHands:
    """The same for tasks of the core's loop."""

    def __init__(self, core: ConsumerCore, idle_timeout_s: float | None) -> None:
        self._core = core
        self._idle_timeout_s = idle_timeout_s
        self._filled = asyncio.Event()
        core.inbox.notify = self._filled.set

    async def take(self, *, whole: bool = False) -> Hand | None:
        """Waits for a batch; None when it was closed or idle."""
        inbox = self._core.inbox
        began_at = time.monotonic()
        while not inbox.closed:
            self._filled.clear()
            with inbox.lock:
                hand = inbox.take(whole=whole)
            if hand is not None:
                return hand
            wait_s = left_s(self._idle_timeout_s, began_at, self._core)
            if wait_s is not None and wait_s <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # wait_for() of Python 3.11 may lose a cancellation
                    await self._filled.wait()
        return None

    def release(self, hand: Hand, *, in_hand: bool) -> None:
        """A handler has finished a batch; `in_hand`: the last message it was given is done."""
        if self._core.inbox.finish(hand, in_hand=in_hand):
            self._core.refetch(hand.state)
        self._core.consumed()

    @property
    def closed(self) -> bool:
        """Whether nothing is to come any more."""
        return self._core.inbox.closed
