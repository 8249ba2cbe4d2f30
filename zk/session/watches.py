"""Watches: called once each, in the loop, when the node changes or the connection is lost.

kazoo calls a watch in one of its threads, and hands the answer that left the watch over in another. So the call may
overtake the answer: it is kept until the caller has its answer, and forgotten when the answer is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class OneWatch:
    """Who reads the same thing again and again: leaves a watch with it only once the one before has been called."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._is_left = False

    async def leave(self, read: Callable[[Callable[[], None] | None], Awaitable[T]]) -> T:
        """What `read(watch)` reads."""
        if self._is_left:
            return await read(None)
        self._is_left = True  # before the answer: the watch may be called before it is here
        try:
            return await read(self._called)
        except BaseException:
            self._is_left = False
            raise

    def _called(self) -> None:
        self._is_left = False
        self._callback()


class Watches:
    """The watches of one session that have not been called yet. For use in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, in_loop: Callable[[Callable[[], None]], None]) -> None:
        """`in_loop` hands a call over to the loop from any thread."""
        self.loop = loop
        self.in_loop = in_loop
        self.waiting: set[Watch] = set()

    def leaving(self, callback: Callable[[], None] | None) -> Leaving:
        """Leaves `callback` as a watch when the block succeeds, and nothing when it fails."""
        return Leaving(Watch(self, callback) if callback is not None else None)

    def fire_all(self) -> None:
        """Call every watch, soon: the connection that would have told of changes is gone."""
        for watch in list(self.waiting):
            self.loop.call_soon(watch.fire)


class Watch:
    """One watch; kazoo calls the object itself, in its thread."""

    def __init__(self, watches: Watches, callback: Callable[[], None]) -> None:
        self._watches = watches
        self._callback = callback
        self._armed = False
        self._fired = False
        watches.waiting.add(self)

    def __call__(self, _: Any) -> None:
        self._watches.in_loop(self.fire)

    def fire(self) -> None:
        """Call back, or remember to, unless that was done already."""
        self._watches.waiting.discard(self)
        if not self._fired:
            self._fired = True
            if self._armed:
                self._callback()

    def arm(self) -> None:
        """The caller has its answer: from now on the callback may be called."""
        self._armed = True
        if self._fired:
            self._watches.loop.call_soon(self._callback)

    def forget(self) -> None:
        """The caller got an error instead of an answer: never call back."""
        self._fired = True
        self._watches.waiting.discard(self)


class Leaving:
    """The block in which a watch is left; `watch` is what kazoo is given."""

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
