"""A connection to a broker for one thread, without a loop: data is processed on the core that received it.

One request is unanswered at a time. It may be sent long before the thread waits for its answer: until then the answer
is in the kernel's buffer.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from metamq.client.net import transport
from metamq.errors import ConnectError, MetamqError, ProtocolError, Timeout, UnsupportedVersion
from metamq.wire.addresses import are_near
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.connection import ClientConnection, Response

if TYPE_CHECKING:
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
        self._wake_bytes = 1
        self.is_open = True
        """False as soon as something has failed on the connection."""
        self.is_near = False
        """True if the broker is on this machine."""

    @classmethod
    def open(cls, host: str, port: int, *, timeout_s: float = transport.CONNECT_TIMEOUT_S) -> BlockingConnection:
        """Connects and greets. `host` may be several hosts, separated by commas, which are tried in their order.

        Raises ConnectError, UnsupportedVersion, or the broker's error.
        """
        address = f"{host}:{port}"
        refused: dict[str, ConnectError] = {}
        for one, limit_s in transport.hosts_with_timeouts(host, timeout_s):
            try:
                return cls._open(address, one, port, limit_s)
            except UnsupportedVersion:
                raise
            except ConnectError as error:
                refused[one] = error
        raise transport.none_answered(address, refused)

    @classmethod
    def _open(cls, address: str, host: str, port: int, timeout_s: float) -> BlockingConnection:
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
                connection.is_near = are_near(sock.getpeername(), sock.getsockname())
                connection._write(connection._connection.hello())
                while connection._connection.greeting is None:
                    sock.settimeout(max(deadline_s - time.monotonic(), SOON_S))
                    connection._received()
            except ProtocolError as error:
                raise ConnectError(address, error.problem, hint=error.hint) from error
            except OSError as error:
                raise _not_connected(address, error, timeout_s) from error
            undo.pop_all()
        return connection

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
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

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

        In a large answer the limit is for each part: WAKE_BYTES, or the rest.
        """
        try:
            self._socket.settimeout(timeout_s)
            while True:
                for response in self._received():
                    return response
        except MetamqError as error:
            self.abort()
            raise ConnectError(self.address, error.problem, hint=error.hint, outcome="unknown") from error
        except OSError as error:
            raise self._broken(error, timeout_s) from error

    def _write(self, buffers: Iterable[Buffer]) -> None:
        self._socket.sendall(b"".join(buffers))

    def _received(self) -> list[Response]:
        count = self._socket.recv_into(self._connection.next_buffer())
        if not count:
            raise ConnectionError("the broker closed the connection")
        responses = list(self._connection.received(count))
        wake_bytes = min(self._connection.missing_bytes, transport.WAKE_BYTES) or 1
        if wake_bytes != self._wake_bytes:
            self._wake_bytes = wake_bytes
            transport.wake_after(self._socket, wake_bytes)
        return responses

    def _broken(self, error: OSError, timeout_s: float) -> MetamqError:
        self.abort()
        if isinstance(error, TimeoutError):
            return Timeout(f"the answer of {self.address}", timeout_s)
        return ConnectError(self.address, transport.reason_of(error), outcome="unknown")

    def abort(self) -> None:
        """Closes the connection at once."""
        self.is_open = False
        self._connection.close()
        self._socket.close()


def _not_connected(address: str, error: OSError, timeout_s: float) -> ConnectError:
    reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else transport.reason_of(error)
    return ConnectError(address, reason, hint=transport.IS_IT_RUNNING)
