"""Whether a server could listen on a port."""

from __future__ import annotations

import errno
import socket


def is_free(host: str, port: int) -> bool:
    """Raises OSError when it is not that the port is taken, but that nobody could listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a connection that still lingers in TIME_WAIT does not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
