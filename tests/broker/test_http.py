"""The status server by itself: it stops at once, and a slow client keeps nobody waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metamq.broker.config import BrokerConfig
from metamq.broker.process.http import StatusServer, _Server, status_address
from metamq.broker.process.pages import BrokerPages
from metamq.broker.process.server import Broker
from tests.parts import http_get


class Told:
    """What the status server asks of a broker."""

    config = BrokerConfig(http_port=0)

    def health(self) -> tuple[bool, str]:
        return True, "fine"

    def readiness(self) -> tuple[bool, str]:
        return True, "ready"

    def statistics(self) -> dict[str, Any]:
        return {"epoch": 1, "connections": 0, "topics": {}, "partitions": []}


def serving(told: Told) -> StatusServer:
    config = told.config
    return StatusServer(config.http_host or config.host, config.http_port, BrokerPages(cast(Broker, told)).respond)


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def test_it_stops_at_once() -> None:
    took_s = []
    for _ in range(8):
        server = serving(Told())
        assert http_get(server.port, "/readyz") == (200, "ready\n")
        began = time.monotonic()
        server.close()
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 0.2, "half a second each when a stop waits for the next poll; any may be slow"


def test_it_may_have_an_address_of_its_own() -> None:
    """A broker listens on all of them, and its metrics on one that only scrapers reach."""

    class Public(Told):
        config = BrokerConfig(host="0.0.0.0", http_host="127.0.0.2", http_port=0)

    server = serving(Public())
    try:
        assert server._server.server_address[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 60)
        socket.create_connection(("127.0.0.2", server.port), 60).close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("settings", "advertised", "address"),
    [
        ({}, "127.0.0.1", "http://127.0.0.1:8120"),
        ({"host": "0.0.0.0"}, "broker-0", "http://broker-0:8120"),
        ({"host": "0.0.0.0", "http_host": "::"}, "broker-0", "http://broker-0:8120"),
        ({"host": "10.0.0.1", "http_tls": True}, "inside, outside.example.org", "https://inside:8120"),
        ({"host": "0.0.0.0", "http_host": "10.0.0.2"}, "broker-0", "http://10.0.0.2:8120"),
        ({"host": "::1"}, "::1", "http://[::1]:8120"),
        ({"host": "0.0.0.0", "http_host": "127.0.0.1"}, "broker-0", ""),  # it would be the reader's own machine
    ],
)
def test_the_address_for_other_machines(settings: dict[str, Any], advertised: str, address: str) -> None:
    assert status_address(BrokerConfig(**settings), advertised, 8120) == address
    assert status_address(BrokerConfig(**settings), advertised, -1) == ""


def test_it_does_not_pause_when_its_thread_sees_the_closed_socket_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when no descriptor is left."""
    paused, refused = threading.Event(), threading.Event()
    monkeypatch.setattr("metamq.broker.process.http.time", SimpleNamespace(sleep=lambda _s: paused.set()))
    take, stop = _Server.get_request, _Server.shutdown

    def get_request(server: _Server) -> Any:
        try:
            return take(server)
        except OSError:
            refused.set()
            raise

    def shutdown(server: _Server) -> None:
        assert refused.wait(60)
        stop(server)

    monkeypatch.setattr(_Server, "get_request", get_request)
    monkeypatch.setattr(_Server, "shutdown", shutdown)
    serving(Told()).close()
    assert not paused.is_set()


def test_a_client_that_says_nothing_keeps_nobody_waiting(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.broker.process.http._QuietHandler.timeout", 600)
    server = serving(Told())
    with closing(socket.create_connection(("127.0.0.1", server.port))):
        assert http_get(server.port, "/healthz") == (200, "fine\n")  # within a time-out that is shorter
        with at_most(60):
            server.close()
    assert capfd.readouterr().err == ""
