"""A value in ZooKeeper that is read again only when it may have changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Watched(Generic[T]):
    """The result of `read`, read again after its watch has fired or `forget` was called.

    `read` receives the watch to set, or None if the previous watch is still set. `changed` is called when the watch
    fires. Not for concurrent use: one task at a time.
    """

    def __init__(self, read: Callable[[Callable[[], None] | None], Awaitable[T]], changed: Callable[[], None]) -> None:
        self._read = read
        self._changed = changed
        self._armed = False
        self._fresh = False
        self._value: T

    async def get(self) -> T:
        """Returns the value. Raises the errors of `read`."""
        if not self._fresh:
            # One watch at a time: ZooKeeper would call each of them. The watch may fire before the answer is here.
            was_armed = self._armed
            self._fresh = self._armed = True
            try:
                self._value = await self._read(None if was_armed else self._fired)
            except BaseException:
                self._fresh, self._armed = False, was_armed and self._armed
                raise
        return self._value

    def forget(self) -> None:
        """Makes the next `get` read again, changed or not."""
        self._fresh = False

    def _fired(self) -> None:
        self._fresh = self._armed = False
        self._changed()
