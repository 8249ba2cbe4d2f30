"""The client's end of a TCP connection to a broker, and the set of connections that a client keeps open.

One connection per broker carries any number of requests at once, answered in any order. If a connection breaks, its
unanswered requests fail with `outcome = "unknown"`; the caller decides about a repetition.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import metamq
from metamq.client.net.delays import Delays
from metamq.errors import AuthenticationFailed, ConnectError, MetamqError, ProtocolError, Timeout, UnsupportedVersion
from metamq.security.tls_errors import ENDED, tls_reason
from metamq.threads import scratch
from metamq.wire import status
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import Command, HelloReply
from metamq.wire.connection import PUSHED, ClientConnection, Response

if TYPE_CHECKING:
    from metamq.security.tls import ClientSecurity
    from metamq.wire.frames import Buffer
    from metamq.zk.cluster.registrations import BrokerAddress

log = logging.getLogger("metamq.client")

CONNECT_TIMEOUT_S = 5.0
NEXT_HOST_S = 1.0
"""Seconds that the client waits for a host if the broker has announced another host, too."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
REFUSALS_MIN = 2
LOGIN_PAUSE_S = 10.0
"""The pause after a failed login. After many of them, brokers refuse a user even with the right password."""
KEPT_BYTES = 8 * 1024 * 1024
"""Bytes of buffers for large answers that a connection keeps for reuse."""

IS_IT_RUNNING = "Check that the broker runs: `metamq doctor`."

WAKE_BYTES = 256 * 1024
"""Within a large answer the kernel wakes the reader once per this number of bytes, instead of once per 100 KB or so.
One wake-up costs as much as copying some ten thousand bytes."""
_CLOSED = "the broker closed the connection"


def wake_after(sock: socket.socket, size: int) -> None:
    """Makes the kernel wake a reader only after `size` bytes, which must be certain to come, or at the end.

    Not for TLS: its records, which the kernel counts, are longer than the data, and come in an order of their own.
    """
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def grow_receive_buffer(sock: socket.socket, size: int) -> None:
    """Makes the kernel buffer at least about `size` unread bytes, and at most about twice as many.

    The kernel grows the buffer to the wake-up mark, and keeps the size after the mark is lowered again. SO_RCVBUF would
    be limited by net.core.rmem_max, on many machines a fifth of a megabyte, and would fix the size permanently.
    """
    wake_after(sock, size)
    wake_after(sock, 1)


def hosts_with_timeouts(host: str, timeout_s: float) -> list[tuple[str, float]]:
    """Splits the hosts that a broker announces, separated by commas. Returns each host with its timeout in seconds."""
    *others, last = (one.strip() for one in host.split(","))
    return [(one, min(timeout_s, NEXT_HOST_S)) for one in others] + [(last, timeout_s)]


def none_answered(address: str, errors: dict[str, ConnectError]) -> ConnectError:
    """Returns the error for an address at which no host answered. `errors` has the error of each host.

    Its cause is a ConnectionRefusedError if each host refused: then no process listens at any of them.
    """
    *_others, last = errors.values()
    if len(errors) == 1:
        return last
    reasons = "; ".join(f"{one}: {error.reason}" for one, error in errors.items())
    failure = ConnectError(address, reasons, hint=last.hint)
    if all(isinstance(error.__cause__, ConnectionRefusedError) for error in errors.values()):
        failure.__cause__ = last.__cause__
    return failure


def reason_of(error: OSError) -> str:
    """Returns the system's words for an error. The texts of asyncio repeat the address."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def keep_alive(sock: Any) -> None:
    """Turns on TCP keep-alive: an idle connection to a machine that is gone fails within two minutes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def client_name() -> str:
    """Returns the name of this process in its greeting to a broker."""
    return f"metamq {metamq.__version__} python {platform.python_version()} {socket.gethostname()}:{os.getpid()}"


