"""Watches: each is called once, in the loop, when the node changes or the connection is lost.

kazoo calls a watch in one of its threads, and passes the answer of the request that left it in another. So the call may
overtake the answer. It is held back until the caller has the answer, and dropped if the answer is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class OneWatch:
    """A watch for repeated reads of the same node: it is left again only after it was called."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._is_left = False

    async def leave(self, read: Callable[[Callable[[], None] | None], Awaitable[T]]) -> T:
        """Returns the result of `read(watch)`."""
        if self._is_left:
            return await read(None)
        self._is_left = True  # before the answer, since the watch may be called first
        try:
            return await read(self._called)
        except BaseException:
            self._is_left = False
            raise

    def _called(self) -> None:
        self._is_left = False
        self._callback()


class Watches:
    """The watches of one session that have not been called yet. Use it in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        in_loop: Callable[[Callable[[], None]], None],
        forget: Callable[[str, Watch], None] = lambda path, watch: None,
    ) -> None:
        """`in_loop` passes a call to the loop from any thread. `forget` makes kazoo drop the watch of a path."""
        self.loop = loop
        self.in_loop = in_loop
        self._forget = forget
        self.waiting: dict[Watch, None] = {}

    def leaving(self, callback: Callable[[], None] | None, path: str = "") -> Leaving:
        """Leaves `callback` as a watch of a path if the block succeeds; drops it if the block fails."""
        return Leaving(Watch(self, callback, path) if callback is not None else None)

    def fire_all(self) -> None:
        """Calls every watch soon: the connection that would have reported changes is gone."""
        for watch in list(self.waiting):
            self.loop.call_soon(watch.fire)

    def leave_kazoo(self) -> None:
        """Makes kazoo drop the watches: it would keep their callbacks as long as its session lives."""
        for watch in self.waiting:
            self._forget(watch.path, watch)


def _nothing() -> None:
    """Instead of a callback."""


class Watch:
    """One watch. kazoo calls the object itself, in its thread."""

    __slots__ = ("_armed", "_callback", "_fired", "_watches", "path")

    def __init__(self, watches: Watches, callback: Callable[[], None], path: str) -> None:
        self._watches = watches
        self._callback = callback
        self.path = path
        self._armed = False
        self._fired = False
        watches.waiting[self] = None

    def __call__(self, _: Any) -> None:
        self._watches.in_loop(self.fire)

    def fire(self) -> None:
        """Calls back, or remembers the call, unless it was already done."""
        self._watches.waiting.pop(self, None)
        if not self._fired:
            self._fired = True
            if self._armed:
                self._callback()

    def arm(self) -> None:
        """Notes that the caller has its answer: from now on the callback may be called."""
        self._armed = True
        if self._fired:
            self._watches.loop.call_soon(self._callback)

    def forget(self) -> None:
        """Notes that the caller got an error instead of an answer: the callback is never called. kazoo may keep the
        watch, but no part of a closed client with it."""
        self._fired = True
        self._callback = _nothing
        self._watches.waiting.pop(self, None)


class Leaving:
    """The block in which a watch is left. `watch` is passed to kazoo."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.watch is None:
            return
        if kind is None:
            self.watch.arm()
        else:
            self.watch.forget()
