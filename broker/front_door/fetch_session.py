"""The fetch session of a connection: what its consumer has open, what is armed, and the one parked long poll.

Theory of operation
-------------------
A consumer of 1,000 partitions must not send 1,000 offsets with each poll, nor make the broker look at 1,000 logs.
So the broker remembers. A partition is opened once under a handle, and *armed* with an offset when its consumer has
room for more. An armed partition is in one of two places: in `_ready` when there is data (or an error) to send, or
in its partition's set of readers, from where an append moves it to `_ready`. Work is in proportion to what changes.

A reader that opens a partition may say of which epoch the message is that it has read last. Where the log has another
one there, a loss was accepted since, and the reader is told up to where the two are the same. A log is cut only at a
slave; whoever has it open then is told to open it anew, and so is looked at again.

A slave knows less than its master. It takes an offset beyond its end for one that is to come, and sends a reader of
what lies before its start to the master; only a master says that an offset is out of range.

Answering a poll takes ready partitions from the front, each up to its cap, and disarms them; arming puts them at
the back. So partitions take turns, and a busy one cannot starve its neighbours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

from metamq.broker.data.partition import Partition
from metamq.broker.log import FilePart, PartitionLog
from metamq.errors import CorruptData, Fenced, MetamqError, OffsetDiverged, OffsetOutOfRange, ProtocolError
from metamq.wire import status
from metamq.wire.commands import FilePlace, Get, GetPartition, GetResult, unpack
from metamq.wire.connection import Request
from metamq.wire.frames import Buffer
from metamq.wire.limits import (
    FETCH_BYTES_MAX,
    FETCH_PARTITIONS_MAX,
    FETCH_RESULTS_MAX,
    FETCH_WAIT_MS_MAX,
)
from metamq.zk.names import MAX_NAME_CHARS

Find = Callable[[str, str, int], Partition]
Answer = Callable[[Request, list[GetResult], list[Buffer]], None]


class ServingRole(Protocol):
    """What this replica is at present."""

    @property
    def is_master(self) -> bool:
        """Whether its word on the log's ends is the last one."""

    @property
    def epoch(self) -> int:
        """The term that its logs are of."""

    def preferred_replica(self, partition: Partition, position: int) -> int:
        """The replica that a reader at this byte had better ask next, -1: this one."""

    def found_damage(self, partition: Partition, error: CorruptData) -> None:
        """A log could not be read."""


UNWRITABLE_RETRY_S = 0.05
IN_PLACE_BYTES_MIN = 128 * 1024
"""Less is sent: to open a file and read it there takes longer."""
PLENTY_BYTES = 1 << 64
"""More than `bytes_min` can ask for."""


