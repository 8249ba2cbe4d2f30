"""Opening a partition log: what is read, what may be cut, and what is refused.

Theory of operation
-------------------
A crash leaves a log in one of two conditions, which look alike and must not be treated alike:

- a *torn tail*: bytes that were written but never flushed are missing, zero or half there. Nobody was promised them.
  They are cut, and the cut is reported;
- *damage*: bytes that were on the disk have changed. Somebody may have been promised them. Cutting there would lose
  every intact batch that follows, silently; so the partition is not opened and nothing is modified.

What tells them apart is the flushed point F, from the file `flushed`. It is written after each fsync of the log, so
it never says too much: below F every byte was on the disk, and whatever is wrong there is damage. It may say too
little, since it is not fsynced itself each time: after a power cut F may be older than the last fsync. Therefore a
second witness: each batch says in its header how far behind it the flushed point was when it was appended. If the
first bad byte is at B ≥ F, but an intact batch behind it says that B was flushed by then, it is damage after all.
Batches begin on multiples of 8, so they are found again behind any damage. What remains undetected is damage in
bytes that were flushed by the last fsyncs before a power cut with nothing appended after them.

On a replica that copied its master's log, byte for byte, the second witness is none: its batches tell how far the
*master's* disk was. So only batches of the log's own epochs are asked, those in which this replica was the master; the
file `flushed` names them. To make up for it, a flush of copied bytes also makes the F of the flush before it durable,
so that F is at most one flush behind. That is as much as batches can tell: those that say so came after that flush,
and are on the disk for certain only after the next.

A batch that was appended here speaks the truth about this disk as long as what lay below it is still the same. So
whatever cuts the log disowns all epochs up to then, durably and before it cuts: the bytes may come back from a master,
with the same claims, to be flushed anew.

The check can err to the safe side only: a message that holds a copy of an intact batch, inside a torn batch, may
claim too much; then the partition is refused although a cut would have done.

Below F nothing needs to be read: it is on the disk and its readers check it. But two things are derived from the log,
the producer states and the active segment's index, and are saved as of some position P ≤ F. From P to F the log is
walked to bring them up to date, checked whole since that is cheap; damage met there is refused like any below F.
With a clean close, or a checkpoint after which nothing was appended, P = F = end and nothing is read at all.

Sealed segments are checked by name and size: each must end where the next begins. A gap below F is a missing segment;
a gap at or above F is a torn tail (the next file's name reached the disk before the bytes did).

The tail [F, end) that passed is *written once more* over itself. If the process ended because an fsync failed, the
kernel may hold these pages as clean though they never reached the disk, and the next fsync would succeed without
writing them. Written again, they are dirty, and that fsync means what it says. F itself is not advanced here.

A cut is made durable, the file's new size and the removal of what described the bytes behind it, before the log is
used: else a second crash could bring the old bytes back behind new ones.

A log that was being emptied when the crash came has nothing to recover: metamq.broker.log.fresh tells.

Before any of that is done, whoever opens the log is told that it lacks what it had: a cut leaves no trace, and a note
that is made afterwards may be lost to the next crash.

A second crash during recovery finds the same state or one further on: segments are removed from the newest to the
oldest, then the torn one is cut, and each step leaves a log with the same first bad position or none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from metamq.broker.log import fresh
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.derived import load_index, load_producers, unlink, unlink_all
from metamq.broker.log.disk.files import FileCache, is_full
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushFile, FlushPoint
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.producers import ProducerStates
from metamq.broker.log.disk.scan import checked_batches, find_flushed_claim
from metamq.broker.log.disk.segments import Inventory, Segment, SnapshotName, take_inventory
from metamq.errors import CorruptData

log = logging.getLogger("metamq.broker.log")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What opening a log found and did."""

    clean: bool
    """The log was closed cleanly."""
    scanned_bytes: int = 0
    cut_bytes: int = 0
    reason: str = ""
    """Why bytes were cut."""
    stable_offset_before: int = 0
    """The stable offset as last saved: above the log's end, what readers saw was lost here."""


@dataclass(slots=True)
class RecoveredLog:
    """A log that is fit for use, as recovery hands it over."""

    segments: list[Segment]
    snapshots: list[SnapshotName]
    flush_file: FlushFile
    point: FlushPoint
    end_offset: int
    last_append_us: int
    producers: ProducerStates | None
    """None: not read, since a snapshot as of the end is there."""
    report: RecoveryReport


