"""The session with ZooKeeper: every operation is a coroutine, every answer a plain value, every wait bounded.

Theory of operation. kazoo runs three threads (`metamq.zk.session.link`). This class belongs to one event loop and never
blocks it. A request goes to kazoo at once, and its answer comes back by `call_soon_threadsafe`. This class never
retries: kazoo's retry repeats a write in a later session, where it may undo another client's change. A caller that gets
ConnectionLost with the outcome "unknown" must read before it decides.

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
import enum
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from kazoo.protocol.states import KazooState

from metamq.errors import ClosedError, ConfigError, ConnectError, MessageTooLarge, NotAuthorized
from metamq.security.tls import OFF, Security
from metamq.zk.errors import ConnectionLost, NodeExists, NoNode
from metamq.zk.nodes import Create, Listing, Node, Op, SetData, Stat
from metamq.zk.paths import DEFAULT_ROOT, Paths
from metamq.zk.servers import parse_servers
from metamq.zk.session.acls import Acl, acl_of, is_open, shared_root
from metamq.zk.session.answers import commit, create_node, error_of, failure_of, node_of, stat_of, version_after
from metamq.zk.session.link import Link
from metamq.zk.session.many_nodes import found_nodes, requests
from metamq.zk.session.refused import is_refused_alone
from metamq.zk.session.watches import Watches

log = logging.getLogger("metamq.zk")

MAX_DATA_BYTES = 1_000_000
"""ZooKeeper cuts the connection on a request beyond 1 MB, including its header."""

# kazoo wakes its thread by a byte in a socket pair, which holds about 270 bytes: with more, the loop would block.
_MAX_IN_FLIGHT = 100
_CLOSE_GRACE_S = 0.4
_CLOSE_LIMIT_S = 0.5
NO_SERVER_HINT = "Start one with `metamq up`, or set METAMQ_ZOOKEEPER to yours."
WARN_AFTER_S = 1.0
WARN_AGAIN_S = 10.0
_LOOK_S = 0.05
"""Seconds between checks of the reasons while there is no connection."""


class SessionState(enum.Enum):
    """The known state of the session; see the module."""

    CONNECTED = KazooState.CONNECTED
    SUSPENDED = KazooState.SUSPENDED
    LOST = KazooState.LOST


class Session:
    """One session with ZooKeeper after another, for one event loop; made by `Session.open`.

    Call all methods in the loop of `open`. If a call is cancelled, the outcome of its request is unknown. In addition
    to their own errors, all methods raise ConnectionLost, SessionExpired, ClosedError after `close`, and ConfigError
    for an invalid path. Paths are absolute, below the chroot.
    """

    def __init__(self, servers: str, *, timeout_ms: int, root: str, make_chroot: bool, security: Security) -> None:
        """Internal: use `await Session.open(...)`."""
        self.servers = servers
        self.security = security
        self.paths = Paths(root)
        self.state = SessionState.LOST
        self.session_id = 0
        self.negotiated_timeout_ms = timeout_ms
        self.generation = 0
        self._hosts, self.chroot = parse_servers(servers)
        self._make_chroot = make_chroot
        self._loop = asyncio.get_running_loop()
        self._link = Link(self._hosts, timeout_ms, self._state_changed_in_thread, security.zookeeper)
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._answers: set[asyncio.Future[Any]] = set()
        self._watches = Watches(self._loop, self._in_loop)
        self._listeners: list[Callable[[SessionState], None]] = []
        self._state_waiters: set[asyncio.Future[None]] = set()
        self._closed: asyncio.Future[None] | None = None
        self._refused: asyncio.Task[None] | None = None
        self.prover: Callable[[], Awaitable[str]] | None = None
        """Returns this client's proof of identity for ZooKeeper; None: only a certificate can be one."""
        self._is_proved = False
        self._warned: set[str] = set()  # groups and sinks that are open, and for which it has warned

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
    ) -> Session:
        """Opens a connected session. `servers` may end in a chroot, "zk1:2181,zk2:2181/chroot".

        The chroot is made only with `make_chroot`. If it is missing otherwise, nothing can be written, and methods that
        make parents raise ConfigError. `timeout_ms` is the wish; `negotiated_timeout_ms` is the server's decision.
        `on_state` is called with each later state, see the method of that name. Raises ConfigError for a wrong address
        or root. Raises ConnectError if no server answers in `connect_timeout_s` (None: tries without end), or, unless
        `patient`, as soon as every server has refused.
        """
        if timeout_ms <= 0:
            raise ConfigError(f"the session time-out is {timeout_ms} ms", hint="It is in milliseconds, above 0.")
        session = cls(servers, timeout_ms=timeout_ms, root=root, make_chroot=make_chroot, security=security)
        session._link.start()
        try:
            await session._come_up(connect_timeout_s, patient)
        except BaseException:
            await session.close()
            raise
        if on_state is not None:
            session.on_state(on_state)
        return session

    async def _come_up(self, timeout_s: float | None, patient: bool) -> None:
        """Waits for the first connection, and logs the reasons of the wait."""
        began_s = self._loop.time()
        warn_s = began_s + WARN_AFTER_S
        attempts = self._link.attempts
        coming = asyncio.ensure_future(self._first_connection())
        try:
            while not (await asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                now_s = self._loop.time()
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
        with self._watches.leaving(watch) as watching:
            data, stat = await self._ask(session_id, path, lambda client: client.get_async(full, watching.watch))
        return node_of(data, stat)

    async def get_or_none(self, path: str, watch: Callable[[], None] | None = None) -> Node | None:
        """The node, or None if it does not exist. `watch` is called once if it changes, is deleted or is created."""
        session_id, full = self._open_session_id(), self._full(path)
        with self._watches.leaving(watch) as watching:
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
        with self._watches.leaving(watch) as watching:
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
        with self._watches.leaving(watch) as watching:
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

    async def sync(self) -> None:
        """Makes a round trip to ZooKeeper's leader, which saw the session alive. Later reads are not older."""
        await self._ask(self._open_session_id(), "/", lambda client: client.sync_async("/"))

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
        if self._is_known and is_open(acl) and root not in self._warned:
            self._warned.add(root)
            log.warning(
                "each client of ZooKeeper may change %s: it was made without an identity. `metamq group owner` gives a "
                "group an owner", root,
            )  # fmt: skip
        return acl

    @property
    def _is_known(self) -> bool:
        """True if ZooKeeper knows the identity of this client."""
        return self.security.has_certificate or self._is_proved

    async def _prove(self, paths: Iterable[str]) -> None:
        """Proves this client's identity to ZooKeeper before its first change of a group. Raises ConnectError."""
        if self.prover is None or self._is_proved or not any(shared_root(self.paths, path) for path in paths):
            return
        proof = await self.prover()
        if proof:  # kazoo repeats it on each new connection
            await self._ask(self._open_session_id(), "", lambda client: client.add_auth_async("digest", proof))
            self._is_proved = True

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
        stat = await self._ask(session_id, path, lambda client: client.set_async(full, data, version))
        return node_of(data, stat)

    async def delete(self, path: str, version: int) -> None:
        """Deletes a node that has `version` (ANY_VERSION: any). Raises BadVersion, NoNode, NotEmpty."""
        await self._prove([path])
        session_id, full = self._open_session_id(), self._full(path)
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
        results: list[Any] = await self._ask(session_id, operations[0].path, work)
        failure = failure_of(results)
        if failure is not None:
            index, error = failure
            raise error_of(error, self.servers, operations[index].path, index)
        return [version_after(operation, result) for operation, result in zip(operations, results, strict=True)]

    # State

    async def connected(self) -> None:
        """Waits until the session is CONNECTED. Only the caller bounds the wait. Raises ClosedError."""
        while True:
            self._check_open()
            # The link knows first. If the loop's state is older, the event is on its way.
            if self.state is SessionState.CONNECTED and self._link.live_session_id == self.session_id:
                return
            waiter = self._loop.create_future()
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
        """Ends the session. Its ephemeral nodes are removed: at once if the server answers, else when it times out.

        Takes less than a second. Requests in flight fail, watches are called. A second call waits for the first.
        """
        if self._closed is not None:
            await asyncio.wait({self._closed})
            return
        self._closed = stopped = self._loop.create_future()
        self.state = SessionState.LOST
        if self._refused is not None:
            self._refused.cancel()
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(self._lost("the session was closed before an answer came"))
        self._wake()
        # A request that waits for its turn gets it, is refused, and passes the turn on.
        self._slots.release()
        self._link.stop(lambda: self._in_loop(_settle, stopped, None))
        try:
            await asyncio.wait({stopped}, timeout=_CLOSE_GRACE_S)
            if not stopped.done():
                self._link.interrupt()
                await asyncio.wait({stopped}, timeout=_CLOSE_LIMIT_S)
        except asyncio.CancelledError:
            self._link.interrupt()
            raise
        if stopped.done():
            self._link.join()
        else:
            log.warning("the connection to ZooKeeper at %s is still closing in the background", self.servers)
            stopped.set_result(None)

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
        """Passes one request of session `session_id` to kazoo, and waits for its answer."""
        await self._slots.acquire()
        answer = self._loop.create_future()
        try:
            result = self._link.submit(session_id, call) if self._closed is None else None
        except BaseException:
            self._slots.release()
            raise
        if result is None:
            self._slots.release()
            # The event of the loss is on its way. Without this pause, a caller that retries would delay it.
            await asyncio.sleep(0)
            raise self._lost("it was lost, nothing was sent", outcome="not_done")
        self._answers.add(answer)
        result.rawlink(lambda finished: self._in_loop(self._finish, answer, finished, path))
        timer = self._loop.call_later(self._limit_s(), self._expire, answer, result)
        try:
            return await answer
        finally:
            timer.cancel()
            self._answers.discard(answer)

    def _finish(self, answer: asyncio.Future[Any], result: Any, path: str) -> None:
        # Only here, not when the caller leaves: until now the request was in kazoo's queue.
        self._slots.release()
        if answer.done():
            return
        if result.exception is not None:
            answer.set_exception(error_of(result.exception, self.servers, path))
        else:
            answer.set_result(result.value)

    def _expire(self, answer: asyncio.Future[Any], result: Any) -> None:
        # A loop that was blocked for long finds both the due timer and the answer: the answer counts.
        if answer.done() or result.ready():
            return
        answer.set_exception(self._lost(f"no answer within {self._limit_s():.1f} s"))
        self._link.drop()

    def _open_session_id(self) -> int:
        self._check_open()
        return self.session_id

    def _limit_s(self) -> float:
        return self.negotiated_timeout_ms / 1000 * 2 / 3

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError("ZooKeeper session")

    def _full(self, path: str) -> str:
        if path == "/":
            return self.chroot or "/"
        if not path.startswith("/") or path.endswith("/") or "//" in path:
            raise ConfigError(f"{path!r} is not a znode path", hint='Write it like "/meta/brokers".')
        return self.chroot + path

    def _lost(self, reason: str, *, outcome: Any = "unknown") -> ConnectionLost:
        return ConnectionLost(self.servers, reason, outcome=outcome)

    def _in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("an answer of ZooKeeper came after the event loop was closed")

    def _state_changed_in_thread(self, state: str, session_id: int, timeout_ms: int) -> None:
        self._in_loop(self._state_changed, SessionState(state), session_id, timeout_ms)

    def _state_changed(self, state: SessionState, session_id: int, timeout_ms: int) -> None:
        if self._closed is not None:
            return
        self.state = state
        if state is SessionState.CONNECTED:
            self.negotiated_timeout_ms = timeout_ms
            if session_id != self.session_id:
                self.session_id = session_id
                self.generation += 1
            log.info("ZooKeeper at %s: connected, session 0x%x", self.servers, session_id)
        elif state is SessionState.SUSPENDED:
            log.warning("ZooKeeper at %s: connection lost, trying again", self.servers)
        else:
            log.warning("ZooKeeper at %s: the session expired, starting a new one", self.servers)
        self._wake()
        if state is SessionState.SUSPENDED and (self._refused is None or self._refused.done()):
            self._refused = asyncio.ensure_future(self._leave_refusing_servers())
        for listener in list(self._listeners):
            self._loop.call_soon(listener, state)

    async def _leave_refusing_servers(self) -> None:
        attempts, tls = self._link.attempts, self.security.zookeeper
        if await is_refused_alone(attempts, lambda: self.state is SessionState.SUSPENDED, self._hosts, tls):
            log.warning(
                "ZooKeeper at %s gives sessions, but refuses this one permanently: it was replaced, or restored from a "
                "copy. Beginning a new session", self.servers,
            )  # fmt: skip
            self._link.give_up_session()

    def _wake(self) -> None:
        for waiter in list(self._state_waiters):
            _settle(waiter, None)
        if self.state is not SessionState.CONNECTED:
            self._watches.fire_all()


def _parent(full: str) -> str | None:
    return full.rpartition("/")[0] or None


def _check_data(path: str, data: bytes) -> None:
    if len(data) > MAX_DATA_BYTES:
        raise MessageTooLarge(
            f"the data of znode {path}", len(data), MAX_DATA_BYTES, hint="ZooKeeper holds small records only."
        )


def _settle(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)