class _Place:
    """One opened partition in one session. Implements metamq.broker.data.partition.Reader."""

    __slots__ = ("checked", "cuts", "entry", "error", "offset", "partition", "seen", "session", "start_position")

    def __init__(self, session: FetchSession, entry: GetPartition) -> None:
        self.session = session
        self.entry = entry
        self.partition: Partition | None = None
        self.error: MetamqError | None = None
        """Why there is no partition, or none that goes on where the reader is."""
        self.checked = False
        """Whether it was found out if it does."""
        self.cuts = -1
        self.offset: int | None = None
        self.start_position = 0
        """Where the bytes begin that `bytes_min` counts."""
        self.seen = (-1, -1)
        """(stable offset, stable position) as of the last answer."""

    def arm(self, offset: int) -> bool:
        """Takes the offset to read from; whether there is something to send already."""
        self.offset = offset
        if self.partition is None or self.partition.closed_by:
            return True
        if self.refusal(offset) is not None:
            return True
        log, (seen_offset, seen_position) = self.partition.log, self.seen
        if self.is_ahead():
            self.start_position = log.stable_position
            return False
        # How many bytes an older offset is away, only the log could tell: it is no reason to wait, however few.
        self.start_position = seen_position if offset == seen_offset < log.stable_offset else -PLENTY_BYTES
        return True

    def refusal(self, offset: int) -> MetamqError | None:
        """Why nothing is read there; None: it may be."""
        partition = self.partition
        if self.error is None and partition is not None:
            if self.cuts < 0:
                self.cuts = partition.cuts
            if self.cuts != partition.cuts:
                self.error = Fenced("this replica", f"{partition.name} was cut here meanwhile: open it anew")
            elif not self.checked:
                self.checked, self.error = parted(partition, offset, self.entry.epoch, self.session.role)
        return self.error

    def available_bytes(self) -> int:
        """What counts for `bytes_min`; plenty when there is an error to tell."""
        if self.partition is None or self.partition.closed_by or self.error is not None:
            return PLENTY_BYTES
        return self.partition.log.stable_position - self.start_position

    def is_ahead(self) -> bool:
        """Whether it waits for what is not stable yet."""
        assert self.partition is not None
        assert self.offset is not None
        log = self.partition.log
        if self.offset <= log.end_offset:
            return self.offset >= log.stable_offset
        return not self.session.role.is_master

    def data_ready(self, added_bytes: int) -> None:
        partition = self.partition
        if partition is not None and not partition.closed_by and self.cuts == partition.cuts and self.is_ahead():
            partition.readers.add(self)
        else:
            self.session.place_ready(self)


