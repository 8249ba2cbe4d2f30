"""HAConnection: the master's end of the link to one slave.

Theory of operation
-------------------
Each partition of the slave has a *place* on the link, in one of two ways of being sent:

    copied   from the log, a chunk at a time, from where the handshake put it; acknowledged by position
    live     every append is queued here as it happens, in the master's order; acknowledged by sequence number

A place becomes live when its copy has reached the end of the log. All of this runs in one loop, so between "it has
reached the end" and the next append there is nothing. What is queued refers to the memory that the batch came in:
nothing is read again. A slave that is too slow for that, over BACKLOG_BYTES, loses its queue, and the places in it
go back to being copied, each from what was sent of it: it costs bounded memory and stalls nobody.

An acknowledgement is cumulative, and is taken apart into places by the queue of what was sent. Two numbers come: up
to which sequence number the slave *holds* everything, and up to which it has *flushed* what is to be flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from metamq.broker.data.partition import Partition
from metamq.broker.ha.flow import FlowMonitor
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.frames import Buffer
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.broker.ha.service import HAService

log = logging.getLogger("metamq.broker")

FRAME_BYTES = 1024 * 1024
BACKLOG_BYTES = 32 * 1024 * 1024
STABLE_DELAY_S = 0.005
"""How long news of stable marks may wait for a frame that goes anyway."""
FRAMES_A_TURN = 4
"""Sent before the loop's other work has its turn."""


class Wire(Protocol):
    """The connection below."""

    peer: str

    @property
    def writable(self) -> bool:
        """Whether the write buffer is below its mark; `HAConnection.pump` is called when it is again."""

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        """Sends a SYNC frame of its own accord; returns its size."""

    def close(self) -> None:
        """Closes after what is written has been sent."""


class ReplicaEnd(NamedTuple):
    """An end that a replica has reached."""

    offset: int
    position: int


class LinkedPartition:
    """One partition on one link."""

    __slots__ = ("copies", "flushed", "handle", "held", "live", "partition", "sent_position", "since", "told_position")

    def __init__(self, handle: int, partition: Partition, mark: ReplicaEnd, now: float) -> None:
        self.handle = handle
        self.partition = partition
        start = ReplicaEnd(partition.log.start_offset, partition.log.start_position)
        self.held = mark
        self.flushed = min(start, mark)
        """Not `mark`: an attaching slave says what it has written, and its next acknowledgement what it has flushed."""
        self.sent_position = mark.position
        self.told_position = 0
        """The stable mark that the slave was told of last."""
        self.live = False
        self.copies: deque[tuple[ReplicaEnd, float]] = deque()
        """Ends of what was copied and is not acknowledged as it is to be, and since when they are so."""
        if mark.position > start.position:
            self.copies.append((mark, now))
        self.since = now
        """Since when it is not live."""

    def mark(self) -> ReplicaEnd:
        """What counts for the stable mark."""
        return self.flushed if self.partition.flushes_before_ack else self.held

    def copied(self, held_position: int, flushed_position: int) -> None:
        """The slave holds, and has flushed, its copy up to here. Raises ProtocolError beyond what was sent."""
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
        """The slave has written it up to there, if not further."""
        self.held = max(self.held, end)

    def has_flushed(self, end: ReplicaEnd) -> None:
        """The slave has fsynced it up to there, if not further."""
        self.flushed = max(self.flushed, end)

    def copied_since(self) -> float | None:
        """When the oldest part was copied that does not count for the stable mark yet; None: all does. Any thread."""
        position = self.mark().position
        return next((since for end, since in tuple(self.copies) if end.position > position), None)


class _Entry(NamedTuple):
    """Queued for sending, then for its acknowledgement."""

    place: LinkedPartition
    position: int
    end: ReplicaEnd
    batch: memoryview
    flush: bool
    at: float


