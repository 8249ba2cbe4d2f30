"""The durability of a log's bytes: its marks, the flushes that move them, and the failure that ends all writing.

Three marks move along the log. Each is always at a batch boundary, as an offset and a position:

    start ≤ flushed ≤ end       flushed: certainly on the disk; end: written, at least to the kernel
    start ≤ stable  ≤ end       stable: readers see the log up to here

The stable mark follows the log's *own* mark: the flushed mark if the topic flushes before acknowledging, else the end.
It never passes the *bound*, which the log's owner sets. On a replica that copies, the bound is the place that every
in-sync replica has reached, as the master says. On a master with in-sync replicas it is the lowest place that they
acknowledged. Without in-sync replicas there is no bound. Only `_advance_stable` moves the stable mark up, and only a
cut of the log moves it back.

The stable mark is stored with the flushed mark. When the log is opened again, the process that set the bound may be
gone, and the part above the stable mark may still be cut. So an open log is bound to its stored stable mark until its
owner decides.

*A flush* has three steps because fsync is slow. start_flush() notes the end and duplicates the descriptors.
ticket.sync() runs in any thread while appends continue. finish_flush() advances the marks and stores them in the file
`flushed`. At most one flush runs at a time: the kernel reports a write error to one fsync only, so of two concurrent
flushes one would miss the error.

*A full disk does not end writing.* A write that finds no space is not a failure of the disk: the partly written bytes
are cut off, and the log is as before. An append raises DiskFull. The derived files are stored later, and so is the
flushed point, which may be too low without harm. An fsync that fails is a failure of the disk, whatever its reason.

*Any other failed write, or failed fsync, ends all writing.* The content of the disk is then unknown, and another fsync
does not help: it succeeds without having written anything. So every later append raises the first error, reads below
the stable mark continue, and the next start recovers.

*A lack of descriptors is not a failure.* TooManyOpenFiles does not end writing: it is raised before any change. Files
that cannot be stored now are stored with the next flush or checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from metamq.broker.log.disk.derived import unlink_all
from metamq.broker.log.disk.files import SHORTAGES, FileCache, disk_error, is_full, storage_error
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushPoint
from metamq.broker.log.disk.segments import Segment
from metamq.broker.log.flush import FILES_MAX, FlushTicket
from metamq.broker.log.store import SegmentStore
from metamq.errors import ClosedError, DiskFull, MetamqError, StorageError, TooManyOpenFiles

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig
    from metamq.broker.log.disk.cold import ColdReader
    from metamq.broker.log.recovery import RecoveredLog

log = logging.getLogger("metamq.broker.log")
T = TypeVar("T")
UNBOUND = 1 << 63
"""A value beyond any position and offset."""


class DurableLog:
    """The part of a PartitionLog that keeps the marks and flushes. Callers may read the marks, but not set them."""

    __slots__ = (
        "_bound_offset", "_bound_position", "_config", "_files", "_flush_file", "_folder", "_own_from",
        "_own_to", "_point", "_refusal", "_slot_unsynced", "_store", "_ticket", "_unsynced", "_writing",
        "end_offset", "end_position", "flushed_offset", "flushed_position", "last_append_us", "name",
        "stable_offset", "stable_position", "start_offset", "start_position",
    )  # fmt: skip

    def __init__(self, folder: str, name: str, config: LogConfig, files: FileCache, recovered: RecoveredLog) -> None:
        self.name = name
        self._folder = folder
        self._config = config
        self._files = files
        self._store = SegmentStore(folder, files, recovered.segments, recovered.snapshots, config.index_interval_bytes)
        self._flush_file = recovered.flush_file
        self._writing = False
        self._slot_unsynced = False
        self._unsynced: set[str] = set()
        """Paths of snapshots, of the epochs, and of the folder, that the next flush must make durable."""
        if not recovered.report.clean:  # a killed process may have begun a segment without syncing its name
            self._unsynced.add(folder)
        self._ticket: FlushTicket | None = None
        self._refusal: MetamqError | None = None
        self._take_point(recovered.point)
        self.end_offset, self.end_position = recovered.end_offset, recovered.segments[-1].end_position
        self.last_append_us = recovered.last_append_us

    def _take_point(self, point: FlushPoint) -> None:
        """Sets all marks from the point. The log then ends where it is flushed, and is bound."""
        self._point = point
        self.start_offset, self.start_position = point.start_offset, point.start_position
        self.flushed_offset, self.flushed_position = point.offset, point.position
        self.end_offset, self.end_position = point.offset, point.position
        self.stable_offset, self.stable_position = point.stable_offset, point.stable_position
        self.last_append_us = point.last_append_us
        self._own_from, self._own_to = point.own_from, point.own_to
        self._bound_offset, self._bound_position = point.stable_offset, point.stable_position

    @property
    def size_bytes(self) -> int:
        """Total size of all batches."""
        return self.end_position - self.start_position

    @property
    def config(self) -> LogConfig:
        """The settings of the last reconfigure()."""
        return self._config

    def set_bound(self, offset: int, position: int) -> None:
        """Sets the bound: readers see nothing at or above it. It is a batch boundary and may be beyond the end.

        A lower bound than before does not move the stable mark back: it only stops its advance.
        """
        self._bound_offset, self._bound_position = offset, position
        self._advance_stable()

    def clear_bound(self) -> None:
        """Removes the bound: readers see everything that this disk stores as the topic asks."""
        self.set_bound(UNBOUND, UNBOUND)

    def _advance_stable(self) -> None:
        """Moves the stable mark up to the log's own mark, but not beyond the bound."""
        if self._config.flush.before_ack:
            offset, position = self.flushed_offset, self.flushed_position
        else:
            offset, position = self.end_offset, self.end_position
        if position > self._bound_position:
            offset, position = self._bound_offset, self._bound_position
        if position > self.stable_position:
            self.stable_offset, self.stable_position = offset, position

    # -- flushing -------------------------------------------------------------------------------------------------

    def flush_due(self, since_ms: float) -> bool:
        """True if the topic's policy requires a flush now. `since_ms`: age of the oldest unflushed append."""
        return self._config.flush.due(self.end_offset - self.flushed_offset, since_ms)

    def start_flush(self) -> FlushTicket | None:
        """Returns a ticket for the unflushed files, or for as many as one ticket may have.

        None if everything is flushed, or if another ticket is not finished. Call its sync() in any thread, then
        finish_flush() in this one. Raises StorageError, ClosedError.
        """
        self._check_writable()
        settled = self.flushed_position == self.end_position and not self._slot_unsynced and not self._unsynced
        if self._ticket is not None or settled:
            return None
        dirty = [s for s in self._store.segments if s.size_bytes and s.end_position > self.flushed_position]
        taken = dirty[:FILES_MAX]
        end = self.end_offset, self.end_position
        if len(taken) < len(dirty):
            end = dirty[FILES_MAX].base_offset, dirty[FILES_MAX].base_position
        paths = [segment.path for segment in taken]
        if self._slot_unsynced:
            paths.append(self._flush_file.path)
        unsynced = sorted(self._unsynced)[:FILES_MAX]  # the folder comes first, since the paths of its files are longer
        whole = len(taken) == len(dirty) and len(unsynced) == len(self._unsynced)
        others = [path for path in unsynced if os.path.exists(path)]
        try:
            ticket = FlushTicket(self.name, self._files, paths, others, *end, self._refuse, whole=whole)
        except OSError as error:
            raise self._fail("opening the log for a flush", error) from error
        self._slot_unsynced = False
        self._unsynced.difference_update(unsynced)
        self._ticket = ticket
        return ticket

    def finish_flush(self, ticket: FlushTicket) -> None:
        """Advances the marks to the end of the synced ticket. A ticket from before a truncate changes nothing.

        Raises StorageError if its sync() did. Raises TooManyOpenFiles with the marks unchanged: then flush again.
        """
        if ticket.error is not None:
            self._refuse(ticket.error)
            raise ticket.error
        if ticket is not self._ticket:
            return
        assert ticket.done
        self._ticket = None
        before = self.flushed_offset, self.flushed_position, self.stable_offset, self.stable_position
        if ticket.end_position > self.flushed_position:
            self.flushed_offset, self.flushed_position = ticket.end_offset, ticket.end_position
        self._advance_stable()
        try:
            self._store_point()
        except TooManyOpenFiles:  # no other code has seen the new marks yet
            self.flushed_offset, self.flushed_position, self.stable_offset, self.stable_position = before
            raise

    def _flush_now(self) -> None:
        """Flushes up to the end and waits, also for a ticket that is not finished."""
        while True:
            ticket = self._ticket or self.start_flush()
            if ticket is None:
                return
            self._finish_now(ticket)

    def _finish_now(self, ticket: FlushTicket) -> None:
        with contextlib.suppress(StorageError):  # finish_flush notes it, and raises it again
            ticket.sync()
        self.finish_flush(ticket)

    def _store_point(self, *, clean: bool = False) -> bool:
        """Stores the marks. Returns False if the disk is full: the stored marks then remain true, but lower."""
        point = self._make_point(clean)
        if point != self._point:
            try:
                with self._unless_full("the flushed point"):
                    self._flush_file.write(point)
                    self._point = point
            except OSError as error:
                raise self._fail("storing the flushed point", error) from error
        return point == self._point

    def _take_marks_back(self, offset: int, position: int) -> None:
        """Moves the marks back to `position` before a cut: a log that ends below its flushed point counts as damaged.

        Raises OSError with nothing changed.
        """
        point = self._make_point(clean=False)._replace(own_from=NO_EPOCHS[0], own_to=NO_EPOCHS[1])
        if point.position > position:
            point = point._replace(offset=offset, position=position)
        if point.stable_position > position:
            point = point._replace(stable_offset=offset, stable_position=position)
        self._flush_file.write_both(point)
        bound = self._bound_offset, self._bound_position
        self._take_point(point)
        self.end_offset, self.end_position = offset, position
        if bound[1] <= position or bound[1] == UNBOUND:
            self._bound_offset, self._bound_position = bound
        else:
            self._bound_offset, self._bound_position = offset, position

    def _make_point(self, clean: bool) -> FlushPoint:
        return FlushPoint(
            self.flushed_position, self.flushed_offset, self.stable_offset, self.stable_position,
            self.start_offset, self.start_position, self.last_append_us, self._own_from, self._own_to, clean,
        )  # fmt: skip

    def _remove_indexes(self, segments: list[Segment]) -> None:
        """Frees space on a full disk: removes the indexes of segments that will be removed. Raises StorageError."""
        try:
            unlink_all([segment.index_path for segment in segments])
        except OSError as error:
            raise self._fail("removing indexes", error) from error

    # -- verifying ------------------------------------------------------------------------------------------------

    def pieces(self) -> list[Segment]:
        """The flushed part of each segment, oldest first, for metamq.broker.log.scrub."""
        end = self.flushed_position
        return [_piece(one, end) for one in self._store.segments if one.base_position < min(one.end_position, end)]

    def has_piece(self, piece: Segment) -> bool:
        """True if the log still has the piece: neither retention nor a cut nor emptying removed it."""
        if isinstance(self._refusal, ClosedError):
            return False
        found = self._store.segment_at(piece.base_position)
        return found is not None and found.path == piece.path and found.end_position >= piece.end_position

    def place_of(self, offset: int) -> tuple[Segment, tuple[int, int]] | None:
        """The piece with the batch that holds an offset, and the batch's (offset, position). None if the log has none.

        Raises CorruptData if the batches' headers do not lead there, StorageError, ClosedError.
        """
        self._check_open()
        if not self.start_offset <= offset < self.end_offset:
            return None
        segment, base, position = self._stored(self._store.find, offset)
        return _piece(segment, self.end_position), (base, position)

    def without_waiting(self, reader: ColdReader) -> AbstractContextManager[None]:
        """Reads in this block raise NotInMemory instead of waiting for the disk: metamq.broker.log.disk.cold."""
        return self._files.without_waiting(reader)

    # -- failing --------------------------------------------------------------------------------------------------

    def _stored(self, query: Callable[..., T], *arguments: object) -> T:
        """Calls the store and returns its result. Raises StorageError if the store cannot read its files."""
        try:
            return query(*arguments)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error

    def _reserve_descriptors(self, action: str) -> None:
        """Frees descriptors before a change that cannot be retried halfway. Raises TooManyOpenFiles."""
        try:
            self._files.reserve_descriptors()
        except OSError as error:
            raise storage_error(self.name, action, error) from error

    def _fail(self, action: str, error: OSError, *, half_done: bool = False) -> StorageError:
        """Returns the error to raise. Ends all writing, unless it is a shortage and nothing is `half_done`."""
        failure = disk_error(self.name, action, error) if half_done else storage_error(self.name, action, error)
        if not isinstance(failure, SHORTAGES):
            self._refuse(failure)
        return failure

    def _not_written(self, segment: Segment, error: OSError) -> StorageError:
        """The error to raise for an append. On a full disk, first cuts off the part that was written."""
        if is_full(error):
            try:
                os.ftruncate(self._files.descriptor(segment.path), segment.size_bytes)
            except OSError as worse:
                return self._fail("writing", worse, half_done=True)
        return self._fail("writing", error)

    @contextlib.contextmanager
    def _unless_full(self, what: str) -> Iterator[None]:
        """Stores a file that the log does not need at once. On a full disk, leaves it for later.

        Raises any other OSError.
        """
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            log.info("%s: %s is stored later: %s", self.name, what, error)

    @contextlib.contextmanager
    def _or_later(self, action: str) -> Iterator[None]:
        """Stores a file that the log does not need at once. During a shortage, leaves it for later.

        Raises StorageError.
        """
        with contextlib.suppress(*SHORTAGES):
            try:
                yield
            except OSError as error:
                raise self._fail(action, error) from error

    def _refuse(self, failure: MetamqError) -> None:
        """Makes every later append raise. A ticket's thread also calls this: two assignments, in this order."""
        if self._refusal is None:
            self._refusal = failure
        self._writing = False

    def _check_writable(self) -> None:
        first = self._refusal
        if first is None:
            return
        if not isinstance(first, StorageError) or isinstance(first, DiskFull):
            raise first.with_traceback(None)
        raise StorageError(
            f"{self.name} takes no writes since its disk failed ({first.problem})", hint=first.hint, outcome="not_done"
        )

    def _check_open(self) -> None:
        if self._refusal is not None and isinstance(self._refusal, ClosedError):
            raise self._refusal


def _piece(segment: Segment, end_position: int) -> Segment:
    """A copy of the segment up to `end_position`."""
    end = min(segment.end_position, end_position)
    return Segment(segment.path, segment.base_offset, segment.base_position, end - segment.base_position)
