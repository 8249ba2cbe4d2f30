"""Serves /metrics, /healthz and /readyz in threads: they answer even while the event loop is blocked.

It uses the standard library and prometheus-client: a port for scrapers needs no web framework. With `http_tls` the port
speaks TLS only, and shows /metrics to a client whose certificate has the right `describe cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from socketserver import ThreadingMixIn
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from metamq.broker.front_door.audit import REFUSED, Audit
from metamq.broker.process.metrics import BrokerCollector
from metamq.errors import ConfigError, TooManyThreads
from metamq.security.tls import FreshContext, principal_of
from metamq.threads import start

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.process.server import Broker
    from metamq.broker.process.users import KnownUsers
    from metamq.security.tls import BrokerSecurity

log = logging.getLogger("metamq.broker")

ACCEPT_PAUSE_S = 0.2
CONNECTIONS_MAX = 16
DEADLINE_S = 10.0
"""Seconds for a request and its answer."""
HEAD_BYTES_MAX = 16 * 1024
PRINCIPAL = "metamq.principal"


class StatusGuard(NamedTuple):
    """The protection of the port. Any thread."""

    tls: FreshContext
    may_describe: Callable[[str], bool]
    """True if this principal may see the metrics."""
    refused: Callable[[str, str], None]
    """Called with the principal and the address of a client that may not."""


def guard_of(
    config: BrokerConfig, security: BrokerSecurity | None, users: KnownUsers, audit: Audit
) -> StatusGuard | None:
    """Returns the protection of the port, or None. Raises ConfigError if `http_tls` is set without certificates."""
    if not config.http_tls:
        return None
    if security is None:
        raise ConfigError(
            "http_tls is on, and security is off", hint="Set `dir` in [security], or METAMQ_SECURITY_DIR."
        )
    loop = asyncio.get_running_loop()

    def refused(principal: str, address: str) -> None:
        loop.call_soon_threadsafe(partial(audit.record, REFUSED, principal, address, "/metrics", allowed=False))

    return StatusGuard(security.server, users.may_describe, refused)


class _Head:
    """The head of a request. After HEAD_BYTES_MAX it ends."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = HEAD_BYTES_MAX

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._file.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.settimeout(self.timeout)
            self.request.do_handshake()
        super().setup()
        self.rfile = cast(Any, _Head(self.rfile))

    def get_environ(self) -> dict[str, Any]:
        """Returns WSGI's variables, and the name in the client's certificate."""
        tls = self.request if isinstance(self.request, ssl.SSLSocket) else None
        return super().get_environ() | {PRINCIPAL: principal_of(tls)}

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per request: a silent client delays neither other clients nor the stop.

    It serves at most CONNECTIONS_MAX clients at a time, each for at most DEADLINE_S. So this port takes no descriptors
    and no threads that the broker needs.
    """

    daemon_threads = True
    is_stopping = False
    tls: FreshContext | None = None

    def __init__(self, *args: Any) -> None:
        self._began: dict[Any, float] = {}
        """The start time of each request by socket."""
        self._lock = threading.Lock()
        super().__init__(*args)

    def get_request(self) -> tuple[Any, Any]:
        """Pauses after an error. Without a free descriptor, the loop of socketserver would try again at once."""
        try:
            request, address = super().get_request()
        except OSError:
            if not self.is_stopping:
                time.sleep(ACCEPT_PAUSE_S)
            raise
        if self.tls is not None:  # its thread makes the handshake
            context = self.tls.current()
            request = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns True if the client can be served. Otherwise the client gets 503."""
        with self._lock:
            if len(self._began) < CONNECTIONS_MAX:
                self._began[request] = monotonic()
                return True
        log.debug("http: %s is refused, %d are served", client_address, CONNECTIONS_MAX)
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        return False

    def service_actions(self) -> None:
        """Ends requests over DEADLINE_S. Called twice a second."""
        late = monotonic() - DEADLINE_S
        with self._lock:
            for request, began in self._began.items():
                if began < late:
                    with contextlib.suppress(OSError):  # it is closed already
                        socket.socket.shutdown(request, socket.SHUT_RDWR)  # that of ssl would continue without TLS

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before the close: afterwards another file may have its number
            self._began.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http: a request of %s", client_address, exc_info=True)


def first_page(console_url: str) -> str:
    """Returns the page `/` as HTML, with a link to the console, or the command that starts it."""
    address = html.escape(console_url)
    console = f'<a href="{address}">{address}</a>' if console_url else "run <code>metamq console</code>"
    links = " ".join(f'<a href="/{name}">/{name}</a>' for name in ("metrics", "healthz", "readyz"))
    title = "A metamq broker"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        f"<p>The console shows the cluster: {console}</p><p>This port has {links}</p></html>\n"
    )


class StatusServer:
    """The HTTP port of a broker, from its construction on. Raises ConfigError if the port is taken, TooManyThreads."""

    def __init__(self, broker: Broker, guard: StatusGuard | None = None) -> None:
        self._broker = broker
        self._guard = guard
        registry = CollectorRegistry()
        registry.register(BrokerCollector(broker))
        self._metrics = make_wsgi_app(registry)
        self._first_page = first_page(broker.config.console_url)
        host, port = broker.config.http_host or broker.config.host, broker.config.http_port
        try:
            self._server = make_server(host, port, self._respond, _Server, _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                hint="Choose another --http-port (0 takes a free one, -1 serves none), or --http-host.",
            ) from error
        self._server.tls = guard.tls if guard is not None else None
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metamq-http", daemon=True)
        try:
            start(self._thread)
        except TooManyThreads:
            self._server.server_close()
            raise

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics" and self._guard is not None and not self._guard.may_describe(environ[PRINCIPAL]):
            self._guard.refused(environ[PRINCIPAL], environ["REMOTE_ADDR"])
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"/metrics needs a certificate with the right `describe cluster`\n"]
        if path == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        if path == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [self._first_page.encode()]
        checks = {"/healthz": self._broker.health, "/readyz": self._broker.readiness}
        if path not in checks:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics, /healthz and /readyz are here.\n"]
        good, reason = checks[path]()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{reason}\n".encode()]

    def close(self) -> None:
        """Stops serving. Requests in progress are not finished."""
        self._server.is_stopping = True
        # Wakes the thread. Outside of Linux this has no effect, and the thread notices the stop within half a second.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
