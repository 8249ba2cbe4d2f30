"""Limits the memory of unread answers, over all connections.

Bytes that a client does not read stay in the write buffer of its connection. Each connection has a bound: while its
buffer is above the high-water mark, the broker reads no logs for it. Thousands of connections have no common bound. So
they share one budget: the bytes in buffers above their marks. An answer to a GET fits into the rest of the budget, but
has at least one batch. So a client that reads is served, however many others do not read.

One batch for each of thousands of connections, and the buffers below their marks, can still be too much. So the memory
of all unread answers has a ceiling. Above it the broker closes the connections that have read nothing for the longest
time, until the memory is within the budget again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from metamq.wire.frames import Buffer


ABOVE_BYTES_LEAST = 64 * 1024 * 1024
"""The least distance from the budget to the ceiling, in bytes: some of the largest batches must fit in between."""


TLS_PIECE_BYTES = 64 * 1024
"""Bytes that are given to a TLS connection at a time. With pieces of this size its buffer can be counted."""


def write_in_pieces(transport: asyncio.Transport, buffers: list[Buffer]) -> None:
    """Writes to a TLS connection. uvloop encrypts data at once, and then counts it as written."""
    for buffer in buffers:
        view = memoryview(buffer)
        for at in range(0, len(view), TLS_PIECE_BYTES):
            transport.write(view[at : at + TLS_PIECE_BYTES])


class AnswerHolder(Protocol):
    """A connection with unread answers."""

    def count_unread(self) -> int:
        """Counts the unread bytes again, and returns their number."""
        ...

    def give_up(self) -> None:
        """Closes the connection."""


class AnswerMemory:
    """The budget. Used by the broker's loop only; the figures may be read by any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stalled = 0
        """The number of connections that were closed because they made no progress."""
        self.held_bytes = 0
        """The memory of all unread answers, above and below the marks, by the last count of each connection."""
        self._held: dict[AnswerHolder, int] = {}
        """The share of each connection. The first connection has read nothing for the longest time."""

    @property
    def ceiling_bytes(self) -> int:
        """The limit on the memory of unread answers."""
        return self.limit_bytes + max(self.limit_bytes, ABOVE_BYTES_LEAST)

    @property
    def is_scarce(self) -> bool:
        """True if the budget is used up."""
        return self.used_bytes >= self.limit_bytes

    def available_bytes(self, wanted: int) -> int:
        """Returns how many of the wanted bytes an answer may have; 1 allows one batch."""
        return max(min(wanted, self.limit_bytes - self.used_bytes), 1)

    def changed(self, before: int, after: int) -> None:
        """Counts a new size of a connection's buffer."""
        self.used_bytes += after - before

    def holds(self, holder: AnswerHolder, held_bytes: int, *, has_read: bool) -> None:
        """Notes a connection's share. `has_read`: its client has read something since the last count."""
        if has_read or not held_bytes:
            self.held_bytes -= self._held.pop(holder, 0)
        if held_bytes:
            self.held_bytes += held_bytes - self._held.get(holder, 0)
            self._held[holder] = held_bytes

    def keep_below_ceiling(self, writer: AnswerHolder) -> None:
        """Closes connections if the memory is above the ceiling, but not `writer`, which has just got an answer."""
        if self.held_bytes <= self.ceiling_bytes:
            return
        for holder in list(self._held):
            holder.count_unread()  # the last count may be old, and clients that read must stay
        if self.held_bytes <= self.ceiling_bytes:
            return
        for holder in list(self._held):
            if self.held_bytes <= self.limit_bytes:
                return
            if holder is not writer:
                holder.give_up()


class UnreadAnswers:
    """The unread bytes of one connection, as the memory of all answers counts them."""

    def __init__(self, memory: AnswerMemory, holder: AnswerHolder, now: float) -> None:
        self.written_bytes = 0
        self.read_at = now
        """The last time at which reads() was True."""
        self._seen_bytes = 0
        """Bytes that the client had read at the last call of reads()."""
        self._memory = memory
        self._holder = holder
        self._counted_bytes = 0
        """Bytes that the budget counts for this connection."""
        self._has_unread = False
        """True if bytes were unread at the last count."""
        self._read_bytes = 0
        """Bytes that the client had read at the last count."""
        self._answer_bytes = 0
        """The size of the last answer."""
        self._empty_at_bytes = 0
        """Bytes written at the last count at which all of them were read."""

    def reads(self, now: float) -> bool:
        """True if the client has read something since the last call, or has nothing to read."""
        reads = self._read_bytes > self._seen_bytes or self._read_bytes == self.written_bytes
        if reads:
            self.read_at = now
        self._seen_bytes = self._read_bytes
        return reads

    def wrote(self, size: int) -> None:
        """Notes an answer."""
        self._answer_bytes = size
        self.written_bytes += size

    def count(self, unread_bytes: int, *, is_above_mark: bool, is_held: bool) -> None:
        """Passes the number of unread bytes on.

        The budget counts bytes in buffers above the mark. The ceiling counts all answers with unread bytes, of
        connections that are `held`.
        """
        if not unread_bytes and not self._has_unread:  # the usual case
            self._empty_at_bytes = self._read_bytes = self.written_bytes
            return
        self._has_unread = unread_bytes > 0
        counted_bytes = unread_bytes if is_above_mark else 0
        self._memory.changed(self._counted_bytes, counted_bytes)
        self._counted_bytes = counted_bytes
        read_bytes = self.written_bytes - unread_bytes
        if not unread_bytes:
            self._empty_at_bytes = self.written_bytes
        # An answer stays in memory whole until its last byte is sent.
        held_bytes = min(unread_bytes + self._answer_bytes, self.written_bytes - self._empty_at_bytes)
        self._memory.holds(self._holder, held_bytes if is_held else 0, has_read=read_bytes > self._read_bytes)
        self._read_bytes = read_bytes
