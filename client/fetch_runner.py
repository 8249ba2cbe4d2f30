"""A fetch runner: asks one broker for all of a consumer's partitions there, in one fetch session.

The broker remembers what is open and armed (metamq.broker.fetch_session), so a GET carries only what changed. While
a long poll is parked, requests that become due are sent in a further GET, which the broker takes as an amendment: it
answers the parked one with nothing and goes on with both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import count
from typing import Protocol

from metamq.client.cluster import Cluster
from metamq.client.fetch_queue import FetchRequest, FetchRequestQueue
from metamq.client.transport import BrokerConnection
from metamq.errors import ConnectError, MetamqError
from metamq.wire import status
from metamq.wire.commands import Command, Get, GetPartition, GetResult, unpack_list
from metamq.wire.connection import Response

log = logging.getLogger("metamq.client")

ANSWER_LATE_S = 10.0


class FetchSink(Protocol):
    """Who fetched data is for. Both methods are called in the loop, and put the request back when they want more."""

    def fetched(self, request: FetchRequest, result: GetResult, data: memoryview) -> None:
        """Data, or at least news of the log's ends."""

    def fetch_failed(self, request: FetchRequest, error: MetamqError) -> None:
        """The broker refused, or is not to be reached."""


class FetchRunner:
    """Serves the queue's requests to one broker until cancelled."""

    def __init__(
        self,
        broker_id: int,
        queue: FetchRequestQueue,
        cluster: Cluster,
        sink: FetchSink,
        *,
        wait_ms: int,
        min_bytes: int,
        max_bytes: int,
        partition_max_bytes: int,
    ) -> None:
        self.broker_id = broker_id
        self._queue = queue
        self._cluster = cluster
        self._sink = sink
        self._wait_ms = wait_ms
        self._limits = (wait_ms, min_bytes, max_bytes, partition_max_bytes)
        self._changed = asyncio.Event()
        self._armed: dict[int, FetchRequest] = {}
        self._cancelled: list[FetchRequest] = []
        self._polls: deque[asyncio.Future[Response]] = deque()
        self.last_answer_s = 0.0

    def wake(self) -> None:
        """There may be something due."""
        self._changed.set()

    def cancel(self, request: FetchRequest) -> None:
        """Nobody wants the request's answer any more; the broker is told with the next GET."""
        request.cancelled = True
        self._cancelled.append(request)
        self._changed.set()

    async def run(self) -> None:
        """Fetches, for ever."""
        while True:
            try:
                connection = await self._cluster.connection(self.broker_id)
                await self._fetch(connection)
            except MetamqError as error:
                self._give_back(error)
                await self._wait(asyncio.get_running_loop(), None)

    def _give_back(self, error: MetamqError) -> None:
        """The connection is gone, or there is none: everybody tries again, each after its own delay."""
        armed, self._armed = self._armed, {}
        self._polls.clear()
        waiting = self._queue.take(self.broker_id, asyncio.get_running_loop().time())
        for request in (*armed.values(), *waiting):
            request.opened = None
            if not request.cancelled:
                self._sink.fetch_failed(request, error)

    async def _fetch(self, connection: BrokerConnection) -> None:
        loop = asyncio.get_running_loop()
        handles = count(1)
        connection.closed.add_done_callback(lambda _closed: self._changed.set())
        while True:
            if connection.closed.done():
                raise connection.closed.result()
            due = self._queue.take(self.broker_id, loop.time())
            cancelled, self._cancelled = self._cancelled, []
            closed = [r.opened[1] for r in cancelled if r.opened is not None and r.opened[0] is connection]
            for handle in closed:
                self._armed.pop(handle, None)
            if due or closed or (self._armed and not self._polls):
                self._send(connection, due, closed, handles)
            await self._wait(loop, connection)
            while self._polls and self._polls[0].done():
                self._answered(self._polls.popleft())

    def _send(
        self,
        connection: BrokerConnection,
        due: list[FetchRequest],
        closed: list[int],
        handles: count[int],
    ) -> None:
        opened = []
        armed = []
        for request in due:
            if request.opened is None or request.opened[0] is not connection:
                handle = next(handles)
                request.opened = connection, handle
                opened.append(GetPartition(handle, request.tp.topic, request.topic_id, request.index))
            handle = request.opened[1]
            self._armed[handle] = request
            armed.append((handle, request.offset))
        try:
            poll = connection.send(Command.GET, Get(*self._limits, opened, armed, closed))
        except MetamqError:
            return  # the loop sees that the connection is closed
        poll.add_done_callback(lambda _done: self._changed.set())
        self._polls.append(poll)

    async def _wait(self, loop: asyncio.AbstractEventLoop, connection: BrokerConnection | None) -> None:
        """Until something changed: a request due, an answer, a lost connection, an answer that is late."""
        if self._polls and self._polls[0].done():
            return
        next_due = self._queue.next_due(self.broker_id)
        late = loop.time() + self._wait_ms / 1000 + ANSWER_LATE_S
        timer = loop.call_at(min(next_due or late, late), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        self._changed.clear()
        if connection is not None and self._polls and loop.time() >= late:
            log.warning("%s did not answer a long poll: reconnecting", connection.address)
            connection.abort()

    def _answered(self, poll: asyncio.Future[Response]) -> None:
        error = poll.exception()
        if error is not None:
            raise error
        response = poll.result()
        if response.status != status.OK:
            raise ConnectError(f"broker {self.broker_id}", str(status.decode_error(response.status, response.header)))
        self.last_answer_s = asyncio.get_running_loop().time()
        position = 0
        for result in unpack_list(GetResult, response.header):
            data = response.body[position : position + result.size]
            position += result.size
            request = self._armed.pop(result.handle, None)
            if request is None or request.cancelled:
                continue
            if result.status == status.OK:
                self._sink.fetched(request, result, data)
            else:
                self._sink.fetch_failed(request, status.decode_error(result.status, result.error))
