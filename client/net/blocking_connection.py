"""A connection to a broker for one thread, without a loop: data is processed on the core that received it.

One request is unanswered at a time. It may be sent long before the thread waits for its answer: until then the answer
is in the kernel's buffer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.client.net import transport
from metamq.client.net.delays import Delays
from metamq.errors import AuthenticationFailed, ConnectError, MetamqError, ProtocolError, Timeout, UnsupportedVersion
from metamq.security.tls_errors import ENDED, tls_reason
from metamq.wire.addresses import are_near
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import Command
from metamq.wire.connection import ClientConnection, Response

if TYPE_CHECKING:
    from metamq.security.tls import ClientSecurity
    from metamq.wire.frames import Buffer

SOON_S = 0.001
"""The shortest wait in seconds; 0 would mean not to wait at all."""
RECEIVE_BUFFER_BYTES = 1024 * 1024
"""The kernel buffers at least this number of bytes of an unread answer. The rest stays with the broker."""


class BlockingConnection:
    """An open connection, until something fails on it. Not thread-safe."""

    def __init__(self, address: str, sock: socket.socket) -> None:
        self.address = address
        self._socket = sock
        self._connection = ClientConnection(address, transport.client_name(), BufferPool(transport.KEPT_BYTES).take)
        self._is_plain = True
        self._wake_bytes = 1
        self._delays = Delays(address)
        self.is_open = True
        """False as soon as something has failed on the connection."""
        self.is_near = False
        """True if the broker is on this machine."""

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        *,
        security: ClientSecurity | None = None,
        timeout_s: float = transport.CONNECT_TIMEOUT_S,
    ) -> BlockingConnection:
        """Connects and greets. `host` may be several hosts, separated by commas, which are tried in their order.

        With `security`, the broker's certificate must be valid for the host.

        Raises ConnectError, UnsupportedVersion, AuthenticationFailed, or the broker's error.
        """
        address = f"{host}:{port}"
        refused: dict[str, ConnectError] = {}
        for one, limit_s in transport.hosts_with_timeouts(host, timeout_s):
            try:
                return cls._open(address, one, port, security, limit_s)
            except (UnsupportedVersion, AuthenticationFailed):
                raise
            except ConnectError as error:
                refused[one] = error
        raise transport.none_answered(address, refused)

    @classmethod
    def _open(
        cls, address: str, host: str, port: int, security: ClientSecurity | None, timeout_s: float
    ) -> BlockingConnection:
        deadline_s = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise _not_connected(address, error, timeout_s) from error
        connection = cls(address, sock)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.abort)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                transport.keep_alive(sock)
                transport.grow_receive_buffer(sock, RECEIVE_BUFFER_BYTES)
                if security is not None:
                    sock.settimeout(max(deadline_s - time.monotonic(), SOON_S))
                    connection.secure(security, host)
                connection.is_near = are_near(connection._socket.getpeername(), connection._socket.getsockname())
                connection._write(connection._connection.hello())
                while not connection._connection.is_open:
                    connection._socket.settimeout(max(deadline_s - time.monotonic(), SOON_S))
                    connection._received()
                    if login := connection._connection.outgoing():
                        connection._write(login)
            except ProtocolError as error:
                raise ConnectError(address, error.problem, hint=error.hint) from error
            except ssl.SSLError as error:
                raise _with_reason(address, tls_reason(error)) from error
            except ConnectionError as error:
                if security is None or connection._connection.greeting is not None:
                    raise _not_connected(address, error, timeout_s) from error
                raise _with_reason(address, ENDED) from error
            except OSError as error:
                raise _not_connected(address, error, timeout_s) from error
            undo.pop_all()
        return connection

    def secure(self, security: ClientSecurity, host: str) -> None:
        """Begins TLS. Raises OSError, SSLError."""
        self._socket = tls = security.tls.current().wrap_socket(self._socket, server_hostname=host)
        self._is_plain = False
        self._connection.login = partial(security.login, self.address, tls)

    @property
    def broker_id(self) -> int:
        """The id of the connected broker."""
        assert self._connection.greeting is not None
        return self._connection.greeting.broker_id

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and has no unread data. Without a request, unread data means that the broker
        has closed the connection."""
        if not self.is_open:
            return False
        unread = select.poll()
        unread.register(self._socket, select.POLLIN)
        return not unread.poll(0)

    def send(self, command: int, header: Any, *, timeout_s: float) -> None:
        """Sends a request. The previous request must be answered. Raises ConnectError, Timeout."""
        if not self.is_open:
            raise ConnectError(self.address, "the connection is closed")
        _opaque, buffers = self._connection.request(command, header)
        self._socket.settimeout(timeout_s)
        try:
            self._write(buffers)
        except OSError as error:
            raise self._broken(error, timeout_s) from error

    def receive(self, *, timeout_s: float) -> Response:
        """Waits for the answer to the request. Raises ConnectError, or Timeout after `timeout_s` seconds without data.

        In a large answer the limit is for each part: WAKE_BYTES, or the rest. The time of a delay does not count
        (metamq.client.net.delays).
        """
        try:
            while True:
                self._socket.settimeout(timeout_s + self._delays.left_s)
                for response in self._received():
                    if response.command != Command.DELAY:
                        return response
                    self._delays.received(response.header)
        except MetamqError as error:
            self.abort()
            raise ConnectError(self.address, error.problem, hint=error.hint, outcome="unknown") from error
        except OSError as error:
            raise self._broken(error, timeout_s) from error

    def _write(self, buffers: Iterable[Buffer]) -> None:
        self._socket.sendall(b"".join(buffers))

    def _received(self) -> list[Response]:
        buffer = self._connection.next_buffer()
        count = self._socket.recv_into(buffer)
        if not count:
            raise ConnectionError("the broker closed the connection")
        if not self._is_plain:  # each call returns one record of TLS, 16 KiB at most
            enough = min(self._wake_bytes, len(buffer))
            while count < enough and (more := self._socket.recv_into(buffer[count:])):
                count += more
        responses = list(self._connection.received(count))
        wake_bytes = min(self._connection.missing_bytes, transport.WAKE_BYTES) or 1
        if wake_bytes != self._wake_bytes:
            self._wake_bytes = wake_bytes
            if self._is_plain:
                transport.wake_after(self._socket, wake_bytes)
        return responses

    def _broken(self, error: OSError, timeout_s: float) -> MetamqError:
        self.abort()
        if isinstance(error, TimeoutError):
            return Timeout(f"the answer of {self.address}", timeout_s)
        if isinstance(error, ssl.SSLError):
            reason, hint = tls_reason(error)
            return ConnectError(self.address, reason, hint=hint, outcome="unknown")
        return ConnectError(self.address, transport.reason_of(error), outcome="unknown")

    def abort(self) -> None:
        """Closes the connection at once."""
        self.is_open = False
        self._connection.close()
        self._socket.close()


def _with_reason(address: str, reason: tuple[str, str]) -> ConnectError:
    return ConnectError(address, reason[0], hint=reason[1])


def _not_connected(address: str, error: OSError, timeout_s: float) -> ConnectError:
    reason = (
        f"no answer within {round(timeout_s, 3):g} s" if isinstance(error, TimeoutError) else transport.reason_of(error)
    )
    return ConnectError(address, reason, hint=transport.IS_IT_RUNNING)
