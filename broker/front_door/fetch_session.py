"""The fetch session of a connection: its open partitions, the armed ones among them, and one parked long poll.

Theory of operation
-------------------
A consumer of 1,000 partitions must not send 1,000 offsets with each poll, nor make the broker look at 1,000 logs.
So the session remembers. A partition is opened once under a handle, and *armed* with an offset when its consumer wants
more. An armed partition is in one of two places: in `_ready` if there is data or an error to send, else in its
partition's set of readers, from which an append moves it to `_ready`. The work is in proportion to the changes.

A reader that opens a partition may give the epoch of the last message that it has read. If the log has another epoch at
that offset, an operator has accepted a loss since then. The answer gives the offset up to which the two agree. A log is
cut at a slave only. The slave then asks readers with that log open to open it again, which checks their epoch again.

A slave knows less than its master. It waits for data at an offset beyond its end, and sends a reader of an offset
before its start to the master. Only a master answers that an offset is out of range.

An answer takes ready partitions from the front, each up to its cap, and disarms them. Arming puts a partition at the
back. So partitions take turns, and a busy one cannot starve the others.

Data that is not in memory is read by a thread (metamq.broker.log.disk.cold). Meanwhile its partition is in `_reading`,
and the poll stays parked, unless other partitions have data. It also stays parked at the end of its time: an answer
without data means that there is none. When the thread is done, the partition is at the front of `_ready` again. It is
read from the beginning, with every check. A partition that is closed or armed meanwhile leaves `_reading` at once.

A session keeps only partitions that exist and that its client may read. The answer to the GET that opens another one
has the error, and its handle is not open. So a client without rights holds no memory by the names that it sends.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from metamq.broker.front_door.limits.turns import Turns
from metamq.broker.log.disk.cold import ColdReader, NotInMemory
from metamq.broker.roles.role import MasterRole, ReplicaStatus
from metamq.errors import CorruptData, Fenced, MetamqError, OffsetDiverged, OffsetOutOfRange, ProtocolError
from metamq.wire import status
from metamq.wire.commands import FilePlace, Get, GetPartition, GetResult
from metamq.wire.connection import Request
from metamq.wire.frames import Buffer
from metamq.wire.headers import unpack
from metamq.wire.limits import FETCH_BYTES_MAX, FETCH_PARTITIONS_MAX, FETCH_RESULTS_MAX, FETCH_WAIT_MS_MAX
from metamq.zk.names import MAX_NAME_CHARS

if TYPE_CHECKING:
    from metamq.broker.data.cold_reads import ColdReads
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.log.store import FilePart
    from metamq.broker.log.trim import TrimmedLog

Answer = Callable[[Request, list[GetResult], list[Buffer]], None]


UNWRITABLE_RETRY_S = 0.05
IN_PLACE_BYTES_MIN = 128 * 1024
"""Smaller parts are sent: the reader would need more time to open the file and read it."""
THREAD_READS_MAX = 8
"""Reads of one session that wait for the disk."""
PLENTY_BYTES = 1 << 64
"""A number above every `bytes_min`."""


class ReplicaReadRole:
    """The role of this replica as readers see it. Used by the broker's loop only."""

    def __init__(self, status: ReplicaStatus, topics: Topics, far_bytes: int) -> None:
        """`far_bytes`: readers further behind the end are sent to a slave; 0: none is."""
        self._status = status
        self._topics = topics
        self._far_bytes = far_bytes
        self.turns = Turns()
        """The answers to readers that new data has woken."""

    @property
    def cold_reads(self) -> ColdReads:
        """The threads that read what is not in memory."""
        return self._topics.cold_reads

    @property
    def is_master(self) -> bool:
        """True if this replica is the master."""
        return isinstance(self._status.role, MasterRole)

    @property
    def epoch(self) -> int:
        """The epoch of the logs here."""
        return self._status.role.followed_epoch

    def not_master(self) -> Fenced:
        """Returns the refusal of a request that only a master serves. This replica is not the master."""
        role = self._status.role
        assert not isinstance(role, MasterRole)
        return role.refusal.with_traceback(None)

    def find(self, topic: str, topic_id: str, index: int) -> Partition:
        """See Topics.find_for_clients."""
        return self._topics.find_for_clients(topic, topic_id, index)

    def preferred_replica(self, partition: Partition, position: int) -> int:
        """Returns the replica that a reader at this byte asks next; -1 is this one."""
        return self._status.role.preferred_replica(partition, position, self._far_bytes)

    def found_damage(self, partition: Partition, error: CorruptData) -> None:
        """Reports a damaged log: a slave copies it again, a master serves the rest of it and logs the damage."""
        if self.is_master:
            self._topics.has_damage(partition, error)
        else:
            self._topics.is_damaged(partition, error)