class BrokerConnection(asyncio.BufferedProtocol):
    """An open connection. Not thread-safe: for its loop only. Cancelling a wait does not revoke the request."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop, security: ClientSecurity | None = None) -> None:
        self.address = address
        self._loop = loop
        self._security = security
        self._connection = ClientConnection(address, client_name(), BufferPool(KEPT_BYTES).take, scratch=scratch)
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._pushed: Callable[[Any, memoryview], None] | None = None
        self._opened: asyncio.Future[HelloReply] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._is_plain = True
        self._wake_bytes = 1
        self.delays = Delays(address)
        self.closed = loop.create_future()
        """A future that is done, with the reason as its result, once the connection is closed."""

    @classmethod
    async def open(
        cls, host: str, port: int, *, security: ClientSecurity | None = None, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> BrokerConnection:
        """Connects and greets. `host` may be several hosts, separated by commas, which are tried in their order.

        With `security`, the broker's certificate must be valid for the host.

        Raises ConnectError, UnsupportedVersion, AuthenticationFailed, or the broker's error.
        """
        address = f"{host}:{port}"
        errors: dict[str, ConnectError] = {}
        for one, limit_s in hosts_with_timeouts(host, timeout_s):
            try:
                return await cls._open(address, one, port, security, limit_s)
            except (UnsupportedVersion, AuthenticationFailed):
                raise
            except ConnectError as error:
                errors[one] = error
        raise none_answered(address, errors)

    @classmethod
    async def _open(
        cls, address: str, host: str, port: int, security: ClientSecurity | None, timeout_s: float
    ) -> BrokerConnection:
        loop = asyncio.get_running_loop()
        connection = cls(address, loop, security)
        context = None if security is None else security.tls.current()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: connection, host, port, ssl=context)
                await connection._opened
        except TimeoutError:
            connection.abort()
            raise ConnectError(address, f"no answer within {round(timeout_s, 3):g} s", hint=IS_IT_RUNNING) from None
        except ssl.SSLError as error:
            reason, hint = tls_reason(error)
            raise ConnectError(address, reason, hint=hint) from error
        except OSError as error:  # without a reason if the broker ends a handshake
            reason, hint = (reason_of(error), IS_IT_RUNNING) if reason_of(error) else ENDED
            raise ConnectError(address, reason, hint=hint) from error
        except ProtocolError as error:
            raise ConnectError(address, error.problem, hint=error.hint) from error
        except BaseException:
            connection.abort()
            raise
        return connection

    @property
    def greeting(self) -> HelloReply:
        """The broker's answer to the greeting."""
        assert self._connection.greeting is not None
        return self._connection.greeting

    @property
    def producer_prefix(self) -> int:
        """The first bits of the producer ids that this client may use; 0: any."""
        return self._connection.producer_prefix

    @property
    def certificate_ends_s(self) -> float | None:
        """The end of the broker's certificate, in seconds since 1970; None: the connection is not encrypted."""
        transport = self._transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        return ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None

    @property
    def zookeeper_proof(self) -> str:
        """This client's proof of identity for ZooKeeper; empty if the broker gives none."""
        return self._connection.zookeeper_proof

    @property
    def alive(self) -> bool:
        """True if requests can be sent."""
        return self._transport is not None and not self._transport.is_closing() and not self.closed.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # the class of uvloop is not a subclass
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        self._is_plain = tls is None
        if self._security is not None:
            self._connection.login = partial(self._security.login, self.address, tls)
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
        if not self._opened.done():
            self._go_on_opening()
        wake_bytes = min(self._connection.missing_bytes, WAKE_BYTES) or 1
        if wake_bytes != self._wake_bytes and self._transport is not None and self._is_plain:
            self._wake_bytes = wake_bytes
            wake_after(self._transport.get_extra_info("socket"), wake_bytes)

    def _go_on_opening(self) -> None:
        if self._transport is not None and (login := self._connection.outgoing()):
            self._transport.writelines(login)
        if self._connection.is_open:
            self._opened.set_result(self.greeting)

    def _push_received(self, response: Response) -> None:
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        if response.command == Command.DELAY:
            self.delays.received(response.header)
            return
        assert self._pushed is not None
        self._pushed(response.header, response.body)

    def _fail(self, error: MetamqError) -> None:
        if isinstance(error, ProtocolError):
            log.info("%s", error)  # the callers that wait for an answer get another error
        if self._opened.done():  # the broker may have done the requests
            error = ConnectError(self.address, error.problem, hint=error.hint, outcome="unknown")
        self._lost(error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connection.close()
        reason, hint = tls_reason(exc) if isinstance(exc, ssl.SSLError) else (str(exc or _CLOSED), "")
        if self._security is not None and self._connection.greeting is None:
            reason, hint = ENDED
        self._lost(ConnectError(self.address, reason, hint=hint, outcome="unknown"))

    def _lost(self, error: MetamqError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # open() may have timed out, and then no other code reads the exception
        if not self.closed.done():
            self.closed.set_result(error)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # the caller may be gone: asyncio must not warn about an error that is not fetched

    def send(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> asyncio.Future[Response]:
        """Sends a request. The returned future gives its response, or fails with ConnectError.

        Raises ConnectError, or MessageTooLarge if the frame is larger than the broker accepts.
        """
        if self._transport is None or not self.alive:
            raise ConnectError(self.address, "the connection is closed")
        opaque, buffers = self._connection.request(command, header, bodies)
        future: asyncio.Future[Response] = self._loop.create_future()
        self._waiting[opaque] = future
        self._transport.writelines(buffers)
        return future

    async def request(self, command: int, header: Any, bodies: list[Buffer] | None = None, *, timeout_s: float) -> Any:
        """Sends a request and returns its response's header. Raises the broker's error, ConnectError or Timeout.

        The time of a delay does not count (metamq.client.net.delays).
        """
        future = self.send(command, header, bodies)
        expiry = _Expiry(self._loop, self.delays, future, timeout_s)
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
        """Turns the connection into a stream by a SYNC request. Returns the answer to the request.

        From then on `pushed(header, body)` is called for each frame that the broker pushes, which may begin before this
        call returns. Raises as `request`.
        """
        self._pushed = pushed
        return await self.request(Command.SYNC, header, timeout_s=timeout_s)

    def push(self, header: Any) -> None:
        """Sends a frame of the stream. Raises ConnectError, ClosedError."""
        if self._transport is None or not self.alive:
            raise ConnectError(self.address, "the connection is closed")
        self._transport.writelines(self._connection.push(header))

    def pause(self) -> None:
        """Stops reading until resume(): new data stays with the sender. Data that was read is still delivered."""
        if self._transport is not None and self.alive:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continues reading. May be called at any time."""
        if self._transport is not None and self.alive:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Sends the written data, closes the connection, and waits at most one second for the close."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self.closed], timeout=1.0)
            self.abort()


def another_answered(address: str, broker_id: int, expected: int) -> ConnectError:
    """Returns the error for a connection whose address now belongs to another broker.

    Different brokers have partitions of the same topic and index: only the broker id identifies the right one.
    """
    return ConnectError(address, f"broker {broker_id} is there, not broker {expected}")


class _Expiry:
    """The time-out of one request. It costs a third of asyncio.timeout()."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delays: Delays, future: asyncio.Future[Response], timeout_s: float
    ) -> None:
        self._loop, self._delays, self._future, self._timeout_s = loop, delays, future, timeout_s
        self._timer = loop.call_later(timeout_s, self._due)

    def _due(self) -> None:
        left_s = self._delays.ends_at_s + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._due)
        elif not self._future.done():
            self._future.set_exception(TimeoutError())

    def cancel(self) -> None:
        self._timer.cancel()


_Place = tuple[int, str, int, str]
"""Broker id, host, port, and the purpose, which may be empty."""


class Connections:
    """One connection per address, opened on demand. After a failure it is opened again, with growing pauses."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self._security = security
        self._open: dict[_Place, BrokerConnection] = {}
        self._opening: dict[_Place, asyncio.Task[BrokerConnection]] = {}
        self._pause_s: dict[_Place, float] = {}
        self._closed = False
        self._refusals = 0
        self._was_accepted = False

    async def get(self, at: BrokerAddress, *, purpose: str = "") -> BrokerConnection:
        """Returns the connection to a broker. Callers may repeat the call at once: this method pauses between attempts.

        Each purpose has a connection of its own. Raises ConnectError, also if another broker answers at the address.
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
        try:
            connection = await BrokerConnection.open(host, port, security=self._security)
        except AuthenticationFailed:
            self._pause_s[place] = LOGIN_PAUSE_S
            self._refusals += 1
            raise
        if connection.greeting.broker_id != broker_id:
            connection.abort()
            raise another_answered(connection.address, connection.greeting.broker_id, broker_id)
        return connection

    def _opened(self, place: _Place, task: asyncio.Task[BrokerConnection]) -> None:
        del self._opening[place]
        if not task.cancelled() and task.exception() is None:
            self._pause_s.pop(place, None)
            self._was_accepted = True
            self._open[place] = task.result()

    @property
    def is_rejected(self) -> bool:
        """True if brokers rejected each login of this client. One rejection is not enough: a broker may not know a new
        user yet. A client that was accepted before may have a password in renewal."""
        return not self._was_accepted and self._refusals >= REFUSALS_MIN

    @property
    def delayed_s(self) -> float:
        """Seconds until no broker delays requests any more; 0 if none does now. Thread-safe."""
        return max((connection.delays.left_s for connection in list(self._open.values())), default=0.0)

    async def close(self) -> None:
        """Closes all connections permanently."""
        self._closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._open.values()))
        self._open.clear()
