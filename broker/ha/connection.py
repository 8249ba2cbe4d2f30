"""HAConnection: the master's end of the link to one slave.

Theory of operation
-------------------
Each partition of the slave has a *place* on the link. A place is sent in one of two ways:

    copied   from the log, in chunks, from the position of the handshake; acknowledged by position. A thread reads a
             chunk that is not in memory. Other work of the loop goes first (CopyPace)
    live     every append is queued at once, in the master's order; acknowledged by sequence number

A place becomes live when its copy has reached the end of the log. All of this runs in one loop, so no append comes
between the end of the copy and this change. The queue refers to the memory of the received batches: nothing is read
again. If a slave is too slow, and its queue is over BACKLOG_BYTES, the queue is dropped, and its places are copied
again, each from the position that was sent. So a slow slave uses bounded memory and delays no other replica.

An acknowledgement is cumulative. The queue of sent entries maps it to places. It has two sequence numbers: the slave
*holds* everything up to the first, and has *flushed* everything up to the second that must be flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from metamq.broker.ha.flow import CopyPace
from metamq.broker.log.disk.cold import ColdReader, NotInMemory
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.ha.flow import FlowMonitor
    from metamq.broker.ha.service import HAService
    from metamq.wire.frames import Buffer

log = logging.getLogger("metamq.broker")

FRAME_BYTES = 1024 * 1024
BACKLOG_BYTES = 32 * 1024 * 1024
THREAD_READS_MAX = 4
"""Chunks of one link that wait for the disk."""
STABLE_DELAY_S = 0.005
"""Seconds that new stable marks may wait for a frame that is sent anyway."""
FRAMES_A_TURN = 4
"""Frames sent in one turn of the loop."""


class Wire(Protocol):
    """The network connection of a link."""

    peer: str

    @property
    def writable(self) -> bool:
        """True if the write buffer is below its mark. When it falls below, HAConnection.pump() is called."""
        ...

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        """Sends a SYNC frame that is no answer; returns its size."""
        ...

    def close(self) -> None:
        """Closes the connection when all written bytes are sent."""


class ReplicaEnd(NamedTuple):
    """The end of a replica's log."""

    offset: int
    position: int


class LinkedPartition:
    """One partition on one link."""

    __slots__ = (
        "cold", "copies", "flushed", "handle", "held", "known_position", "live", "partition", "sent_position", "since"
    )  # fmt: skip

    def __init__(self, handle: int, partition: Partition, mark: ReplicaEnd, now: float) -> None:
        self.handle = handle
        self.partition = partition
        start = ReplicaEnd(partition.log.start_offset, partition.log.start_position)
        self.held = mark
        self.flushed = min(start, mark)
        """The flushed end. It is not `mark` at first: a slave attaches with its written end only."""
        self.sent_position = mark.position
        self.known_position = 0
        """The stable mark that was sent to the slave last."""
        self.live = False
        self.cold = ColdReader()
        self.copies: deque[tuple[ReplicaEnd, float]] = deque()
        """(end, time) of each chunk that was copied at this time and is not fully acknowledged."""
        if mark.position > start.position:
            self.copies.append((mark, now))
        self.since = now
        """The time since which the place is not live."""

    def mark(self) -> ReplicaEnd:
        """Returns the slave's end that counts for the stable mark."""
        return self.flushed if self.partition.flushes_before_ack else self.held

    def copied(self, held_position: int, flushed_position: int) -> None:
        """Notes the positions that the slave holds and has flushed. Raises ProtocolError if they were not sent yet."""
        if max(held_position, flushed_position) > self.sent_position:
            raise ProtocolError(f"{self.partition.name} is acknowledged to byte {held_position:,}, which was not sent")
        for end, _since in self.copies:
            if end.position <= held_position:
                self.holds(end)
            if end.position <= flushed_position:
                self.has_flushed(end)
        if flushed_position >= self.held.position:
            self.has_flushed(self.held)
        while self.copies and self.copies[0][0].position <= self.mark().position:
            self.copies.popleft()

    def holds(self, end: ReplicaEnd) -> None:
        """Notes that the slave has written the log at least up to there."""
        self.held = max(self.held, end)

    def has_flushed(self, end: ReplicaEnd) -> None:
        """Notes that the slave has flushed the log at least up to there."""
        self.flushed = max(self.flushed, end)

    def copied_since(self) -> float | None:
        """Returns the time of the oldest chunk that does not count for the stable mark yet, or None. Any thread."""
        position = self.mark().position
        return next((since for end, since in tuple(self.copies) if end.position > position), None)


