"""The session with ZooKeeper: every operation is a coroutine, every answer a plain value, every wait bounded.

Theory of operation. kazoo runs three threads (`metamq.zk.session.link`). A Session belongs to one event loop and never
blocks it. A request goes to kazoo at once, through the channel, and its answer comes back by `call_soon_threadsafe`. A
Session never retries: kazoo's retry repeats a write in a later session, where it may undo another client's change. A
caller that gets ConnectionLost with the outcome "unknown" must read before it decides.

There are three states, as the loop sees them:

    CONNECTED   the session is alive and the server answers
    SUSPENDED   the connection broke; only the next answer of a server shows if the session is alive or over
    LOST        the session is over, and its ephemeral nodes are gone. A new one follows, one `generation` higher

A request belongs to the session in which its method was called. It is refused at once, with ConnectionLost and the
outcome "not_done", unless the connection of that session is up. A request that is lost with its connection has the
outcome "unknown": the server may still carry it out, but it is never sent again.

Time. A request without an answer after two thirds of the negotiated time-out fails with ConnectionLost, and the
connection is cut. So a server that answers nothing (SIGSTOP, a cut cable) delays no caller for long, and the next one
is tried while the session can still be saved. Beyond a hundred requests in flight, others wait while answers come.

Watches. A watch is called once: when its node changes, or when the connection is lost, since the watches of a lost
connection are not kept. The callback must read again, after `connected()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from metamq.errors import ClosedError, ConfigError, ConnectError, MessageTooLarge, NotAuthorized
from metamq.security.tls import OFF, Security
from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists, NoNode
from metamq.zk.nodes import Create, Delete, Listing, Node, Op, SetData, Stat
from metamq.zk.paths import DEFAULT_ROOT, Paths
from metamq.zk.session.acls import Acl, acl_of, is_open, shared_root
from metamq.zk.session.answers import commit, create_node, error_of, failure_of, node_of, stat_of, version_after
from metamq.zk.session.channel import ROOM_MAX, Channel, SessionState, settle, shared
from metamq.zk.session.many_nodes import found_nodes, requests
from metamq.zk.session.watches import Watches

__all__ = ["ROOM_MAX", "Session", "SessionState"]

log = logging.getLogger("metamq.zk")

MAX_DATA_BYTES = 1_000_000
"""ZooKeeper cuts the connection on a request beyond 1 MB, including its header."""

NO_SERVER_HINT = "Start one with `metamq up`, or set METAMQ_ZOOKEEPER to yours."
WARN_AFTER_S = 1.0
WARN_AGAIN_S = 10.0
_LOOK_S = 0.05
"""Seconds between checks of the reasons while there is no connection."""


class Session:
    """One session with ZooKeeper after another, for one client and one event loop; made by `Session.open`.

    Several clients may share the session of ZooKeeper. Each has its own watches and ephemeral nodes: close() ends them.

    Call all methods in the loop of `open`. If a call is cancelled, the outcome of its request is unknown. In addition
    to their own errors, all methods raise ConnectionLost, SessionExpired, ClosedError after `close`, and ConfigError
    for an invalid path. Paths are absolute, below the chroot.
    """

    def __init__(
        self, channel: Channel, root: str, security: Security, *, make_chroot: bool = False, is_client: bool = True
    ) -> None:
        """Internal: use `await Session.open(...)`."""
        self.servers = channel.servers
        self.chroot = channel.chroot
        self.security = security
        self.paths = Paths(root)
        self._channel = channel
        self._make_chroot = make_chroot
        self.answers: set[asyncio.Future[Any]] = set()
        """The futures on which the requests wait; for the channel."""
        self._watches = Watches(channel.loop, channel.in_loop, channel.link.forget)
        self._listeners: list[Callable[[SessionState], None]] = []
        self._state_waiters: set[asyncio.Future[None]] = set()
        self._closed: asyncio.Future[None] | None = None
        self.prover: Callable[[], Awaitable[str]] | None = None
        """Returns this client's proof of identity for ZooKeeper; None: only a certificate can be one."""
        channel.sessions[self] = is_client

    @classmethod
    async def open(
        cls,
        servers: str,
        *,
        timeout_ms: int = 10_000,
        connect_timeout_s: float | None = 10.0,
        patient: bool = True,
        root: str = DEFAULT_ROOT,
        make_chroot: bool = False,
        on_state: Callable[[SessionState], None] | None = None,
        security: Security = OFF,
        shared_by: Hashable | None = None,
        room: int = 0,
    ) -> Session:
        """Opens a connected session. `servers` may end in a chroot, "zk1:2181,zk2:2181/chroot".

        The chroot is made only with `make_chroot`. If it is missing otherwise, nothing can be written, and methods that
        make parents raise ConfigError. `timeout_ms` is the wish; `negotiated_timeout_ms` is the server's decision.
        `on_state` is called with each later state, see the method of that name. `shared_by` is the identity of a client
        that shares its session of ZooKeeper with others, and `room` the bytes of the paths of its ephemeral nodes,
        see room_for(). Raises ConfigError for a wrong address or root. Raises ConnectError
        if no server answers in `connect_timeout_s` (None: tries without end), or, unless `patient`, as soon as every
        server has refused.
        """
        if timeout_ms <= 0:
            raise ConfigError(f"the session time-out is {timeout_ms} ms", hint="It is in milliseconds, above 0.")
        Paths(root)  # raises ConfigError
        if shared_by is None:
            channel = Channel(servers, timeout_ms, security)
            channel.link.start()
        else:
            channel = shared(servers, timeout_ms, security, (root, shared_by), room)
        session = cls(channel, root, security, make_chroot=make_chroot)
        session.reserve(room)
        try:
            await session._come_up(connect_timeout_s, patient)
        except BaseException:
            await session.close()
            raise
        if on_state is not None:
            session.on_state(on_state)
        return session

    def twin(self) -> Session:
        """Returns another session on the same channel, for a part that its clients share. It must be closed, too, and
        it does not keep the channel open."""
        return Session(self._channel, self.paths.root, self.security, is_client=False)

    def room_for(self, paths: Iterable[str]) -> int:
        """Returns the bytes that ephemeral nodes with these paths need in ZooKeeper's record of the session's end."""
        return self._channel.room_for(paths)

    def reserve(self, room: int) -> bool:
        """Reserves room for the ephemeral nodes that this client makes. Returns False if it must open another session
        for so many: `open(..., room=room)`."""
        return self._channel.reserve(self, room)

    @property
    def common(self) -> dict[type, Any]:
        """The parts that the clients on the same channel share, by class."""
        return self._channel.common

    @property
    def state(self) -> SessionState:
        """The known state; LOST after `close`."""
        return self._channel.state if self._closed is None else SessionState.LOST

    @property
    def session_id(self) -> int:
        """The id of the present session in ZooKeeper; 0 before the first."""
        return self._channel.session_id

    @property
    def generation(self) -> int:
        """The number of the present session."""
        return self._channel.generation

    @property
    def negotiated_timeout_ms(self) -> int:
        """The session's time-out, as the server decided."""
        return self._channel.negotiated_timeout_ms

    async def _come_up(self, timeout_s: float | None, patient: bool) -> None:
        """Waits for the first connection, and logs the reasons of the wait."""
        loop, attempts = self._channel.loop, self._channel.link.attempts
        began_s = loop.time()
        warn_s = began_s + WARN_AFTER_S
        coming = asyncio.ensure_future(self._first_connection())
        try:
            while not (await asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                now_s = loop.time()
                if timeout_s is not None and now_s > began_s + timeout_s:
                    raise self._unreachable(f"{attempts.reason()}, tried for {timeout_s:g} s")
                if not patient and attempts.all_refused():
                    raise self._unreachable(attempts.reason())
                if now_s > warn_s:
                    warn_s = now_s + WARN_AGAIN_S
                    log.warning("waiting for ZooKeeper at %s: %s. %s", self.servers, attempts.reason(), NO_SERVER_HINT)
            await coming
        finally:
            coming.cancel()

    def _unreachable(self, reason: str) -> ConnectError:
        return ConnectError(f"ZooKeeper at {self.servers}", reason, hint=NO_SERVER_HINT)

    async def _first_connection(self) -> None:
        while True:
            await self.connected()
            try:
                if self._make_chroot:
                    await self.ensure("/")
                else:
                    await self.exists("/")
                return
            except ConnectionLost:
                continue

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Reading

    async def get(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        """The node. `watch` is called once if it changes or is deleted. Raises NoNode, and then leaves no watch."""
        session_id, full = self._open_session_id(), self._full(path)
        with self._watches.leaving(watch, full) as watching:
            data, stat = await self._ask(session_id, path, lambda client: client.get_async(full, watching.watch))
        return node_of(data, stat)

    async def get_or_none(self, path: str, watch: Callable[[], None] | None = None) -> Node | None:
        """The node, or None if it does not exist. `watch` is called once if it changes, is deleted or is created."""
        session_id, full = self._open_session_id(), self._full(path)
        with self._watches.leaving(watch, full) as watching:
            while True:
                try:
                    data, stat = await self._ask(
                        session_id, path, lambda client: client.get_async(full, watching.watch)
                    )
                    return node_of(data, stat)
                except NoNode:
                    if watch is None:
                        return None
                # Only `exists` leaves a watch for a node that does not exist yet.
                if not await self._ask(session_id, path, lambda client: client.exists_async(full, watching.watch)):
                    return None

    async def nodes(self, paths: Sequence[str]) -> list[Node | None]:
        """The results of `get_or_none`, in order, by a request for each hundred. Raises the first path's error."""
        session_id, works = self._open_session_id(), requests([*map(self._full, paths)])
        found = await asyncio.gather(*(self._ask(session_id, paths[0], work) for work in works))
        return found_nodes(found, self.servers, paths)

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> Stat | None:
        """The node's stat, or None. `watch` is called once if the node changes, is deleted or is created."""
        session_id, full = self._open_session_id(), self._full(path)
        with self._watches.leaving(watch, full) as watching:
            stat = await self._ask(session_id, path, lambda client: client.exists_async(full, watching.watch))
        return stat_of(stat) if stat is not None else None

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        """The children's names, unordered. `watch` is called once if one is added or removed, or the node is deleted.

        Raises NoNode, and then leaves no watch.
        """
        return (await self.listing(path, watch)).names

    async def listing(self, path: str, watch: Callable[[], None] | None = None) -> Listing:
        """The result of `children`, with the version of the list."""
        session_id, full = self._open_session_id(), self._full(path)
        with self._watches.leaving(watch, full) as watching:
            names, stat = await self._ask(
                session_id, path, lambda client: client.get_children_async(full, watching.watch, include_data=True)
            )
        return Listing(names, stat.cversion)

    async def children_or_none(self, path: str, watch: Callable[[], None] | None = None) -> list[str] | None:
        """Returns the result of `children`, or None if the node does not exist; `watch` then waits for its creation."""
        found = await self.listing_or_none(path, watch)
        return None if found is None else found.names

    async def listing_or_none(self, path: str, watch: Callable[[], None] | None = None) -> Listing | None:
        """Returns the result of `children_or_none`, with the version of the list."""
        while True:
            try:
                return await self.listing(path, watch)
            except NoNode:
                if await self.exists(path, watch) is None:
                    return None

    async def names_at(self, full: str) -> list[str] | None:
        """The children's names of any node, even outside of the chroot; None if the node does not exist."""
        try:
            names: list[str] = await self._ask(
                self._open_session_id(), full, lambda client: client.get_children_async(full)
            )
        except NoNode:
            return None
        return names

    async def sync(self, *, is_urgent: bool = False) -> None:
        """Makes a round trip to ZooKeeper's leader, which saw the session alive. Later reads are not older.

        `is_urgent`: it does not wait behind the requests of other clients.
        """
        session_id = self._open_session_id()
        await self._channel.ask(self, session_id, "/", lambda client: client.sync_async("/"), is_urgent=is_urgent)

    # Writing

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, makepath: bool = False) -> Node:
        """Creates a node and returns it. `makepath` also creates missing parents, as persistent nodes.

        Raises NodeExists, NoNode if the parent is missing, MessageTooLarge.
        """
        await self._prove([path])
        session_id, full = self._open_session_id(), self._full(path)
        _check_data(path, data)
        while True:
            acl = (await self._acls([path]))[path]
            work = functools.partial(create_node, full, data, acl, ephemeral)
            try:
                with self._noting([Create(path, data, ephemeral)]):
                    _, stat = await self._ask(session_id, path, work)
                return node_of(data, stat)
            except NoNode:
                parent = _parent(full)
                if not makepath or parent is None:
                    raise
                await self._ensure(session_id, parent)

    async def _acls(self, paths: Iterable[str]) -> dict[str, Acl | None]:
        """Returns the access list of each new node; None is kazoo's default: each client may do everything."""
        if self.security.zookeeper is None:
            return dict.fromkeys(paths)
        found: dict[str, Acl | None] = {}
        of_roots: dict[str, Acl] = {}
        for path in paths:
            root = shared_root(self.paths, path)
            if root is None:
                found[path] = acl_of(self.paths, path)
                continue
            if root not in of_roots:
                of_roots[root] = await self._acl_in(root)
            found[path] = of_roots[root]
        return found

    async def _acl_in(self, root: str) -> Acl:
        """Returns the access list of new nodes in this group or sink: that of its first node."""
        try:
            acl = await self.acl(root)
        except (NoNode, NotAuthorized):
            return acl_of(self.paths, root, is_owned=self._is_known)
        if self._is_known and is_open(acl) and root not in self._channel.warned:
            self._channel.warned.add(root)
            log.warning(
                "each client of ZooKeeper may change %s: it was made without an identity. `metamq group owner` gives a "
                "group an owner", root,
            )  # fmt: skip
        return acl

    @property
    def _is_known(self) -> bool:
        """True if ZooKeeper knows the identity of this client."""
        return self.security.has_certificate or self._channel.is_proved

    async def _prove(self, paths: Iterable[str]) -> None:
        """Proves this client's identity to ZooKeeper before its first change of a group. Raises ConnectError."""
        if self.prover is None or self._channel.is_proved or not any(shared_root(self.paths, path) for path in paths):
            return
        proof = await self.prover()
        if proof:  # kazoo repeats it on each new connection
            await self._ask(self._open_session_id(), "", lambda client: client.add_auth_async("digest", proof))
            self._channel.is_proved = True

    async def acl(self, path: str) -> Acl:
        """Returns the access list of a node. Raises NoNode, NotAuthorized."""
        full = self._full(path)
        found, _stat = await self._ask(self._open_session_id(), path, lambda client: client.get_acls_async(full))
        return list(found)

    async def set_acl(self, path: str, acl: Acl) -> None:
        """Gives a node this access list. Raises NoNode, NotAuthorized."""
        await self._prove([path])
        full = self._full(path)
        await self._ask(self._open_session_id(), path, lambda client: client.set_acls_async(full, acl))

    async def set(self, path: str, data: bytes, version: int) -> Node:
        """Writes a node that has `version` (ANY_VERSION: any). Returns the node with its new version.

        Raises BadVersion, NoNode, MessageTooLarge.
        """
        await self._prove([path])
        session_id, full = self._open_session_id(), self._full(path)
        _check_data(path, data)
        with self._noting([SetData(path, data, version)]):
            stat = await self._ask(session_id, path, lambda client: client.set_async(full, data, version))
        return node_of(data, stat)

    async def delete(self, path: str, version: int) -> None:
        """Deletes a node that has `version` (ANY_VERSION: any). Raises BadVersion, NoNode, NotEmpty."""
        await self._prove([path])
        session_id, full = self._open_session_id(), self._full(path)
        with self._noting([Delete(path, version)]):
            await self._ask(session_id, path, lambda client: client.delete_async(full, version))

    async def ensure(self, path: str) -> None:
        """Creates the node and its parents if they are missing, as persistent nodes without data."""
        await self._ensure(self._open_session_id(), self._full(path))

    async def multi(self, operations: Sequence[Op]) -> list[int | None]:
        """Carries out all operations or none. Returns the node's new version for each Create and SetData, else None.

        Raises the error of the first operation that fails (NodeExists, NoNode, BadVersion, NotEmpty), with its place in
        `.index`; MessageTooLarge.
        """
        if not operations:
            return []
        await self._prove(operation.path for operation in operations)
        session_id = self._open_session_id()
        full = [self._full(operation.path) for operation in operations]
        for operation in operations:
            if isinstance(operation, Create | SetData):
                _check_data(operation.path, operation.data)
        acls = await self._acls(operation.path for operation in operations if isinstance(operation, Create))
        work = functools.partial(commit, list(zip(operations, full, strict=True)), acls)
        with self._noting(operations):
            results: list[Any] = await self._ask(session_id, operations[0].path, work)
            failure = failure_of(results)
            if failure is not None:
                index, error = failure
                raise error_of(error, self.servers, operations[index].path, index)
        return [version_after(operation, result) for operation, result in zip(operations, results, strict=True)]

    def _noting(self, operations: Sequence[Op]) -> AbstractContextManager[None]:
        ephemerals = self._channel.ephemerals
        return contextlib.nullcontext() if ephemerals is None else ephemerals.writing(self, operations)

    def made(self, path: str, node: Node) -> bool:
        """True if this client made the ephemeral node: not another client, even if it shares the session."""
        ephemerals = self._channel.ephemerals
        is_ours = node.ephemeral_owner == self.session_id
        return is_ours and (ephemerals is None or ephemerals.made_by(self, path, node.data))

    async def remove_of(self, client: Session, path: str) -> None:
        """Deletes a node if a former client on the same channel made it. Raises ConnectionLost."""
        node = await self.get_or_none(path)
        if node is not None and client.made(path, node):
            with contextlib.suppress(BadVersion, NoNode):
                await self.delete(path, node.version)
        elif self._channel.ephemerals is not None:
            self._channel.ephemerals.forget(client, path)

    # State

    async def connected(self) -> None:
        """Waits until the session is CONNECTED. Only the caller bounds the wait. Raises ClosedError."""
        while True:
            self._check_open()
            # The link knows first. If the loop's state is older, the event is on its way.
            if self.state is SessionState.CONNECTED and self._channel.link.live_session_id == self.session_id:
                return
            waiter = self._channel.loop.create_future()
            self._state_waiters.add(waiter)
            try:
                await waiter
            finally:
                self._state_waiters.discard(waiter)

    def on_state(self, callback: Callable[[SessionState], None]) -> Callable[[], None]:
        """Calls `callback` with each later state, in the loop; the returned function ends this. `close` is no state."""
        self._listeners.append(callback)

        def remove() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return remove

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closed is not None

    async def close(self) -> None:
        """Ends the session. Its ephemeral nodes are removed: at once if the server answers, else later.

        Without an answer, ZooKeeper removes them when the session times out. If the session is shared, this process
        removes them when the server answers again. Takes less than a second. Requests in flight fail, watches are
        called. A second call waits for the first.
        """
        if self._closed is not None:
            await asyncio.wait({self._closed})
            return
        closed = self.end()
        try:
            await self._channel.leave(self)
        finally:
            settle(closed)

    def end(self) -> asyncio.Future[None]:
        """Refuses and fails all requests; for the channel. The future is for the end of close()."""
        self._closed = self._channel.loop.create_future()
        for answer in list(self.answers):
            if not answer.done():
                answer.set_exception(self._channel.lost("the session was closed before an answer came"))
        self._watches.leave_kazoo()
        self._wake()
        return self._closed

    # Inside

    async def _ensure(self, session_id: int, full: str) -> None:
        # Any server answers `exists` at once; a `create` that fails goes through the leader's log.
        if await self._ask(session_id, full, lambda client: client.exists_async(full)) is not None:
            return
        if not self._make_chroot and f"{self.chroot}/".startswith(f"{full}/"):
            raise ConfigError(
                f"there is no {self.chroot} in ZooKeeper at {self.servers}",
                hint="The first broker makes it. Give the chroot that the brokers have in their address.",
            )
        try:
            path = full.removeprefix(self.chroot) or "/"
            acl = (await self._acls([path]))[path]
            await self._ask(session_id, full, lambda client: client.create_async(full, b"", acl))
        except NodeExists:
            return
        except NoNode:
            parent = _parent(full)
            if parent is None:
                raise
            await self._ensure(session_id, parent)
            await self._ensure(session_id, full)

    async def _ask(self, session_id: int, path: str, call: Callable[[Any], Any]) -> Any:
        return await self._channel.ask(self, session_id, path, call)

    def _open_session_id(self) -> int:
        self._check_open()
        return self.session_id

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError("ZooKeeper session")

    def _full(self, path: str) -> str:
        if path == "/":
            return self.chroot or "/"
        if not path.startswith("/") or path.endswith("/") or "//" in path:
            raise ConfigError(f"{path!r} is not a znode path", hint='Write it like "/meta/brokers".')
        return self.chroot + path

    def state_changed(self, state: SessionState) -> None:
        """Takes a state of the channel."""
        self._wake()
        for listener in list(self._listeners):
            self._channel.loop.call_soon(listener, state)

    def _wake(self) -> None:
        for waiter in list(self._state_waiters):
            settle(waiter)
        if self.state is not SessionState.CONNECTED:
            self._watches.fire_all()


def _parent(full: str) -> str | None:
    return full.rpartition("/")[0] or None


def _check_data(path: str, data: bytes) -> None:
    if len(data) > MAX_DATA_BYTES:
        raise MessageTooLarge(
            f"the data of znode {path}", len(data), MAX_DATA_BYTES, hint="ZooKeeper holds small records only."
        )
