"""The readers that wait for data of one partition. Used by the broker's loop only.

One message may wake thousands. So they are woken AT_ONCE in a turn of the loop, and other work comes between. A reader
that leaves meanwhile is not woken; one that comes meanwhile waits for the next data.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

AT_ONCE = 20
"""Readers that are woken in one turn: their answers, and their next requests, take two milliseconds."""


class Reader(Protocol):
    """A waiting reader: the place of a fetch session in this partition."""

    def data_ready(self, added_bytes: int) -> None:
        """Called once when the stable offset has moved or the partition has closed. The wait then ends."""


class Readers:
    """The waiting readers."""

    __slots__ = ("_added_bytes", "_waiting", "_waking")

    def __init__(self) -> None:
        self._waiting: set[Reader] = set()
        self._waking: dict[Reader, None] = {}
        """Readers to wake in the next turns."""
        self._added_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._waking)

    def add(self, reader: Reader) -> None:
        """Lets a reader wait."""
        self._waiting.add(reader)

    def discard(self, reader: Reader) -> None:
        """Ends the wait of a reader without waking it."""
        self._waiting.discard(reader)
        self._waking.pop(reader, None)

    def wake(self, added_bytes: int) -> None:
        """Wakes all, the first ones now."""
        if not self._waiting:
            return
        is_waking = bool(self._waking)
        self._waking.update(dict.fromkeys(self._waiting))
        self._waiting.clear()
        self._added_bytes = added_bytes
        if not is_waking:
            self._wake_some()

    def wake_now(self) -> None:
        """Wakes all now: the partition was closed or cut."""
        readers = [*self._waking, *self._waiting]
        self._waking.clear()
        self._waiting.clear()
        for reader in readers:
            reader.data_ready(0)

    def _wake_some(self) -> None:
        for reader in list(islice(self._waking, AT_ONCE)):
            if reader in self._waking:  # the wake of another one may end its wait
                del self._waking[reader]
                reader.data_ready(self._added_bytes)
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake_some)