@dataclass(eq=False, slots=True)
class _Place:
    """One opened partition in one session. Implements metamq.broker.data.readers.Reader."""

    session: FetchSession
    entry: GetPartition
    partition: Partition
    error: MetamqError | None = None
    """The reason why the partition is not read any more, or does not continue at the reader's offset."""
    checked: bool = False
    """True if that was checked."""
    cuts: int = -1
    offset: int | None = None
    start_position: int = 0
    """The position from which `bytes_min` counts bytes."""
    seen: tuple[int, int] = (-1, -1)
    """The stable offset and position at the last answer."""
    cold: ColdReader | None = None
    """The results of threads; None: everything it read so far was in memory."""
    in_thread: bool = False
    """True while a thread reads for it."""

    def arm(self, offset: int) -> bool:
        """Sets the offset to read from; returns True if there is something to send already."""
        self.offset = offset
        if self.partition.closed_by or self.refusal(offset) is not None:
            return True
        log, (seen_offset, seen_position) = self.partition.log, self.seen
        if self.is_ahead():
            self.start_position = log.stable_position
            return False
        # Only the log knows the distance in bytes from an older offset. Such a reader does not wait for `bytes_min`.
        self.start_position = seen_position if offset == seen_offset < log.stable_offset else -PLENTY_BYTES
        return True

    def refusal(self, offset: int) -> MetamqError | None:
        """Returns the reason why the offset is not read, or None."""
        partition = self.partition
        if self.error is None:
            if self.cuts < 0:
                self.cuts = partition.cuts
            if self.cuts != partition.cuts:
                self.error = Fenced("this replica", f"{partition.name} was cut here meanwhile: open it again")
            elif not self.checked:
                self.checked, self.error = parted(partition, offset, self.entry.epoch, self.session.role)
        return self.error

    def available_bytes(self) -> int:
        """Returns the bytes that count for `bytes_min`; PLENTY_BYTES if there is an error to send."""
        if self.partition.closed_by or self.error is not None:
            return PLENTY_BYTES
        return self.partition.log.stable_position - self.start_position

    def is_ahead(self) -> bool:
        """True if the reader waits for data that is not stable yet."""
        assert self.offset is not None
        log = self.partition.log
        if self.offset <= log.end_offset:
            return self.offset >= log.stable_offset
        return not self.session.role.is_master

    def data_ready(self, added_bytes: int) -> None:
        partition = self.partition
        if not partition.closed_by and self.cuts == partition.cuts and self.is_ahead():
            partition.readers.add(self)
        else:
            self.session.place_ready(self)


