"""The memory of answers that nobody reads, over all connections.

What a client does not read stays in its connection's write buffer. One connection is bounded by itself: while its
buffer is above the mark nothing more is read for it from the logs. Thousands are not. So all share one budget: the
bytes in the buffers above their marks. An answer to a GET is as large as it may be and as the budget has room for, one
batch at least: so a reader that reads is served, however many others do not.

One batch for each of thousands, and buffers below their marks, are still too much. So the memory of all unread answers
has a ceiling. Above it the connections that have read nothing for longest are closed, until the budget is enough again.
"""

from __future__ import annotations

from typing import Protocol

ABOVE_BYTES_LEAST = 64 * 1024 * 1024
"""The ceiling is at least so much above the budget: some of the largest batches have to fit in between."""


class Holder(Protocol):
    """A connection whose client has not read all answers."""

    def count_unread(self) -> int:
        """Counts its unread bytes, and passes their memory to AnswerMemory.holds(). Returns the bytes."""

    def give_up(self) -> None:
        """Closes the connection. It holds nothing from now on."""


class AnswerMemory:
    """The budget. Used by the broker's loop only; the figures may be read by any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stalled = 0
        """Connections that were closed because they did not go on."""
        self.held_bytes = 0
        """The memory of all unread answers, also below the marks; each connection's as of when it was last counted."""
        self._held: dict[Holder, int] = {}
        """The connections that hold them, the one that has read nothing for longest first."""

    @property
    def ceiling_bytes(self) -> int:
        """No more than this stays unread."""
        return self.limit_bytes + max(self.limit_bytes, ABOVE_BYTES_LEAST)

    @property
    def is_scarce(self) -> bool:
        """Whether all of it is used."""
        return self.used_bytes >= self.limit_bytes

    def room(self, wanted: int) -> int:
        """How many of the wanted bytes a reader may be given; 1 is one batch."""
        return max(min(wanted, self.limit_bytes - self.used_bytes), 1)

    def changed(self, before: int, after: int) -> None:
        """A connection's buffer has another size."""
        self.used_bytes += after - before

    def holds(self, holder: Holder, held_bytes: int, *, has_read: bool) -> None:
        """A connection was counted; `has_read` if its client has read anything since it was counted before."""
        if has_read or not held_bytes:
            self.held_bytes -= self._held.pop(holder, 0)
        if held_bytes:
            self.held_bytes += held_bytes - self._held.get(holder, 0)
            self._held[holder] = held_bytes

    def keep_below_ceiling(self, writer: Holder) -> None:
        """Closes connections if there is too much, but not `writer`, which has just got an answer."""
        if self.held_bytes <= self.ceiling_bytes:
            return
        for holder in list(self._held):
            holder.count_unread()  # the last count may be old: clients that read are not to be closed
        if self.held_bytes <= self.ceiling_bytes:
            return
        for holder in list(self._held):
            if self.held_bytes <= self.limit_bytes:
                return
            if holder is not writer:
                holder.give_up()
