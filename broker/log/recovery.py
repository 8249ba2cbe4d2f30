"""Opening a partition log: the parts that are read, the bytes that may be cut, and the damage that is refused.

Theory of operation
-------------------
A crash leaves a log in one of two conditions. They look the same, but need different treatment:

- A *torn tail*: bytes that were written but never flushed are missing, zero or partly there. No client has an
  acknowledgement for them. They are cut, and the cut is reported.
- *Damage*: bytes that were on the disk have changed. A client may have an acknowledgement for them. A cut would
  silently lose every intact batch that follows. So the partition is not opened, and nothing is modified.

The flushed point F, from the file `flushed`, tells them apart. It is written after each fsync of the log, so it is
never too high: below F every byte was on the disk, and any error there is damage. It may be too low, since it is not
fsynced itself each time: after a power cut F may be older than the last fsync. Therefore there is a second witness:
each batch says in its header how far behind it the flushed point was when it was appended. If the first bad byte is at
B ≥ F, but an intact batch behind it says that B was already flushed, then it is damage. Batches begin on multiples
of 8, so they can be found behind any damage. One case remains undetected: damage in bytes that the last fsyncs before
a power cut flushed, if nothing was appended after them.

A replica that copied its master's log byte for byte does not have the second witness: the batches describe the
*master's* disk. So only batches of the log's own epochs count, in which this replica was the master; the file
`flushed` has these epochs. To compensate, a flush of copied bytes also makes the F of the previous flush durable, so
that F is at most one flush behind. The batch headers are no better: the batches that describe a flush came after it,
and are certainly on the disk only after the next one.

A batch that was appended here describes this disk correctly as long as the bytes below it are the same. So a cut of
the log first disowns all epochs up to then, durably. A master may send the same bytes again, with the same headers,
and they must be flushed again.

If the check is wrong, it is wrong in the safe direction. If a message holds a copy of an intact batch, inside a torn
batch, the copy may state too much. Then the partition is refused although a cut would be right.

Bytes below F are not read: they are on the disk, and their readers check them. But two things are derived from the
log, the producer states and the active segment's index, and are saved as of some position P ≤ F. Recovery walks the
log from P to F to bring them up to date. It checks whole batches, since that is cheap; damage there is refused, like
any damage below F. After a clean close, or a checkpoint without a later append, P = F = end, and nothing is read.

Sealed segments are checked by name and size: each must end where the next begins. A gap below F is a missing segment.
A gap at or above F is a torn tail: the next file's name reached the disk before the bytes did.

Recovery *rewrites* the checked tail [F, end) over itself. If the process ended because an fsync failed, the kernel may
hold these pages as clean although they never reached the disk. The next fsync would then succeed without writing them.
Rewritten pages are dirty, so fsync writes them. F itself is not advanced here.

A cut is made durable before the log is used: both the file's new size and the removal of the files that describe the
bytes behind it. Otherwise a second crash could bring the old bytes back behind new ones.

A log that was being emptied at the crash has nothing to recover: see metamq.broker.log.fresh. One that was being
trimmed may have two files with the same batches, and the start in the flush point says which one counts.

Before anything is changed, the caller is notified that the log lacks messages that it had. A cut leaves no trace, and
the next crash could lose a note that is made afterwards.

A second crash during recovery finds the same state or a later one. Segments are removed from the newest to the oldest,
then the torn one is cut. Each step leaves a log with the same first bad position, or with none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from metamq.broker.log import fresh
from metamq.broker.log.disk.derived import load_index, load_producers, unlink, unlink_all
from metamq.broker.log.disk.files import FileCache, is_full
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushFile, FlushPoint
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.producers import ProducerStates
from metamq.broker.log.disk.scan import checked_batches, find_flushed_claim
from metamq.broker.log.disk.segments import Inventory, Segment, SnapshotName, take_inventory
from metamq.errors import CorruptData

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig

log = logging.getLogger("metamq.broker.log")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The findings and actions of opening a log."""

    clean: bool
    """True if the log was closed cleanly."""
    scanned_bytes: int = 0
    cut_bytes: int = 0
    reason: str = ""
    """The reason of the cut."""
    stable_offset_before: int = 0
    """The stable offset as last saved. If it is above the log's end, messages that readers saw are lost."""


@dataclass(slots=True)
class RecoveredLog:
    """A log that is ready for use: the result of recovery."""

    segments: list[Segment]
    snapshots: list[SnapshotName]
    flush_file: FlushFile
    point: FlushPoint
    end_offset: int
    last_append_us: int
    producers: ProducerStates | None
    """None: not read, because there is a snapshot as of the end."""
    report: RecoveryReport


