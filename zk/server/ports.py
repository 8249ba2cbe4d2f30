"""Ports for servers: checks if a port is free, and chooses and reserves ports."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import weakref

from metamq.errors import ConfigError

PORTS = range(20_000, 32_000)
"""The ports to choose from, below the range of ephemeral ports."""
_ATTEMPTS = 200


def is_free(host: str, port: int) -> bool:
    """True if a server can listen on the port. Raises OSError if listening fails for another reason."""
    with _socket(host) as probe:
        # Like servers do: a connection in TIME_WAIT does not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bound(probe, host, port)


class HeldPort:
    """A port that was free, and that no other HeldPort or free_port chooses while this object exists.

    A bound socket that never listens reserves the port, even while the port's server is down. Linux lets a server that
    allows reuse, like those of asyncio and ZooKeeper, bind next to such a socket. On other systems nothing is reserved.
    Raises ConfigError if listening on the host is impossible, or if no port is free.
    """

    def __init__(self, host: str) -> None:
        self.number, keeper = _chosen(host)
        if sys.platform != "linux":
            keeper.close()
            return
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        weakref.finalize(self, os.close, keeper.detach())


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no process listens on or holds. Another process may take it. Raises the errors of HeldPort."""
    number, keeper = _chosen(host)
    keeper.close()
    return number


def _chosen(host: str) -> tuple[int, socket.socket]:
    """A port, and the socket that is bound to it without reuse: no other process can hold the port."""
    with contextlib.ExitStack() as undo:
        keeper = undo.enter_context(_socket(host))
        for _ in range(_ATTEMPTS):
            # Not `random`: processes with the same seed would choose the same ports.
            port = secrets.choice(PORTS)
            try:
                if _bound(keeper, host, port):
                    undo.pop_all()
                    return port, keeper
            except OSError as error:
                raise ConfigError(f"cannot listen on {host}:{port}: {error}", hint="Choose another host.") from error
    raise ConfigError(f"no free port among {PORTS.start} to {PORTS.stop - 1} on {host}", hint="Give a port.")


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _bound(probe: socket.socket, host: str, port: int) -> bool:
    try:
        probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
