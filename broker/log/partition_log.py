"""One partition's log: append, read, flush, and what keeps them true.

Theory of operation
-------------------
The log is a row of segments. The last is active: batches are appended to it until the next would make it too large;
the others never change. Three marks move along the log, each always at a batch boundary, as offset and as position:

    start ≤ flushed ≤ end       flushed: on the disk for certain; end: written, at least to the kernel
    start ≤ stable  ≤ end       stable: readers see up to here

A topic that flushes before acknowledging has stable = flushed, the others stable = end. `_advance_stable` is the
only place that moves it up, and only truncate() takes it back.

*Append* is the hot path and does no more than it must: stamp the broker part in place, one pwrite, then a few
additions. Memory is changed only after the write is complete. What a failed or half-done write leaves behind the end
is invisible to readers and cut by the next recovery.

*Flush* has three steps because fsync is slow: start_flush() notes the end and duplicates the descriptors,
ticket.sync() runs in any thread while appends go on, finish_flush() advances the marks and stores them in the file
`flushed`. At most one flush is under way, since the kernel reports a write error to one fsync only: two side by side
could share the news.

*The first failed write or fsync ends the log's life as a writer.* What is on the disk is unknown then and asking
again does not tell (a second fsync succeeds without having written anything). So every later append raises what the
first one raised, reads go on below the stable mark, and the next start recovers.

*Derived files* (.index, .producers) are written at roll, checkpoint and clean close, and never needed to be right:
each has a checksum and says up to where it goes. Only one thing is asked of them: none may describe bytes that were
replaced. So whatever cuts the log removes first, durably, what describes the bytes behind the cut.

After an open nothing is read until it is used: a broker with a thousand partitions starts with their names and sizes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

from metamq.broker.log import retention
from metamq.broker.log.config import LogConfig
from metamq.broker.log.derived import complete_index, cut_index, rebuild_producers, superfluous, unlink
from metamq.broker.log.files import FileCache, storage_error
from metamq.broker.log.flush import FlushTicket
from metamq.broker.log.flushed import FlushPoint
from metamq.broker.log.index import SparseIndex
from metamq.broker.log.producers import NEW, Duplicate, New, ProducerStates
from metamq.broker.log.recovery import Recovered, RecoveryReport, recover
from metamq.broker.log.scan import LOCATION, damaged, find_batch, find_time, read_at
from metamq.broker.log.segments import Segment, SegmentStats, SnapshotName, file_path
from metamq.errors import ClosedError, ConfigError, MetamqError, OffsetOutOfRange, StorageError
from metamq.wire.batch import HEADER_BYTES, BatchHeader, stamp
from metamq.wire.limits import BATCH_BYTES_MAX

log = logging.getLogger("metamq.broker.log")
_BASE_OFFSET = attrgetter("base_offset")
_BASE_POSITION = attrgetter("base_position")


class LogSlice(NamedTuple):
    """Batches as they lie in the log; the last may be cut off anywhere."""

    data: bytes
    base_offset: int
    """Of the first batch, at or below the offset that was asked for."""
    position: int


class PartitionLog:
    """The log of one partition. One thread only, except for FlushTicket.sync(). Its marks are to be read, not set."""

    __slots__ = (
        "_checkpoint_position",
        "_config",
        "_expired_us",
        "_files",
        "_flush_file",
        "_folder",
        "_folder_changed",
        "_point",
        "_producers",
        "_refusal",
        "_segments",
        "_slot_unsynced",
        "_snapshots",
        "_ticket",
        "_writing",
        "end_offset",
        "end_position",
        "flushed_offset",
        "flushed_position",
        "last_append_us",
        "name",
        "recovery",
        "stable_offset",
        "stable_position",
        "start_offset",
        "start_position",
    )  # fmt: skip

    def __init__(
        self, folder: str, name: str, config: LogConfig, files: FileCache, recovered: Recovered, now_us: int
    ) -> None:
        """Use open()."""
        point = recovered.point
        self.name = name
        self.recovery: RecoveryReport = recovered.report
        self.start_offset, self.start_position = point.start_offset, point.start_position
        self.flushed_offset, self.flushed_position = point.offset, point.position
        self.end_offset, self.end_position = recovered.end_offset, recovered.segments[-1].end_position
        self.stable_offset, self.stable_position = point.offset, point.position
        self.last_append_us = recovered.last_append_us
        self._folder = folder
        self._config = config
        self._files = files
        self._segments = recovered.segments
        self._snapshots: list[SnapshotName] = recovered.snapshots
        self._producers: ProducerStates | None = recovered.producers
        self._flush_file = recovered.flush_file
        self._point = point
        self._checkpoint_position = point.position if recovered.producers is None else -1
        self._expired_us = now_us
        self._writing = False
        self._folder_changed = False
        self._slot_unsynced = False
        self._ticket: FlushTicket | None = None
        self._refusal: MetamqError | None = None
        self._advance_stable()

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], name: str, config: LogConfig, files: FileCache, *, now_us: int
    ) -> PartitionLog:
        """Opens the log in `folder`, or makes a new one there, and recovers it.

        `name` ("flights/0-3") stands in errors and log lines. Raises CorruptData, with nothing modified, when bytes
        that were on the disk are damaged; StorageError when the disk fails.
        """
        path = os.fspath(folder)
        try:
            recovered = recover(path, name, config, files)
        except OSError as error:
            raise storage_error(name, "opening the log", error) from error
        return cls(path, name, config, files, recovered, now_us)

    @property
    def size_bytes(self) -> int:
        """Bytes of all batches."""
        return self.end_position - self.start_position

    @property
    def config(self) -> LogConfig:
        """The settings as of the last reconfigure()."""
        return self._config

    # -- writing --------------------------------------------------------------------------------------------------

    def check_producer(self, header: BatchHeader) -> New | Duplicate:
        """Whether a batch from a producer is new or repeated. Raises SequenceGap when its predecessor is missing.

        A Duplicate may lie above the stable offset still: it is to be answered once that has passed it.
        """
        if not header.producer_id:
            return NEW
        producers = self._producers
        if producers is None:
            producers = self._load_producers()
        return producers.check(self.name, header.producer_id, header.sequence)

    def append(self, batch: memoryview, header: BatchHeader, *, epoch: int, batch_id: int, now_us: int) -> int:
        """Stamps the batch in place and writes it; returns its base offset.

        `batch` is one whole batch, writable; `header` is its header, checked by the caller, as is its sequence.
        Raises StorageError when the disk fails, now or before; ClosedError.
        """
        if not self._writing:
            self._begin_writing()
        size = header.size
        segment = self._segments[-1]
        if segment.size_bytes and segment.size_bytes + size > self._config.segment_bytes:
            segment = self._roll()
        position, offset = self.end_position, self.end_offset
        stamp(
            batch, 0, epoch=epoch, base_offset=offset, batch_id=batch_id, append_time_us=now_us,
            unflushed_bytes=position - self.flushed_position,
        )  # fmt: skip
        try:
            self._files.write(segment.path, batch, segment.size_bytes)
        except OSError as error:
            raise self._fail("writing", error) from error
        segment.size_bytes += size
        index, producers = segment.index, self._producers
        assert index is not None
        assert producers is not None
        index.add(size, header.count, header.max_timestamp_us, now_us, self._config.index_interval_bytes)
        if header.producer_id:
            producers.record(header.producer_id, header.sequence, offset, header.count, now_us)
        self.end_position = position + size
        self.end_offset = offset + header.count
        self.last_append_us = now_us
        self._advance_stable()
        return offset

    def _begin_writing(self) -> None:
        """Before the first append after an open, a truncate or a failure: all that an append relies on."""
        if self._refusal is not None:
            raise self._refused()
        try:
            self._index_of(self._segments[-1])
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        if self._producers is None:
            self._load_producers()
        if self._point.clean:
            self._store_point()
        self._writing = True

    def _roll(self) -> Segment:
        """Seals the active segment and starts the next."""
        sealed = self._segments[-1]
        assert sealed.index is not None
        segment = Segment(
            file_path(self._folder, self.end_offset, self.end_position, "log"), self.end_offset, self.end_position, 0
        )
        try:
            self._files.replace(sealed.index_path, sealed.index.to_bytes(), sync=False)
            self._files.create(segment.path)
            self._segments.append(segment)
            self._save_producers(sync=False)
        except OSError as error:
            raise self._fail("starting a segment", error) from error
        self._files.indexes.put(sealed.path, sealed.index)
        sealed.last_append_us = sealed.index.last_append_us
        sealed.index = None
        segment.index = SparseIndex(segment.base_offset, segment.base_position)
        self._folder_changed = True
        self._slot_unsynced = True
        return segment

    def _fail(self, action: str, error: OSError) -> StorageError:
        """Ends the log's life as a writer; returns the error to raise."""
        failure = storage_error(self.name, action, error)
        self._refuse(failure)
        return failure

    def _refuse(self, failure: MetamqError) -> None:
        self._writing = False
        if self._refusal is None:
            self._refusal = failure

    def _refused(self) -> MetamqError:
        first = self._refusal
        assert first is not None
        if isinstance(first, StorageError):
            return StorageError(
                f"{self.name} takes no writes since its disk failed ({first.problem})",
                hint=first.hint,
                outcome="not_done",
            )
        return first

    def _advance_stable(self) -> None:
        """Moves the stable mark up to where the topic's promise holds."""
        if self._config.flush.before_ack:
            offset, position = self.flushed_offset, self.flushed_position
        else:
            offset, position = self.end_offset, self.end_position
        if position > self.stable_position:
            self.stable_offset, self.stable_position = offset, position

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int) -> LogSlice:
        """Batches from the one that holds `offset` on, below the stable mark, of one segment.

        The first is whole even if larger than `bytes_max`; the last may be cut. Empty at the stable end and above it.
        Raises OffsetOutOfRange, CorruptData, StorageError.
        """
        self._check_open()
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.name, offset, self.start_offset, self.end_offset)
        if offset >= self.stable_offset:
            return LogSlice(b"", offset, self.stable_position)
        segment = self._segments[-1]
        if offset < segment.base_offset:
            segment = self._segments[bisect_right(self._segments, offset, key=_BASE_OFFSET) - 1]
        try:
            base, position = self._find(segment, offset)
            available = min(self.stable_position, segment.end_position) - position
            data = read_at(self._files, segment, position, min(max(bytes_max, HEADER_BYTES), available) & ~7)
            size, found, count = LOCATION.unpack_from(data)
            if found != base or offset >= base + count or not HEADER_BYTES <= size <= min(available, BATCH_BYTES_MAX):
                raise damaged(f"{self.name}: {segment.path}", position, f"offset {base} is due here")
            if size > len(data):
                data = read_at(self._files, segment, position, size)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        return LogSlice(data, base, position)

    def _find(self, segment: Segment, offset: int) -> tuple[int, int]:
        """(base offset, position) of the batch that holds `offset`."""
        index = segment.index or self._index_of(segment)
        at = index.find(offset)
        if at[0] == offset:
            return at
        return find_batch(self._files, segment, offset, at, self._config.index_interval_bytes)

    def _index_of(self, segment: Segment) -> SparseIndex:
        """A segment's index; read or rebuilt when it is not in memory. Raises CorruptData, OSError."""
        if segment is self._segments[-1]:
            if segment.index is None:
                segment.index = complete_index(self._files, segment, self._config.index_interval_bytes)
            return segment.index
        index = self._files.indexes.get(segment.path)
        if index is None:
            index = complete_index(self._files, segment, self._config.index_interval_bytes)
            self._files.indexes.put(segment.path, index)
        return index

    def offset_at_time(self, timestamp_us: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first message whose timestamp is at or after the time; None if there is none.

        Times are the producers', microseconds since 1970, and need not rise with the offset. Raises CorruptData,
        StorageError.
        """
        self._check_open()
        try:
            for segment in self._segments:
                if segment.base_position >= self.stable_position:
                    return None
                index = segment.index or self._index_of(segment)
                if index.max_timestamp_us >= timestamp_us:
                    found = find_time(self._files, segment, timestamp_us, index.find_time(timestamp_us))
                    return found if found[0] < self.stable_offset else None
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        return None

    # -- flushing -------------------------------------------------------------------------------------------------

    def flush_due(self, since_ms: float) -> bool:
        """Whether the topic's policy asks for a flush now; `since_ms` is the age of the oldest unflushed append."""
        return self._config.flush.due(self.end_offset - self.flushed_offset, since_ms)

    def start_flush(self) -> FlushTicket | None:
        """A ticket for all that is unflushed; None when there is nothing, or while another ticket is out.

        Call its sync() in any thread, then finish_flush() in this one. Raises StorageError, ClosedError.
        """
        if self._refusal is not None:
            raise self._refused()
        if self._ticket is not None or (self.flushed_position == self.end_position and not self._slot_unsynced):
            return None
        paths = [s.path for s in self._segments if s.size_bytes and s.end_position > self.flushed_position]
        if self._slot_unsynced:
            paths.append(self._flush_file.path)
        folder = self._folder if self._folder_changed else None
        try:
            ticket = FlushTicket(self.name, self._files, paths, folder, self.end_offset, self.end_position)
        except OSError as error:
            raise self._fail("opening the log for a flush", error) from error
        self._folder_changed = self._slot_unsynced = False
        self._ticket = ticket
        return ticket

    def finish_flush(self, ticket: FlushTicket) -> None:
        """Advances the marks to what the ticket made durable. A ticket that a truncate overtook changes nothing.

        Raises StorageError when its sync() did.
        """
        if ticket.error is not None:
            self._refuse(ticket.error)
            raise ticket.error
        if ticket is not self._ticket:
            return
        assert ticket.done
        self._ticket = None
        if ticket.end_position > self.flushed_position:
            self.flushed_offset, self.flushed_position = ticket.end_offset, ticket.end_position
        self._advance_stable()
        self._store_point()

    def _flush_now(self) -> None:
        """Flushes to the end here and now, waiting for a ticket that is out."""
        while True:
            ticket = self._ticket or self.start_flush()
            if ticket is None:
                return
            with contextlib.suppress(StorageError):  # finish_flush raises it, after taking note
                ticket.sync()
            self.finish_flush(ticket)

    def _store_point(self, *, clean: bool = False) -> None:
        self._point = self._make_point(clean)
        try:
            self._flush_file.write(self._point)
        except OSError as error:
            raise self._fail("storing the flushed point", error) from error

    def _make_point(self, clean: bool) -> FlushPoint:
        return FlushPoint(
            self.flushed_position, self.flushed_offset, self.stable_offset, self.start_offset, self.start_position,
            self.last_append_us, clean,
        )  # fmt: skip

    def checkpoint(self) -> None:
        """Flushes, and saves what is derived from the log, so that a crash costs no scan of what is there now.

        Runs fsyncs in this thread; short when a flush has just been finished. Raises StorageError, ClosedError.
        """
        if self._refusal is not None:
            raise self._refused()
        if self._checkpoint_position == self.end_position == self.flushed_position:
            return
        self._save_checkpoint(clean=False)

    def _save_checkpoint(self, *, clean: bool) -> None:
        self._flush_now()
        active = self._segments[-1]
        try:
            if active.index is not None and active.size_bytes:
                self._files.replace(active.index_path, active.index.to_bytes(), sync=False)
            self._save_producers(sync=True)
            self._store_point(clean=clean)
            self._flush_file.sync()
            self._files.sync_folder(self._folder)
            self._slot_unsynced = False
        except OSError as error:
            raise self._fail("a checkpoint", error) from error
        self._checkpoint_position = self.end_position

    # -- changing the log as a whole ------------------------------------------------------------------------------

    def segments(self) -> list[SegmentStats]:
        """The segments, oldest first."""
        ends = [segment.base_offset for segment in self._segments[1:]] + [self.end_offset]
        active = self._segments[-1]
        return [
            SegmentStats(s.path, s.base_offset, end, s.base_position, s.size_bytes, s is active)
            for s, end in zip(self._segments, ends, strict=True)
        ]

    def reconfigure(self, config: LogConfig) -> None:
        """Takes new settings; they hold from the next append, flush or retention on."""
        self._config = config
        self._advance_stable()

    def apply_retention(self, now_us: int) -> list[SegmentStats]:
        """Removes or archives what is older or more than the topic keeps; returns the segments that went.

        Never what is above the stable mark. The active segment goes only when it is too old, and is sealed first. Runs
        a few fsyncs when something goes; an archive on another file system is copied to, here and now. A segment that
        cannot be archived stays, and so do the younger ones. Also forgets idempotent producers that expired. Raises
        StorageError, ClosedError.
        """
        if self._refusal is not None:
            raise self._refused()
        self._expired_us = now_us
        if self._producers is not None:
            self._producers.expire(now_us - 1000 * self._config.producer_expiry_ms)
        active = self._segments[-1]
        if (
            active.size_bytes
            and active.end_position <= self.stable_position
            and retention.expired_by_age(self._config, self.last_append_us, now_us)
        ):
            self._begin_writing()
            active = self._roll()
        sealed = self._segments[:-1]
        count = retention.removable(
            self._config, [(s.end_position, s.size_bytes) for s in sealed], active.size_bytes, self.stable_position,
            lambda number: self._last_append_us(sealed[number]), now_us,
        )  # fmt: skip
        going = self._archived(sealed[:count])
        if not going:
            return []
        removed = self.segments()[: len(going)]
        self.checkpoint()
        self._remove_oldest(going)
        return removed

    def _last_append_us(self, segment: Segment) -> int:
        if segment.last_append_us is None:
            try:
                segment.last_append_us = self._index_of(segment).last_append_us
            except OSError as error:
                raise storage_error(self.name, "reading", error) from error
        return segment.last_append_us

    def _archived(self, going: list[Segment]) -> list[Segment]:
        """Those that may be removed: all, or with an archive those that are in it now."""
        folder = self._config.archive_dir
        if self._config.cleanup != "archive" or folder is None:
            return going
        for number, segment in enumerate(going):
            try:
                retention.archive(self._files, segment.path, folder)
            except OSError as error:
                log.warning("%s: %s could not be archived to %s and stays: %s", self.name, segment.path, folder, error)
                return going[:number]
        return going

    def _remove_oldest(self, going: list[Segment]) -> None:
        """Moves the log's start, durably, and only then removes what is before it, the oldest first."""
        del self._segments[: len(going)]
        first = self._segments[0]
        self.start_offset, self.start_position = first.base_offset, first.base_position
        self._store_point(clean=False)
        try:
            self._flush_file.sync()
            for segment in going:
                self._drop(segment)
            for old in superfluous(self._snapshots, self._segments):
                unlink(old.path)
                self._snapshots.remove(old)
        except OSError as error:
            raise self._fail("removing old segments", error) from error

    def _drop(self, segment: Segment) -> None:
        """Removes a segment's files. Raises OSError."""
        self._files.forget(segment.path)
        self._files.indexes.forget(segment.path)
        unlink(segment.path)
        unlink(segment.index_path)

    def truncate(self, position: int) -> None:
        """Cuts the log back to the last batch boundary at or below `position`, durably; producer states follow.

        Only for a replica that gives up what its master does not have: the stable mark is taken back too. Raises
        ConfigError when the log starts behind `position`, CorruptData, StorageError, ClosedError.
        """
        if self._refusal is not None:
            raise self._refused()
        if position >= self.end_position:
            return
        if position < self.start_position:
            raise ConfigError(
                f"{self.name} cannot be cut at byte {position:,}: it starts at byte {self.start_position:,}",
                hint="Copy the partition anew from its master.",
            )
        if self._ticket is not None:
            with contextlib.suppress(StorageError):
                self._ticket.sync()
            self.finish_flush(self._ticket)
        number = bisect_right(self._segments, position, key=_BASE_POSITION) - 1
        segment = self._segments[number]
        try:
            index = self._index_of(segment)
            self._files.indexes.forget(segment.path)
            cut_index(self._files, segment, index, position, self._config.index_interval_bytes)
            self._cut(number, index)
        except OSError as error:
            raise self._fail("cutting the log", error) from error

    def _cut(self, number: int, index: SparseIndex) -> None:
        """Cuts the log at the end of `index`, in its segment `number`. Raises OSError.

        The flushed point goes first: a log that ends below it would be taken for damaged.
        """
        self._writing = False
        self.end_offset, self.end_position = index.end_offset, index.end_position
        if self.flushed_position > self.end_position:
            self.flushed_offset, self.flushed_position = self.end_offset, self.end_position
        if self.stable_position > self.end_position:
            self.stable_offset, self.stable_position = self.end_offset, self.end_position
        segment = self._segments[number]
        segment.index = index
        self._point = self._make_point(clean=False)
        self._flush_file.write_both(self._point)
        for later in reversed(self._segments[number + 1 :]):
            self._drop(later)
        del self._segments[number + 1 :]
        unlink(segment.index_path)
        for snapshot in [s for s in self._snapshots if s.position > self.end_position]:
            unlink(snapshot.path)
            self._snapshots.remove(snapshot)
        fd = self._files.descriptor(segment.path)
        segment.size_bytes = self.end_position - segment.base_position
        segment.last_append_us = None
        os.ftruncate(fd, segment.size_bytes)
        self._files.sync(fd)
        self._files.sync_folder(self._folder)
        self._producers = None
        self._checkpoint_position = -1
        newest = next((s for s in reversed(self._segments) if s.size_bytes), None)
        self.last_append_us = self._index_of(newest).last_append_us if newest is not None else 0

    def close(self, clean: bool = True) -> None:
        """Closes the files. A clean close flushes and saves all that a start would have to scan for otherwise.

        After a failure of the disk the close is never clean. Raises StorageError when flushing fails; the files are
        closed all the same. A second call does nothing.
        """
        if isinstance(self._refusal, ClosedError):
            return
        try:
            settled = self._point.clean and self._checkpoint_position == self.end_position == self.flushed_position
            if clean and self._refusal is None and not settled:
                self._save_checkpoint(clean=True)
        finally:
            self._refusal = ClosedError(f"log of {self.name}")
            self._writing = False
            self._ticket = None
            self._files.forget(self._flush_file.path)
            for segment in self._segments:
                self._files.forget(segment.path)
                self._files.indexes.forget(segment.path)

    def _check_open(self) -> None:
        if self._refusal is not None and isinstance(self._refusal, ClosedError):
            raise self._refusal

    # -- producer states ------------------------------------------------------------------------------------------

    def _load_producers(self) -> ProducerStates:
        try:
            states = rebuild_producers(self._files, self._segments, self._snapshots, self.end_position)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        states.expire(self._expired_us - 1000 * self._config.producer_expiry_ms)
        self._producers = states
        return states

    def _save_producers(self, *, sync: bool) -> None:
        """Saves the states as of the end, and drops the snapshots that nobody needs any more. Raises OSError."""
        states = self._producers if self._producers is not None else self._load_producers()
        snapshot = SnapshotName(
            self.end_position,
            self.end_offset,
            file_path(self._folder, self.end_offset, self.end_position, "producers"),
        )
        self._files.replace(snapshot.path, states.to_bytes(self.end_offset, self.end_position), sync=sync)
        if snapshot not in self._snapshots:
            self._snapshots.append(snapshot)
        for old in superfluous(self._snapshots, self._segments):
            unlink(old.path)
            self._snapshots.remove(old)
