"""The memory of requests under way, over all connections: who may read on, and who waits until some are answered.

Every connection is bounded by itself, but thousands of them are not. So all share one budget:

- a large frame (one that needs memory of its own) is read only when its *whole* size has been set aside. Then whatever
  was begun can be finished, and connections that each hold half a frame cannot wait for one another. Who comes when
  there is no room waits in line, unread: what it sends stays in its kernel;
- small frames have been read before anybody can ask. They only count; while the budget is used up, or somebody waits
  in line, a connection is not read while a request of its own is under way. So nobody small waits for the large, and
  nobody large is overtaken for ever. Small frames exceed the budget by one shared buffer a connection, at most;
- a frame's bytes are free again when its request is answered, or its connection is gone.

What is set aside comes back, since a connection that has memory and makes no progress is closed (BrokerProtocol.sweep).
"""

from __future__ import annotations

from typing import Protocol

from metamq.wire.buffer_pool import BufferPool

KEPT_BYTES = 32 * 1024 * 1024
"""Memory of large frames that is used again; a part of it may be idle, beside what is set aside."""


class InLine(Protocol):
    """A connection that waits for its turn."""

    def granted(self) -> None:
        """The memory was set aside."""


class RequestMemory:
    """The budget. Used by the broker's loop only; the figures may be read by any thread."""

    def __init__(self, limit_bytes: int) -> None:
        """At least as much as the largest frame."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.rooms = BufferPool(KEPT_BYTES)
        self._line: dict[InLine, int] = {}

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    @property
    def scarce(self) -> bool:
        """Whether all is used up, or asked for."""
        return self.used_bytes >= self.limit_bytes or bool(self._line)

    def reserve(self, size: int, asker: InLine) -> bool:
        """Sets memory aside for a frame; False when the asker has to wait until it is `granted`."""
        if self._line or self.used_bytes + size > self.limit_bytes:
            self._line[asker] = size
            return False
        self.used_bytes += size
        return True

    def withdraw(self, asker: InLine) -> None:
        """The asker does not wait any more."""
        if self._line.pop(asker, None) is not None:
            self._grant()

    def take(self, size: int) -> None:
        """These bytes are there, asked for or not."""
        self.used_bytes += size

    def release(self, size: int) -> None:
        """These bytes are free again."""
        self.used_bytes -= size
        if self._line:
            self._grant()

    def _grant(self) -> None:
        while self._line:
            asker, size = next(iter(self._line.items()))
            if self.used_bytes + size > self.limit_bytes:
                return
            del self._line[asker]
            self.used_bytes += size
            asker.granted()
