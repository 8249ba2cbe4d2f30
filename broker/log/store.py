"""The files of one partition log: its segments, their indexes, the snapshots of producer states.

It knows which bytes exist, finds them and removes them; the log knows if they are flushed or stable. Every function
raises OSError, and CorruptData if the bytes are damaged.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.log.disk import derived, epochs
from metamq.broker.log.disk.files import FileCache, is_full
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.scan import LOCATION, damaged, find_batch, headers, read_at
from metamq.broker.log.disk.segments import Segment, SegmentStats, SnapshotName, file_path
from metamq.broker.log.disk.times import Search, first_at_time
from metamq.wire.batch import HEADER_BYTES, bytes_to_read, check_broker_part, read_header
from metamq.wire.buffer_pool import SMALL_BYTES
from metamq.wire.limits import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from metamq.broker.log.disk.epochs import EpochList
    from metamq.broker.log.disk.producers import ProducerStates

_BASE_OFFSET = attrgetter("base_offset")
_BASE_POSITION = attrgetter("base_position")


class LogSlice(NamedTuple):
    """Batches as stored in the log; the last one may be cut off anywhere."""

    data: bytes | memoryview
    base_offset: int
    """The offset of the first batch, at or below the requested offset."""
    position: int


class FilePart(NamedTuple):
    """The place of batches in a segment file; the last one may be cut off anywhere."""

    path: str
    at: int
    size: int
    position: int


class BatchRun(NamedTuple):
    """Whole batches as stored in the log, back to back."""

    data: memoryview
    position: int
    base_offset: int
    end_offset: int

    @property
    def end_position(self) -> int:
        """The position after the last batch."""
        return self.position + len(self.data)


@dataclass(eq=False, slots=True)
class SegmentStore:
    """The files of one log. One thread only."""

    folder: str
    files: FileCache
    segments: list[Segment]
    """The segments in order of positions, at least one; the last one is active."""
    snapshots: list[SnapshotName]
    index_interval_bytes: int

    # -- finding --------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, stable_position: int) -> LogSlice:
        """Reads for PartitionLog.read(); `offset` is below the stable position."""
        segment, base, position = self.find(offset)
        available = min(stable_position, segment.end_position) - position
        wanted = min(max(bytes_max, HEADER_BYTES), available) & ~7
        data = read_at(self.files, segment, position, wanted if wanted <= SMALL_BYTES else HEADER_BYTES)
        size, found, count = LOCATION.unpack_from(data)
        if found != base or offset >= base + count or not HEADER_BYTES <= size <= min(available, BATCH_BYTES_MAX):
            raise damaged(segment.path, position, f"the batch with offset {base} should begin here")
        wanted = bytes_to_read(wanted, size, available)
        if wanted > len(data):
            data = read_at(self.files, segment, position, wanted)
        return LogSlice(data[:wanted], base, position)

    def locate(self, offset: int, bytes_max: int, stable_position: int) -> FilePart:
        """Finds the place for PartitionLog.locate(); `offset` is below the stable position."""
        segment, _base, position = self.find(offset)
        available = min(stable_position, segment.end_position) - position
        size = min(max(bytes_max, BATCH_BYTES_MAX), available)
        return FilePart(segment.path, position - segment.base_position, size, position)

    def find(self, offset: int) -> tuple[Segment, int, int]:
        """(segment, base offset, position) of the batch that holds the offset."""
        segment = self.segments[-1]
        if offset < segment.base_offset:
            segment = self.segments[bisect_right(self.segments, offset, key=_BASE_OFFSET) - 1]
        index = segment.index or self.index_of(segment)
        base, position = index.find(offset)
        if base != offset:
            base, position = find_batch(self.files, segment, offset, (base, position), self.index_interval_bytes)
        return segment, base, position

    def segment_at(self, position: int) -> Segment | None:
        """The segment that begins at `position`, or None."""
        segment = self.segments[max(bisect_right(self.segments, position, key=_BASE_POSITION) - 1, 0)]
        return segment if segment.base_position == position else None

    def begins_at(self, offset: int, position: int) -> bool:
        """Checks for PartitionLog.begins_at(); `offset` is in the log."""
        _segment, *found = self.find(offset)
        return found == [offset, position]

    def before(self, offset: int) -> list[Segment]:
        """The segments that end at or below an offset."""
        return [segment for segment, following in pairwise(self.segments) if following.base_offset <= offset]

    def read_whole(self, position: int, bytes_max: int) -> BatchRun:
        """Reads for PartitionLog.read_position(); `position` is below the end."""
        segment = self.segments[bisect_right(self.segments, position, key=_BASE_POSITION) - 1]
        available = segment.end_position - position
        data = memoryview(read_at(self.files, segment, position, min(max(bytes_max, HEADER_BYTES), available)))
        first = read_header(data) if available >= HEADER_BYTES else None
        if first is None or check_broker_part(data, 0, first) or first.size > min(available, BATCH_BYTES_MAX):
            raise damaged(segment.path, position, "a batch should begin here")
        if first.size > len(data):
            data = memoryview(read_at(self.files, segment, position, first.size))
        at, offset = first.size, first.end_offset
        while at + HEADER_BYTES <= len(data):
            size, found, count = LOCATION.unpack_from(data, at)
            if found != offset or not HEADER_BYTES <= size <= min(available - at, BATCH_BYTES_MAX):
                raise damaged(segment.path, position + at, f"the batch with offset {offset} should begin here")
            if at + size > len(data):
                break
            at += size
            offset += count
        return BatchRun(data[:at], position, first.base_offset, offset)

    def first_at_time(self, begin: Callable[[], int], timestamp_us: int, stable_position: int) -> Search:
        """Searches the segments that begin below the stable mark for the first message at or after the time."""
        return first_at_time(self.files, self.segments, self.index_of, begin, timestamp_us, stable_position)

    def index_of(self, segment: Segment) -> SparseIndex:
        """The index of a segment. Reads or rebuilds it if it is not in memory."""
        if segment is self.segments[-1]:
            if segment.index is None:
                segment.index = self._complete_index(segment)
            return segment.index
        index = self.files.indexes.get(segment.path)
        if index is None:
            index = self._complete_index(segment)
            self.files.indexes.put(segment.path, index)
        return index

    def _complete_index(self, segment: Segment) -> SparseIndex:
        reader, interval = self.files.reader, self.index_interval_bytes
        if reader is None:
            return derived.complete_index(self.files, segment, interval)
        piece = Segment(segment.path, segment.base_offset, segment.base_position, segment.size_bytes)
        return reader.made(segment.path, SparseIndex, partial(derived.complete_index_in_thread, piece, interval))

    def segment_last_append_us(self, segment: Segment) -> int:
        """Time of a sealed segment's last append."""
        if segment.last_append_us is None:
            segment.last_append_us = self.index_of(segment).last_append_us
        return segment.last_append_us

    def last_append_us(self) -> int:
        """Time of the log's last append; 0 if the log is empty."""
        for segment in reversed(self.segments):
            if segment.size_bytes:
                return self.index_of(segment).last_append_us
        return 0

    def stats(self, end_offset: int) -> list[SegmentStats]:
        """The segments as the API shows them."""
        ends = [segment.base_offset for segment in self.segments[1:]] + [end_offset]
        return [
            SegmentStats(s.path, s.base_offset, end, s.base_position, s.size_bytes)
            for s, end in zip(self.segments, ends, strict=True)
        ]

    # -- changing -------------------------------------------------------------------------------------------------

    def roll(self, end_offset: int, end_position: int) -> Segment:
        """Seals the active segment and starts the next."""
        sealed = self.segments[-1]
        index = self.index_of(sealed)
        segment = Segment(file_path(self.folder, end_offset, end_position, "log"), end_offset, end_position, 0)
        try:
            self.files.replace(sealed.index_path, index.to_bytes())
        except OSError as error:
            if not is_full(error):  # it can be rebuilt from the log
                raise
        self.files.create(segment.path)
        self.segments.append(segment)
        self.files.indexes.put(sealed.path, index)
        sealed.last_append_us = index.last_append_us
        sealed.index = None
        segment.index = SparseIndex(end_offset, end_position)
        return segment

    def save_active_index(self) -> None:
        """Writes the current index of the active segment."""
        active = self.segments[-1]
        if active.index is not None and active.size_bytes:
            self.files.replace(active.index_path, active.index.to_bytes())

    def last_epoch(self) -> int:
        """The epoch of the last batch; -1 if there is no batch."""
        for segment in reversed(self.segments):
            if segment.size_bytes:
                at = self.index_of(segment).entry_at(segment.end_position)
                *_, (_position, header) = headers(self.files, segment, at, self.index_interval_bytes)
                return header.epoch
        return -1

    def load_epochs(self, start_offset: int, start_position: int, end_position: int) -> tuple[EpochList, bool]:
        """The list of epochs of the log between these positions, and True if it is that of the saved file."""
        saved = derived.load_epochs(self.folder)
        if saved is not None:
            kept = saved.drop_prefix(start_offset, start_position)
            if kept.is_of(start_position, end_position, self.last_epoch()):
                return kept, True
        return derived.rebuild_epochs(self.files, self.segments, self.index_of, self.index_interval_bytes), False

    def save_epochs(self, found: EpochList) -> str:
        """Saves the list; returns the file's path. No fsync: if the file is missing, the list is rebuilt."""
        path = f"{self.folder}/{epochs.FILE_NAME}"
        self.files.replace(path, found.to_bytes())
        return path

    def load_producers(self, end_position: int) -> ProducerStates:
        """The producer states as of the end."""
        return derived.rebuild_producers(self.files, self.segments, self.snapshots, end_position)

    def save_producers(self, states: ProducerStates, offset: int, position: int) -> str:
        """Saves the producer states as of the end, (offset, position), and drops snapshots that are not needed.

        Returns the file's path. No fsync: until the next flush, the snapshot before it still serves.
        """
        snapshot = SnapshotName(position, offset, file_path(self.folder, offset, position, "producers"))
        self.files.replace(snapshot.path, states.to_bytes(offset, position))
        if snapshot not in self.snapshots:
            self.snapshots.append(snapshot)
        self._drop_snapshots(derived.superfluous(self.snapshots, self.segments))
        return snapshot.path

    def has_producers_from(self, position: int) -> bool:
        """True if the producer states can be rebuilt without the bytes below `position`."""
        return any(snapshot.position >= position for snapshot in self.snapshots)

    def release_oldest(self, count: int, copy: Segment | None = None, index: SparseIndex | None = None) -> list[str]:
        """Forgets the oldest segments. Returns the files that any thread must remove, the oldest first.

        `copy`, with its index, takes their place: it has the end of the last of them.
        """
        going = self.segments[:count]
        self.segments[:count] = [] if copy is None else [copy]
        if copy is not None and index is not None:
            self.files.indexes.put(copy.path, index)
        paths = []
        for segment in going:
            self.files.forget(segment.path)
            self.files.indexes.forget(segment.path)
            paths += [segment.path, segment.index_path]
        for snapshot in derived.superfluous(self.snapshots, self.segments):
            self.snapshots.remove(snapshot)
            paths.append(snapshot.path)
        return derived.make_void(paths)

    def boundary_before(self, position: int) -> tuple[Segment, SparseIndex]:
        """The segment that holds `position`, and its index, cut at the last batch boundary at or below it."""
        segment = self.segments[bisect_right(self.segments, position, key=_BASE_POSITION) - 1]
        index = self.index_of(segment)
        self.files.indexes.forget(segment.path)
        derived.cut_index(self.files, segment, index, position, self.index_interval_bytes)
        return segment, index

    def cut(self, segment: Segment, index: SparseIndex) -> None:
        """Ends the log, durably, at the end of the segment's index."""
        position = index.end_position
        while self.segments[-1] is not segment:
            self._drop(self.segments[-1])
            del self.segments[-1]
        derived.unlink(segment.index_path)
        derived.unlink(f"{self.folder}/{epochs.FILE_NAME}")
        self._drop_snapshots([s for s in self.snapshots if s.position > position])
        fd = self.files.descriptor(segment.path)
        os.ftruncate(fd, position - segment.base_position)
        self.files.sync(fd)
        self.files.sync_folder(self.folder)
        segment.size_bytes = position - segment.base_position
        segment.last_append_us = None
        segment.index = index

    def close(self) -> None:
        """Closes the files."""
        for segment in self.segments:
            self.files.forget(segment.path)
            self.files.indexes.forget(segment.path)
            segment.index = None

    def _drop(self, segment: Segment) -> None:
        self.files.forget(segment.path)
        self.files.indexes.forget(segment.path)
        derived.unlink(segment.path)
        derived.unlink(segment.index_path)

    def _drop_snapshots(self, snapshots: list[SnapshotName]) -> None:
        for snapshot in snapshots:
            derived.unlink(snapshot.path)
            self.snapshots.remove(snapshot)
