"""The requests of the supervisor of `metamq broker --processes` for the pages of a worker.

Both ends of a pair of sockets are inherited: no other process of the machine can ask. The worker's end is its standard
input. For each page the supervisor sends one end of a new pair, so a late answer is never taken for another one. When
the supervisor ends, however it ends, its end closes, and the worker ends, too (`metamq.broker.process.parent`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Protocol

from metamq.broker.process.pages import BAD, Page
from metamq.broker.process.parent import end_without_parent

REQUEST_BYTES_MAX = 4096
"""A longer request is cut off; its address is only for the audit log."""
SEPARATOR = "\0"


class Pages(Protocol):
    """The pages of a process."""

    def page(self, path: str, principal: str, address: str) -> Page:
        """Returns a page. Any thread."""
        ...


class ParentEnd:
    """The supervisor's end. ask() is for any thread; the others are for the one that starts the worker."""

    def __init__(self) -> None:
        self._ours, self.for_child = socket.socketpair()
        """`for_child` is the worker's standard input; close it after the start."""
        self._ours.setblocking(False)  # a frozen worker must not block the caller

    def ask(self, path: str, principal: str, address: str, timeout_s: float) -> Page:
        """Returns a page of the worker. Raises OSError if it does not answer in time."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                request = SEPARATOR.join((path, principal, address)).encode()[:REQUEST_BYTES_MAX]
                socket.send_fds(self._ours, [request], [theirs.fileno()])
            ours.settimeout(timeout_s)
            with ours.makefile("rb") as answer:
                status, _, kind = answer.readline().decode().rstrip("\n").partition(SEPARATOR)
                if not kind:
                    raise ConnectionError("the worker closed the connection")
                return Page(status, kind, answer.read())

    def close(self) -> None:
        """Closes both ends. The worker ends."""
        self._ours.close()
        self.for_child.close()


class ChildEnd:
    """The worker's end. Its thread answers until the supervisor ends; then this process ends."""

    def __init__(self, fd: int) -> None:
        """`fd`: standard input, which is a socket."""
        self._pages: Pages | None = None
        self._socket = socket.socket(fileno=fd)
        self._is_fork = False
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._answer, name="metamq-parent", daemon=True).start()

    def _leave(self) -> None:
        """Takes the socket from a fork, where no thread answers: there a request would wait after this process."""
        if not self._is_fork:  # else a fork of a fork, whose standard input may be a file
            self._is_fork = True
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), self._socket.fileno())

    def publish(self, pages: Pages) -> None:
        """Answers with these pages from now on; before, with 503."""
        self._pages = pages

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                request, fds, _, _ = socket.recv_fds(self._socket, REQUEST_BYTES_MAX, 1)
                if not request:
                    break
                for fd in fds:
                    with socket.socket(fileno=fd) as asked, contextlib.suppress(OSError):
                        asked.sendall(self._encoded(request))
                        asked.shutdown(socket.SHUT_WR)  # a process forked meanwhile may hold it open
        end_without_parent()

    def _encoded(self, request: bytes) -> bytes:
        path, principal, address = request.decode().split(SEPARATOR)
        pages = self._pages
        page = pages.page(path, principal, address) if pages is not None else Page.text(BAD, "starting")
        return f"{page.status}{SEPARATOR}{page.kind}\n".encode() + page.body
