"""One partition that the broker serves: its log, the readers that wait for data, the appends that wait for a flush."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.data.readers import Readers
from metamq.broker.log.disk.producers import Duplicate
from metamq.broker.log.durable import UNBOUND
from metamq.errors import CorruptData, Fenced, MetamqError
from metamq.wire.batch import BatchHeader, make_batch_id

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig
    from metamq.broker.log.disk.times import Search
    from metamq.broker.log.flush import FlushTicket
    from metamq.broker.log.trim import TrimmedLog
    from metamq.tx.store.records import Key

Done = Callable[[MetamqError | None], None]


class Appended(NamedTuple):
    """The place of one or several stored batches."""

    base_offset: int
    time_us: int
    end_offset: int


class BatchIds:
    """Allocates batch ids of one epoch. They are unique in the broker id for all time."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._counter = 0

    def start_epoch(self, epoch: int) -> None:
        """Begins a new epoch of this master."""
        assert epoch > self.epoch
        self.epoch = epoch
        self._counter = 0

    def reserve(self, count: int) -> int:
        """Returns the first of `count` consecutive ids."""
        first = self._counter + 1
        self._counter += count
        return make_batch_id(self.epoch, first)


class Partition:
    """A log that is open for clients. Only the broker's loop uses it."""

    __slots__ = (
        "_damage", "closed_by", "cuts", "dirty_since_ms", "flush_began_ms", "flush_wanted_position",
        "flushed_listener", "flushing", "index", "log", "name", "needed_offset", "published_position",
        "readers", "stable_listener", "topic", "topic_id", "waiting", "waiting_here",
    )  # fmt: skip

    def __init__(self, topic: str, topic_id: str, index: int, log: TrimmedLog) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.name = f"{topic}/{index}"
        self.log = log
        self.readers = Readers()
        self.waiting: list[tuple[int, Done]] = []
        """(end offset, callback) of appends that are answered when the stable offset has reached the end offset."""
        self.waiting_here: list[tuple[int, Done]] = []
        """(end offset, callback) of appends that are answered when this replica has stored them as the topic asks."""
        self.published_position = log.stable_position
        """The last position that readers and waiting appends were notified of."""
        self.flushing = False
        self.flush_wanted_position = 0
        """The log must be flushed up to this position, whatever the policy: the master waits for it."""
        self.flushed_listener: Callable[[Partition], None] | None = None
        """Called after each flush."""
        self.stable_listener: Callable[[Partition], None] | None = None
        """Called whenever the stable mark has moved, for any reason."""
        self.flush_began_ms = 0
        self.dirty_since_ms: int | None = None
        """Time of the first unflushed append; None if everything is flushed."""
        self.closed_by: MetamqError | None = None
        self._damage: CorruptData | None = None
        self.cuts = 0
        """Number of cuts and resets of this log."""
        self.needed_offset = UNBOUND
        """The highest offset where a master lets a slave's copy begin: later messages depend on it."""

    @property
    def key(self) -> Key:
        """The partition in records of transactions."""
        return self.topic, self.topic_id, self.index

    def stored_before(self, header: BatchHeader) -> Appended | None:
        """Returns the place of the stored batch that this one repeats, or None: it is new.

        Raises SequenceGap, ProtocolError, StorageError, CorruptData, and the error that closed the partition.
        """
        self._check_open()
        repeated = self.log.check_producer(header)
        if not isinstance(repeated, Duplicate):
            return None
        known = repeated.base_offset >= 0
        end_offset = repeated.base_offset + header.count if known else self.log.end_offset
        return Appended(repeated.base_offset, repeated.append_time_us, end_offset)

    def append(
        self, batches: memoryview, headers: Sequence[BatchHeader], ids: BatchIds, batch_id: int | None = None
    ) -> Appended:
        """Stores new batches, which are back to back, by one write, all or none. Takes the next ids, unless `batch_id`
        is given. Returns the place of all of them together.

        Raises StorageError, CorruptData, and the error that closed the partition. The caller has checked the batches,
        and answers `when_stable(end_offset)`.
        """
        self._check_open()
        now_us = time.time_ns() // 1000
        batch_id = ids.reserve(len(headers)) if batch_id is None else batch_id
        base_offset = self.log.append(batches, headers, epoch=ids.epoch, batch_id=batch_id, now_us=now_us)
        end_offset = self.log.end_offset
        self._is_dirty()
        self.publish()
        return Appended(base_offset, now_us, end_offset)

    def _check_open(self) -> None:
        if self.closed_by is not None:
            raise self.closed_by.with_traceback(None)

    def offset_at_time(self, timestamp_us: int) -> Search:
        """Searches like PartitionLog.offset_at_time(). Also raises Fenced if the log is cut, and the closing error."""
        cuts, search = self.cuts, self.log.offset_at_time(timestamp_us)
        while True:
            self._check_open()
            if cuts != self.cuts:
                raise Fenced("this replica", f"{self.name} was cut here meanwhile")
            try:
                missing = next(search)
            except StopIteration as end:
                found: tuple[int, int] | None = end.value
                return found
            yield missing

    @property
    def damage(self) -> CorruptData | None:
        """The known damage of the log, which is still served; None when retention has removed the damaged part."""
        error = self._damage
        if error is not None and error.position is not None and error.position < self.log.start_position:
            return None
        return error

    @damage.setter
    def damage(self, error: CorruptData) -> None:
        self._damage = error

    def reconfigure(self, config: LogConfig) -> None:
        """Takes new settings. Appends that wait for a flush which is no longer required get their answer."""
        self.log.reconfigure(config)
        self.publish()

    def append_replicated(self, batches: memoryview, position: int) -> None:
        """Stores batches of the master, which begin at this position, on a slave.

        Raises CorruptData if they do not fit or are damaged, StorageError, and the error that closed the partition.
        """
        self._check_open()
        self.log.append_replicated(batches, position)
        self._is_dirty()
        self.publish()

    def _is_dirty(self) -> None:
        if self.dirty_since_ms is None:
            self.dirty_since_ms = time.monotonic_ns() // 1_000_000

    def cut(self, position: int) -> None:
        """Cuts a slave's log at this position. Raises StorageError, CorruptData."""
        self.log.truncate(position)
        self.published_position = min(self.published_position, self.log.stable_position)
        self._was_cut()

    def reset_to(self, offset: int, position: int) -> list[str]:
        """Empties a slave's log, which begins again there. Returns obsolete files, which any thread may remove.

        Raises StorageError.
        """
        void = self.log.reset_to(offset, position)
        self.published_position = self.log.stable_position
        self._was_cut()
        return void

    def _was_cut(self) -> None:
        self.cuts += 1
        self.readers.wake_now()

    def bound(self, offset: int, position: int) -> None:
        """Lets readers see the log up to this place, as far as it is stored here. They never see less than before."""
        self.log.set_bound(offset, position)
        self.publish()

    def freeze(self) -> None:
        """Stops the advance of the stable mark until it is known which process sets the bound."""
        self.log.set_bound(self.log.stable_offset, self.log.stable_position)

    def unbound(self) -> None:
        """Lets readers see everything that is stored here as the topic asks: no other replica counts."""
        self.log.clear_bound()
        self.publish()

    @property
    def flushes_before_ack(self) -> bool:
        """True if only flushed batches count."""
        return self.log.config.flush.before_ack

    @property
    def stored_offset(self) -> int:
        """The offset up to which this replica has stored the log as the topic asks."""
        return self.log.flushed_offset if self.flushes_before_ack else self.log.end_offset

    def publish(self) -> None:
        """Wakes the readers and answers the appends that the marks have reached."""
        if self.waiting_here:
            reached, self.waiting_here = _split(self.waiting_here, self.stored_offset)
            for done in reached:
                done(None)
        added_bytes = self.log.stable_position - self.published_position
        if not added_bytes:
            return
        self.published_position = self.log.stable_position
        if self.stable_listener is not None:
            self.stable_listener(self)
        if added_bytes > 0:
            self.readers.wake(added_bytes)
        if self.waiting:
            reached, self.waiting = _split(self.waiting, self.log.stable_offset)
            for done in reached:
                done(None)

    def when_stable(self, end_offset: int, done: Done) -> bool:
        """Returns True if `end_offset`, which is in the log, is already stable; else calls `done` later."""
        assert end_offset <= self.log.end_offset, "only stored messages can be waited for"
        if end_offset <= self.log.stable_offset:
            return True
        self.waiting.append((end_offset, done))
        return False

    def when_stored(self, end_offset: int, done: Done) -> bool:
        """Returns True if this replica has stored up to `end_offset` as the topic asks; else calls `done` later."""
        assert end_offset <= self.log.end_offset, "only stored messages can be waited for"
        if end_offset <= self.stored_offset:
            return True
        self.waiting_here.append((end_offset, done))
        return False

    def fail_waiting(self, error: MetamqError) -> None:
        """Answers every waiting append with an error."""
        waiting = self.waiting + self.waiting_here
        self.waiting, self.waiting_here = [], []
        for _end, done in waiting:
            done(error)

    def flush_due(self, since_ms: int) -> bool:
        """True if a flush is due, `since_ms` after the first unflushed append."""
        return self.flush_wanted_position > self.log.flushed_position or self.log.flush_due(since_ms)

    def start_flush(self, now_ms: int) -> FlushTicket | None:
        """A ticket whose sync() a thread must call; None if nothing is unflushed, or if a flush runs.

        Raises StorageError.
        """
        if self.flushing or self.closed_by:
            return None
        ticket = self.log.start_flush()
        if ticket is not None:
            self.flushing = True
            self.flush_began_ms = now_ms
        return ticket

    def finish_flush(self, ticket: FlushTicket, before_notifying: Callable[[Partition], None] | None = None) -> None:
        """Notes the end of the ticket's sync, and notifies waiting appends and readers. Raises StorageError."""
        self.flushing = False
        if self.closed_by:
            return
        log = self.log
        log.finish_flush(ticket)
        # An append during the flush has waited since the start of the flush at most.
        self.dirty_since_ms = None if log.flushed_position == log.end_position else self.flush_began_ms
        if before_notifying is not None:
            before_notifying(self)
        self.publish()
        if self.flushed_listener is not None:
            self.flushed_listener(self)

    def close(self, error: MetamqError, *, clean: bool = True, synced_later: bool = False) -> None:
        """Ends every wait with `error` and closes the log. It has the waiting appends, but their outcome is unknown.

        `synced_later` is that of PartitionLog.close().
        """
        self.closed_by = error
        self.fail_waiting(error.with_unknown_outcome())
        self.readers.wake_now()
        self.log.close(clean=clean, synced_later=synced_later)


def _split(waiting: list[tuple[int, Done]], mark: int) -> tuple[list[Done], list[tuple[int, Done]]]:
    """The callbacks that a mark has reached, and the remaining entries; both in order."""
    return [done for end, done in waiting if end <= mark], [(end, done) for end, done in waiting if end > mark]