class HAConnection:
    """One slave's link. Used by the broker's loop only; calls back into the service."""

    def __init__(
        self,
        service: HAService,
        wire: Wire,
        join: sync.Join,
        *,
        loop: asyncio.AbstractEventLoop,
        flow: FlowMonitor,
    ) -> None:
        self.replica = join.replica
        self.member = join.replica, join.incarnation
        self.learner = join.learner
        self.generation = join.generation
        """The last that the slave has followed."""
        self.peer = wire.peer
        self.flow = flow
        self.heard_at = self.spoke_at = loop.time()
        self.tasks: set[asyncio.Task[None]] = set()
        self.places: dict[Partition, LinkedPartition] = {}
        self.sent_bytes = 0
        """Of logs."""
        self.sent_seq = 0
        self.held_seq = 0
        self.closed = False
        self.is_leaving = False
        """The slave has said that it stops."""
        self._service = service
        self._wire = wire
        self._loop = loop
        self._now = loop.time
        self._handles: dict[int, LinkedPartition] = {}
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._unheld: deque[tuple[int, LinkedPartition, ReplicaEnd, float]] = deque()
        self._unflushed: deque[tuple[int, LinkedPartition, ReplicaEnd, float]] = deque()
        self._copying: dict[LinkedPartition, None] = {}
        self._copies_next = False
        """Frames of the two kinds take turns."""
        self._stable_news: dict[LinkedPartition, None] = {}
        self._pump_soon = False
        self._later: asyncio.TimerHandle | None = None

    # -- places -----------------------------------------------------------------------------------------------------

    def attach(self, handle: int, partition: Partition, mark: ReplicaEnd) -> None:
        """From here on the partition is sent, from `mark` on, which is where the slave's log ends now."""
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
        """The partition is gone at one of the two."""
        place = self._handles.pop(handle, None)
        if place is not None:
            self.places.pop(place.partition, None)
            self._copying.pop(place, None)
            self._stable_news.pop(place, None)
            place.live = False

    def all_live(self, partitions: Iterable[Partition]) -> bool:
        """Whether every partition is sent as it is appended to."""
        places = self.places
        return all((place := places.get(partition)) is not None and place.live for partition in partitions)

    def behind_since(self) -> float | None:
        """Since when the slave has not held, or not flushed where that counts, what it was sent; None: it has all.

        Any thread.
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
        """A batch was appended at the master: the next in the sequence, unless its place is still being copied."""
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
        """The slave is too slow for the queue: what is in it is copied from the log later."""
        log.info("replica %d falls behind: it goes on by copying from the logs", self.replica)
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
        """Whether some partition is being copied."""
        return bool(self._copying)

    def stable_moved(self, partition: Partition) -> None:
        """The slave is to learn of a stable mark, with the next frame or in a moment."""
        place = self.places.get(partition)
        if place is not None:
            self._stable_news[place] = None
            if not self._pump_soon and self._later is None:
                self._later = self._loop.call_later(STABLE_DELAY_S, self.pump)

    def pump_soon(self) -> None:
        """Sends what there is, once the loop has done what it is doing: appends of one turn share a frame."""
        if not self._pump_soon and not self.closed:
            self._pump_soon = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Sends as much as the connection takes now."""
        self._pump_soon = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _ in range(FRAMES_A_TURN):
            if self.closed or not self._wire.writable:
                return
            pause_s = self.flow.pause_s(self._now())
            if pause_s > 0 and (self._queue or self._copying or self._stable_news):
                self._later = self._loop.call_later(pause_s, self.pump)
                return
            if not (self._queue or self._copying):
                if not self._stable_news:
                    return
                self.beat()
                continue
            if self._queue and not (self._copying and self._copies_next):
                self._copies_next = True
                self._send_queued()
            else:
                self._copies_next = False
                self._send_copy()
        self.pump_soon()

    def _send_queued(self) -> None:
        entries: list[tuple[int, int, int, int]] = []
        bodies: list[Buffer] = []
        room = FRAME_BYTES
        first_seq = self.sent_seq + 1
        while self._queue and len(entries) < ENTRIES_TARGET:
            entry = self._queue[0]
            size = len(entry.batch)
            if entries and size > room:
                break
            self._queue.popleft()
            self._queued_bytes -= size
            room -= size
            if not entry.place.live:  # detached meanwhile
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
        """A chunk of the place whose turn it is."""
        place = next(iter(self._copying))
        del self._copying[place]
        partition = place.partition
        if partition.closed_by is not None:
            return
        log_ = partition.log
        if place.sent_position < log_.start_position:  # retention was faster
            self._service.leave(self, f"retention removed what was to be copied of {partition.name}")
            return
        position = place.sent_position
        try:
            chunk = log_.read_position(position, FRAME_BYTES)
        except MetamqError as error:
            self._service.failed(partition, error)
            if error.retriable:
                self._service.leave(self, str(error))
            return
        place.sent_position = position + len(chunk.data)
        end = ReplicaEnd(chunk.end_offset, place.sent_position)
        place.copies.append((end, self._now()))
        entry = (place.handle, position, len(chunk.data), int(partition.flushes_before_ack))
        self._push(sync.Copy(sync.COPY, self._service.epoch, [entry], self._news()), [chunk.data])
        if place.sent_position == log_.end_position:
            place.live = True
        else:
            self._copying[place] = None

    def _news(self) -> list[tuple[int, int, int]]:
        if not self._stable_news:
            return []
        news = list(islice(self._stable_news, ENTRIES_TARGET))
        for place in news:
            del self._stable_news[place]
            place.told_position = place.partition.log.stable_position
        return [
            (place.handle, place.partition.log.stable_offset, place.partition.log.stable_position)
            for place in news
            if place.partition.closed_by is None
        ]

    def beat(self) -> None:
        """A heartbeat, with what there is to tell of stable marks."""
        self._push(sync.Beat(sync.BEAT, self._service.epoch, self.sent_seq, self._news()))

    def push(self, message: tuple[object, ...], bodies: list[Buffer] | None = None) -> None:
        """Sends any other message of the link."""
        self._push(message, bodies)

    def _push(self, message: tuple[object, ...], bodies: list[Buffer] | None = None) -> None:
        self.spoke_at = self._now()
        if bodies:
            self.sent_bytes += sum(map(len, bodies))
        self.flow.sent(self._wire.push(message, bodies), self.spoke_at)

    # -- acknowledgements ---------------------------------------------------------------------------------------------

    def acknowledged(self, ack: sync.Ack) -> list[Partition]:
        """Takes note of an acknowledgement; returns the partitions whose marks may have moved.

        Raises ProtocolError when it is of another epoch, or beyond what was sent.
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
            self._wire.close()
