"""TrimmedLog: a log whose oldest messages can be deleted up to a chosen offset, at once.

Theory of operation
-------------------
A trim is an offset and an epoch. The messages before the offset that have this epoch, or an earlier one, are *hidden*
at once: a reader of one gets OffsetOutOfRange, as after retention. metamq.zk.cluster.trims explains the epoch. The trim
is stored in ZooKeeper, before it comes here. So a restart, a promotion or a new copy of the log begins with it.

remove_hidden() then removes the hidden batches from the disk. A batch has one checksum, and replicas have equal bytes.
So a batch with a hidden and a visible message stays, and the log starts at the begin of a batch. Whole segments go
as in retention, without an archive. If the begin is inside of a segment, that segment is sealed, and a thread copies
it from there on. Then, without a pause in the log's own thread:

    1  the copy gets its name, durably: two files of the log have the same batches
    2  the flush point gets the new start, durably: from here on the copy counts
    3  the old segment gets a name that no log looks for, and a thread removes it

A crash before 2 leaves the log as it was, and recovery removes the copy; the next round copies again. After 2 recovery
removes the old segment. Invariant: the start never moves back, and each batch behind the start is in a file that
counts. The start never passes the stable mark or the flushed mark.

The producer states as of the begin are saved beside the copy, since every segment has them at its start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from metamq.broker.log.disk.derived import rebuild_producers, remove_file, unlink_all
from metamq.broker.log.disk.files import ReadOnlyFiles, is_full
from metamq.broker.log.disk.segments import Segment, SnapshotName, file_path
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import CorruptData, DiskFull, OffsetOutOfRange
from metamq.private_files import opener

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig
    from metamq.broker.log.disk.files import FileCache
    from metamq.broker.log.disk.index import SparseIndex
    from metamq.broker.log.recovery import RecoveredLog
    from metamq.broker.log.steps import Steps

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Copy:
    """The end of a segment, for files of its own."""

    segment: Segment
    index: SparseIndex

    @property
    def snapshot(self) -> SnapshotName:
        """The producer states as of its start."""
        path = self.segment.path.removesuffix(".log") + ".producers"
        return SnapshotName(self.segment.base_position, self.segment.base_offset, path)


class TrimmedLog(PartitionLog):
    """The log of one partition that is open for clients. Used like a PartitionLog."""

    __slots__ = ("_hidden_before", "_hidden_epoch", "trimmed")

    def __init__(
        self, folder: str, name: str, config: LogConfig, files: FileCache, recovered: RecoveredLog, now_us: int
    ) -> None:
        """Internal: use open()."""
        super().__init__(folder, name, config, files, recovered, now_us)
        self._hidden_before, self._hidden_epoch = 0, -1
        self.trimmed: tuple[int, int] = 0, -1
        """(offset, epoch) of the last trim whose messages are gone from the disk; -1: of none since the open."""

    def hide_before(self, offset: int, epoch: int) -> None:
        """Hides the messages before the offset that have this epoch or an earlier one. Replaces the former trim.

        Raises CorruptData, StorageError, ClosedError.
        """
        self.epochs()  # begin_offset needs them
        self._hidden_before, self._hidden_epoch = offset, epoch

    @property
    def begin_offset(self) -> int:
        """The offset of the first message that is not hidden; the stable offset if there is none."""
        if self._hidden_before <= self.start_offset:
            return self.start_offset
        assert self._epochs is not None
        later = [entry.offset for entry in self._epochs.entries if entry.epoch > self._hidden_epoch]
        return max(self.start_offset, min([self._hidden_before, self.stable_offset, *later[:1]]))

    def _is_readable(self, offset: int) -> bool:
        if offset < self._hidden_before:
            self._check_open()
            if offset < (begin := self.begin_offset):
                raise OffsetOutOfRange(self.name, offset, begin, self.end_offset)
        return super()._is_readable(offset)

    def _first_visible(self) -> tuple[int, int]:
        """(offset, position) of the batch with the first message that is not hidden; the log's end if there is none."""
        begin = self.begin_offset
        if begin == self.start_offset:
            return self.start_offset, self.start_position
        if begin == self.end_offset:
            return self.end_offset, self.end_position
        _segment, *place = self._stored(self._store.find, begin)
        return place[0], place[1]

    @property
    def has_hidden(self) -> bool:
        """True if remove_hidden() is not done. Any thread."""
        return self.trimmed != (self._hidden_before, self._hidden_epoch)

    def remove_hidden(self, now_us: int, keep_from: int | None = None) -> Steps[bool]:
        """Removes the hidden batches, durably. Returns False if some stay for now: call it again.

        Removes nothing while the byte `keep_from` is before the begin, or while a slave lacks hidden messages. Raises
        StorageError, CorruptData, ClosedError.
        """
        self._check_writable()
        trim = self._hidden_before, self._hidden_epoch
        if self.stable_offset < trim[0] and self.epochs().last <= trim[1]:
            return False
        is_done = yield from self._remove_before(*self._first_visible(), now_us, keep_from)
        if is_done:
            self.trimmed = trim
        return is_done

    def _remove_before(self, offset: int, position: int, now_us: int, keep_from: int | None) -> Steps[bool]:
        if position <= self.start_position:
            return True
        if keep_from is not None and position > keep_from:
            return False
        if position > self._store.segments[-1].base_position:
            if not self._writing:
                self._begin_writing()
            with contextlib.suppress(DiskFull):  # whole segments can go, and free space
                self._roll()
        yield from self.retain(now_us, keep_from, offset)
        if position <= self.start_position:
            return True
        yield from self.checkpoint()
        self._check_writable()
        first = self._store.segments[0]
        if not (self._is_sealed(first) and first.base_position < position < first.end_position):
            return False
        if position > self.flushed_position or not self._store.has_producers_from(position):
            return False
        return (yield from self._begin_inside(first, offset, position))

    def _is_sealed(self, segment: Segment) -> bool:
        return any(one is segment for one in self._store.segments[:-1])

    def _begin_inside(self, old: Segment, offset: int, position: int) -> Steps[bool]:
        """Replaces the oldest segment by a copy of its end."""
        path = file_path(self._folder, offset, position, "log")
        target = Segment(path, offset, position, old.end_position - position)
        copy = _Copy(target, self._stored(self._store.index_of, old).of_the_end(offset, position))
        piece = Segment(old.path, old.base_offset, old.base_position, old.size_bytes)
        try:
            made: list[str] = yield partial(_make, self._files, piece, copy, list(self._store.snapshots))
        except OSError as error:
            raise self._fail("copying the end of a segment", error) from error
        self._check_writable()
        is_same = self._store.segments[0] is old and old.end_position == target.end_position
        if not (made and is_same and self._is_sealed(old)):  # the log was cut or emptied
            unlink_all([f"{path}.tmp" for path in made])
            return False
        self._begin_with(copy, made)
        try:
            with self._unless_full("the removal of files"):
                paths = self._store.release_oldest(1, copy.segment, copy.index)
                self._unsynced = set(filter(os.path.exists, self._unsynced))
                for path in paths:
                    self._check_open()
                    yield partial(remove_file, path)
        except OSError as error:
            raise self._fail("removing old segments", error) from error
        return True

    def _begin_with(self, copy: _Copy, made: list[str]) -> None:
        """Makes the copy count, durably. Raises StorageError."""
        self._reserve_descriptors("trimming the log")
        try:
            for path in made:
                os.rename(f"{path}.tmp", path)
            self._files.sync_folder(self._folder)
        except OSError as error:
            failure = self._fail("naming the copy of a segment", error, half_done=not is_full(error))
            with contextlib.suppress(OSError):
                unlink_all([*(f"{path}.tmp" for path in made), copy.segment.path])
            raise failure from error
        self.start_offset, self.start_position = copy.segment.base_offset, copy.segment.base_position
        point = self._make_point(clean=False)
        try:
            self._flush_file.write_both(point)
        except OSError as error:
            raise self._fail("storing the start of the log", error, half_done=True) from error
        self._point = point
        if copy.snapshot.path in made and copy.snapshot not in self._store.snapshots:
            self._store.snapshots.append(copy.snapshot)
            self._store.snapshots.sort()
        self._epochs = self.epochs().drop_prefix(self.start_offset, self.start_position)


