"""Serves /metrics, /healthz and /readyz in threads: they answer even while the event loop is blocked.

It uses the standard library: a port for scrapers needs no web framework. `metamq.broker.process.pages` has the pages.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from metamq.errors import ConfigError, TooManyThreads
from metamq.security.exposure import is_exposed
from metamq.security.tls import FreshContext, principal_of
from metamq.threads import start

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

log = logging.getLogger("metamq.broker")

ANY_HOST = ("0.0.0.0", "::")
ACCEPT_PAUSE_S = 0.2
CONNECTIONS_MAX = 16
DEADLINE_S = 10.0
"""Seconds for a request and its answer."""
HEAD_BYTES_MAX = 16 * 1024
PRINCIPAL = "metamq.principal"
"""The variable of WSGI with the name in the client's certificate."""
Respond: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""An application of WSGI."""


def status_address(config: BrokerConfig, advertised: str, port: int) -> str:
    """Returns the address of the port for other machines, as "http://host:8120"; empty without one that they reach.

    `advertised` is the broker's own host for clients, which may be several names.
    """
    name = advertised.partition(",")[0].strip()
    listens_at = config.http_host or config.host
    host = name if listens_at in ANY_HOST or not config.http_host else config.http_host
    if port < 0 or (is_exposed(name) and not is_exposed(listens_at)):
        return ""
    bracketed = f"[{host}]" if ":" in host else host
    return f"{'https' if config.http_tls else 'http'}://{bracketed}:{port}"


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


class StatusServer:
    """An HTTP port, from its construction on. Raises ConfigError if the port is taken, TooManyThreads."""

    def __init__(self, host: str, port: int, respond: Respond, tls: FreshContext | None = None) -> None:
        """`respond` answers each request, in any thread. With `tls` the port speaks TLS only."""
        try:
            self._server = make_server(host, port, respond, _Server, _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                hint="Choose another --http-port (0 takes a free one, -1 serves none), or --http-host.",
            ) from error
        self._server.tls = tls
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metamq-http", daemon=True)
        try:
            start(self._thread)
        except TooManyThreads:
            self._server.server_close()
            raise

    def close(self) -> None:
        """Stops serving. Requests in progress are not finished."""
        self._server.is_stopping = True
        # Wakes the thread. Outside of Linux this has no effect, and the thread notices the stop within half a second.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