class _Entry(NamedTuple):
    """A live batch, queued for sending and then for its acknowledgement."""

    place: LinkedPartition
    position: int
    end: ReplicaEnd
    batch: memoryview
    flush: bool
    at: float


class HAConnection:
    """The link of one slave. Used by the broker's loop only. It calls the service."""

    def __init__(
        self, service: HAService, wire: Wire, join: sync.Join, *, loop: asyncio.AbstractEventLoop, flow: FlowMonitor
    ) -> None:
        self.replica = join.replica
        self.member = join.replica, join.incarnation
        self.learner = join.learner
        self.generation = join.generation
        """The newest broker generation that the slave has followed."""
        self.peer = wire.peer
        self.flow = flow
        self.heard_at = self.spoke_at = loop.time()
        self.tasks: set[asyncio.Task[None]] = set()
        self.places: dict[Partition, LinkedPartition] = {}
        self.sent_bytes = 0
        """Bytes of logs sent on this link."""
        self.sent_seq = 0
        self.held_seq = 0
        self.closed = False
        self.is_leaving = False
        """True if the slave has reported that it stops."""
        self._service = service
        self._wire = wire
        self._loop = loop
        self._now = loop.time
        self._handles: dict[int, LinkedPartition] = {}
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._unheld: deque[tuple[int, LinkedPartition, ReplicaEnd, float]] = deque()
        self._unflushed: deque[tuple[int, LinkedPartition, ReplicaEnd, float]] = deque()
        self._copying: OrderedDict[LinkedPartition, None] = OrderedDict()
        self._reading: dict[LinkedPartition, None] = {}
        """Places whose next chunk is read by a thread."""
        self._in_threads = 0
        """Reads in threads, also for places that were detached meanwhile."""
        self._copies_next = False
        """True if the next frame has copies. Live and copied frames take turns."""
        self._stable_news: dict[LinkedPartition, None] = {}
        self._pump_soon = False
        self._pace = CopyPace()
        self._asked_at = 0.0
        """The time at which pump() was last asked for."""
        self._later: asyncio.TimerHandle | None = None

    # -- places -----------------------------------------------------------------------------------------------------

    def attach(self, handle: int, partition: Partition, mark: ReplicaEnd) -> None:
        """Begins to send a partition, from `mark` on, the present end of the slave's log."""
        old = self.places.get(partition)
        if old is not None:
            self.detach(old.handle)
        place = LinkedPartition(handle, partition, mark, self._now())
        self.places[partition] = self._handles[handle] = place
        self._stable_news[place] = None
        if mark.position == partition.log.end_position:
            place.live = True
        else:
            self._copying[place] = None
        self.pump_soon()

    def detach(self, handle: int) -> None:
        """Stops sending a partition that was closed at one of the two replicas."""
        place = self._handles.pop(handle, None)
        if place is not None:
            self.places.pop(place.partition, None)
            self._copying.pop(place, None)
            self._reading.pop(place, None)
            self._stable_news.pop(place, None)
            place.live = False

    def all_live(self, partitions: Iterable[Partition]) -> bool:
        """Returns True if all these partitions are live."""
        places = self.places
        return all((place := places.get(partition)) is not None and place.live for partition in partitions)

    def behind_since(self) -> float | None:
        """Returns the time since which the slave lacks data, or a required flush of it, or None if it has all. Any
        thread.
        """
        waiting = [place.copied_since() for place in list(self.places.values())]
        with contextlib.suppress(IndexError):
            waiting.append(self._unheld[0][3])
        with contextlib.suppress(IndexError):
            waiting.append(self._unflushed[0][3])
        with contextlib.suppress(IndexError):
            waiting.append(self._queue[0].at)
        return min((since for since in waiting if since is not None), default=None)

    # -- sending ----------------------------------------------------------------------------------------------------

    def appended(self, partition: Partition, batch: memoryview, position: int, end: ReplicaEnd, flush: bool) -> None:
        """Queues a batch that the master has appended, unless its place is still being copied."""
        place = self.places.get(partition)
        if place is None or not place.live:
            return
        if self._queued_bytes + len(batch) > BACKLOG_BYTES:
            self._fall_back()
            if not place.live:
                return
        self._queue.append(_Entry(place, position, end, batch, flush, self._now()))
        self._queued_bytes += len(batch)
        self.pump_soon()

    def _fall_back(self) -> None:
        """Drops the queue of a slave that is too slow. Its batches are copied from the log later."""
        log.info("replica %d falls behind: it continues by copying from the logs", self.replica)
        for entry in self._queue:
            place = entry.place
            if place.live:
                place.live = False
                place.since = entry.at
                self._copying[place] = None
        self._queue.clear()
        self._queued_bytes = 0
        self._service.fell_back(self)

    @property
    def copying(self) -> bool:
        """True if a partition is being copied."""
        return bool(self._copying or self._reading)

    @property
    def _may_copy(self) -> bool:
        """True if a chunk may be copied now."""
        is_free = self._in_threads < THREAD_READS_MAX
        return bool(self._copying) and is_free and not self._pace.wait_s(time.perf_counter())

    def stable_moved(self, partition: Partition) -> None:
        """Sends a new stable mark, with the next frame or after STABLE_DELAY_S."""
        place = self.places.get(partition)
        if place is not None:
            self._stable_news[place] = None
            if not self._pump_soon and self._later is None:
                self._later = self._loop.call_later(STABLE_DELAY_S, self.pump)

    def pump_soon(self) -> None:
        """Calls pump() at the end of this turn of the loop: appends of one turn share a frame."""
        if not self._pump_soon and not self.closed:
            self._pump_soon = True
            self._asked_at = time.perf_counter()
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Sends as much as the connection takes now."""
        if self._pump_soon:
            self._pump_soon = False
            self._pace.turned(time.perf_counter() - self._asked_at)
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _ in range(FRAMES_A_TURN):
            if self.closed or not self._wire.writable:
                return
            pause_s = self.flow.pause_s(self._now())
            if pause_s > 0 and (self._queue or self._may_copy or self._stable_news):
                self._later = self._loop.call_later(pause_s, self.pump)
                return
            if not (self._queue or self._may_copy):
                if not self._stable_news:
                    self._copy_later()
                    return
                self.beat()
                continue
            if self._queue and not (self._may_copy and self._copies_next):
                self._copies_next = True
                self._send_queued()
            else:
                self._copies_next = False
                self._send_copy()
                break  # one in a turn: others have theirs between
        self.pump_soon()

    def _copy_later(self) -> None:
        """Calls pump() after the pause, which may have ended just now. The end of a read in a thread calls it, too."""
        if self._copying and self._in_threads < THREAD_READS_MAX:
            wait_s = self._pace.wait_s(time.perf_counter())
            self._later = self._loop.call_later(min(wait_s, STABLE_DELAY_S), self.pump)

    def _send_queued(self) -> None:
        entries: list[tuple[int, int, int, int]] = []
        bodies: list[Buffer] = []
        left_bytes = FRAME_BYTES
        first_seq = self.sent_seq + 1
        while self._queue and len(entries) < ENTRIES_TARGET:
            entry = self._queue[0]
            size = len(entry.batch)
            if entries and size > left_bytes:
                break
            self._queue.popleft()
            self._queued_bytes -= size
            left_bytes -= size
            if not entry.place.live:  # it was detached
                continue
            self.sent_seq += 1
            entry.place.sent_position = entry.end.position
            self._unheld.append((self.sent_seq, entry.place, entry.end, entry.at))
            if entry.flush:
                self._unflushed.append((self.sent_seq, entry.place, entry.end, entry.at))
            entries.append((entry.place.handle, entry.position, size, int(entry.flush)))
            bodies.append(entry.batch)
        if entries:
            self._push(sync.Data(sync.DATA, self._service.epoch, first_seq, entries, self._news()), bodies)

    def _send_copy(self) -> None:
        """Sends a chunk of the next place that is copied."""
        place, _ = self._copying.popitem(last=False)
        partition = place.partition
        if partition.closed_by is not None:
            return
        log_ = partition.log
        if place.sent_position < log_.start_position:  # retention was faster
            self._service.leave(self, f"retention removed the next part to copy of {partition.name}")
            return
        position = place.sent_position
        try:
            with log_.without_waiting(place.cold):
                chunk = log_.read_position(position, FRAME_BYTES)
        except NotInMemory as missing:
            self._reading[place] = None
            self._in_threads += 1
            self._service.cold_reads.start(self, place.cold, missing, partial(self._thread_has_read, place))
            return
        except MetamqError as error:
            self._service.failed(partition, error)
            if error.retriable:
                self._service.leave(self, str(error))
            return
        self._service.cold_reads.read_ahead(place.cold)
        self._pace.sent(time.perf_counter())
        place.sent_position = position + len(chunk.data)
        end = ReplicaEnd(chunk.end_offset, place.sent_position)
        place.copies.append((end, self._now()))
        entry = (place.handle, position, len(chunk.data), int(partition.flushes_before_ack))
        self._push(sync.Copy(sync.COPY, self._service.epoch, [entry], self._news()), [chunk.data])
        if place.sent_position == log_.end_position:
            place.live = True
        else:
            self._copying[place] = None

    def _thread_has_read(self, place: LinkedPartition) -> None:
        """Sends the chunk now, if the connection takes it. Else the page cache has it later."""
        self._in_threads -= 1
        if place in self._reading and not self.closed:
            del self._reading[place]
            self._copying[place] = None
            self._copying.move_to_end(place, last=False)
            if self._wire.writable and self._may_copy and not self.flow.pause_s(self._now()):
                self._send_copy()
        if place not in self._reading:
            place.cold.clear()
        self.pump_soon()  # also after a place that was detached: others wait for the thread

    def _news(self) -> list[tuple[int, int, int]]:
        if not self._stable_news:
            return []
        news = list(islice(self._stable_news, ENTRIES_TARGET))
        for place in news:
            del self._stable_news[place]
            place.known_position = place.partition.log.stable_position
        return [
            (place.handle, place.partition.log.stable_offset, place.partition.log.stable_position)
            for place in news
            if place.partition.closed_by is None
        ]

    def beat(self) -> None:
        """Sends a heartbeat, with the new stable marks."""
        self._push(sync.Beat(sync.BEAT, self._service.epoch, self.sent_seq, self._news()))

    def push(self, message: tuple[object, ...], bodies: list[Buffer] | None = None) -> None:
        """Sends another message of the link."""
        self._push(message, bodies)

    def _push(self, message: tuple[object, ...], bodies: list[Buffer] | None = None) -> None:
        self.spoke_at = self._now()
        if bodies:
            self.sent_bytes += sum(map(len, bodies))
        self.flow.sent(self._wire.push(message, bodies), self.spoke_at)

    # -- acknowledgements ---------------------------------------------------------------------------------------------

    def acknowledged(self, ack: sync.Ack) -> list[Partition]:
        """Notes an acknowledgement; returns the partitions whose marks may have moved.

        Raises ProtocolError if it has another epoch, or a number that was not sent yet.
        """
        if ack.epoch != self._service.epoch:
            raise ProtocolError(f"replica {self.replica} acknowledges in epoch {ack.epoch}, not {self._service.epoch}")
        if max(ack.held_seq, ack.flushed_seq) > self.sent_seq or ack.flushed_seq > ack.held_seq:
            raise ProtocolError(f"replica {self.replica} acknowledges {ack.held_seq}, sent was {self.sent_seq}")
        moved: dict[Partition, None] = {}
        while self._unheld and self._unheld[0][0] <= ack.held_seq:
            _seq, place, end, _at = self._unheld.popleft()
            place.holds(end)
            moved[place.partition] = None
        while self._unflushed and self._unflushed[0][0] <= ack.flushed_seq:
            _seq, place, end, _at = self._unflushed.popleft()
            place.has_flushed(end)
            moved[place.partition] = None
        for handle, held_position, flushed_position in ack.copied:
            copied = self._handles.get(handle)
            if copied is not None:
                copied.copied(held_position, flushed_position)
                moved[copied.partition] = None
        self.held_seq = ack.held_seq
        return list(moved)

    def close(self, reason: str) -> None:
        """Ends the link. A second call does nothing."""
        if not self.closed:
            self.closed = True
            log.info("the link to replica %d at %s ends: %s", self.replica, self.peer, reason)
            if self._later is not None:
                self._later.cancel()
            self._queue.clear()
            self._unheld.clear()
            self._unflushed.clear()
            self._service.cold_reads.drop(self)
            self._wire.close()
