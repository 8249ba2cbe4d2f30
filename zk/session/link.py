"""A restricted kazoo client: its threads only pass events on, and it sends nothing on its own.

The changes to kazoo, and their reasons:

- Its connection thread survives every exception. In kazoo one unexpected answer ends the thread, and the client stops
  working without a message.
- Reconnecting backs off to a tenth of the session time-out, at most a second. kazoo's own limit is an hour.
- Connecting and the handshake get a fraction of the session time-out each, and connecting can be interrupted. kazoo
  gives each the whole time-out. With one unreachable host, or with a server that lost the request while it was starting
  (ZooKeeper does that), the session would end before another server is tried.
- The negotiated time-out is kept; kazoo only logs it. The reason of a failed attempt to connect is kept, too.
- TLS is made by a context of metamq.security.tls, and several answers in one TLS record are all read. kazoo reads one,
  and the others when something else arrives.
- `drop` cuts the connection. kazoo detects a hanging server by an idle time without an answer to its ping, but every
  request postpones that ping: a client with frequent requests would wait without end.
- A request is passed on under a lock, and only while the connection of the right session is up. kazoo would keep it for
  the next connection. Under the same lock, the link counts as down before kazoo fails its pending requests. So each
  request is either refused, or sent on the connection for which it was meant, or failed with it. No request is carried
  out on a later connection or in a later session.

kazoo logs to "metamq.zk.kazoo", which is silent unless its level is set.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.exceptions import SessionExpiredError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Connect
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry

from metamq.errors import TooManyThreads
from metamq.threads import start
from metamq.zk.session.attempts import ConnectAttempts

if TYPE_CHECKING:
    from metamq.security.tls import TlsSource

log = logging.getLogger("metamq.zk")

kazoo_log = logging.getLogger("metamq.zk.kazoo")
if kazoo_log.level == logging.NOTSET:
    kazoo_log.setLevel(logging.CRITICAL + 1)

_INTERRUPT_CHECK_S = 0.05
_JOIN_LIMIT_S = 0.1

StateListener = Callable[[str, int, int], None]
"""Called in kazoo's thread with (KazooState, session id, negotiated time-out in ms)."""


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a TCP connect that ends soon after `interrupted` is set."""

    def __init__(self, connect_timeout_s: float, tls: TlsSource | None) -> None:
        super().__init__()
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self.interrupted = threading.Event()

    def create_connection(self, address: tuple[str, int], hostname: str = "", **_: Any) -> socket.socket:
        """Connects a TCP socket to `address`, with TLS if that is on. Raises OSError."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            self._connect(connection, address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection.settimeout(self._connect_timeout_s)
                connection = self._tls.current().wrap_socket(connection, server_hostname=hostname or address[0])
                connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection

    def select(self, readers: list[Any], *others: Any) -> Any:
        """Waits like select(). With TLS the data of several answers may have arrived in one record: a socket whose
        record is not read to its end is ready."""
        ready = [one for one in readers if isinstance(one, ssl.SSLSocket) and one.pending()]
        if not ready:
            return super().select(readers, *others)
        more = super().select([one for one in readers if one not in ready], *others[:2], 0)
        return [*ready, *more[0]], more[1], more[2]

    def _connect(self, connection: socket.socket, address: tuple[str, int]) -> None:
        code = connection.connect_ex(address)
        deadline = time.monotonic() + self._connect_timeout_s
        while code == errno.EINPROGRESS:
            if self.interrupted.is_set():
                raise ConnectionAbortedError(errno.ECONNABORTED, "closed meanwhile")
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "no answer to a TCP connect")
            if self.select([], [connection], [], _INTERRUPT_CHECK_S)[1]:
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection thread. It survives every exception, keeps the negotiated time-out, and can be cut."""

    negotiated_timeout_ms = 0
    is_over = False
    """True if the next attempt to connect must give up the session."""

    def __init__(self, client: KazooClient, patience_s: float, attempts: ConnectAttempts) -> None:
        retry: Any = client._conn_retry
        super().__init__(client, retry.copy(), logger=kazoo_log)
        self._first_patience_s = self._patience_s = patience_s
        self._attempts = attempts

    def _expand_client_hosts(self) -> Any:
        addresses = super()._expand_client_hosts()
        self._attempts.begin(addresses)
        return addresses

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        if self.is_over:
            self.is_over = False
            raise SessionExpiredError
        try:
            return super()._connect(host, hostip, port)
        except SessionExpiredError:
            raise
        except Exception as error:
            self._attempts.failed(host, hostip, port, error)
            raise

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        if not isinstance(request, Connect):
            return super()._invoke(timeout, request, xid)
        try:
            result = super()._invoke(min(timeout, self._patience_s), request, xid)
        except self.handler.timeout_exception:
            # An overloaded ensemble may need longer to begin a session: at most kazoo's own time.
            self._patience_s = min(self._patience_s * 2, timeout)
            raise
        self._patience_s = self._first_patience_s
        assert result is not None  # a Connect has an answer
        self.negotiated_timeout_ms = result[0].time_out
        return result

    def _connect_attempt(self, host: str, hostip: str, port: int, retry: Any) -> Any:
        try:
            return super()._connect_attempt(host, hostip, port, retry)
        except OSError as error:
            log.debug("ZooKeeper at %s:%d: %s", host, port, error)
        except Exception as error:
            log.error("ZooKeeper at %s:%d sent an invalid answer, reconnecting: %r", host, port, error)
        self.client._session_callback(KeeperState.CONNECTING)
        return None

    def drop(self) -> None:
        """Cuts the connection, if there is one; the connection thread notices at once."""
        connection = self._socket
        if connection is not None:
            try:
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of ssl would continue without TLS
            except OSError as error:
                log.debug("the connection to ZooKeeper was closed already: %s", error)


class _Client(KazooClient):  # type: ignore[misc]
    """kazoo's client. It calls `before_break` before it fails the requests of a lost connection."""

    def __init__(self, before_break: Callable[[], None], **settings: Any) -> None:
        self._before_break = before_break
        super().__init__(**settings)

    def _session_callback(self, state: str) -> None:
        if state != KeeperState.CONNECTED:
            self._before_break()
        super()._session_callback(state)


