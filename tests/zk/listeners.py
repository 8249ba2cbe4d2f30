"""Ports at which no ZooKeeper listens, but something else, or nothing that answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def black_hole() -> Iterator[int]:
    """A port at which a TCP connect gets no answer: the listener's queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            yield port
        finally:
            for filler in fillers:
                filler.close()


@contextmanager
def talker(says: bytes | None) -> Iterator[int]:
    """A port where something else than a ZooKeeper listens: it says this and closes, or None: nothing, ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    taken.append(connection)
                    if says is not None:
                        connection.recv(4096)  # what lies unread at the end would make it a reset
                        connection.sendall(says)
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for connection in taken:
                connection.close()
