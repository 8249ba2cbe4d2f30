"""The client's end of a TCP connection to a broker, and the connections a client keeps open.

One connection a broker carries any number of requests at once, answered in any order. A connection that breaks fails
what is under way on it with `outcome = "unknown"`; whether that is asked again is for the caller to decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

import metamq
from metamq.errors import ConnectError, MetamqError, ProtocolError, Timeout, UnsupportedVersion
from metamq.wire import status
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import Command, HelloReply
from metamq.wire.connection import PUSHED, ClientConnection, Response
from metamq.wire.frames import Buffer
from metamq.zk.cluster.brokers import BrokerAddress

log = logging.getLogger("metamq.client")

CONNECT_TIMEOUT_S = 5.0
NEXT_HOST_S = 1.0
"""So long a host is waited for when the broker has told of another one."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
KEPT_BYTES = 8 * 1024 * 1024
"""Memory of large answers that a connection uses again."""

IS_IT_RUNNING = "Is the broker running? `metamq doctor` looks at every part."

WAKE_BYTES = 256 * 1024
"""Within a large answer the kernel wakes us for so much at a time, instead of for each 100 KB or so: a wake-up costs as
much as copying some ten thousand bytes."""


def wake_after(sock: socket.socket, size: int) -> None:
    """Has the kernel wait for `size` bytes, or the end, before it wakes a reader. No more than are sure to come."""
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def make_room(sock: socket.socket, size: int) -> None:
    """Has the kernel keep at least about `size` bytes that nobody reads yet, at most about twice as much.

    It makes room for as much as a reader is to be woken for, and leaves it when the mark is taken down again. SO_RCVBUF
    would be bounded by net.core.rmem_max, on many machines a fifth of a megabyte, and fix the size for ever.
    """
    wake_after(sock, size)
    wake_after(sock, 1)


def hosts_in_turn(host: str, timeout_s: float) -> list[tuple[str, float]]:
    """Each of the hosts that a broker has told, separated by commas, and how long it may take."""
    *others, last = (one.strip() for one in host.split(","))
    return [(one, min(timeout_s, NEXT_HOST_S)) for one in others] + [(last, timeout_s)]


def none_answered(address: str, refused: dict[str, ConnectError]) -> ConnectError:
    """What the hosts of an address have come to, given what each of them has."""
    *_others, last = refused.values()
    if len(refused) == 1:
        return last
    return ConnectError(address, "; ".join(f"{one}: {error.reason}" for one, error in refused.items()), hint=last.hint)


def reason_of(error: OSError) -> str:
    """In the system's words: asyncio's own name the address again."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def keep_alive(sock: Any) -> None:
    """Finds out within two minutes that the other end's machine is gone, where nobody says anything."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def client_name() -> str:
    """How this process introduces itself to brokers."""
    return f"metamq {metamq.__version__} python {platform.python_version()} {socket.gethostname()}:{os.getpid()}"