def recover(
    folder: str, name: str, config: LogConfig, files: FileCache, on_loss: Callable[[str], object]
) -> RecoveredLog:
    """Opens the log in the folder, or makes a new one there.

    `on_loss` is called before anything is modified if the log lacks messages that it had; a later attempt may call it
    again. Raises CorruptData, with nothing modified, if bytes that were on the disk are missing or changed. Raises
    OSError, and the errors of `on_loss`.
    """
    inventory = take_inventory(folder)
    flush_file = FlushFile(folder, files)
    try:
        point = flush_file.load(name)
        if point is not None and point.emptying:
            segment, void = fresh.empty(folder, files, flush_file, point)
            unlink_all(void)
            return _without_a_batch(segment, flush_file, point._replace(emptying=False))
        if point is not None:
            return _Recovery(folder, name, config, files, inventory, flush_file, point, on_loss).run()
        if any(segment.size_bytes for segment in inventory.segments):
            raise _refusal(name, flush_file.path, "the file is missing", 0)
        fresh.make(folder, files)
        files.sync_folder(os.path.dirname(folder))
        return recover(folder, name, config, files, on_loss)
    except BaseException:  # the next attempt may find another folder at this path
        for segment in inventory.segments:
            files.forget(segment.path)
        files.forget(flush_file.path)
        raise


def _without_a_batch(segment: Segment, flush_file: FlushFile, point: FlushPoint) -> RecoveredLog:
    report = RecoveryReport(clean=True, stable_offset_before=point.stable_offset)
    return RecoveredLog([segment], [], flush_file, point, point.offset, 0, ProducerStates(), report)


def _retired(segments: list[Segment], start_position: int) -> list[Segment]:
    """The segments that a crash kept from removal: before the log's start, or see metamq.broker.log.trim.

    A segment that holds the start is one if its copy from the start on is there. The flush point has decided that. A
    copy that the point did not reach is one, too: it ends with the segment that it was copied from.
    """
    is_copied = any(s.base_position == start_position for s in segments)
    retired: list[Segment] = []
    last: Segment | None = None
    for segment in segments:
        is_before = segment.base_position < start_position and (is_copied or segment.end_position <= start_position)
        if is_before or (last is not None and segment.base_position < last.end_position == segment.end_position):
            retired.append(segment)
        else:
            last = segment
    return retired


def _refusal(name: str, path: str, reason: str, position: int) -> CorruptData:
    return CorruptData(
        f"{name}: {path}",
        reason,
        position=position,
        hint="These bytes were once on the disk, so nothing was cut. `metamq log verify` shows the extent. "
        "If a replica is in sync: promote it, and this one copies the partition. If not: restore the folder from "
        "a backup, or stop the broker and give the log up with `metamq log forget`.",
    )


