"""The fetch session of a connection: what its consumer has open, what is armed, and the one parked long poll.

Theory of operation
-------------------
A consumer of 1,000 partitions must not send 1,000 offsets with each poll, nor make the broker look at 1,000 logs.
So the broker remembers. A partition is opened once under a handle, and *armed* with an offset when its consumer has
room for more. An armed partition is in one of two places: in `_ready` when there is data (or an error) to send, or
in its partition's set of readers, from where an append moves it to `_ready`. Work is in proportion to what changes.

Answering a poll takes ready partitions from the front, each up to its cap, and disarms them; arming puts them at
the back. So partitions take turns, and a busy one cannot starve its neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from metamq.broker.partition import Partition
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import status
from metamq.wire.commands import Get, GetPartition, GetResult, unpack
from metamq.wire.connection import Request
from metamq.wire.frames import Buffer

Find = Callable[[str, str, int], Partition]
Answer = Callable[[Request, list[GetResult], list[Buffer]], None]

PARTITIONS_MAX = 100_000
PARKED_MS_MAX = 5 * 60 * 1000
UNWRITABLE_RETRY_S = 0.05


class _Place:
    """One opened partition in one session. Implements metamq.broker.partition.Reader."""

    __slots__ = ("available_bytes", "error", "handle", "offset", "partition", "session")

    def __init__(
        self, session: FetchSession, handle: int, partition: Partition | None, error: MetamqError | None
    ) -> None:
        self.session = session
        self.handle = handle
        self.partition = partition
        self.error = error
        self.offset: int | None = None
        self.available_bytes = 0

    def data_ready(self, added_bytes: int) -> None:
        self.available_bytes += added_bytes
        self.session.place_ready(self)


class FetchSession:
    """Serves the GETs of one connection. `answer` sends a response; `writable` tells whether one may be sent now."""

    def __init__(
        self, find: Find, answer: Answer, writable: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._find = find
        self._answer = answer
        self._writable = writable
        self._loop = loop
        self._places: dict[int, _Place] = {}
        self._ready: dict[_Place, None] = {}
        self._parked: tuple[Request, Get] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._serve_soon = False

    def get(self, request: Request) -> None:
        """Takes a GET: applies its changes, answers it now or parks it. Raises ProtocolError."""
        poll = unpack(Get, request.header)
        self._unpark()
        for handle in poll.closed:
            self._close(self._places.pop(handle, None))
        for entry in poll.opened:
            self._open(unpack(GetPartition, entry))
        for handle, offset in poll.armed:
            self._arm(handle, offset, poll)
        self._parked = request, poll
        self.serve()
        if self._parked is not None and poll.wait_ms > 0:
            delay_s = min(poll.wait_ms, PARKED_MS_MAX) / 1000
            self._deadline = self._loop.call_later(delay_s, self._expire)
        elif self._parked is not None:
            self._expire()

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
            self._respond(*self._parked)
        else:
            self._deadline = self._loop.call_later(UNWRITABLE_RETRY_S, self._expire)

    def _open(self, entry: GetPartition) -> None:
        if entry.handle in self._places or len(self._places) >= PARTITIONS_MAX:
            raise ProtocolError(f"fetch handle {entry.handle} is in use, or there are more than {PARTITIONS_MAX:,}")
        try:
            place = _Place(self, entry.handle, self._find(entry.topic, entry.topic_id, entry.partition), None)
        except MetamqError as error:
            place = _Place(self, entry.handle, None, error)
        self._places[entry.handle] = place

    def _arm(self, handle: int, offset: int, poll: Get) -> None:
        place = self._places.get(handle)
        if place is None:
            raise ProtocolError(f"fetch handle {handle} was not opened")
        place.offset = offset
        place.available_bytes = 0
        partition = place.partition
        self._ready.pop(place, None)
        if partition is None or partition.closed_by or offset != partition.log.stable_offset:
            place.available_bytes = poll.bytes_min  # old data: no reason to wait for more
            self._ready[place] = None
        else:
            partition.readers.add(place)

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
        enough = any(place.error or place.partition is None or place.partition.closed_by for place in self._ready)
        if enough or sum(place.available_bytes for place in self._ready) >= poll.bytes_min:
            self._respond(request, poll)
        else:
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        for place in self._ready:
            assert place.partition is not None
            place.partition.readers.add(place)

    def _respond(self, request: Request, poll: Get) -> None:
        results: list[GetResult] = []
        bodies: list[Buffer] = []
        room = poll.bytes_max
        while self._ready and room > 0:
            place = next(iter(self._ready))
            del self._ready[place]
            result, data = self._read(place, min(room, poll.partition_bytes_max))
            results.append(result)
            if data:
                bodies.append(data)
                room -= len(data)
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._answer(request, results, bodies)

    def _read(self, place: _Place, bytes_max: int) -> tuple[GetResult, Buffer]:
        partition, offset = place.partition, place.offset
        place.offset = None
        error = place.error or (partition.closed_by if partition else None)
        if partition is not None:
            partition.readers.discard(place)
        if error is None:
            assert partition is not None
            assert offset is not None
            log = partition.log
            try:
                data = log.read(offset, bytes_max).data
                return GetResult(place.handle, status.OK, len(data), log.start_offset, log.stable_offset, None), data
            except MetamqError as read_error:
                error = read_error
        number, fields = status.encode_error(error)
        return GetResult(place.handle, number, 0, -1, -1, fields), b""

    def close(self) -> None:
        """Forgets everything: the connection is gone."""
        self._parked = None
        if self._deadline is not None:
            self._deadline.cancel()
        for place in self._places.values():
            self._close(place)
        self._places.clear()

    def statistics(self) -> dict[str, Any]:
        """How much is open, ready and parked."""
        return {"open": len(self._places), "ready": len(self._ready), "parked": self._parked is not None}
