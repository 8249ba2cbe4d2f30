"""Accepts connections, and keeps accepting after any error.

The server of an event loop does not. uvloop disconnects new clients while the process has no descriptor left. When the
system has none, uvloop closes its listening socket permanently, without an error. Here an error pauses accepting for a
moment. Clients wait in the kernel's queue in the meantime, and one log line gives the reason. Connections leave the
last descriptors of the process to the files of its logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.broker.log.disk.files import descriptors_max
from metamq.client.net.transport import keep_alive
from metamq.errors import ProtocolError
from metamq.security.tls import HANDSHAKE_S, TLS_RECORD
from metamq.security.tls_errors import tls_reason
from metamq.wire.connection import ServerConnection

if TYPE_CHECKING:
    from metamq.security.tls import BrokerSecurity, FreshContext

log = logging.getLogger("metamq.broker")

BACKLOG = 1024
DESCRIPTORS_LEFT = 32
"""Descriptors of the process that connections may not use."""
AT_ONCE = 64
"""Connections accepted in one turn of the loop."""
PAUSE_S = 0.2
OPENING_MAX = 256
"""Connections in the TLS handshake. It costs time and memory, and comes before all other limits."""
SHUTDOWN_S = 5.0
"""Seconds for the end of a TLS connection."""
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8
"""States of a socket, of <netinet/tcp.h>."""
TLS_HINT = "Give the client the certificate of the cluster's authority: METAMQ_SECURITY_CA."


def peer_is_gone(transport: asyncio.Transport) -> bool:
    """True if the kernel knows the end of the peer's stream, also while it is not read. Only Linux says so."""
    if sys.platform != "linux":
        return False
    sock = transport.get_extra_info("socket")  # None: TLS has ended already
    return sock is None or sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in (TCP_CLOSE, TCP_CLOSE_WAIT)


class Acceptor:
    """Serves a bound socket until close(). `made` returns the protocol of a new connection."""

    def __init__(
        self, listener: socket.socket, made: Callable[[], asyncio.BaseProtocol], security: BrokerSecurity | None = None
    ) -> None:
        self._listener = listener
        self._made = made
        self._tls = security.server if security is not None else None
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._is_failing = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                self._check_descriptors()
                client, address = self._listener.accept()
            except BlockingIOError:  # the kernel's queue is empty
                if self._is_failing:
                    self._is_failing = False
                    log.warning("connections are accepted again")
                return
            except (ConnectionError, InterruptedError):  # the client is gone already
                continue
            except OSError as error:
                self._pause(error)
                return
            if self._tls is not None and len(self._opening) >= OPENING_MAX:
                client.close()
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(client)
            task: asyncio.Task[object] = self._loop.create_task(self._open(client, address))
            self._opening.add(task)
            task.add_done_callback(partial(self._end_opening, client))

    def _check_descriptors(self) -> None:
        """Raises OSError if the next descriptor, the lowest free one, is among the last DESCRIPTORS_LEFT."""
        lowest = os.dup(self._listener.fileno())
        os.close(lowest)
        if lowest >= descriptors_max() - DESCRIPTORS_LEFT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def _open(self, client: socket.socket, address: Any) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._made, client)
            else:
                await self._open_with_tls(client, address, self._tls)
        except ssl.SSLError as error:
            log.info("%s:%d is refused: %s", *address[:2], tls_reason(error)[0])
            client.close()
        except OSError as error:
            log.info("a connection was lost before it was served: %s", error)
            client.close()

    def _end_opening(self, client: socket.socket, task: asyncio.Task[object]) -> None:
        """Closes the socket here, because a task that is cancelled before its first turn runs none of its code."""
        self._opening.discard(task)
        if task.cancelled():
            client.close()

    async def _open_with_tls(self, client: socket.socket, address: Any, tls: FreshContext) -> None:
        """Begins TLS. A client that begins with other bytes gets the reason in its own protocol. Raises OSError."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                first = await self._first_byte(client)
        except TimeoutError:
            client.close()
            return
        if not first:
            client.close()
            return
        if first != TLS_RECORD:
            log.info("%s:%d is refused: it does not speak TLS", *address[:2])
            refusal = ServerConnection.refusal(ProtocolError("this broker speaks only TLS", hint=TLS_HINT))
            with contextlib.suppress(OSError):
                client.send(b"".join(refusal))
                client.shutdown(socket.SHUT_WR)
                client.recv(64 * 1024)  # a close with unread bytes would discard the reason
            client.close()
            return
        await self._loop.connect_accepted_socket(
            self._made, client, ssl=tls.current(), ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=SHUTDOWN_S
        )

    async def _first_byte(self, client: socket.socket) -> bytes:
        """Returns the first byte, which stays unread; empty if the client has ended the stream. Raises OSError."""
        arrived = asyncio.Event()
        self._loop.add_reader(client.fileno(), arrived.set)
        try:
            await arrived.wait()
        finally:
            self._loop.remove_reader(client.fileno())
        return client.recv(1, socket.MSG_PEEK)

    def _pause(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.error(
                "no connection is accepted at present: %s. New ones wait. Raise the limit on open files, %s "
                "(`ulimit -n`), or lower connections_max or open_files_max.",
                error.strerror or error, f"{descriptors_max():,}",
            )  # fmt: skip
        self._loop.remove_reader(self._listener.fileno())
        self._paused = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._accept()

    def close(self) -> None:
        """Accepts no more connections; open ones stay. A second call does nothing."""
        if self._listener.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._opening:
            task.cancel()