class FetchSession:
    """Serves the GETs of one connection.

    `answer` sends a response. `writable` returns True if one may be sent now. `available_bytes` returns how many of the
    wanted bytes the budget of answers allows. `refusal` returns the reason why a topic is not read, or None.
    """

    def __init__(
        self,
        role: ReplicaReadRole,
        answer: Answer,
        writable: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        available_bytes: Callable[[int], int] = lambda wanted: wanted,
        refusal: Callable[[str], MetamqError | None] = lambda topic: None,
    ) -> None:
        self.role = role
        self._answer = answer
        self._writable = writable
        self._available_bytes = available_bytes
        self._refusal = refusal
        self._loop = loop
        self._places: dict[int, _Place] = {}
        self._ready: OrderedDict[_Place, None] = OrderedDict()
        self._reading: dict[_Place, None] = {}
        """Places that a thread reads for."""
        self._in_threads = 0
        """Reads in threads, also for places that were closed or armed again meanwhile."""
        self._is_over = False
        """True if the time of the parked poll is over: it waits for threads only."""
        self._refused: list[GetResult] = []
        """Errors of partitions that the last GET could not open."""
        self._parked: tuple[Request, Get] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._serve_soon = False
        self.is_near = False
        """True if the reader is on this machine. Then an answer may give a place in a file instead of batches."""

    def get(self, request: Request) -> None:
        """Applies the changes of a GET, and answers it now or parks it.

        Raises ProtocolError. The session is unchanged then.
        """
        poll, opened = self._checked(unpack(Get, request.header))
        self._unpark()
        for handle in poll.closed:
            self._close(self._places.pop(handle, None))
        for entry in opened:
            self._open(entry)
        for handle, offset in poll.armed:
            if handle in self._places:
                self._arm(self._places[handle], offset)
        self._parked = request, poll
        self._is_over = False
        self.serve()
        if self._parked is not None and poll.wait_ms > 0:
            delay_s = min(poll.wait_ms, FETCH_WAIT_MS_MAX) / 1000
            self._deadline = self._loop.call_later(delay_s, self._expire)
        elif self._parked is not None:
            self._expire()

    def _checked(self, poll: Get) -> tuple[Get, list[GetPartition]]:
        """Returns the poll, clipped to the limits, and the partitions to open. Raises ProtocolError."""
        places, closed = self._places, set(poll.closed)
        opened = [unpack(GetPartition, entry) for entry in poll.opened]
        new: set[int] = set()
        for entry in opened:
            if entry.handle in new or (entry.handle in places and entry.handle not in closed):
                raise ProtocolError(f"fetch handle {entry.handle} is in use")
            if max(len(entry.topic), len(entry.topic_id)) > MAX_NAME_CHARS:  # the session keeps the name
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
            refused, self._refused = self._refused, []
            self._answer(request, refused, [])

    def _expire(self) -> None:
        """Answers the parked poll at the end of its time, even with less than `bytes_min`."""
        if self._parked is None:
            return
        if self._writable():
            self._respond(*self._parked, is_over=True)
        else:
            self._deadline = self._loop.call_later(UNWRITABLE_RETRY_S, self._expire)

    def _open(self, entry: GetPartition) -> None:
        error = self._refusal(entry.topic)
        if error is None:
            try:
                partition = self.role.find(entry.topic, entry.topic_id, entry.partition)
                self._places[entry.handle] = _Place(self, entry, partition)
            except MetamqError as not_found:
                error = not_found
        if error is not None:
            self._refused.append(error_result(entry.handle, error))

    def _arm(self, place: _Place, offset: int) -> None:
        self._ready.pop(place, None)  # arming puts it at the back
        self._reading.pop(place, None)
        if place.arm(offset):
            self._ready[place] = None
        else:
            place.partition.readers.add(place)

    def rights_changed(self) -> None:
        """Ends the reading of partitions that may not be read any more, also in a parked poll."""
        for place in self._places.values():
            if place.error is None and (refusal := self._refusal(place.entry.topic)) is not None:
                place.partition.readers.discard(place)
                place.error = refusal
                if place.offset is not None:
                    self.place_ready(place)

    def _close(self, place: _Place | None) -> None:
        if place is not None:
            self._ready.pop(place, None)
            self._reading.pop(place, None)
            place.partition.readers.discard(place)

    def place_ready(self, place: _Place) -> None:
        """Called when an armed partition has got data, or was closed."""
        self._reading.pop(place, None)
        self._ready[place] = None
        if self._parked is not None and not self._serve_soon:
            # Later: appends of the same loop iteration go into the same answer.
            self._serve_soon = True
            self.role.turns.add(self._serve_ready)

    def _serve_ready(self) -> None:
        self._serve_soon = False
        self.serve()

    def serve(self) -> None:
        """Answers the parked poll if enough is ready. Also called when the connection is writable again."""
        if self._parked is None or not (self._ready or self._refused) or not self._writable():
            return
        request, poll = self._parked
        if self._is_over or self._has(poll.bytes_min):
            self._respond(request, poll, is_over=self._is_over)
        else:
            self._wait_for_more()

    def _has(self, bytes_min: int) -> bool:
        """Returns True if enough bytes are ready. Stops early: a consumer that is behind has all partitions ready."""
        if self._refused:
            return True
        found = 0
        for place in chain(self._ready, self._reading):
            found += place.available_bytes()
            if found >= bytes_min:
                return True
        return False

    def _wait_for_more(self) -> None:
        for place in self._ready:
            place.partition.readers.add(place)

    def _respond(self, request: Request, poll: Get, *, is_over: bool = False) -> None:
        results, self._refused = self._refused, []
        bodies: list[Buffer] = []
        left_bytes = self._available_bytes(poll.bytes_max)
        waits = bool(self._reading)
        while self._ready and left_bytes > 0 and len(results) < FETCH_RESULTS_MAX:
            place, _ = self._ready.popitem(last=False)
            bytes_max = min(left_bytes, poll.partition_bytes_max)
            try:
                result, data = self._read(place, bytes_max)
            except NotInMemory as missing:
                waits = True
                left_bytes -= bytes_max
                if not self._read_in_thread(place, missing):
                    break
                continue
            place.offset = None
            results.append(result)
            left_bytes -= result.size
            if data:
                bodies.append(data)
        if waits and not results:  # the end of its time is no reason to answer "no data"
            self._is_over |= is_over
            return
        if is_over and not self.role.is_master:
            results += self._sent_back(FETCH_RESULTS_MAX - len(results))
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._answer(request, results, bodies)

    def _read_in_thread(self, place: _Place, missing: NotInMemory) -> bool:
        """Starts the read of what is missing; returns False, and does not, if enough reads run for this session."""
        assert place.cold is not None
        if not place.in_thread and self._in_threads >= THREAD_READS_MAX:
            self._ready[place] = None
            self._ready.move_to_end(place, last=False)
            return False
        self._reading[place] = None
        if not place.in_thread:  # else that read was for another offset; it tries again when that one ends
            place.in_thread = True
            self._in_threads += 1
            self.role.cold_reads.start(self, place.cold, missing, partial(self._thread_has_read, place))
        return True

    def _thread_has_read(self, place: _Place) -> None:
        place.in_thread = False
        self._in_threads -= 1
        if place in self._reading:
            del self._reading[place]
            self._ready[place] = None
            self._ready.move_to_end(place, last=False)
        self.serve()
        if place.cold is not None and place not in self._reading:
            place.cold.clear()  # the answer has it; or it cannot be sent now, and the page cache has it

    def _read(self, place: _Place, bytes_max: int) -> tuple[GetResult, Buffer]:
        """Reads one place. Raises NotInMemory."""
        partition, offset = place.partition, place.offset
        assert offset is not None
        error = place.error or partition.closed_by or place.refusal(offset)
        partition.readers.discard(place)
        if error is None:
            try:
                return self._read_log(place, partition, offset, bytes_max)
            except OffsetOutOfRange as read_error:
                error = read_error if self.role.is_master else _not_here(read_error)
            except MetamqError as read_error:
                error = read_error
                if isinstance(error, CorruptData):
                    self.role.found_damage(partition, error)
        return error_result(place.entry.handle, error), b""

    def _sent_back(self, count_max: int) -> list[GetResult]:
        """Sends readers that got no data from a slave to the master: only the master knows if more data exists."""
        results: list[GetResult] = []
        for handle, place in self._places.items():
            partition = place.partition
            is_waiting = place.offset is not None and place not in self._ready and place not in self._reading
            if not is_waiting or len(results) >= count_max:
                continue
            log = partition.log
            preferred = self.role.preferred_replica(partition, log.stable_position)
            if preferred >= 0:
                place.offset = None
                partition.readers.discard(place)
                results.append(GetResult(handle, status.OK, 0, log.begin_offset, log.stable_offset, None, preferred))
        return results

    def _read_log(self, place: _Place, partition: Partition, offset: int, bytes_max: int) -> tuple[GetResult, Buffer]:
        cold = place.cold or ColdReader()
        try:
            with partition.log.without_waiting(cold):
                return self._read_in_memory(place, partition, offset, bytes_max)
        except NotInMemory:
            place.cold = cold
            raise
        finally:
            if cold.due is not None:
                self.role.cold_reads.read_ahead(cold)

    def _read_in_memory(
        self, place: _Place, partition: Partition, offset: int, bytes_max: int
    ) -> tuple[GetResult, Buffer]:
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
            place.entry.handle, status.OK, size, log.begin_offset, log.stable_offset, None, preferred, file
        )

    def close(self) -> None:
        """Closes all partitions. The connection is closed."""
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
        for place in self._places.values():
            self._close(place)
        self._places.clear()
        if self._in_threads:
            self.role.cold_reads.drop(self)


