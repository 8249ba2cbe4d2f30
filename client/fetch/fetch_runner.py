"""A fetch runner: fetches all of a consumer's partitions at one replica, in one fetch session.

The broker remembers the open and armed partitions (metamq.broker.front_door.fetch_session), so a GET carries only
changes. During a long poll, requests that become due are sent in a further GET, which the broker takes as an amendment:
it answers the waiting GET without data and continues with both.

A GET carries at most ENTRIES_TARGET changes of a kind, to fit into a frame. Further changes follow in GETs of
their own, each of which amends the one before.

If the replica has another address now, for example after a change of the master, the runner closes the connection and
continues at the new address.

A partition that was answered with an error is opened again when it is next due: the broker's error for the old handle
is final, even if the broker only did not know the topic yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from metamq.client.signal import Signal
from metamq.errors import ConnectError, MetamqError
from metamq.wire import status
from metamq.wire.commands import Command, Get, GetPartition, GetResult
from metamq.wire.headers import unpack_list
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.client.fetch.consumer_options import ConsumerOptions
    from metamq.client.fetch.fetch_queue import FetchRequest, FetchRequestQueue
    from metamq.client.fetch.inbox import Inbox, PartitionState
    from metamq.client.net.cluster import ClusterClient, Source
    from metamq.client.net.transport import BrokerConnection
    from metamq.wire.connection import Response

log = logging.getLogger("metamq.client")

ANSWER_LATE_S = 10.0


class FetchSink(Protocol):
    """The receiver of fetched data. Called in the loop. After an answer it puts the request back into the queue."""

    def fetched(self, request: FetchRequest, result: GetResult, data: memoryview) -> None:
        """Receives data, or at least new ends of the log."""

    def sent(self, requests: list[FetchRequest]) -> None:
        """Called when the requests are sent on an open connection. The broker answers each of them when it has data."""

    def fetch_failed(self, request: FetchRequest, error: MetamqError) -> None:
        """Called if the broker refused the request, or cannot be reached."""


class FetchLimits(NamedTuple):
    """The limits of one GET: its size in bytes, and its wait in milliseconds."""

    wait_ms: int
    min_bytes: int
    max_bytes: int
    partition_max_bytes: int


class FetchBudget:
    """The free capacity of a consumer's inbox."""

    def __init__(self, options: ConsumerOptions, inbox: Inbox) -> None:
        self._options = options
        self._inbox = inbox

    def limits(self) -> FetchLimits:
        """Returns the limits of the next GET."""
        options = self._options
        share_bytes = options.partition_fetch_max_bytes
        if self._inbox.buffered_bytes >= options.prefetch_bytes:
            share_bytes = min(share_bytes, self._share_bytes())
        return FetchLimits(options.fetch_wait_ms, options.fetch_min_bytes, options.fetch_max_bytes, share_bytes)

    def _share_bytes(self) -> int:
        return max(self._options.prefetch_bytes // max(len(self._inbox.states), 1), 1)

    def allows_more(self, state: PartitionState) -> bool:
        """Returns True if more may be fetched. A partition below its fair share always gets more, so a slow one blocks
        no other."""
        limit = self._options.prefetch_bytes
        if state.buffered_bytes < self._share_bytes():
            return True
        return self._inbox.buffered_bytes < limit and state.buffered_bytes < limit // 2


@dataclass(eq=False)
class FetchRunner:
    """Serves the queue's requests to one replica until cancelled. `limits` is called before each GET."""

    source: Source
    queue: FetchRequestQueue
    cluster: ClusterClient
    sink: FetchSink
    limits: Callable[[], FetchLimits]
    _changed: Signal = field(default_factory=Signal, init=False)
    _armed: dict[int, FetchRequest] = field(default_factory=dict, init=False)
    _closed_handles: list[tuple[object, int]] = field(default_factory=list, init=False)
    _polls: list[tuple[asyncio.Future[Response], float, float]] = field(default_factory=list, init=False)
    """Unanswered GETs, each with the time at which it was sent, and the seconds in which an answer must come."""
    last_answer_s: float = field(default=0.0, init=False)

    def wake(self) -> None:
        """Makes the runner check for due requests."""
        self._changed.set()

    def cancel(self, request: FetchRequest) -> None:
        """Cancels a request: its answer is not needed any more. The next GET closes it at the broker."""
        request.cancelled = True
        self._close(request)
        self._changed.set()

    def release(self, request: FetchRequest) -> None:
        """Closes a request that has no unanswered GET and moves to another source."""
        self._close(request)
        self._changed.set()

    def _close(self, request: FetchRequest) -> None:
        if request.opened is not None:
            self._closed_handles.append(request.opened)
            request.opened = None

    async def run(self) -> None:
        """Fetches until the task is cancelled."""
        while True:
            while self.queue.next_due(self.source) is None:
                await self._wait(asyncio.get_running_loop(), None)
            connection: BrokerConnection | None = None
            try:
                connection = await self.cluster.connection(*self.source)
                await self._fetch(connection)
                connection.abort()
                self._move()
            except MetamqError as error:
                if connection is not None:
                    connection.abort()  # handles begin at 1 again, in a fetch session that is empty
                self._give_back(error)
                await self._wait(asyncio.get_running_loop(), None)

    def _move(self) -> None:
        """Queues the unanswered requests again, for the replica's new address."""
        armed, self._armed = self._armed, {}
        self._polls.clear()
        for request in armed.values():
            request.opened = None
            if not request.cancelled:
                self.queue.put(request, asyncio.get_running_loop().time())

    def _give_back(self, error: MetamqError) -> None:
        """Fails all requests after the connection broke, or none was opened. Each is repeated after its own delay."""
        armed, self._armed = self._armed, {}
        self._polls.clear()
        waiting = self.queue.take(self.source, asyncio.get_running_loop().time())
        for request in (*armed.values(), *waiting):
            request.opened = None
            if not request.cancelled:
                self.sink.fetch_failed(request, error)

    async def _fetch(self, connection: BrokerConnection) -> None:
        """Fetches until the replica has another address. Raises ConnectError."""
        loop = asyncio.get_running_loop()
        handles = count(1)
        connection.closed.add_done_callback(lambda _closed: self._changed.set())
        while True:
            if connection.closed.done():
                raise connection.closed.result()
            if not self.cluster.is_current(self.source, connection.address):
                return
            due = self.queue.take(self.source, loop.time(), ENTRIES_TARGET)
            closed = self._next_closed(connection)
            if due or closed or (self._armed and not self._polls):
                self._send(connection, due, closed, handles)
            await self._wait(loop, connection)
            while self._polls and self._polls[0][0].done():
                self._answered(self._polls.pop(0)[0])

    def _next_closed(self, connection: BrokerConnection) -> list[int]:
        """Returns the handles that the next GET closes."""
        closed: list[int] = []
        some, self._closed_handles = self._closed_handles[:ENTRIES_TARGET], self._closed_handles[ENTRIES_TARGET:]
        for opened_on, handle in some:
            if opened_on is connection:
                self._armed.pop(handle, None)
                closed.append(handle)
        if self._closed_handles:
            self._changed.set()
        return closed

    def _send(
        self, connection: BrokerConnection, due: list[FetchRequest], closed: list[int], handles: count[int]
    ) -> None:
        opened = []
        armed = []
        for request in due:
            if request.opened is None or request.opened[0] is not connection:
                handle = next(handles)
                request.opened = connection, handle
                opened.append(GetPartition(handle, request.tp.topic, request.topic_id, request.index, request.epoch))
            handle = request.opened[1]
            self._armed[handle] = request
            armed.append((handle, request.offset))
        limits = self.limits()
        try:
            poll = connection.send(Command.GET, Get(*limits, opened, armed, closed))
        except MetamqError:
            return  # the loop notices that the connection is closed
        poll.add_done_callback(lambda _done: self._changed.set())
        self.sink.sent(due)
        self._polls.append((poll, asyncio.get_running_loop().time(), limits.wait_ms / 1000 + ANSWER_LATE_S))

    async def _wait(self, loop: asyncio.AbstractEventLoop, connection: BrokerConnection | None) -> None:
        """Waits for a change: a due request, an answer, a broken connection, or an answer that is late."""
        if self._polls and self._polls[0][0].done():
            return
        next_due = self.queue.next_due(self.source)
        late = self._late_at(connection)
        wake_up = min((time for time in (next_due, late) if time is not None), default=None)
        timer = None if wake_up is None else loop.call_at(wake_up, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._changed.clear()
        late = self._late_at(connection)
        if connection is not None and late is not None and loop.time() >= late and not self._polls[0][0].done():
            log.warning("%s did not answer a long poll: reconnecting", connection.address)
            connection.abort()

    def _late_at(self, connection: BrokerConnection | None) -> float | None:
        """Returns the time of the loop at which the answer to the first poll is late."""
        if not self._polls:
            return None
        _poll, sent_at_s, patience_s = self._polls[0]
        return patience_s + (sent_at_s if connection is None else max(sent_at_s, connection.delays.ends_at_s))

    def _answered(self, poll: asyncio.Future[Response]) -> None:
        error = poll.exception()
        if error is not None:
            raise error
        response = poll.result()
        if response.status != status.OK:
            raise ConnectError(
                f"broker {self.source.broker_id}", str(status.decode_error(response.status, response.header))
            )
        self.last_answer_s = asyncio.get_running_loop().time()
        position = 0
        for result in unpack_list(GetResult, response.header):
            data = response.body[position : position + result.size]
            position += result.size
            request = self._armed.pop(result.handle, None)
            if request is None or request.cancelled:
                continue
            if result.status == status.OK:
                self.sink.fetched(request, result, data)
            else:
                self._close(request)
                self.sink.fetch_failed(request, status.decode_error(result.status, result.error))
