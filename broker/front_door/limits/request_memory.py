"""Limits the memory of unanswered requests, over all connections.

Each connection has a bound, but thousands of connections have no common bound. So all share one budget:

- A large frame (a frame with memory of its own) is read only when its *whole* size is reserved. So each frame that is
  begun can be finished, and connections with half a frame each cannot wait for one another. If the budget has too few
  bytes left, the connection waits in a queue, and its client's bytes stay in the kernel.
- One owner, a principal or an address, has at most half of the budget for large frames; a frame above that size waits
  for the budget only. Each owner has a queue of its own, and the queues take turns. So other owners are
  served while one fills its share.
- Small frames are read before their size is known, so they only count. While the budget is used up, or a connection is
  in a queue because of it, a connection with an unanswered request is not read. So small frames do not wait for large
  ones, and a large frame is not overtaken without end. Small frames exceed the budget by one shared buffer a
  connection, at most.
- The bytes of a frame are free again when its request is answered, or its connection is closed.

Reserved memory always comes back: the broker closes a connection that has memory and makes no progress
(BrokerProtocol.sweep).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from metamq.wire.buffer_pool import BufferPool

KEPT_BYTES = 32 * 1024 * 1024
"""Bytes of large frames that are kept for reuse. A part of them may be idle, beside the reserved bytes."""


class Reserver(Protocol):
    """A connection that reserves memory."""

    @property
    def owner(self) -> str:
        """The principal of its client, or the address of a client that has none."""
        ...

    def granted(self) -> None:
        """Continues with its frame: the memory is reserved."""


class RequestMemory:
    """The budget. Used by the broker's loop only; any thread may read the figures."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: at least the size of the largest frame."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.rooms = BufferPool(KEPT_BYTES)
        self._used_by: Counter[str] = Counter()
        self._queues: dict[str, dict[Reserver, int]] = {}
        """By owner. The first owner has the next turn."""
        self._is_short = False
        """True if a connection waits for the budget, not for its owner's share."""

    @property
    def waiting(self) -> int:
        """The number of connections in the queues."""
        return sum(map(len, self._queues.values()))

    @property
    def scarce(self) -> bool:
        """True if the budget is used up, or connections wait for it."""
        return self.used_bytes >= self.limit_bytes or self._is_short

    def reserve(self, size: int, connection: Reserver) -> bool:
        """Reserves memory for a frame; returns False if the connection must wait until granted() is called."""
        owner = connection.owner
        may_have = owner not in self._queues and self._has_share(owner, size)
        if may_have and not self._is_short and self.used_bytes + size <= self.limit_bytes:
            self.take(size, owner)
            return True
        self._queues.setdefault(owner, {})[connection] = size
        self._is_short |= may_have
        return False

    def is_queued(self, connection: Reserver) -> bool:
        """True if the connection waits in a queue."""
        return connection in self._queues.get(connection.owner, ())

    def withdraw(self, connection: Reserver) -> None:
        """Takes a connection out of its queue."""
        if self.is_queued(connection):
            self._leave(connection)
            self._grant()

    def take(self, size: int, owner: str) -> None:
        """Counts bytes that are in memory."""
        self.used_bytes += size
        self._used_by[owner] += size

    def release(self, size: int, owner: str) -> None:
        """Frees bytes."""
        self.used_bytes -= size
        self._used_by[owner] -= size
        if not self._used_by[owner]:
            del self._used_by[owner]
        if self._queues:
            self._grant()

    def _has_share(self, owner: str, size: int) -> bool:
        share_bytes = self.limit_bytes // 2
        return size > share_bytes or self._used_by[owner] + size <= share_bytes

    def _leave(self, connection: Reserver) -> int:
        queue = self._queues[connection.owner]
        size = queue.pop(connection)
        if not queue:
            del self._queues[connection.owner]
        return size

    def _grant(self) -> None:
        """Grants what fits, one frame for each owner in turn, up to a frame that waits for the budget."""
        self._is_short = False
        for connection, size in self._next_ones():
            if self.used_bytes + size > self.limit_bytes:
                self._is_short = True
                return
            owner = connection.owner
            self._leave(connection)
            if owner in self._queues:  # its next turn comes after those of the others
                self._queues[owner] = self._queues.pop(owner)
            self.take(size, owner)
            connection.granted()

    def _next_ones(self) -> Iterator[tuple[Reserver, int]]:
        """Yields the first connection of the first owner whose share allows it, while there is one."""
        while True:
            firsts = (next(iter(queue.items())) for queue in self._queues.values())
            found = next((one for one in firsts if self._has_share(one[0].owner, one[1])), None)
            if found is None:
                return
            yield found
