"""/metrics, /healthz and /readyz, from a thread of their own, so that they answer while the event loop does not.

Standard library and prometheus-client; a broker's port for scrapers needs no web framework.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from metamq.broker.metrics import BrokerCollector
from metamq.errors import ConfigError, TooManyThreads
from metamq.threads import start

if TYPE_CHECKING:
    from metamq.broker.server import Broker

log = logging.getLogger("metamq.broker")

ACCEPT_PAUSE_S = 0.2


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a request: a client that says nothing holds up neither the others nor the stop."""

    daemon_threads = True
    is_stopping = False

    def get_request(self) -> tuple[Any, Any]:
        """Without a descriptor left, the loop of socketserver would try again at once, for ever."""
        try:
            return super().get_request()
        except OSError:
            if not self.is_stopping:
                time.sleep(ACCEPT_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http: a request of %s", client_address, exc_info=True)


class StatusServer:
    """Serves from the moment it is made. Raises ConfigError when the port is taken, TooManyThreads."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        registry = CollectorRegistry()
        registry.register(BrokerCollector(broker))
        self._metrics = make_wsgi_app(registry)
        host, port = broker.config.host, broker.config.http_port
        try:
            self._server = make_server(host, port, self._respond, _Server, _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                hint="Choose another --http-port (0 takes a free one, -1 serves none).",
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metamq-http", daemon=True)
        try:
            start(self._thread)
        except TooManyThreads:
            self._server.server_close()
            raise

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        checks = {"/healthz": self._broker.health, "/readyz": self._broker.readiness}
        if path not in checks:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics, /healthz and /readyz are here\n"]
        good, reason = checks[path]()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{reason}\n".encode()]

    def close(self) -> None:
        """Stops serving, whatever is under way."""
        self._server.is_stopping = True
        # Wakes the thread; where that does nothing, outside of Linux, it looks within half a second.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
