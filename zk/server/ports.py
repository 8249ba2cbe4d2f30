"""Ports for servers: whether one could listen on a port, and ports that are chosen and kept."""

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
"""Below the range of ephemeral ports."""
_ATTEMPTS = 200


def is_free(host: str, port: int) -> bool:
    """Raises OSError when it is not that the port is taken, but that nobody could listen there."""
    with _socket(host) as probe:
        # As servers do: a connection that still lingers in TIME_WAIT does not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bound(probe, host, port)


class HeldPort:
    """A port that was free, and that no other HeldPort or free_port chooses while this object lives.

    A socket that is bound to it and never listens keeps it, also while the server it was chosen for is down. Linux lets
    a server that allows reuse, as asyncio's and ZooKeeper's do, bind beside such a socket. Elsewhere nothing is kept.
    Raises ConfigError where nobody could listen on the host, or no port is free.
    """

    def __init__(self, host: str) -> None:
        self.number, keeper = _chosen(host)
        if sys.platform != "linux":
            keeper.close()
            return
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        weakref.finalize(self, os.close, keeper.detach())


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on, nor holds. Another process may take it. Raises as HeldPort."""
    number, keeper = _chosen(host)
    keeper.close()
    return number


def _chosen(host: str) -> tuple[int, socket.socket]:
    """A port, and the socket that is bound to it, which allows no reuse: so it is neither held by somebody else."""
    with contextlib.ExitStack() as undo:
        keeper = undo.enter_context(_socket(host))
        for _ in range(_ATTEMPTS):
            # Not `random`: processes that seed it alike would choose alike.
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
