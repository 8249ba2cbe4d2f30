"""The memory of answers that nobody reads, over all connections.

What a client does not read stays in its connection's write buffer. One connection is bounded by itself: while its
buffer is above the mark nothing more is read for it from the logs. Thousands are not. So all share one budget: the
bytes in the buffers above their marks. An answer to a GET is as large as it may be and as the budget has room for, one
batch at least: so a reader that reads is served, however many others do not.
"""

from __future__ import annotations


class AnswerMemory:
    """The budget. Used by the broker's loop only; the figures may be read by any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stalled = 0
        """Connections that were closed because they did not go on."""

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
