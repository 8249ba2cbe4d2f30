"""How far a log's bytes are good: its marks, the flushes that move them, and the first failure, which ends that.

Three marks move along the log, each always at a batch boundary, as offset and as position:

    start ≤ flushed ≤ end       flushed: on the disk for certain; end: written, at least to the kernel
    start ≤ stable  ≤ end       stable: readers see up to here

The stable mark goes up to the log's *own* mark, which is the flushed one where the topic flushes before acknowledging,
else the end; and no further than the *bound* that the log's owner sets. On a replica that copies it is where the master
says that every in-sync replica has got to, on a master with such replicas the least that they acknowledged, and without
any there is none. `_advance_stable` is the only place that moves the stable mark up, and only what cuts the log takes
it back.

It is stored with the flushed mark. Whoever was to tell the bound may be gone when the log is opened again, and what is
above may yet be cut: so an open log is bound to the stable mark it stored, until its owner decides.

*Flush* has three steps because fsync is slow: start_flush() notes the end and duplicates the descriptors,
ticket.sync() runs in any thread while appends go on, finish_flush() advances the marks and stores them in the file
`flushed`. At most one flush is under way, since the kernel reports a write error to one fsync only: two side by side
could share the news.

*A full disk ends nothing.* A write that finds no room is no failure of the disk: what it wrote in part is cut off, and
the log is as it was. An append raises DiskFull; what is derived from the log, and the flushed point, which may say too
little, are stored another time. An fsync that fails is a failure of the disk, whatever its reason.

*The first other failed write, or fsync, ends the log's life as a writer.* What is on the disk is unknown then, and
asking again does not tell (a second fsync succeeds without having written anything). So every later append raises what
the first one raised, reads go on below the stable mark, and the next start recovers.

*Without a descriptor left nothing has failed.* TooManyOpenFiles ends no log: it is raised with nothing changed, and
what cannot be stored now is stored with the next flush or checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.derived import unlink_all
from metamq.broker.log.disk.files import SHORTAGES, FileCache, disk_error, is_full, storage_error
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushPoint
from metamq.broker.log.disk.segments import Segment
from metamq.broker.log.flush import FILES_MAX, FlushTicket
from metamq.broker.log.recovery import RecoveredLog
from metamq.broker.log.store import SegmentStore
from metamq.errors import ClosedError, DiskFull, MetamqError, StorageError, TooManyOpenFiles

log = logging.getLogger("metamq.broker.log")
T = TypeVar("T")
UNBOUND = 1 << 63
"""Beyond any position and offset."""


class DurableLog:
    """The half of a PartitionLog that knows what its bytes are worth. Its marks are to be read, not set."""

    __slots__ = (
        "_bound_offset",
        "_bound_position",
        "_config",
        "_files",
        "_flush_file",
        "_folder",
        "_own_from",
        "_own_to",
        "_point",
        "_refusal",
        "_slot_unsynced",
        "_store",
        "_ticket",
        "_unsynced",
        "_writing",
        "end_offset",
        "end_position",
        "flushed_offset",
        "flushed_position",
        "last_append_us",
        "name",
        "stable_offset",
        "stable_position",
        "start_offset",
        "start_position",
    )

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
        """Snapshots, the epochs, and the folder, that the next flush is to make durable."""
        if not recovered.report.clean:  # a process that was killed may have begun a segment, and never synced its name
            self._unsynced.add(folder)
        self._ticket: FlushTicket | None = None
        self._refusal: MetamqError | None = None
        self._take_point(recovered.point)
        self.end_offset, self.end_position = recovered.end_offset, recovered.segments[-1].end_position
        self.last_append_us = recovered.last_append_us

    def _take_point(self, point: FlushPoint) -> None:
        """All marks as the point has them; the log is taken to end where it is flushed, and is bound."""
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
        """Bytes of all batches."""
        return self.end_position - self.start_position

    @property
    def config(self) -> LogConfig:
        """The settings as of the last reconfigure()."""
        return self._config

    def set_bound(self, offset: int, position: int) -> None:
        """Readers see nothing at or above this place, a batch boundary that may lie beyond the end.

        A lower bound than before takes nothing back that was stable: it only keeps more from becoming so.
        """
        self._bound_offset, self._bound_position = offset, position
        self._advance_stable()

    def clear_bound(self) -> None:
        """Readers see all that keeps the topic's promise on this disk: nobody else's copy counts."""
        self.set_bound(UNBOUND, UNBOUND)

    def _advance_stable(self) -> None:
        """Moves the stable mark up to where the topic's promise holds, here and as far as the bound tells elsewhere."""
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
        """Whether the topic's policy asks for a flush now; `since_ms` is the age of the oldest unflushed append."""
        return self._config.flush.due(self.end_offset - self.flushed_offset, since_ms)

    def start_flush(self) -> FlushTicket | None:
        """A ticket for what is unflushed, as far as one ticket goes; None when there is nothing, or while one is out.

        Call its sync() in any thread, then finish_flush() in this one. Raises StorageError, ClosedError.
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
        unsynced = sorted(self._unsynced)[:FILES_MAX]  # the folder first: each of its files has a longer path
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
        """Advances the marks to what the ticket made durable. A ticket that a truncate overtook changes nothing.

        Raises StorageError when its sync() did; TooManyOpenFiles, with the marks as they were: then flush again.
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
        except TooManyOpenFiles:  # nobody has seen the new marks yet
            self.flushed_offset, self.flushed_position, self.stable_offset, self.stable_position = before
            raise

    def _flush_now(self) -> None:
        """Flushes to the end here and now, waiting for a ticket that is out."""
        while True:
            ticket = self._ticket or self.start_flush()
            if ticket is None:
                return
            self._finish_now(ticket)

    def _finish_now(self, ticket: FlushTicket) -> None:
        with contextlib.suppress(StorageError):  # finish_flush raises it, after taking note
            ticket.sync()
        self.finish_flush(ticket)

    def _store_point(self, *, clean: bool = False) -> bool:
        """Stores the marks; False when the disk is full: the ones before them are true still, and say less."""
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
        """Before the log ends at `position`. A log that ends below its flushed point would be taken for damaged.

        Raises OSError; then all is as it was.
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
        """Makes some room on a full disk with the indexes of segments that are to go. Raises StorageError."""
        try:
            unlink_all([segment.index_path for segment in segments])
        except OSError as error:
            raise self._fail("removing indexes", error) from error

    # -- verifying ------------------------------------------------------------------------------------------------

    def pieces(self) -> list[Segment]:
        """What is flushed of each segment, oldest first, for metamq.broker.log.scrub."""
        return [_piece(one, self.flushed_position) for one in self._store.segments if self._is_flushed_from(one)]

    def _is_flushed_from(self, segment: Segment) -> bool:
        return segment.base_position < min(segment.end_position, self.flushed_position)

    def has_piece(self, piece: Segment) -> bool:
        """Whether retention, a cut, or an emptying has left it in the log."""
        if isinstance(self._refusal, ClosedError):
            return False
        found = self._store.segment_at(piece.base_position)
        return found is not None and found.path == piece.path and found.end_position >= piece.end_position

    def place_of(self, offset: int) -> tuple[Segment, tuple[int, int]] | None:
        """The piece with the batch that holds an offset, and the batch's (offset, position); None: the log has none.

        Raises CorruptData when the batches' headers do not lead there, StorageError, ClosedError.
        """
        self._check_open()
        if not self.start_offset <= offset < self.end_offset:
            return None
        segment, base, position = self._stored(self._store.find, offset)
        return _piece(segment, self.end_position), (base, position)

    # -- failing --------------------------------------------------------------------------------------------------

    def _stored(self, ask: Callable[..., T], *what: object) -> T:
        """What the store answers. Raises StorageError where it cannot read its files."""
        try:
            return ask(*what)
        except OSError as error:
            raise storage_error(self.name, "reading", error) from error

    def _make_room(self, action: str) -> None:
        """Before what cannot be tried again from its middle. Raises TooManyOpenFiles."""
        try:
            self._files.make_room()
        except OSError as error:
            raise storage_error(self.name, action, error) from error

    def _fail(self, action: str, error: OSError, *, half_done: bool = False) -> StorageError:
        """Ends the log's life as a writer, unless it is a shortage and nothing is `half_done`; returns the error to
        raise."""
        failure = disk_error(self.name, action, error) if half_done else storage_error(self.name, action, error)
        if not isinstance(failure, SHORTAGES):
            self._refuse(failure)
        return failure

    def _not_written(self, segment: Segment, error: OSError) -> StorageError:
        """The error to raise for an append. On a full disk the part that was written is cut off again."""
        if is_full(error):
            try:
                os.ftruncate(self._files.descriptor(segment.path), segment.size_bytes)
            except OSError as worse:
                return self._fail("writing", worse, half_done=True)
        return self._fail("writing", error)

    @contextlib.contextmanager
    def _unless_full(self, what: str) -> Iterator[None]:
        """Stores what the log can do without for a while: on a full disk that is left for another time.

        Raises any other OSError.
        """
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            log.info("%s: %s is stored another time: %s", self.name, what, error)

    @contextlib.contextmanager
    def _or_later(self, action: str) -> Iterator[None]:
        """Stores what the log can do without for a while: where something is short it is stored another time.

        Raises StorageError.
        """
        with contextlib.suppress(*SHORTAGES):
            try:
                yield
            except OSError as error:
                raise self._fail(action, error) from error

    def _refuse(self, failure: MetamqError) -> None:
        """From now on every append raises. Also called by a ticket's thread: two assignments, in this order."""
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
            f"{self.name} takes no writes since its disk failed ({first.problem})",
            hint=first.hint,
            outcome="not_done",
        )

    def _check_open(self) -> None:
        if self._refusal is not None and isinstance(self._refusal, ClosedError):
            raise self._refusal


def _piece(segment: Segment, end_position: int) -> Segment:
    """The segment up to there, as a value of its own."""
    end = min(segment.end_position, end_position)
    return Segment(segment.path, segment.base_offset, segment.base_position, end - segment.base_position)
