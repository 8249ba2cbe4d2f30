"""One partition as the broker serves it: its log, who waits for its data, who waits for its flush."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from metamq.broker.log import FlushTicket, PartitionLog
from metamq.broker.log.producers import Duplicate
from metamq.errors import MetamqError
from metamq.wire.batch import BatchHeader, make_batch_id

Done = Callable[[MetamqError | None], None]


class Reader(Protocol):
    """Somebody who waits for data: a fetch session's place in this partition."""

    def data_ready(self, added_bytes: int) -> None:
        """Called once after the stable offset has moved, or the partition has closed; the wait is over then."""


class Appended(NamedTuple):
    """Where a batch is stored; `repeated` when it was before."""

    base_offset: int
    time_us: int
    end_offset: int
    repeated: bool


class BatchIds:
    """Hands out batch ids under one epoch: unique in the broker id for ever."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._counter = 0

    def start_epoch(self, epoch: int) -> None:
        """A new term as master."""
        assert epoch > self.epoch
        self.epoch = epoch
        self._counter = 0

    def next(self) -> int:
        """The next id."""
        self._counter += 1
        return make_batch_id(self.epoch, self._counter)


class Partition:
    """A log that is open for clients. Used by the broker's loop only."""

    __slots__ = (
        "closed_by",
        "dirty_since_ms",
        "flush_began_ms",
        "flushing",
        "index",
        "log",
        "name",
        "published_position",
        "readers",
        "topic",
        "topic_id",
        "waiting",
    )

    def __init__(self, topic: str, topic_id: str, index: int, log: PartitionLog) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.name = f"{topic}/{index}"
        self.log = log
        self.readers: set[Reader] = set()
        self.waiting: list[tuple[int, Done]] = []
        """(end offset, callback) of appends that are answered once the stable offset has reached them."""
        self.published_position = log.stable_position
        """Up to here readers and waiting appends have been told."""
        self.flushing = False
        self.flush_began_ms = 0
        self.dirty_since_ms: int | None = None
        """Since when there is something to flush; None when there is nothing."""
        self.closed_by: MetamqError | None = None

    def append(self, batch: memoryview, header: BatchHeader, ids: BatchIds) -> Appended:
        """Stores a batch, or finds the one it repeats.

        Raises SequenceGap, StorageError, CorruptData, and what closed the partition. The caller has checked the batch,
        and answers `when_stable(end_offset)`.
        """
        if self.closed_by is not None:
            raise self.closed_by.with_traceback(None)
        repeated = self.log.check_producer(header)
        if isinstance(repeated, Duplicate):
            known = repeated.base_offset >= 0
            end_offset = repeated.base_offset + header.count if known else self.log.end_offset
            return Appended(repeated.base_offset, repeated.append_time_us, end_offset, True)
        now_us = time.time_ns() // 1000
        base_offset = self.log.append(batch, header, epoch=ids.epoch, batch_id=ids.next(), now_us=now_us)
        if self.dirty_since_ms is None:
            self.dirty_since_ms = time.monotonic_ns() // 1_000_000
        self.publish()
        return Appended(base_offset, now_us, base_offset + header.count, False)

    def publish(self) -> None:
        """Wakes those whose data or acknowledgement the stable offset has reached."""
        added_bytes = self.log.stable_position - self.published_position
        if not added_bytes:
            return
        self.published_position = self.log.stable_position
        if self.readers and added_bytes > 0:
            readers, self.readers = self.readers, set()
            for reader in readers:
                reader.data_ready(added_bytes)
        if self.waiting:
            stable = self.log.stable_offset
            reached = [done for end, done in self.waiting if end <= stable]
            self.waiting = [(end, done) for end, done in self.waiting if end > stable]
            for done in reached:
                done(None)

    def when_stable(self, end_offset: int, done: Done) -> bool:
        """True when `end_offset` is stable already; else calls `done` later."""
        if end_offset <= self.log.stable_offset:
            return True
        self.waiting.append((end_offset, done))
        return False

    def flush_due(self, since_ms: int) -> bool:
        """Whether the topic's policy asks for a flush, `since_ms` after the first append that is not flushed."""
        return self.log.flush_due(since_ms)

    def start_flush(self, now_ms: int) -> FlushTicket | None:
        """A ticket whose sync() a thread is to call; None when there is nothing to flush, or a flush runs.

        Raises StorageError.
        """
        if self.flushing or self.closed_by:
            return None
        ticket = self.log.start_flush()
        if ticket is not None:
            self.flushing = True
            self.flush_began_ms = now_ms
        return ticket

    def finish_flush(self, ticket: FlushTicket) -> None:
        """The ticket is synced: takes note, and tells who waited for it. Raises StorageError."""
        self.flushing = False
        if self.closed_by:
            return
        log = self.log
        log.finish_flush(ticket)
        # What was appended meanwhile waits since then, at most.
        self.dirty_since_ms = None if log.flushed_position == log.end_position else self.flush_began_ms
        self.publish()

    def close(self, error: MetamqError, *, clean: bool = True) -> None:
        """Ends every wait with `error` and closes the log."""
        self.closed_by = error
        waiting, self.waiting = self.waiting, []
        for _end, done in waiting:
            done(error)
        readers, self.readers = self.readers, set()
        for reader in readers:
            reader.data_ready(0)
        self.log.close(clean=clean)
