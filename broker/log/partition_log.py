"""The log of one partition: append, read, flush, and the files derived from it.

Theory of operation
-------------------
The log is a sequence of segments. The last one is active: batches are appended to it until the next one would make it
too large. The others never change. metamq.broker.log.durable explains the marks that move along the log, and flushes.

*Append* is the hot path and does only the minimum: stamp the broker parts in place, one pwrite, then a few additions.
Memory changes only after the write is complete. Bytes of a failed write are behind the end: recovery cuts them off.

*A replica that copies* appends the batches that its master stamped, byte for byte: the same batches at the same
positions. So positions mean the same on both. State comes from the headers of the batches.

*Derived files* (.index, .producers) are written at roll, checkpoint and clean close, and may be wrong or missing: each
has a checksum and its end in the log. There is only one rule: none may describe bytes that were replaced. So a cut of
the log first removes, durably, the files that describe the bytes behind the cut. The file `epochs` is derived, too; it
is written at the first batch of each epoch: metamq.broker.log.disk.epochs.

*Retention and checkpoints* take fsyncs, copies and removals. They run in steps, concurrently with the log's other work:
metamq.broker.log.steps has the rules. Sealed segments are never written. The log's start moves past old segments,
durably, before their files are removed. A checkpoint is true as of a position, and later appends do not change that.

After an open, nothing is read until it is used: a broker with a thousand partitions starts with their names and sizes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from metamq.broker.log import fresh, retention
from metamq.broker.log.disk.derived import remove_file
from metamq.broker.log.disk.epochs import EpochList
from metamq.broker.log.disk.files import FileCache, is_full, storage_error
from metamq.broker.log.disk.producers import NEW, Duplicate, New, ProducerStates
from metamq.broker.log.durable import UNBOUND, DurableLog
from metamq.broker.log.recovery import RecoveredLog, RecoveryReport, recover
from metamq.broker.log.replicated import CopyDamaged, check_replicated, fitting
from metamq.broker.log.steps import FLUSH, Steps
from metamq.broker.log.store import BatchRun, FilePart, LogSlice, SegmentStore
from metamq.errors import ClosedError, ConfigError, CorruptData, DiskFull, Fenced, OffsetOutOfRange
from metamq.wire.batch import BatchHeader, stamp

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig
    from metamq.broker.log.disk.segments import Segment, SegmentStats
    from metamq.broker.log.disk.times import Search

log = logging.getLogger("metamq.broker.log")


class PartitionLog(DurableLog):
    """The log of one partition.

    Only one thread may use it, except for FlushTicket.sync() and the steps that checkpoint() and retain() yield.
    """

    __slots__ = ("_checkpoint_position", "_epoch", "_epochs", "_expired_us", "_producers", "recovery")

    def __init__(
        self, folder: str, name: str, config: LogConfig, files: FileCache, recovered: RecoveredLog, now_us: int
    ) -> None:
        """Internal: use open()."""
        super().__init__(folder, name, config, files, recovered)
        self.recovery: RecoveryReport = recovered.report
        self._producers: ProducerStates | None = recovered.producers
        self._epochs: EpochList | None = None
        self._epoch = -1  # the epoch under which appends skip the check of earlier epochs; -1: none
        self._checkpoint_position = recovered.snapshots[-1].position if recovered.snapshots else -1
        self._expire_producers(now_us)

    @staticmethod
    def make(folders: Sequence[str | os.PathLike[str]], name: str, files: FileCache) -> None:
        """Makes new logs on one disk, unless a folder has one; durable, except for the folders' own names. Any thread.

        open() makes one as well, but waits for the disk. `name` is for errors. Raises StorageError.
        """
        try:
            fresh.make_all([os.path.normpath(folder) for folder in folders], files)
        except OSError as error:
            raise storage_error(name, "making the log", error) from error

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        name: str,
        config: LogConfig,
        files: FileCache,
        *,
        now_us: int,
        on_loss: Callable[[str], object] = lambda what: None,
    ) -> Self:
        """Opens the log in `folder`, or makes a new one there, and recovers it.

        `name` ("flights/0-3") is for errors and log lines. `on_loss` is called with a description if the log lacks
        messages that it had, before anything is modified. If `on_loss` raises, nothing has been done, and the next open
        calls it again. Raises CorruptData, with nothing modified, if bytes that were on the disk are damaged;
        StorageError if the disk fails.

        Readers see no more of the log than before, until set_bound() or clear_bound() allows more.
        """
        path = os.path.normpath(folder)
        try:
            recovered = recover(path, name, config, files, on_loss)
        except OSError as error:
            raise storage_error(name, "opening the log", error) from error
        return cls(path, name, config, files, recovered, now_us)

    def segments(self) -> list[SegmentStats]:
        """The segments, oldest first."""
        return self._store.stats(self.end_offset)

    # -- appending ------------------------------------------------------------------------------------------------

    def check_producer(self, header: BatchHeader) -> New | Duplicate:
        """Decides if a batch from a producer is new or repeated.

        Raises SequenceGap if its predecessor is missing, ProtocolError if another batch is stored under its number,
        CorruptData, StorageError. A Duplicate may still be above the stable offset: answer it when that has passed it.
        """
        if not header.producer_id:
            return NEW
        producers = self._producers if self._producers is not None else self._load_producers()
        return producers.check(self.name, header.producer_id, header.sequence, header.count)

    def append(
        self, batches: memoryview, headers: Sequence[BatchHeader], *, epoch: int, batch_id: int, now_us: int
    ) -> int:
        """Stamps batches in place and appends them by one write, all or none; returns the base offset of the first.

        `batches` are whole batches, back to back and writable, with ids from `batch_id` on. The caller has checked them
        and their sequence numbers. Raises Fenced if the log has batches of a later epoch; StorageError if the disk
        fails, now or earlier; CorruptData; ClosedError.
        """
        if not self._writing:
            self._begin_writing()
        begins = epoch != self._epoch
        if begins and epoch < (last := self.epochs().last):
            raise Fenced(f"epoch {epoch} of {self.name}", f"the log already has batches of epoch {last}")
        segment = self._store.segments[-1]
        if segment.size_bytes and segment.size_bytes + len(batches) > self._config.segment_bytes:
            segment = self._roll()
        position, first = self.end_position, self.end_offset
        unflushed, offset, at = position - self.flushed_position, first, 0
        for number, header in enumerate(headers):
            stamp(
                batches, at, epoch=epoch, base_offset=offset, batch_id=batch_id + number, append_time_us=now_us,
                unflushed_bytes=unflushed + at,
            )  # fmt: skip
            at += header.size
            offset += header.count
        self._write(segment, batches, headers, now_us)
        if begins:
            self._begin_epoch(epoch, first, position)
        self._advance_stable()
        return first

    def append_replicated(self, batches: memoryview, position: int) -> None:
        """Appends whole batches of the master's log, byte for byte. `position` must be the end of the log here.

        Readers see none of them until a bound allows it. Raises CorruptData and ProtocolError, with nothing stored, if
        the batches are damaged or not the next ones; StorageError, ClosedError.
        """
        self._check_writable()
        last_epoch = self.epochs().cut(self.end_position).last
        headers = check_replicated(self.name, batches, position, self.end_offset, self.end_position, last_epoch)
        if not self._writing:
            self._begin_writing()
        if self._bound_position == UNBOUND:
            self.set_bound(self.stable_offset, self.stable_position)
        self._epoch = -1
        self._slot_unsynced = True  # see metamq.broker.log.recovery
        while headers:
            segment = self._store.segments[-1]
            count, size = fitting(headers, segment.size_bytes, self._config.segment_bytes)
            if count:
                self._write_replicated(segment, batches[:size], headers[:count])
                batches, headers = batches[size:], headers[count:]
            else:
                self._roll()

    def _write_replicated(self, segment: Segment, batches: memoryview, headers: list[BatchHeader]) -> None:
        position = self.end_position
        self._write(segment, batches, headers)
        epochs = self.epochs()
        for header in headers:
            epochs = epochs.add(header.epoch, header.base_offset, position)
            position += header.size
        self._change_epochs(epochs)
        self._advance_stable()

    def _write(
        self, segment: Segment, batches: memoryview, headers: Sequence[BatchHeader], now_us: int | None = None
    ) -> None:
        """Writes batches behind the end. `now_us`: their append time, unless their headers have it."""
        try:
            self._files.write(segment.path, batches, segment.size_bytes)
        except OSError as error:
            raise self._not_written(segment, error) from error
        segment.size_bytes += len(batches)
        index, producers = segment.index, self._producers
        assert index is not None
        assert producers is not None
        for header in headers:
            time_us = self.last_append_us = header.append_time_us if now_us is None else now_us
            index.add(header.size, header.count, header.max_timestamp_us, time_us, self._config.index_interval_bytes)
            if header.producer_id:
                producers.record(header.producer_id, header.sequence, self.end_offset, header.count, time_us)
            self.end_offset += header.count
        self.end_position = segment.end_position

    def _begin_writing(self) -> None:
        """Prepares for the first append after an open, a truncate or a failure."""
        self._check_writable()
        self._stored(self._store.index_of, self._store.segments[-1])
        if self._producers is None:
            self._load_producers()
        if self._point.clean:
            self._store_point()
        self._writing = True
        if self._refusal is not None:  # the thread of a flush has just set it
            self._writing = False
            self._check_writable()

    def _begin_epoch(self, epoch: int, offset: int, position: int) -> None:
        """Notes the first append under an epoch in which this replica is the master."""
        epochs = self.epochs()
        own_from = self._own_from if self._own_from <= self._own_to == epochs.last else epoch
        if (own_from, epoch) != (self._own_from, self._own_to):
            self._own_from, self._own_to = own_from, epoch
            with self._or_later("storing the flushed point"):
                self._store_point()
            self._slot_unsynced = True
        self._change_epochs(epochs.add(epoch, offset, position))
        self._epoch = epoch

    def _roll(self) -> Segment:
        """Seals the active segment and starts the next."""
        assert self._producers is not None
        try:
            with self._unless_full("the producer states"):  # first: a lack of descriptors must change nothing
                self._save_producers(self._producers)
            segment = self._store.roll(self.end_offset, self.end_position)
        except OSError as error:
            raise self._fail("starting a segment", error) from error
        self._unsynced.add(self._folder)
        self._slot_unsynced = True
        return segment

    def _load_producers(self) -> ProducerStates:
        try:
            states = self._store.load_producers(self.end_position)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        self._producers = states
        self._expire_producers(self._expired_us)
        return states

    def producers_before_start(self) -> bytes:
        """A snapshot of the batches that producers stored below the log's start; empty if none are known.

        Raises CorruptData, StorageError.
        """
        if not self.start_offset:
            return b""
        states = self._producers if self._producers is not None else self._load_producers()
        gone = states.before(self.start_offset)
        return gone.to_bytes(self.start_offset, self.start_position) if gone else b""

    def begin_with_producers(self, snapshot: bytes) -> None:
        """Takes the result of `producers_before_start` of the master's log. A log with batches knows these already.

        Raises CopyDamaged, StorageError, ClosedError.
        """
        self._check_writable()
        if self.start_position != self.end_position:
            return
        states = ProducerStates.from_bytes(snapshot, self.end_offset, self.end_position)
        if states is None:
            raise CopyDamaged(f"the copy of {self.name}", "its producer states are damaged")
        self._producers = states
        try:
            self._save_producers(states)
        except OSError as error:
            raise self._fail("saving the producer states", error) from error

    def _save_producers(self, states: ProducerStates) -> None:
        """Saves the states as of the end; the next flush makes the file durable. Raises OSError."""
        self._unsynced.update((self._store.save_producers(states, self.end_offset, self.end_position), self._folder))

    def _expire_producers(self, now_us: int) -> None:
        self._expired_us = now_us
        if self._producers is not None:
            self._producers.expire(now_us - 1000 * self._config.producer_expiry_ms)

    def epochs(self) -> EpochList:
        """The places where each epoch's first batch begins. Raises CorruptData, StorageError, ClosedError."""
        if self._epochs is None:
            self._check_open()
            found, is_saved = self._stored(
                self._store.load_epochs, self.start_offset, self.start_position, self.end_position
            )
            if found.entries and not is_saved and self._refusal is None:
                self._change_epochs(found)
            self._epochs = found
        return self._epochs

    def _change_epochs(self, epochs: EpochList) -> None:
        """Saves the list if it has changed; the next flush makes it durable."""
        if epochs == self._epochs:
            return
        self._epochs = epochs
        with self._or_later("saving the epochs"):
            self._unsynced.update((self._store.save_epochs(epochs), self._folder))

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int) -> LogSlice:
        """Batches below the stable mark, of one segment, beginning with the batch that holds `offset`.

        The first batch is whole, even if larger than `bytes_max`; the last may be cut off. Empty at the stable end and
        above it. Raises OffsetOutOfRange, CorruptData, StorageError, ClosedError.
        """
        if not self._is_readable(offset):
            return LogSlice(b"", offset, self.stable_position)
        return self._stored(self._store.read, offset, bytes_max, self.stable_position)

    def locate(self, offset: int, bytes_max: int) -> FilePart | None:
        """The place of the bytes that read() would return, at least one batch. None at the stable end and above."""
        is_there = self._is_readable(offset)
        return self._stored(self._store.locate, offset, bytes_max, self.stable_position) if is_there else None

    def _is_readable(self, offset: int) -> bool:
        """True if there is a message to read. Raises OffsetOutOfRange, ClosedError."""
        self._check_open()
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.name, offset, self.start_offset, self.end_offset)
        return offset < self.stable_offset

    def read_position(self, position: int, bytes_max: int) -> BatchRun:
        """Whole batches for a replica to copy, of one segment, from the batch boundary `position` up to the *end*.

        At least one batch, even if larger than `bytes_max`; none at the end. Raises ConfigError outside of the log,
        CorruptData, StorageError, ClosedError.
        """
        self._check_open()
        if position == self.end_position:
            return BatchRun(memoryview(b""), position, self.end_offset, self.end_offset)
        if not self.start_position <= position < self.end_position:
            there = f"the bytes {self.start_position:,} to {self.end_position:,}"
            raise ConfigError(f"{self.name} has {there}, not {position:,}")
        return self._stored(self._store.read_whole, position, bytes_max)

    def begins_at(self, offset: int, position: int) -> bool:
        """True if a batch begins there, or the log ends there. Raises CorruptData, StorageError, ClosedError."""
        self._check_open()
        if not self.start_offset <= offset < self.end_offset:
            return (offset, position) == (self.end_offset, self.end_position)
        return self._stored(self._store.begins_at, offset, position)

    @property
    def begin_offset(self) -> int:
        """The offset of the first message for readers."""
        return self.start_offset

    def offset_at_time(self, timestamp_us: int) -> Search:
        """(offset, timestamp) of the first message at or after the time that is not hidden; None if there is none.

        Times come from producers, in microseconds since 1970, and may fall. Abandon the search if the log is cut.
        Raises CorruptData, StorageError, ClosedError.
        """
        self._check_open()
        try:
            found = yield from self._store.first_at_time(lambda: self.begin_offset, timestamp_us, self.stable_position)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        return found if found is not None and found[0] < self.stable_offset else None

    # -- saving what is derived -----------------------------------------------------------------------------------

    def checkpoint(self) -> Steps[None]:
        """Flushes, and saves the derived files: a start after a crash then does not scan the existing batches.

        Raises StorageError, ClosedError.
        """
        self._check_writable()
        if self._checkpoint_position == self.end_position == self.flushed_position and not self._slot_unsynced:
            self._store_point(clean=self._point.clean)  # the bound may have moved the stable mark
            return
        yield FLUSH
        self._check_writable()
        self._save_derived(clean=False)
        yield FLUSH

    def _save_derived(self, *, clean: bool) -> None:
        """Saves the derived files as of the end; the next flush makes them durable."""
        states = self._producers if self._producers is not None else self._load_producers()
        try:
            with self._unless_full("a checkpoint"):
                self._save_producers(states)
                self._store.save_active_index()
                self._checkpoint_position = self.end_position
        except OSError as error:
            raise self._fail("a checkpoint", error) from error
        self._store_point(clean=clean)
        self._slot_unsynced = True

    # -- changing the log as a whole ------------------------------------------------------------------------------

    def reconfigure(self, config: LogConfig) -> None:
        """Takes new settings. They apply from the next append, flush or retention on."""
        self._config = config
        self._store.index_interval_bytes = config.index_interval_bytes
        self._advance_stable()

    def retain(
        self, now_us: int, keep_from: int | None = None, drop_before: int | None = None
    ) -> Steps[list[SegmentStats]]:
        """Removes or archives segments that are older or more than the topic keeps; returns these segments.

        Never removes a segment that ends above the stable mark or above the byte `keep_from`. The active segment is
        removed only if it is too old, and is sealed first. If one cannot be archived, it and the younger ones stay.
        With `drop_before`, removes all segments below that offset instead, without an archive, but not the active one.
        Also forgets expired idempotent producers. Raises StorageError, CorruptData, ClosedError.
        """
        self._check_writable()
        self._expire_producers(now_us)
        kept, dropped = self.end_position if keep_from is None else keep_from, min(drop_before or 0, self.stable_offset)
        try:
            going = self._expired_segments(now_us) if drop_before is None else self._store.before(dropped)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error
        going = [segment for segment in going if segment.end_position <= kept]
        archive = self._config.archive_dir if drop_before is None and self._config.cleanup == "archive" else None
        if going and archive is not None:
            paths = [segment.path for segment in going]
            going = going[: (yield partial(retention.archive_all, self._files, self.name, paths, archive))]
        if not going:
            return []
        yield from self.checkpoint()
        if not self._store.has_producers_from(going[-1].end_position):  # the disk is full
            self._remove_indexes(going)
            yield from self.checkpoint()
        yield FLUSH  # also makes the snapshot durable: only it keeps the producer states of these segments
        self._check_writable()
        if (segments := self._store.segments)[: len(going)] != going or len(segments) == len(going):  # the log was cut
            return []
        going = [segment for segment in going if self._store.has_producers_from(segment.end_position)]
        removed, first = self.segments()[: len(going)], segments[len(going)]
        before = self.start_offset, self.start_position
        self.start_offset, self.start_position = first.base_offset, first.base_position
        if not (going and self._store_point()):  # the disk is full
            self.start_offset, self.start_position = before
            return []
        if self._epochs is not None:
            self._epochs = self._epochs.drop_prefix(first.base_offset, first.base_position)
        self._slot_unsynced = True
        yield FLUSH  # the new start must be durable first: else a crash could leave a log without its start
        self._check_writable()
        if self._store.segments[: len(going)] != going:  # the log was emptied
            return []
        try:
            with self._unless_full("the removal of files"):
                paths = self._store.release_oldest(len(going))
                self._unsynced = set(filter(os.path.exists, self._unsynced))
                for path in paths:  # a step each: a stop waits for one file at most
                    self._check_open()
                    yield partial(remove_file, path)
        except OSError as error:
            raise self._fail("removing old segments", error) from error
        return removed

    def _expired_segments(self, now_us: int) -> list[Segment]:
        """The sealed segments that retention removes now. Raises OSError."""
        store, config = self._store, self._config
        active = store.segments[-1]
        all_stable = active.size_bytes and active.end_position <= self.stable_position
        if all_stable and retention.expired_by_age(config, self.last_append_us, now_us):
            if not self._writing:
                self._begin_writing()
            with contextlib.suppress(DiskFull):
                active = self._roll()
        sealed = store.segments[:-1]
        count = retention.removable(
            config,
            [(segment.end_position, segment.size_bytes) for segment in sealed],
            active.size_bytes,
            self.stable_position,
            lambda number: store.segment_last_append_us(sealed[number]),
            now_us,
        )
        return sealed[:count]

    def truncate(self, position: int) -> None:
        """Cuts the log at the last batch boundary at or below `position`, durably. Producer states follow.

        Only for a replica that drops batches that its master does not have. The stable mark and the bound are moved
        back, too, since other batches may come there. Raises ConfigError if the log starts above `position`,
        CorruptData, StorageError, ClosedError.
        """
        self._check_writable()
        if position >= self.end_position:
            return
        if position < self.start_position:
            raise ConfigError(
                f"{self.name} cannot be cut at byte {position:,}: it starts at byte {self.start_position:,}",
                hint="Copy the partition again from its master.",
            )
        if self._ticket is not None:
            self._finish_now(self._ticket)
        self._reserve_descriptors("cutting the log")
        self._writing = False
        try:
            segment, index = self._store.boundary_before(position)
            try:
                self._take_marks_back(index.end_offset, index.end_position)
            except OSError as error:
                segment.index = None  # the index is already cut
                raise self._fail("cutting the log", error) from error
            self._epoch, self._producers, self._checkpoint_position = -1, None, -1
            self._store.cut(segment, index)
            self.last_append_us = self._store.last_append_us()
            if self._epochs is not None:
                self._change_epochs(self._epochs.cut(self.end_position))
        except OSError as error:
            raise self._fail("cutting the log", error, half_done=True) from error
        except CorruptData as error:
            self._refuse(error)
            raise

    def reset_to(self, offset: int, position: int) -> list[str]:
        """Empties the log, durably. It then begins at this place: the master does not have the bytes before it.

        Returns obsolete files, which any thread may remove. Only for a replica: readers see nothing until a bound
        allows it. Raises StorageError, ClosedError.
        """
        is_decided = isinstance(self._refusal, DiskFull)  # an earlier attempt found no space for the rest
        if not is_decided:
            self._check_writable()
        if self._ticket is not None:
            self._finish_now(self._ticket)
        self._reserve_descriptors("emptying the log")
        point = fresh.empty_point(offset, position)
        if not is_decided and point == self._make_point(clean=True) and self.end_position == position:
            self._take_point(self._point)
            return []
        self._writing, self._refusal = False, None
        try:
            fresh.decide_to_empty(self._flush_file, point)
            is_decided = True
            self._store.close()
            segment, void = fresh.empty(self._folder, self._files, self._flush_file, point)
        except OSError as error:
            failure = self._fail("emptying the log", error, half_done=not is_full(error))
            if is_decided:  # on a full disk, too: the next start would drop any append
                self._refuse(failure)
            raise failure from error
        self._store = SegmentStore(self._folder, self._files, [segment], [], self._config.index_interval_bytes)
        self._take_point(point)
        self._producers, self._epochs, self._epoch = ProducerStates(), EpochList(), -1
        self._checkpoint_position = -1
        self._slot_unsynced = False
        self._unsynced.clear()
        return void

    def close(self, clean: bool = True, *, synced_later: bool = False) -> None:
        """Closes the files. A clean close first flushes and saves the derived files, so the next start scans nothing.

        With `synced_later` the caller waits for the whole disk before it counts the close as clean. After a failure of
        the disk no close is clean. Raises StorageError if flushing fails; the files are closed anyway. May be repeated.
        """
        if isinstance(self._refusal, ClosedError):
            return
        try:
            untouched = self._point.clean and self._point == self._make_point(clean=True)
            if clean and self._refusal is None and not untouched:
                self._close_cleanly(synced_later)
        finally:
            self._refusal = ClosedError(f"log of {self.name}")
            self._writing = False
            self._ticket = None
            self._files.forget(self._flush_file.path)
            self._store.close()

    def _close_cleanly(self, synced_later: bool) -> None:
        self._flush_now()
        self._save_derived(clean=True)
        try:
            if not synced_later:
                self._flush_file.sync()
        except OSError as error:
            raise self._fail("the last fsync", error) from error
