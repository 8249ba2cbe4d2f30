"""Limits the memory of unanswered requests, over all connections.

Each connection has a bound, but thousands of connections have no common bound. So all share one budget:

- A large frame (a frame with memory of its own) is read only when its *whole* size is reserved. So each frame that is
  begun can be finished, and connections with half a frame each cannot wait for one another. If the budget has too few
  bytes left, the connection waits in a queue, and its client's bytes stay in the kernel.
- Small frames are read before their size is known, so they only count. While the budget is used up, or a connection is
  in the queue, a connection with an unanswered request is not read. So small frames do not wait for large ones, and a
  large frame is not overtaken without end. Small frames exceed the budget by one shared buffer a connection, at most.
- The bytes of a frame are free again when its request is answered, or its connection is closed.

Reserved memory always comes back: the broker closes a connection that has memory and makes no progress
(BrokerProtocol.sweep).
"""

from __future__ import annotations

from typing import Protocol

from metamq.wire.buffer_pool import BufferPool

KEPT_BYTES = 32 * 1024 * 1024
"""Bytes of large frames that are kept for reuse. A part of them may be idle, beside the reserved bytes."""


class Reserver(Protocol):
    """A connection that reserves memory."""

    def granted(self) -> None:
        """Continues with its frame: the memory is reserved."""


class RequestMemory:
    """The budget. Used by the broker's loop only; any thread may read the figures."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: at least the size of the largest frame."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.rooms = BufferPool(KEPT_BYTES)
        self._queue: dict[Reserver, int] = {}

    @property
    def waiting(self) -> int:
        """The number of connections in the queue."""
        return len(self._queue)

    @property
    def scarce(self) -> bool:
        """True if the budget is used up, or connections wait for it."""
        return self.used_bytes >= self.limit_bytes or bool(self._queue)

    def reserve(self, size: int, connection: Reserver) -> bool:
        """Reserves memory for a frame; returns False if the connection must wait until granted() is called."""
        if self._queue or self.used_bytes + size > self.limit_bytes:
            self._queue[connection] = size
            return False
        self.used_bytes += size
        return True

    def is_queued(self, connection: Reserver) -> bool:
        """True if the connection waits in the queue."""
        return connection in self._queue

    def withdraw(self, connection: Reserver) -> None:
        """Takes a connection out of the queue."""
        if self._queue.pop(connection, None) is not None:
            self._grant()

    def take(self, size: int) -> None:
        """Counts bytes that are in memory already."""
        self.used_bytes += size

    def release(self, size: int) -> None:
        """Frees bytes."""
        self.used_bytes -= size
        if self._queue:
            self._grant()

    def _grant(self) -> None:
        while self._queue:
            connection, size = next(iter(self._queue.items()))
            if self.used_bytes + size > self.limit_bytes:
                return
            del self._queue[connection]
            self.used_bytes += size
            connection.granted()