class FetchSession:
    """Serves the GETs of one connection. `answer` sends a response; `writable` tells whether one may be sent now,
    `room` how much of the bytes it wants there is memory for."""

    def __init__(
        self,
        find: Find,
        role: ServingRole,
        answer: Answer,
        writable: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        room: Callable[[int], int] = lambda wanted: wanted,
    ) -> None:
        self.role = role
        self._find = find
        self._answer = answer
        self._writable = writable
        self._room = room
        self._loop = loop
        self._places: dict[int, _Place] = {}
        self._ready: dict[_Place, None] = {}
        self._parked: tuple[Request, Get] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._serve_soon = False
        self.is_near = False
        """Whether its reader is on this machine, and may be told where in a file batches lie."""

    def get(self, request: Request) -> None:
        """Takes a GET: applies its changes, answers it now or parks it.

        Raises ProtocolError, with everything as it was before.
        """
        poll, opened = self._checked(unpack(Get, request.header))
        self._unpark()
        for handle in poll.closed:
            self._close(self._places.pop(handle, None))
        for entry in opened:
            self._places[entry.handle] = _Place(self, entry)
        for handle, offset in poll.armed:
            self._arm(self._places[handle], offset)
        self._parked = request, poll
        self.serve()
        if self._parked is not None and poll.wait_ms > 0:
            delay_s = min(poll.wait_ms, FETCH_WAIT_MS_MAX) / 1000
            self._deadline = self._loop.call_later(delay_s, self._expire)
        elif self._parked is not None:
            self._expire()

    def _checked(self, poll: Get) -> tuple[Get, list[GetPartition]]:
        """The poll within the limits, and what it opens. Raises ProtocolError."""
        places, closed = self._places, set(poll.closed)
        opened = [unpack(GetPartition, entry) for entry in poll.opened]
        new: set[int] = set()
        for entry in opened:
            if entry.handle in new or (entry.handle in places and entry.handle not in closed):
                raise ProtocolError(f"fetch handle {entry.handle} is in use")
            if max(len(entry.topic), len(entry.topic_id)) > MAX_NAME_CHARS:  # it would be kept
                raise ProtocolError(f"fetch handle {entry.handle}: a name has at most {MAX_NAME_CHARS} characters")
            new.add(entry.handle)
        if len(places) - len(closed & places.keys()) + len(new) > FETCH_PARTITIONS_MAX:
            raise ProtocolError(f"a fetch session has at most {FETCH_PARTITIONS_MAX:,} partitions")
        armed: set[int] = set()
        for handle, _offset in poll.armed:
            if handle not in new and (handle not in places or handle in closed):
                raise ProtocolError(f"fetch handle {handle} is not open")
            if handle in armed:
                raise ProtocolError(f"fetch handle {handle} is armed twice in one GET")
            armed.add(handle)
        bytes_max = min(max(poll.bytes_max, 1), FETCH_BYTES_MAX)
        return poll._replace(bytes_max=bytes_max, partition_bytes_max=max(poll.partition_bytes_max, 1)), opened

    def _unpark(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._parked is not None:
            request, _poll = self._parked
            self._parked = None
            self._answer(request, [], [])

    def _expire(self) -> None:
        """The parked poll's time is over: answer with what there is, below the minimum too."""
        if self._parked is None:
            return
        if self._writable():
            self._respond(*self._parked, is_over=True)
        else:
            self._deadline = self._loop.call_later(UNWRITABLE_RETRY_S, self._expire)

    def _arm(self, place: _Place, offset: int) -> None:
        if place.partition is None:
            self._look_up(place)
        self._ready.pop(place, None)  # it goes to the back
        if place.arm(offset):
            self._ready[place] = None
        elif place.partition is not None:
            place.partition.readers.add(place)

    def _look_up(self, place: _Place) -> None:
        """Finds the partition. Not for good if it is not there: its topic may be on the way."""
        entry = place.entry
        try:
            place.partition, place.error = self._find(entry.topic, entry.topic_id, entry.partition), None
        except MetamqError as error:
            place.error = error.with_traceback(None)  # which would keep the request

    def _close(self, place: _Place | None) -> None:
        if place is not None:
            self._ready.pop(place, None)
            if place.partition is not None:
                place.partition.readers.discard(place)

    def place_ready(self, place: _Place) -> None:
        """An armed partition got data, or closed."""
        self._ready[place] = None
        if self._parked is not None and not self._serve_soon:
            # Not at once: appends of the same loop iteration go into the same answer.
            self._serve_soon = True
            self._loop.call_soon(self._serve_ready)

    def _serve_ready(self) -> None:
        self._serve_soon = False
        self.serve()

    def serve(self) -> None:
        """Answers the parked poll if there is enough for it. Called when the connection is writable again, too."""
        if self._parked is None or not self._ready or not self._writable():
            return
        request, poll = self._parked
        if self._has(poll.bytes_min):
            self._respond(request, poll)
        else:
            self._wait_for_more()

    def _has(self, bytes_min: int) -> bool:
        """Whether what is ready suffices; looks no further than it must: where a consumer is behind, all are ready."""
        found = 0
        for place in self._ready:
            found += place.available_bytes()
            if found >= bytes_min:
                return True
        return False

    def _wait_for_more(self) -> None:
        for place in self._ready:
            assert place.partition is not None
            place.partition.readers.add(place)

    def _respond(self, request: Request, poll: Get, *, is_over: bool = False) -> None:
        results: list[GetResult] = []
        bodies: list[Buffer] = []
        room = self._room(poll.bytes_max)
        while self._ready and room > 0 and len(results) < FETCH_RESULTS_MAX:
            place = next(iter(self._ready))
            del self._ready[place]
            result, data = self._read(place, min(room, poll.partition_bytes_max))
            results.append(result)
            room -= result.size
            if data:
                bodies.append(data)
        if is_over and not self.role.is_master:
            results += self._sent_back(FETCH_RESULTS_MAX - len(results))
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._answer(request, results, bodies)

    def _read(self, place: _Place, bytes_max: int) -> tuple[GetResult, Buffer]:
        partition, offset = place.partition, place.offset
        place.offset = None
        error = place.error or (partition.closed_by if partition else None)
        if error is None:
            assert offset is not None
            error = place.refusal(offset)
        if partition is not None:
            partition.readers.discard(place)
        if error is None:
            assert partition is not None
            assert offset is not None
            try:
                return self._read_log(place, partition, offset, bytes_max)
            except OffsetOutOfRange as read_error:
                error = read_error if self.role.is_master else _not_here(read_error)
            except MetamqError as read_error:
                error = read_error
                if isinstance(error, CorruptData):
                    self.role.found_damage(partition, error)
        number, fields = status.encode_error(error)
        return GetResult(place.entry.handle, number, 0, -1, -1, fields), b""

    def _sent_back(self, count_max: int) -> list[GetResult]:
        """On a slave, those that have waited in vain: only the master knows if there is something to wait for."""
        results: list[GetResult] = []
        for handle, place in self._places.items():
            partition = place.partition
            if partition is None or place.offset is None or place in self._ready or len(results) >= count_max:
                continue
            log = partition.log
            preferred = self.role.preferred_replica(partition, log.stable_position)
            if preferred >= 0:
                place.offset = None
                partition.readers.discard(place)
                results.append(GetResult(handle, status.OK, 0, log.start_offset, log.stable_offset, None, preferred))
        return results

    def _read_log(self, place: _Place, partition: Partition, offset: int, bytes_max: int) -> tuple[GetResult, Buffer]:
        log = partition.log
        if self.is_near and place.entry.in_place and bytes_max >= IN_PLACE_BYTES_MIN:
            part = log.locate(offset, bytes_max)
            if part is not None and part.size >= IN_PLACE_BYTES_MIN and (file := file_place(part, log)):
                return self._result(place, partition, part.position, part.size, file), b""
        found = log.read(offset, bytes_max)
        return self._result(place, partition, found.position, len(found.data)), found.data

    def _result(
        self, place: _Place, partition: Partition, position: int, size: int, file: FilePlace | None = None
    ) -> GetResult:
        log = partition.log
        place.seen = log.stable_offset, log.stable_position
        preferred = self.role.preferred_replica(partition, position + size)
        return GetResult(
            place.entry.handle, status.OK, size, log.start_offset, log.stable_offset, None, preferred, file
        )

    def close(self) -> None:
        """Forgets everything: the connection is gone."""
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
        for place in self._places.values():
            self._close(place)
        self._places.clear()


def parted(partition: Partition, offset: int, epoch: int, role: ServingRole) -> tuple[bool, MetamqError | None]:
    """Whether it is known if a reader's log, up to a message of an epoch, and this one have parted, and where.

    Only a master knows in any case, and only one that is none of the past. A slave may get what the reader has, and may
    become the master before: then it is to be looked at again.
    """
    log = partition.log
    if role.is_master and epoch > role.epoch:
        reason = f"it is of epoch {role.epoch}, and the reader has a message of epoch {epoch}"
        return True, Fenced("this replica", reason)
    try:
        epochs = log.epochs()
    except MetamqError as error:
        return True, error
    agreed = epochs.agrees_with_reader(offset, epoch, log.start_offset, log.end_offset)
    if agreed == offset:
        return True, None
    if not role.is_master and offset >= log.stable_offset:
        return False, None
    if not role.is_master:
        return True, Fenced("this replica", f"its log has something else from {agreed} on: ask the master")
    return True, OffsetDiverged(
        partition.name, offset, log.start_offset, log.stable_offset, agreed, epochs.epoch_of_reader(agreed)
    )


def file_place(part: FilePart, log: PartitionLog) -> FilePlace | None:
    """Where a reader on this machine finds a part of a log. Raises as PartitionLog.epochs()."""
    path = os.path.abspath(part.path)
    try:
        stat = os.stat(path)
        path.encode()
    except (OSError, UnicodeEncodeError):
        return None
    return FilePlace(path, stat.st_dev, stat.st_ino, part.at, log.epochs().last)


def _not_here(error: OffsetOutOfRange) -> Fenced:
    """What a slave says of an offset that its log does not have."""
    return Fenced("this replica", f"its log begins at {error.start}, ask the master for {error.offset}")