def parted(partition: Partition, offset: int, epoch: int, role: ReplicaReadRole) -> tuple[bool, MetamqError | None]:
    """Compares a reader's last message, by offset and epoch, with this log.

    Returns (True, None) if the log has that message, (True, error) if reader and log have parted, and (False, None) if
    this replica cannot know yet. A present master always knows. A slave may still receive the message; if it becomes
    the master first, the comparison is repeated.
    """
    log = partition.log
    if role.is_master and epoch > role.epoch:
        reason = f"it is of epoch {role.epoch}, and the reader has a message of epoch {epoch}"
        return True, Fenced("this replica", reason)
    try:
        epochs = log.epochs()
    except MetamqError as error:
        return True, error
    agreed = epochs.agrees_with_reader(offset, epoch, log.begin_offset, log.end_offset)
    if agreed == offset:
        return True, None
    if not role.is_master and offset >= log.stable_offset:
        return False, None
    if not role.is_master:
        return True, Fenced("this replica", f"its log has something else from {agreed} on: ask the master")
    return True, OffsetDiverged(
        partition.name, offset, log.begin_offset, log.stable_offset, agreed, epochs.epoch_of_reader(agreed)
    )


def file_place(part: FilePart, log: TrimmedLog) -> FilePlace | None:
    """Returns the place of a part of a log, for a reader on this machine. Raises as PartitionLog.epochs()."""
    path = os.path.abspath(part.path)
    try:
        stat = os.stat(path)
        path.encode()
    except (OSError, UnicodeEncodeError):
        return None
    return FilePlace(path, stat.st_dev, stat.st_ino, part.at, log.epochs().last)


def error_result(handle: int, error: MetamqError) -> GetResult:
    """Returns the result of a partition that is not read."""
    number, fields = status.encode_error(error)
    return GetResult(handle, number, 0, -1, -1, fields)


def _not_here(error: OffsetOutOfRange) -> Fenced:
    """Returns the error of a slave for an offset before the start of its log."""
    return Fenced("this replica", f"its log begins at {error.start}, ask the master for {error.offset}")
