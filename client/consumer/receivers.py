"""Handlers receive batches from the inbox and release them: threads wait for a batch, tasks of the loop await it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

from metamq.client import telemetry
from metamq.client.consumer.loop_end import LoopEnd, LoopStep
from metamq.client.signal import Signal

if TYPE_CHECKING:
    from metamq.client.background import BackgroundLoop
    from metamq.client.consumer.consumer_core import ConsumerCore
    from metamq.client.fetch.commits import OffsetCommits
    from metamq.client.fetch.inbox import Inbox, InFlightBatch, OpenWindow
    from metamq.client.handling.handler_figures import HandlerFigures


DUE_S_MIN = 0.001
"""The least seconds to wait for a batch that is due: 0 would ask for the end of the data."""


class Wait:
    """The wait for one batch: the time until the next check, and the time to ask for the end of the data."""

    def __init__(self, end: LoopEnd, idle_timeout_s: float | None, *, confirms: bool = True) -> None:
        self._end = end
        self._idle_timeout_s = idle_timeout_s
        self._confirms = confirms
        self._idle_since = time.monotonic()
        self.is_over = False
        """True if no further batch will come."""

    def wait_s(self, due_at: float | None = None) -> float | None:
        """Returns the seconds until the next check (None: no limit; 0: ask for the end). Raises a lasting obstacle's
        error.

        `due_at`: the monotonic time at which a batch, which waits for more messages, is due. It ends the idle time.
        """
        if due_at is not None:
            self._idle_since, self.is_over = time.monotonic(), False
            return max(due_at - self._idle_since, DUE_S_MIN)
        if self._idle_timeout_s is None or self.is_over:
            return None
        if not self._confirms:
            self._end.check_patience()
            wait_s = max(self._idle_since + self._idle_timeout_s - time.monotonic(), 0.0)
            self.is_over = not wait_s
            return wait_s
        decision = self._end.look(self._idle_timeout_s, self._idle_since)
        self._idle_since = decision.idle_since
        return 0.0 if decision.step is LoopStep.ASK else decision.wait_s


class PollWait(Wait):
    """The wait of poll(): it ends after so many seconds, whatever the state of the cluster is."""

    def __init__(self, timeout_s: float | None) -> None:
        self.is_over = False
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    def ends_after(self, batches: int) -> bool:
        """Returns True if the time is over after so many batches, in which the filter found nothing."""
        return batches > 0 and self.wait_s() is not None and self.is_over

    def wait_s(self, due_at: float | None = None) -> float | None:
        """Returns the seconds that are left, or None without a limit."""
        left_s = None if self._ends_at is None else self._ends_at - time.monotonic()
        self.is_over = left_s is not None and left_s <= 0
        return left_s


@dataclass(eq=False)
class ThreadReceiver:
    """The receiver for any thread, outside of the core's loop.

    `idle_timeout_s`: seconds to wait for a batch; None waits without limit. `confirms`: True if the idle time ends a
    loop only at the end of the data. With False, the idle time ends it in any case.
    """

    core: ConsumerCore
    background: BackgroundLoop
    idle_timeout_s: float | None
    _: KW_ONLY
    confirms: bool = True

    def new_wait(self) -> Wait:
        """Returns a wait that begins now."""
        return Wait(self.core.end, self.idle_timeout_s, confirms=self.confirms)

    def take(
        self,
        stop: threading.Event | None = None,
        *,
        whole: bool = False,
        max_messages: int = 0,
        within_s: float = 0.0,
        wait: Wait | None = None,
    ) -> InFlightBatch | None:
        """Waits for a batch. Returns None if the inbox is stopped or idle, or if `stop` is set and poke() is called."""
        taken: list[InFlightBatch] = []
        take = partial(self.core.inbox.take, whole=whole, taken=taken, max_messages=max_messages, within_s=within_s)
        try:
            in_flight = self._take(stop, take, wait)
            if in_flight is not None and (reports := telemetry.current) is not None:
                in_flight.processing = reports.taken(in_flight.batch, self.group)
            return in_flight
        except BaseException:  # a Ctrl-C, perhaps after the batch was taken: the caller does not have the batch
            for in_flight in taken:
                self.release(in_flight, last_done=False)
            raise

    def take_window(self, stop: threading.Event, open_window: OpenWindow) -> InFlightBatch | None:
        """Waits for a batch like take(), and adds it to the window of its partition. A Ctrl-C must not end the wait."""
        return self._take(stop, partial(self.core.inbox.take_window, open_window))

    def _take(
        self, stop: threading.Event | None, take: Callable[[], InFlightBatch | None], wait: Wait | None = None
    ) -> InFlightBatch | None:
        inbox = self.core.inbox
        while True:
            with inbox.lock:
                if inbox.stopped or (stop is not None and stop.is_set()):
                    return None
                in_flight = take()
                if in_flight is not None:
                    return in_flight
                wait = wait or self.new_wait()
                wait_s = wait.wait_s(inbox.due_at)
                if wait.is_over:
                    return None
                if wait_s is None or wait_s > 0:
                    inbox.filled.wait(wait_s)
                    continue
            wait.is_over = self.background.run(self.core.end.confirm())

    def release(self, in_flight: InFlightBatch, *, last_done: bool) -> None:
        """Releases a batch that a handler has finished. `last_done`: True if the last delivered message is done."""
        if self.core.inbox.finish(in_flight, last_done=last_done):
            self.background.call_soon(self.core.refetch, in_flight.state)
        self.consumed()

    def consumed(self) -> None:
        """Continues the fetches that waited for memory."""
        if self.core.has_stalled():
            self.background.call_soon(self.core.consumed)

    def poke(self) -> None:
        """Makes the waiting threads check their stop events."""
        self.core.inbox.poke()

    @property
    def inbox(self) -> Inbox:
        """The consumer's inbox."""
        return self.core.inbox

    @property
    def commits(self) -> OffsetCommits:
        """The consumer's commits."""
        return self.core.commits

    @property
    def handlers(self) -> HandlerFigures:
        """The figures of the consumer's handlers."""
        return self.core.handlers

    @property
    def group(self) -> str | None:
        """The consumer's group."""
        return self.core.plan.group

    @property
    def closed(self) -> bool:
        """True if no further batch will come."""
        return self.core.inbox.stopped


