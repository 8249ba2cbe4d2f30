"""A value in ZooKeeper that is read again only when it may have changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Watched(Generic[T]):
    """What `read` gives, read again when its watch has fired or `forget` was called.

    `read` is given what to leave as a watch, None when the one left before still stands. `changed` is called when the
    watch fires. For one task at a time.
    """

    def __init__(self, read: Callable[[Callable[[], None] | None], Awaitable[T]], changed: Callable[[], None]) -> None:
        self._read = read
        self._changed = changed
        self._armed = False
        self._fresh = False
        self._value: T

    async def get(self) -> T:
        """The value. Raises what `read` raises."""
        if not self._fresh:
            # One watch at a time: ZooKeeper would call each of them. It may fire before the answer is here.
            was_armed = self._armed
            self._fresh = self._armed = True
            try:
                self._value = await self._read(None if was_armed else self._fired)
            except BaseException:
                self._fresh, self._armed = False, was_armed and self._armed
                raise
        return self._value

    def forget(self) -> None:
        """Read again at the next `get`, changed or not."""
        self._fresh = False

    def _fired(self) -> None:
        self._fresh = self._armed = False
        self._changed()
