"""The open acknowledgements of a slave on one link: by sequence number for live batches, by position for copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from metamq.wire import sync
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition


class ToAcknowledge:
    """Used by the broker's loop only."""

    def __init__(self, handles: Mapping[int, Partition]) -> None:
        """`handles`: the attached partitions. The link changes this mapping."""
        self.held_seq = 0
        self._handles = handles
        self._unflushed: deque[tuple[int, int, int]] = deque()
        """(sequence number, handle, end position) of batches that count only when they are flushed."""
        self._copied: dict[int, None] = {}
        """Handles whose positions the next acknowledgement has."""
        self._unflushed_copies: dict[int, int] = {}
        """End position by handle, of copies that are acknowledged again when they are flushed."""

    def came(self, handle: int, *, flush: bool) -> None:
        """Notes that the entry `held_seq` was appended. It counts when it is flushed, or at once."""
        partition = self._handles[handle]
        if flush:
            self._unflushed.append((self.held_seq, handle, partition.log.end_position))
        elif partition.flushes_before_ack:  # the master did not know that yet when it sent the entry
            self._unflushed_copies[handle] = partition.log.end_position

    def was_copied(self, handle: int, *, flush: bool) -> None:
        """Notes that the log has a new end to acknowledge, with `flush` again when it is flushed."""
        self._copied[handle] = None
        if flush:
            self._unflushed_copies[handle] = self._handles[handle].log.end_position

    def was_flushed(self, handle: int) -> None:
        """Notes that an fsync of the log has ended."""
        end_position = self._unflushed_copies.get(handle)
        if end_position is not None:
            self._copied[handle] = None
            if self._handles[handle].log.flushed_position >= end_position:
                del self._unflushed_copies[handle]

    def forget(self, handle: int) -> None:
        """Removes a detached partition."""
        self._copied.pop(handle, None)
        self._unflushed_copies.pop(handle, None)

    def frames(self, epoch: int) -> Iterator[sync.Ack]:
        """Yields the acknowledgement of all open entries. Without any it is a heartbeat."""
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
        """Returns True if no flush up to this position is pending. A detached partition is not flushed any more: the
        master receives the Detach before this acknowledgement."""
        partition = self._handles.get(handle)
        return partition is None or partition.log.flushed_position >= end_position
