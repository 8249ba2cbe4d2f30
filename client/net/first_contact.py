"""Opens a client's session with ZooKeeper, with a clear error if another server listens at the address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.client.forks import register_for_forks
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ClosedError, ConnectError, ForkedError, MetamqError, closed_client
from metamq.security.tls import client_security
from metamq.zk.servers import parse_servers
from metamq.zk.session.attempts import CLOSED, NOT_ZOOKEEPER
from metamq.zk.session.presence import warn_without_cluster
from metamq.zk.session.session import Session

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.security.config import SecurityConfig
    from metamq.security.tls import ClientSecurity

GREETING_TIMEOUT_S = 1.0
SESSION_TIMEOUT_MS = 10_000
RECONNECT_TIMEOUT_S = 10.0


async def open_client_session(
    access: ClusterAccess,
    timeout_ms: int = SESSION_TIMEOUT_MS,
    *,
    count_room: Callable[[Session], Awaitable[int]] | None = None,
) -> Session:
    """Opens a session, which shares its session of ZooKeeper with the other clients of this loop that have the same
    access and time-out. `count_room` counts the room for the ephemeral nodes of a client that may make many.

    Warns if no broker has ever used this ZooKeeper. Raises ConfigError, ConnectError.
    """
    identity = _identity(access.security)
    session = await open_session(access, timeout_ms=timeout_ms, shared_by=identity)
    try:
        room = 0 if count_room is None else await count_room(session)
        if not session.reserve(room):
            await session.close()
            session = await open_session(access, timeout_ms=timeout_ms, shared_by=identity, room=room)
        await warn_without_cluster(session)
    except BaseException:
        await session.close()
        raise
    return session


def _identity(security: SecurityConfig) -> Hashable:
    """Returns a value that clients of the same principal share: a file may later have the identity of another."""
    return security, *(_content(path) for path in (security.files().certificate, security.token_file))


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError:  # the connection reports it
        return b""


class OwnCluster:
    """A client's own session and connections, for the loop that opens them, until close() or a fork."""

    def __init__(self, kind: str, hint: str) -> None:
        self.closed_by: MetamqError | None = ClosedError(kind, "it was never opened", hint=hint)
        self._kind = kind
        self._cluster: ClusterClient | None = None
        register_for_forks(self)

    async def open(self, access: ClusterAccess) -> None:
        """Connects to ZooKeeper. Raises ConnectError."""
        self._cluster = ClusterClient(await open_client_session(access))
        self.closed_by = None

    @property
    def cluster(self) -> ClusterClient:
        """The cluster. Raises ClosedError, ForkedError."""
        if self._cluster is None:
            raise (self.closed_by or closed_client(self._kind)).with_traceback(None)
        return self._cluster

    @property
    def is_forked(self) -> bool:
        """True in a fork's child."""
        return isinstance(self.closed_by, ForkedError)

    async def close(self) -> None:
        """Disconnects. May be repeated. Does nothing in a fork's child."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            self.closed_by = closed_client(self._kind)
            await cluster.close()
            await cluster.session.close()

    def forked(self) -> None:
        """Closes the copy in a fork's child: it cannot be used any more."""
        self.closed_by = ForkedError(self._kind)
        self._cluster = None


async def open_session(
    access: ClusterAccess,
    *,
    timeout_ms: int = SESSION_TIMEOUT_MS,
    patient: bool = True,
    make_chroot: bool = False,
    shared_by: Hashable | None = None,
    room: int = 0,
) -> Session:
    """Opens a session like Session.open. If a broker listens at the address, the error reports it."""
    security = client_security(access.security)
    try:
        return await Session.open(
            access.zookeeper,
            root=access.root,
            timeout_ms=timeout_ms,
            patient=patient,
            make_chroot=make_chroot,
            security=security,
            shared_by=shared_by,
            room=room,
        )
    except ConnectError as error:
        if not any(words in error.reason for words in (CLOSED, NOT_ZOOKEEPER)):
            raise
        brokers = await _brokers_among(parse_servers(access.zookeeper)[0], security.brokers)
        if not brokers:
            raise
        hint = "Give ZooKeeper's address: brokers are found through it."
        raise ConnectError(error.address, f"{', '.join(brokers)} is a metamq broker", hint=hint) from error


async def until_connected(session: Session) -> None:
    """Waits while the session reconnects. Raises ConnectError after RECONNECT_TIMEOUT_S."""
    try:
        async with asyncio.timeout(RECONNECT_TIMEOUT_S):
            await session.connected()
    except TimeoutError:
        raise ConnectError(
            f"ZooKeeper at {session.servers}",
            f"it has not answered for {RECONNECT_TIMEOUT_S:g} s",
            hint="Check that it runs: `metamq doctor`.",
        ) from None


async def _brokers_among(hosts: list[tuple[str, int]], security: ClientSecurity | None) -> list[str]:
    async def greets(host: str, port: int) -> bool:
        try:
            connection = await BrokerConnection.open(host, port, security=security, timeout_s=GREETING_TIMEOUT_S)
        except ConnectError:
            return False
        await connection.close()
        return True

    found = await asyncio.gather(*(greets(host, port) for host, port in hosts))
    return [f"{host}:{port}" for (host, port), is_broker in zip(hosts, found, strict=True) if is_broker]