class TaskReceiver:
    """The receiver for tasks of the core's loop."""

    def __init__(self, core: ConsumerCore, idle_timeout_s: float | None) -> None:
        self._core = core
        self._idle_timeout_s = idle_timeout_s
        self._filled = Signal()
        core.inbox.notify = self._filled.set

    def new_wait(self) -> Wait:
        """Returns a wait that begins now."""
        return Wait(self._core.end, self._idle_timeout_s)

    async def take(
        self, *, whole: bool = False, max_messages: int = 0, within_s: float = 0.0, wait: Wait | None = None
    ) -> InFlightBatch | None:
        """Waits for a batch. Returns None if the inbox was stopped or idle. A cancelled call has taken none; a further
        one with the same `wait` continues to count its idle time."""
        take = partial(self._core.inbox.take, whole=whole, max_messages=max_messages, within_s=within_s)
        in_flight = await self._take(take, wait)
        if in_flight is not None and (reports := telemetry.current) is not None:
            in_flight.processing = reports.taken(in_flight.batch, self.group)
        return in_flight

    async def take_window(self, open_window: OpenWindow) -> InFlightBatch | None:
        """Waits for a batch like take(), and adds it to the window of its partition."""
        return await self._take(partial(self._core.inbox.take_window, open_window))

    async def _take(self, take: Callable[[], InFlightBatch | None], wait: Wait | None = None) -> InFlightBatch | None:
        inbox = self._core.inbox
        while not inbox.stopped:
            self._filled.clear()
            with inbox.lock:
                in_flight = take()
            if in_flight is not None:
                return in_flight
            wait = wait or self.new_wait()
            wait_s = wait.wait_s(inbox.due_at)
            if wait.is_over:
                return None
            if wait_s is None or wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):  # wait_for() of Python 3.11 may lose a cancellation
                        await self._filled.wait()
            else:
                wait.is_over = await self._core.end.confirm()
        return None

    def release(self, in_flight: InFlightBatch, *, last_done: bool) -> None:
        """Releases a batch that a handler has finished. `last_done`: True if the last delivered message is done."""
        if self._core.inbox.finish(in_flight, last_done=last_done):
            self._core.refetch(in_flight.state)
        self.consumed()

    def consumed(self) -> None:
        """Continues the fetches that waited for memory."""
        self._core.consumed()

    @property
    def inbox(self) -> Inbox:
        """The consumer's inbox."""
        return self._core.inbox

    @property
    def commits(self) -> OffsetCommits:
        """The consumer's commits."""
        return self._core.commits

    @property
    def handlers(self) -> HandlerFigures:
        """The figures of the consumer's handlers."""
        return self._core.handlers

    @property
    def group(self) -> str | None:
        """The consumer's group."""
        return self._core.plan.group

    @property
    def closed(self) -> bool:
        """True if no further batch will come."""
        return self._core.inbox.stopped
