"""The physical limits for metamq's figures: the same bytes moved with system calls alone.

Two processes each, over loopback, with 1 MiB per call, as a perfect broker and client would do it:

    loopback      one sends, the other receives
    copy_write    one sends, the other receives and writes to a file (page cache): the limit of a produce
    read_send     one reads a file (page cache) and sends, the other receives: the limit of a fetch
    copy_to_file  one reads a file (page cache) and sends, the other writes to a file: the limit of catching up
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable

from settle import settle

PIECE = 1024 * 1024
TOTAL = 1024 * 1024 * 1024


def _receive(listener: socket.socket, handle: Callable[[memoryview], object]) -> None:
    connection, _address = listener.accept()
    buffer = memoryview(bytearray(PIECE))
    with connection:
        while True:
            filled = 0
            while filled < PIECE and (count := connection.recv_into(buffer[filled:])):
                filled += count
            if not filled:
                return
            handle(buffer[:filled])


def _receiver(listener: socket.socket, path: str | None) -> None:
    if path is None:
        _receive(listener, len)
        return
    with open(path, "wb", buffering=0) as file:
        _receive(listener, file.write)


def _send(address: tuple[str, int], path: str | None) -> None:
    with socket.create_connection(address) as connection:
        if path is None:
            piece = os.urandom(PIECE)
            for _ in range(TOTAL // PIECE):
                connection.sendall(piece)
        else:
            with open(path, "rb", buffering=0) as file:
                while piece := file.read(PIECE):
                    connection.sendall(piece)


def _run(sender_path: str | None, receiver_path: str | None) -> float:
    """Returns bytes per second."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = context.Process(target=_receiver, args=(listener, receiver_path))
        receiver.start()
        began = time.perf_counter()
        _send(listener.getsockname(), sender_path)
        receiver.join()
        return TOTAL / (time.perf_counter() - began)


def _echo(listener: socket.socket) -> None:
    connection, _address = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while data := connection.recv(4096):
            connection.sendall(data)


def round_trips(count: int, size: int) -> list[float]:
    """Returns the seconds of each round trip: a thread wakes another thread, which asks another process.

    The answer wakes both again. It is the limit of a blocking call to a broker through an event loop in the background.
    """
    samples = []
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    def ask() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                asked.acquire()
                connection.sendall(bytes(size))
                connection.recv(4096)
                answered.release()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=_echo, args=(listener,))
        process.start()
        thread = threading.Thread(target=ask)
        thread.start()
        for _ in range(count):
            began = time.perf_counter()
            asked.release()
            answered.acquire()
            samples.append(time.perf_counter() - began)
        thread.join()
        process.join()
    return samples


def copy_to_file(folder: str) -> float:
    """Returns bytes per second from file to file."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        source, target = os.path.join(place, "source"), os.path.join(place, "target")
        _run(None, source)
        settle(TOTAL)
        return _run(source, target)


def measure(folder: str) -> dict[str, float]:
    """Returns the first three limits, in bytes per second, with files in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = os.path.join(place, "raw")
        loopback = _run(None, None)
        settle(TOTAL)
        copy_write = _run(None, path)
        read_send = _run(path, None)
    return {"loopback": loopback, "copy_write": copy_write, "read_send": read_send}