class BrokerConnection(asyncio.BufferedProtocol):
    """An open connection. Use within its loop only. Cancelling a request's wait does not take the request back."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self._loop = loop
        self._connection = ClientConnection(address, client_name(), BufferPool(KEPT_BYTES).take)
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._pushed: Callable[[Any, memoryview], None] | None = None
        self._opened: asyncio.Future[HelloReply] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._wake_bytes = 1
        self.closed = loop.create_future()
        """Done, with the reason, once the connection is gone."""

    @classmethod
    async def open(cls, host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> BrokerConnection:
        """Connects and greets. `host` may be several, separated by commas: they are tried in their order.

        Raises ConnectError, UnsupportedVersion, or what the broker refuses with.
        """
        address = f"{host}:{port}"
        refused: dict[str, ConnectError] = {}
        for one, limit_s in hosts_in_turn(host, timeout_s):
            try:
                return await cls._open(address, one, port, limit_s)
            except UnsupportedVersion:
                raise
            except ConnectError as error:
                refused[one] = error
        raise none_answered(address, refused)

    @classmethod
    async def _open(cls, address: str, host: str, port: int, timeout_s: float) -> BrokerConnection:
        loop = asyncio.get_running_loop()
        connection = cls(address, loop)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: connection, host, port)
                await connection._opened
        except TimeoutError:
            connection.abort()
            raise ConnectError(address, f"no answer within {timeout_s:g} s", hint=IS_IT_RUNNING) from None
        except OSError as error:
            raise ConnectError(address, reason_of(error), hint=IS_IT_RUNNING) from error
        except ProtocolError as error:
            raise ConnectError(address, error.problem, hint=error.hint) from error
        except BaseException:
            connection.abort()
            raise
        return connection

    @property
    def greeting(self) -> HelloReply:
        """What the broker said of itself."""
        assert self._connection.greeting is not None
        return self._connection.greeting

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return self._transport is not None and not self._transport.is_closing() and not self.closed.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        transport.writelines(self._connection.hello())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.next_buffer()

    def buffer_updated(self, count: int) -> None:
        try:
            for response in self._connection.received(count):
                if response.opaque == PUSHED:
                    self._push_received(response)
                    continue
                waiting = self._waiting.pop(response.opaque)
                if not waiting.done():
                    waiting.set_result(response)
        except MetamqError as error:
            self._fail(error)
            return
        if not self._opened.done() and self._connection.greeting is not None:
            self._opened.set_result(self._connection.greeting)
        wake_bytes = min(self._connection.missing_bytes, WAKE_BYTES) or 1
        if wake_bytes != self._wake_bytes and self._transport is not None:
            self._wake_bytes = wake_bytes
            wake_after(self._transport.get_extra_info("socket"), wake_bytes)

    def _push_received(self, response: Response) -> None:
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        assert self._pushed is not None
        self._pushed(response.header, response.body)

    def _fail(self, error: MetamqError) -> None:
        if isinstance(error, ProtocolError):
            log.info("%s", error)  # whoever waits for an answer gets it
        if self._opened.done():  # whatever was asked may have been done
            error = ConnectError(self.address, error.problem, hint=error.hint, outcome="unknown")
        self._lost(error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connection.close()
        reason = str(exc) if exc else "the broker closed the connection"
        self._lost(ConnectError(self.address, reason, outcome="unknown"))

    def _lost(self, error: MetamqError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # open() may have timed out: nobody else looks at it then
        if not self.closed.done():
            self.closed.set_result(error)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever asked may have gone: no warning about an error nobody fetched

    def send(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> asyncio.Future[Response]:
        """Sends a request; the future gives its response, or fails with ConnectError.

        Raises ConnectError; MessageTooLarge when the broker would not take a frame of that size.
        """
        if self._transport is None or not self.alive:
            raise ConnectError(self.address, "the connection is closed")
        opaque, buffers = self._connection.request(command, header, bodies)
        future: asyncio.Future[Response] = self._loop.create_future()
        self._waiting[opaque] = future
        self._transport.writelines(buffers)
        return future

    async def request(self, command: int, header: Any, bodies: list[Buffer] | None = None, *, timeout_s: float) -> Any:
        """Sends a request and returns its response's header. Raises the broker's error, ConnectError or Timeout."""
        future = self.send(command, header, bodies)
        expiry = self._loop.call_later(timeout_s, _expire, future)  # a third of what asyncio.timeout() costs
        try:
            response = await future
        except TimeoutError:
            raise Timeout(f"the answer of {self.address}", timeout_s) from None
        finally:
            expiry.cancel()
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        return response.header

    async def stream(self, header: Any, pushed: Callable[[Any, memoryview], None], *, timeout_s: float) -> Any:
        """Makes the connection a stream by a SYNC request; returns the answer to it.

        From then on `pushed(header, body)` is called with each frame that the broker pushes, which may be before this
        returns. Raises as `request`.
        """
        self._pushed = pushed
        return await self.request(Command.SYNC, header, timeout_s=timeout_s)

    def push(self, header: Any) -> None:
        """Sends a frame of the stream. Raises ConnectError, ClosedError."""
        if self._transport is None or not self.alive:
            raise ConnectError(self.address, "the connection is closed")
        self._transport.writelines(self._connection.push(header))

    def pause(self) -> None:
        """Reads nothing more until resume(): what comes stays with the sender. What was read already still comes."""
        if self._transport is not None and self.alive:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads on. May be called at any time."""
        if self._transport is not None and self.alive:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Closes after what is written has been sent, and waits for it for a second at most."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self.closed], timeout=1.0)
            self.abort()


def _expire(future: asyncio.Future[Response]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


def another_answered(address: str, broker_id: int, expected: int) -> ConnectError:
    """Why a connection to an address that was learnt a while ago is not used.

    Brokers have partitions of the same topics and indexes: the number of the broker alone tells whose is asked for.
    """
    return ConnectError(address, f"broker {broker_id} is there, not broker {expected}")


_Place = tuple[int, str, int, str]
"""Broker, host, port, and the purpose where there is one."""


class Connections:
    """One connection an address, opened on demand, opened anew with growing pauses after failures."""

    def __init__(self) -> None:
        self._open: dict[_Place, BrokerConnection] = {}
        self._opening: dict[_Place, asyncio.Task[BrokerConnection]] = {}
        self._pause_s: dict[_Place, float] = {}
        self._closed = False

    async def get(self, at: BrokerAddress, *, purpose: str = "") -> BrokerConnection:
        """The connection to a broker. Raises ConnectError, also when another broker answers at its address; callers may
        ask again at once, the pause is in here.

        What has a purpose of its own has a connection of its own.
        """
        if self._closed:  # a connection opened now would stay open
            raise ConnectError(f"{at.host}:{at.port}", "the client is closed")
        place = at.broker_id, at.host, at.port, purpose
        connection = self._open.get(place)
        if connection is not None and connection.alive:
            return connection
        task = self._opening.get(place)
        if task is None:
            task = asyncio.ensure_future(self._connect(place))
            self._opening[place] = task
            task.add_done_callback(lambda done: self._opened(place, done))
        return await asyncio.shield(task)

    async def _connect(self, place: _Place) -> BrokerConnection:
        broker_id, host, port, _purpose = place
        pause_s = self._pause_s.get(place, 0.0)
        if pause_s:
            await asyncio.sleep(pause_s)
        self._pause_s[place] = min(max(pause_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
        connection = await BrokerConnection.open(host, port)
        if connection.greeting.broker_id != broker_id:
            connection.abort()
            raise another_answered(connection.address, connection.greeting.broker_id, broker_id)
        return connection

    def _opened(self, place: _Place, task: asyncio.Task[BrokerConnection]) -> None:
        del self._opening[place]
        if not task.cancelled() and task.exception() is None:
            self._pause_s.pop(place, None)
            self._open[place] = task.result()

    async def close(self) -> None:
        """Closes all of them, for good."""
        self._closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._open.values()))
        self._open.clear()