class Link:
    """One kazoo client. Any thread may call all methods; none waits for the network."""

    def __init__(
        self, hosts: list[tuple[str, int]], timeout_ms: int, on_state: StateListener, tls: TlsSource | None = None
    ) -> None:
        timeout_s = timeout_ms / 1000
        patience_s = max(timeout_s / 6 / len(hosts), min(timeout_s / 3, 1.0))
        self._handler = _Handler(patience_s, tls)
        self._on_state = on_state
        self._lock = threading.Lock()
        self._live_session_id: int | None = None
        self._stopper: threading.Thread | None = None
        names = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)
        client = _Client(
            self._down,
            hosts=names,
            timeout=timeout_s,
            handler=self._handler,
            connection_retry=KazooRetry(
                max_tries=-1, delay=0.02, backoff=2, max_jitter=0.4, max_delay=min(timeout_s / 10, 1.0)
            ),
            logger=kazoo_log,
        )
        self.attempts = ConnectAttempts(client.hosts or ())  # in kazoo's spelling
        self._connection = _Connection(client, patience_s, self.attempts)
        client._connection = self._connection
        client.add_listener(self._state_changed)
        self._client = client

    def start(self) -> None:
        """Begins to connect, in kazoo's thread. Raises TooManyThreads."""
        try:
            self._client.start_async()
        except RuntimeError as error:
            raise TooManyThreads("kazoo") from error

    @property
    def live_session_id(self) -> int | None:
        """The session whose connection is up now; None if none is."""
        return self._live_session_id

    def submit(self, session_id: int, call: Callable[[KazooClient], Any]) -> Any | None:
        """Returns the result of `call`, which must be one of kazoo's `*_async` methods. None: refused, nothing is sent.

        It is refused unless the connection is up and belongs to session `session_id`.
        """
        with self._lock:
            if self._live_session_id != session_id:
                return None
            return call(self._client)

    def forget(self, path: str, watch: Any) -> None:
        """Makes kazoo forget a watch of a node; ZooKeeper keeps it. Both dictionaries of kazoo keep their keys, since
        its thread iterates over them."""
        for watches in (self._client._data_watchers, self._client._child_watchers):
            watches.get(path, set()).discard(watch)

    def drop(self) -> None:
        """Cuts the connection: requests in flight fail, and kazoo connects again."""
        self._down()
        self._connection.drop()

    def give_up_session(self) -> None:
        """Begins a new session with the next connection, as if a server had ended this one."""
        self._connection.is_over = True

    def stop(self, done: Callable[[], None]) -> None:
        """Ends the session and the threads, in its own thread, which calls `done` when everything has ended."""
        if self._live_session_id is None:
            self._handler.interrupted.set()

        def stop() -> None:
            try:
                self._client.stop()
                self._client.close()
            except Exception as error:
                log.warning("a connection to ZooKeeper did not close cleanly: %r", error)
            finally:
                done()

        stopper = threading.Thread(target=stop, name="metamq-zookeeper-close", daemon=True)
        try:
            start(stopper)
            self._stopper = stopper
        except TooManyThreads:  # close in this thread, without waiting: the session ends by its time-out
            self.interrupt()
            stop()

    def join(self) -> None:
        """Waits, after `stop` called `done`, until its thread has ended, too."""
        if self._stopper is not None:
            self._stopper.join(_JOIN_LIMIT_S)

    def interrupt(self) -> None:
        """Stops waiting for servers, after `stop`."""
        self._handler.interrupted.set()
        self._connection.drop()

    def _down(self) -> None:
        with self._lock:
            self._live_session_id = None

    def _state_changed(self, state: str) -> None:
        session_id = 0
        if state == KazooState.CONNECTED and self._client.client_id is not None:
            session_id = self._client.client_id[0] or 0
            with self._lock:
                self._live_session_id = session_id
        self._on_state(state, session_id, self._connection.negotiated_timeout_ms)
