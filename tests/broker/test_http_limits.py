"""The status port under clients that send little, much, or nothing: it takes few threads, and answers again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from metamq.broker.process import http
from metamq.broker.process.http import CONNECTIONS_MAX, HEAD_BYTES_MAX, StatusServer
from tests.broker.test_http import Told, serving
from tests.parts import http_get, wait_until


@pytest.fixture
def server() -> Iterator[StatusServer]:
    made = serving(Told())
    yield made
    made.close()


def connected(server: StatusServer, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))


def everything(sock: socket.socket) -> bytes:
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionError:
        pass
    return found


@pytest.mark.slow
def test_many_that_drip_take_few_threads_and_one_deadline(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte came in time: what ends them is the time for the whole."""
    before = threading.active_count()
    with ExitStack() as stack:
        dripping = [connected(server, stack) for _ in range(CONNECTIONS_MAX)]
        wait_until(lambda: len(server._server._began) == CONNECTIONS_MAX)
        for sock in dripping:
            sock.sendall(b"G")
        for _ in range(50):
            assert b"503" in everything(connected(server, stack))
        assert threading.active_count() <= before + CONNECTIONS_MAX
        assert len(server._server._began) == CONNECTIONS_MAX
        monkeypatch.setattr(http, "DEADLINE_S", 0.0)
        for sock in dripping:
            assert everything(sock) == b""
        monkeypatch.setattr(http, "DEADLINE_S", 60.0)
        wait_until(lambda: not server._server._began)
        assert http_get(server.port, "/readyz") == (200, "ready\n")


def test_a_head_of_any_length_costs_little(server: StatusServer) -> None:
    with ExitStack() as stack:
        sock = connected(server, stack)
        line = b"X-Much: " + b"x" * 1000 + b"\r\n"
        sock.sendall(b"GET /readyz HTTP/1.0\r\n" + line * (HEAD_BYTES_MAX // len(line) + 1))
        assert everything(sock).startswith(b"HTTP/1.0 "), "it is answered without the rest"
    assert http_get(server.port, "/healthz") == (200, "fine\n")