class _Recovery:
    """One recovery. It first checks everything, then changes the files."""

    def __init__(
        self, folder: str, name: str, config: LogConfig, files: FileCache, inventory: Inventory,
        flush_file: FlushFile, point: FlushPoint, on_loss: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.folder = folder
        self.name = name
        self.config = config
        self.files = files
        self.inventory = inventory
        self.flush_file = flush_file
        self.point = point
        self.on_loss = on_loss
        self.stable_offset_before = point.stable_offset
        self.retired = _retired(inventory.segments, point.start_position)
        self.segments = [s for s in inventory.segments if s not in self.retired]
        self.producers = ProducerStates()
        self.end_offset = point.offset
        self.end_position = point.position
        self.last_append_us = point.last_append_us
        self.scanned_bytes = 0
        self.bad: tuple[int, str] | None = None
        """The first bad position, and the problem there."""

    def run(self) -> RecoveredLog:
        whole = self._check_chain()
        if self.bad is None and self._is_settled():
            self._announce_loss()
            self._correct_the_point()
            self._forget_stale(self.inventory.indexes - self._index_paths())
            return self._recovered(None)
        self._walk(whole)
        if self.bad is not None:
            self._refuse_if_flushed(*self.bad)
        if self.end_position == self.point.position and self.end_offset != self.point.offset:
            reason = f"offset {self.point.offset} was flushed up to here, but the batches end at {self.end_offset}"
            raise _refusal(self.name, self.folder, reason, self.end_position)
        self._announce_loss()
        self._correct_the_point()
        cut_bytes = self._cut() if self.bad is not None else 0
        self._write_tail_again()
        self._save_indexes()
        stale = self.inventory.indexes - self._index_paths()
        active = self.segments[-1]
        if active.index_path in self.inventory.indexes and load_index(active, self.config.index_interval_bytes) is None:
            stale.add(active.index_path)
        self._forget_stale(stale)
        return self._recovered(self.producers, cut_bytes)

    # -- checking: nothing is modified ----------------------------------------------------------------------------

    def _check_chain(self) -> int:
        """Returns the number of adjacent segments from the first one. Notes the gap behind them, if there is one."""
        point, segments = self.point, self.segments
        if not segments:
            raise _refusal(self.name, self.folder, "there is no segment", point.start_position)
        first = segments[0]
        if (first.base_offset, first.base_position) != (point.start_offset, point.start_position):
            reason = f"the first segment should begin at byte {point.start_position:,}, not {first.base_position:,}"
            raise _refusal(self.name, self.folder, reason, point.start_position)
        whole = len(segments)
        for number, (segment, following) in enumerate(pairwise(segments), 1):
            gap = following.base_position - segment.end_position
            if gap == 0 and following.base_offset > segment.base_offset:
                continue
            reason = (
                f"the segment ends at byte {segment.end_position:,}, the next begins at {following.base_position:,}"
            )
            if gap <= 0 or segment.end_position < point.position:
                raise _refusal(self.name, segment.path, reason, segment.end_position)
            self.bad = segment.end_position, reason
            whole = number
            break
        last = segments[whole - 1]
        if last.end_position < point.position:
            reason = f"the log was flushed up to byte {point.position:,} and ends before"
            raise _refusal(self.name, last.path, reason, last.end_position)
        return whole

    def _is_settled(self) -> bool:
        """True if all derived files were saved as of the end of the log."""
        point = self.point
        if self.segments[-1].end_position != point.position:
            return False
        snapshots = self.inventory.snapshots
        return point.clean or bool(snapshots and snapshots[-1].position == point.position)

    def _walk(self, whole: int) -> None:
        """Reads the log from the last saved state up to the first bad position or the end."""
        states_from = self._load_producers()
        segments = self.segments[:whole]
        number = max(n for n, s in enumerate(segments) if s.base_position <= states_from)
        index: SparseIndex | None = self._resume_index(segments[number], states_from)
        for segment in segments[number:]:
            if index is None:
                index = SparseIndex(segment.base_offset, segment.base_position)
                if segment.base_offset != self.end_offset:
                    reason = f"the segment begins with offset {segment.base_offset} instead of {self.end_offset}"
                    self.bad = segment.base_position, reason
                    return
            segment.index = index
            problem = self._walk_segment(segment, index, states_from)
            self.end_offset, self.end_position = index.end_offset, index.end_position
            if problem is not None:
                self.bad = index.end_position, problem
                return
            index = None

    def _walk_segment(self, segment: Segment, index: SparseIndex, states_from: int) -> str | None:
        flushed = self.point.position
        interval = self.config.index_interval_bytes
        for position, header, problem in checked_batches(self.files, segment, index.end_position):
            if header is None or problem is not None:
                return problem
            if header.base_offset != index.end_offset:
                return f"offset {header.base_offset} instead of {index.end_offset}"
            if position < flushed < position + header.size:
                raise _refusal(self.name, segment.path, f"no batch ends at the flushed byte {flushed:,}", position)
            if position == flushed and header.base_offset != self.point.offset:
                reason = f"offset {header.base_offset}, but {self.point.offset} was flushed here"
                raise _refusal(self.name, segment.path, reason, position)
            index.add(header.size, header.count, header.max_timestamp_us, header.append_time_us, interval)
            self.last_append_us = header.append_time_us
            self.scanned_bytes += header.size
            if header.producer_id and position >= states_from:
                self.producers.record(
                    header.producer_id, header.sequence, header.base_offset, header.count, header.append_time_us
                )
        return None

    def _load_producers(self) -> int:
        """Loads the newest usable snapshot; returns the position from which the log must be added to it."""
        for snapshot in reversed(self.inventory.snapshots):
            if not self.point.start_position <= snapshot.position <= self.point.position:
                continue
            states = load_producers(snapshot)
            if states is not None:
                self.producers = states
                return snapshot.position
        return self.point.start_position

    def _resume_index(self, segment: Segment, position: int) -> SparseIndex:
        """The segment's saved index, cut at `position`; an empty one if it is not usable."""
        index = load_index(segment, self.config.index_interval_bytes)
        if index is None:
            return SparseIndex(segment.base_offset, segment.base_position)
        index.cut(position)
        return index

    def _refuse_if_flushed(self, position: int, reason: str) -> None:
        segment = self._segment_at(position)
        if position < self.point.position:
            raise _refusal(self.name, segment.path, reason, position)
        for later in self.segments[self.segments.index(segment) :]:
            start = max(position, later.base_position)
            claim = find_flushed_claim(self.files, later, start, position, self.point.own_epochs)
            if claim is not None:
                reason += f"; the intact batch at byte {claim:,} says that these bytes were flushed before it came"
                raise _refusal(self.name, segment.path, reason, position)

    def _segment_at(self, position: int) -> Segment:
        return next(s for s in reversed(self.segments) if s.base_position <= position)

    def _announce_loss(self) -> None:
        if self.bad is not None:
            self.on_loss(f"{self.name}: the bytes behind offset {self.end_offset} are torn")
        elif self.end_offset < self.stable_offset_before:
            seen = self.stable_offset_before
            self.on_loss(f"{self.name}: it ends at offset {self.end_offset}, but readers have seen it up to {seen}")

    # -- changing the files ---------------------------------------------------------------------------------------

    def _correct_the_point(self) -> None:
        """Corrects, durably, a point that covers bytes that are missing or will be cut."""
        point = self.point
        if point.stable_position > self.end_position:
            point = point._replace(stable_offset=self.end_offset, stable_position=self.end_position)
        if self.bad is not None:
            point = point._replace(own_from=NO_EPOCHS[0], own_to=NO_EPOCHS[1])
        if point != self.point:
            self.point = point
            self.flush_file.write_both(point)

    def _cut(self) -> int:
        """Removes everything from the first bad position on, durably; returns the number of removed bytes."""
        assert self.bad is not None
        position, reason = self.bad
        torn = self._segment_at(position)
        if torn.base_position == position and torn is not self.segments[0]:
            torn = self.segments[self.segments.index(torn) - 1]
        cut_bytes = torn.end_position - position
        while self.segments[-1] is not torn:
            segment = self.segments.pop()
            cut_bytes += segment.size_bytes
            self.files.forget(segment.path)
            os.unlink(segment.path)
        fd = self.files.descriptor(torn.path)
        os.ftruncate(fd, position - torn.base_position)
        self.files.sync(fd)
        torn.size_bytes = position - torn.base_position
        self.files.sync_folder(self.folder)
        log.warning(
            "%s: cut %s bytes at byte %s, offset %s, that were never flushed: %s",
            self.name, f"{cut_bytes:,}", f"{position:,}", self.end_offset, reason,
        )  # fmt: skip
        return cut_bytes

    def _write_tail_again(self) -> None:
        for segment in self.segments:
            position = max(self.point.position, segment.base_position)
            while position < segment.end_position:
                at = position - segment.base_position
                data = os.pread(self.files.descriptor(segment.path), _COPY_BYTES, at)
                self.files.write(segment.path, data, at)
                position += len(data)

    def _save_indexes(self) -> None:
        """Writes the index of each sealed segment that was read; only the active one stays in memory."""
        for segment in self.segments[:-1]:
            if segment.index is not None:
                try:
                    self.files.replace(segment.index_path, segment.index.to_bytes())
                except OSError as error:
                    if not is_full(error):
                        raise
                segment.index = None

    def _index_paths(self) -> set[str]:
        return {segment.index_path for segment in self.segments}

    def _forget_stale(self, index_paths: set[str]) -> None:
        """Removes, durably, these indexes and all snapshots beyond the end, where other batches will be appended."""
        end = self.segments[-1].end_position
        stale = [snapshot for snapshot in self.inventory.snapshots if snapshot.position > end]
        self.inventory.snapshots = [snapshot for snapshot in self.inventory.snapshots if snapshot.position <= end]
        for path in [*index_paths, *(snapshot.path for snapshot in stale)]:
            unlink(path)
        if index_paths or stale:
            self.files.sync_folder(self.folder)

    def _recovered(self, producers: ProducerStates | None, cut_bytes: int = 0) -> RecoveredLog:
        for segment in reversed(self.retired):
            os.unlink(segment.path)
        for path in self.inventory.orphans:
            unlink(path)
        reason = self.bad[1] if self.bad is not None else ""
        report = RecoveryReport(
            self.point.clean and producers is None, self.scanned_bytes, cut_bytes, reason, self.stable_offset_before
        )
        return RecoveredLog(
            self.segments, self.inventory.snapshots, self.flush_file, self.point, self.end_offset,
            self.last_append_us, producers, report,
        )  # fmt: skip