def recover(
    folder: str, name: str, config: LogConfig, files: FileCache, losing: Callable[[str], object]
) -> RecoveredLog:
    """Opens what the folder holds, or makes a new log there.

    `losing` is told, before anything is modified, that the log lacks what it had, and may be told again by a later
    attempt. Raises CorruptData, having modified nothing, when bytes that were on the disk are missing or changed.
    Raises OSError, and what `losing` raises.
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
            return _Recovery(folder, name, config, files, inventory, flush_file, point, losing).run()
        if any(segment.size_bytes for segment in inventory.segments):
            raise _refusal(name, flush_file.path, "the file is missing", 0)
        fresh.make(folder, files)
        files.sync_folder(os.path.dirname(folder))
        return recover(folder, name, config, files, losing)
    except BaseException:  # another folder may stand at this path by the next attempt
        for segment in inventory.segments:
            files.forget(segment.path)
        files.forget(flush_file.path)
        raise


def _without_a_batch(segment: Segment, flush_file: FlushFile, point: FlushPoint) -> RecoveredLog:
    report = RecoveryReport(clean=True, stable_offset_before=point.stable_offset)
    return RecoveredLog([segment], [], flush_file, point, point.offset, 0, ProducerStates(), report)


def _refusal(name: str, path: str, reason: str, position: int) -> CorruptData:
    return CorruptData(
        f"{name}: {path}",
        reason,
        position=position,
        hint="These bytes were on the disk once, so nothing was cut. `metamq log verify` shows the extent. "
        "With a replica in sync: promote that, and this one copies the partition. Without one: restore the folder from "
        "a backup, or stop the broker and give the log up with `metamq log forget`.",
    )


class _Recovery:
    """One run of it. First everything is checked, then the files are changed."""

    def __init__(
        self, folder: str, name: str, config: LogConfig, files: FileCache, inventory: Inventory,
        flush_file: FlushFile, point: FlushPoint, losing: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.folder = folder
        self.name = name
        self.config = config
        self.files = files
        self.inventory = inventory
        self.flush_file = flush_file
        self.point = point
        self.losing = losing
        self.stable_offset_before = point.stable_offset
        self.retired = [s for s in inventory.segments if s.end_position <= point.start_position and s.size_bytes]
        self.segments = [s for s in inventory.segments if s not in self.retired]
        self.producers = ProducerStates()
        self.end_offset = point.offset
        self.end_position = point.position
        self.last_append_us = point.last_append_us
        self.scanned_bytes = 0
        self.bad: tuple[int, str] | None = None
        """The first bad position, and what is wrong there."""

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
            reason = f"offset {self.point.offset} was flushed up to here, the batches give {self.end_offset}"
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
        """How many segments join one another; notes the gap behind them, if there is one."""
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
        """Whether all that is derived from the log was saved as of its very end."""
        point = self.point
        if self.segments[-1].end_position != point.position:
            return False
        snapshots = self.inventory.snapshots
        return point.clean or bool(snapshots and snapshots[-1].position == point.position)

    def _walk(self, whole: int) -> None:
        """Reads the log from the last saved state on, up to the first bad position or the end."""
        states_from = self._load_producers()
        segments = self.segments[:whole]
        number = max(n for n, s in enumerate(segments) if s.base_position <= states_from)
        index: SparseIndex | None = self._resume_index(segments[number], states_from)
        for segment in segments[number:]:
            if index is None:
                index = SparseIndex(segment.base_offset, segment.base_position)
                if segment.base_offset != self.end_offset:
                    reason = f"the segment begins with offset {segment.base_offset}, {self.end_offset} is due"
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
                return f"offset {header.base_offset} where {index.end_offset} is due"
            if position < flushed < position + header.size:
                raise _refusal(self.name, segment.path, f"no batch ends at the flushed byte {flushed:,}", position)
            if position == flushed and header.base_offset != self.point.offset:
                reason = f"offset {header.base_offset} where {self.point.offset} was flushed"
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
        """Loads the newest usable snapshot; returns the position from which the log is to be added to it."""
        for snapshot in reversed(self.inventory.snapshots):
            if not self.point.start_position <= snapshot.position <= self.point.position:
                continue
            states = load_producers(snapshot)
            if states is not None:
                self.producers = states
                return snapshot.position
        return self.point.start_position

    def _resume_index(self, segment: Segment, position: int) -> SparseIndex:
        """The segment's saved index, cut back to at most `position`; an empty one if it is not usable."""
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
            self.losing(f"{self.name}: what was written behind offset {self.end_offset} is torn")
        elif self.end_offset < self.stable_offset_before:
            seen = self.stable_offset_before
            self.losing(f"{self.name}: it ends at offset {self.end_offset}, and readers had seen it up to {seen}")

    # -- changing the files ---------------------------------------------------------------------------------------

    def _correct_the_point(self) -> None:
        """Takes back, durably, what the point says of bytes that are not there, or not for long."""
        point = self.point
        if point.stable_position > self.end_position:
            point = point._replace(stable_offset=self.end_offset, stable_position=self.end_position)
        if self.bad is not None:
            point = point._replace(own_from=NO_EPOCHS[0], own_to=NO_EPOCHS[1])
        if point != self.point:
            self.point = point
            self.flush_file.write_both(point)

    def _cut(self) -> int:
        """Removes everything from the first bad position on, durably; returns how many bytes that were."""
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
        """Writes the index of each sealed segment that was walked; only the active one stays in memory."""
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
        """Removes, durably, the indexes, and what snapshots there are of a place behind the end: others come there."""
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
        for path in self.inventory.leftovers:
            unlink(path)
        reason = self.bad[1] if self.bad is not None else ""
        report = RecoveryReport(
            self.point.clean and producers is None, self.scanned_bytes, cut_bytes, reason, self.stable_offset_before
        )
        return RecoveredLog(
            self.segments, self.inventory.snapshots, self.flush_file, self.point, self.end_offset,
            self.last_append_us, producers, report,
        )  # fmt: skip
