"""What a slave has still to acknowledge on one link: by sequence number what came live, by position what was copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from metamq.broker.data.partition import Partition
from metamq.wire import sync
from metamq.wire.limits import ENTRIES_TARGET


class ToAcknowledge:
    """Used by the broker's loop only."""

    def __init__(self, handles: Mapping[int, Partition]) -> None:
        """`handles`: what is attached, as it changes."""
        self.held_seq = 0
        self._handles = handles
        self._unflushed: deque[tuple[int, int, int]] = deque()
        """(sequence number, handle, end position) of what counts only once it is flushed."""
        self._copied: dict[int, None] = {}
        """Handles whose positions are to be told."""
        self._unflushed_copies: dict[int, int] = {}
        """End position by handle, of what is to be told by position once it is flushed."""

    def came(self, handle: int, *, flush: bool) -> None:
        """The entry `held_seq` was appended; it counts once it is flushed, or at once."""
        partition = self._handles[handle]
        if flush:
            self._unflushed.append((self.held_seq, handle, partition.log.end_position))
        elif partition.flushes_before_ack:  # the master did not know that yet when it sent this
            self._unflushed_copies[handle] = partition.log.end_position

    def was_copied(self, handle: int, *, flush: bool) -> None:
        """The log's end is to be told, and once more when it is flushed."""
        self._copied[handle] = None
        if flush:
            self._unflushed_copies[handle] = self._handles[handle].log.end_position

    def was_flushed(self, handle: int) -> None:
        """An fsync of the log has ended."""
        end_position = self._unflushed_copies.get(handle)
        if end_position is not None:
            self._copied[handle] = None
            if self._handles[handle].log.flushed_position >= end_position:
                del self._unflushed_copies[handle]

    def forget(self, handle: int) -> None:
        """The partition was detached."""
        self._copied.pop(handle, None)
        self._unflushed_copies.pop(handle, None)

    def frames(self, epoch: int) -> Iterator[sync.Ack]:
        """The acknowledgement of all that there is; it is a heartbeat when there is nothing."""
        unflushed = self._unflushed
        while unflushed and self._is_settled(*unflushed[0][1:]):
            unflushed.popleft()
        flushed_seq = unflushed[0][0] - 1 if unflushed else self.held_seq
        copied, self._copied = self._copied, {}
        logs = [(handle, self._handles[handle].log) for handle in copied]
        marks = [(handle, log.end_position, log.flushed_position) for handle, log in logs]
        for start in range(0, max(len(marks), 1), ENTRIES_TARGET):
            yield sync.Ack(sync.ACK, epoch, self.held_seq, flushed_seq, marks[start : start + ENTRIES_TARGET])

    def _is_settled(self, handle: int, end_position: int) -> bool:
        """Whether nobody is to wait for a flush up to there. What was detached is flushed no more, and the master knows
        that: its place is told to be gone before this is acknowledged."""
        partition = self._handles.get(handle)
        return partition is None or partition.log.flushed_position >= end_position