def _make(files: FileCache, old: Segment, copy: _Copy, snapshots: list[SnapshotName]) -> list[str]:
    """Makes the files of the copy of a sealed segment, durably, under temporary names. Any thread.

    Returns the final names, the segment's last; nothing if the segment was cut meanwhile. Damaged batches are copied as
    they are. Raises OSError.
    """
    new, snapshot, made = copy.segment, copy.snapshot, [copy.segment.index_path]
    reader = ReadOnlyFiles(1)
    try:
        _write(files, new.index_path, copy.index.to_bytes())
        with contextlib.suppress(CorruptData):
            states = rebuild_producers(reader, [old], snapshots, new.base_position)
            made.append(snapshot.path)
            _write(files, snapshot.path, states.to_bytes(new.base_offset, new.base_position))
        made.append(new.path)
        with open(old.path, "rb") as source, open(f"{new.path}.tmp", "wb", opener=opener) as copied:
            source.seek(new.base_position - old.base_position)
            shutil.copyfileobj(source, copied, COPY_BYTES)
            copied.flush()
            files.sync(copied.fileno())
            is_whole = copied.tell() == new.size_bytes
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk they would take up the space
            unlink_all([f"{path}.tmp" for path in made])
        raise
    finally:
        reader.close()
    if not is_whole:
        unlink_all([f"{path}.tmp" for path in made])
    return made if is_whole else []


def _write(files: FileCache, path: str, data: bytes) -> None:
    """Writes a file, durably, under a temporary name."""
    with open(f"{path}.tmp", "wb", opener=opener) as file:
        file.write(data)
        file.flush()
        files.sync(file.fileno())
