"""How handlers get batches out of the inbox and let go of them: threads wait for one, tasks of the loop await one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from metamq.client.background import BackgroundLoop
from metamq.client.consumer.consumer_core import ConsumerCore
from metamq.client.consumer.loop_end import LoopEnd, LoopStep
from metamq.client.fetch.inbox import Hand


class _Wait:
    """The wait for one batch: how long to wait before the next look, and when to ask whether this is the end."""

    def __init__(self, end: LoopEnd, *, asks: bool = True) -> None:
        self._end = end
        self._asks = asks
        self._idle_since = time.monotonic()
        self.is_over = False
        """Nothing is to come."""

    def wait_s(self, idle_timeout_s: float | None) -> float | None:
        """Seconds until the next look, None: for ever; 0: ask for the end. Raises the error of what lasts too long."""
        if idle_timeout_s is None:
            return None
        if not self._asks:
            self._end.check_patience()
            wait_s = max(self._idle_since + idle_timeout_s - time.monotonic(), 0.0)
            self.is_over = not wait_s
            return wait_s
        decision = self._end.look(idle_timeout_s, self._idle_since)
        self._idle_since = decision.idle_since
        return 0.0 if decision.step is LoopStep.ASK else decision.wait_s


class ThreadHands:
    """For any thread, beside the core's loop. `idle_timeout_s`: how long to wait for a batch, None for ever.

    `asks`: whether the idle time ends a loop only at the end of the data; else it is a pause between two looks.
    """

    def __init__(
        self, core: ConsumerCore, background: BackgroundLoop, idle_timeout_s: float | None, *, asks: bool = True
    ) -> None:
        self._core = core
        self._background = background
        self._idle_timeout_s = idle_timeout_s
        self._asks = asks

    def take(self, stop: threading.Event | None = None, *, whole: bool = False, max_messages: int = 0) -> Hand | None:
        """Waits for a batch; None when it was closed or idle, or when `stop` is set and poke() was called."""
        taken: list[Hand] = []
        try:
            return self._take(stop, whole, max_messages, taken)
        except BaseException:  # a Ctrl-C, perhaps after it was taken: the caller does not have it
            for hand in taken:
                self.release(hand, in_hand=False)
            raise

    def _take(self, stop: threading.Event | None, whole: bool, max_messages: int, taken: list[Hand]) -> Hand | None:
        inbox = self._core.inbox
        wait: _Wait | None = None
        while True:
            with inbox.lock:
                if inbox.closed or (stop is not None and stop.is_set()):
                    return None
                hand = inbox.take(whole=whole, taken=taken, max_messages=max_messages)
                if hand is not None:
                    return hand
                wait = wait or _Wait(self._core.end, asks=self._asks)
                wait_s = None if wait.is_over else wait.wait_s(self._idle_timeout_s)
                if wait.is_over:
                    return None
                if wait_s is None or wait_s > 0:
                    inbox.filled.wait(wait_s)
                    continue
            wait.is_over = self._background.run(self._core.end.confirm())

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

    async def take(self, *, whole: bool = False, max_messages: int = 0) -> Hand | None:
        """Waits for a batch; None when it was closed or idle."""
        inbox = self._core.inbox
        wait: _Wait | None = None
        while not inbox.closed:
            self._filled.clear()
            with inbox.lock:
                hand = inbox.take(whole=whole, max_messages=max_messages)
            if hand is not None:
                return hand
            wait = wait or _Wait(self._core.end)
            if wait.is_over:
                return None
            wait_s = wait.wait_s(self._idle_timeout_s)
            if wait_s is None or wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):  # wait_for() of Python 3.11 may lose a cancellation
                        await self._filled.wait()
            else:
                wait.is_over = await self._core.end.confirm()
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
