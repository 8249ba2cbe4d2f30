"""The connection to ZooKeeper behind sessions: its requests, its state, its end.

Clients of one loop that have the same identity share a channel, and so one session of ZooKeeper (`shared`). Each of
them has a `metamq.zk.session.session.Session` of its own on the channel, and the channel ends with its last client. A
client that is closed before that leaves no ephemeral nodes: the channel deletes those that the client may have made,
as soon as ZooKeeper answers.

ZooKeeper writes the paths of all ephemeral nodes of a session into one record when the session ends, and a record above
`jute.maxbuffer`, 1 MB by default, stops an ensemble (ZOOKEEPER-4306). So a client that may make many nodes reserves
room for their paths, and a channel takes a limited number of clients and bytes. The next client begins another channel.
A client that reserves more than that is alone on its channel. The partitions that topics get later do not count.

A fork's child has no channel of its parent. The tasks of a channel are no part of the trace of one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from kazoo.protocol.states import KazooState

from metamq.errors import MetamqError
from metamq.zk.errors import ConnectionLost
from metamq.zk.servers import parse_servers
from metamq.zk.session.answers import error_of
from metamq.zk.session.ephemerals import Ephemerals
from metamq.zk.session.link import Link
from metamq.zk.session.refused import is_refused_alone

if TYPE_CHECKING:
    from metamq.security.tls import Security
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.zk")

CLIENTS_MAX = 250
ROOM_MAX = 500_000
"""The clients of a channel, and the bytes of the paths of all their ephemeral nodes."""
_LENGTH_BYTES = 4
# kazoo wakes its thread by a byte in a socket pair, which holds about 270 bytes: with more, the loop would block.
_MAX_IN_FLIGHT = 100
_CLOSE_GRACE_S = 0.4
_CLOSE_LIMIT_S = 0.5

Answers = set[asyncio.Future[Any]]
"""The futures on which the requests of one client wait."""


class SessionState(enum.Enum):
    """The known state of the session; see metamq.zk.session.session."""

    CONNECTED = KazooState.CONNECTED
    SUSPENDED = KazooState.SUSPENDED
    LOST = KazooState.LOST


class _Turns:
    """The limit of requests in flight. Others wait for their turns, in order."""

    def __init__(self) -> None:
        self._free = _MAX_IN_FLIGHT
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, answers: Answers) -> None:
        """Waits for a turn. The wait is one of a client's `answers`: it fails when the client is closed."""
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        answers.add(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give()
            raise
        finally:
            answers.discard(turn)

    def take_now(self) -> None:
        """Takes a turn beyond the limit."""
        self._free -= 1

    def give(self) -> None:
        """Passes a turn on."""
        self._free += 1
        while self._free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


class Channel:
    """One session with ZooKeeper after another, for the clients of one loop. Use it in that loop.

    `session_id`, `generation`, `negotiated_timeout_ms` and `state` are those of the present session.
    """

    def __init__(self, servers: str, timeout_ms: int, security: Security, *, is_shared: bool = False) -> None:
        self.servers = servers
        self.hosts, self.chroot = parse_servers(servers)
        self.state = SessionState.LOST
        self.session_id = 0
        self.negotiated_timeout_ms = timeout_ms
        self.generation = 0
        self.is_proved = False
        """True if a client has proved the identity of all its clients to ZooKeeper."""
        self.ephemerals = Ephemerals() if is_shared else None
        self.sessions: dict[Session, bool] = {}
        """The sessions on this channel; True for those of clients, which keep it open."""
        self._rooms: dict[Session, int] = {}
        """The bytes that clients have reserved for the paths of their nodes."""
        self.warned: set[str] = set()
        """The groups and sinks that are open, and for which a client has warned."""
        self.common: dict[type, Any] = {}
        """The parts that the clients share, by class."""
        self._tls = security.zookeeper
        self.loop = asyncio.get_running_loop()
        self.link = Link(self.hosts, timeout_ms, self._state_changed_in_thread, self._tls)
        self._turns = _Turns()
        self._is_closed = False
        self._refused: asyncio.Task[None] | None = None
        self._clearing: set[asyncio.Task[None]] = set()

    @property
    def clients(self) -> int:
        """The number of clients."""
        return sum(self.sessions.values())

    def takes(self, room: int) -> bool:
        """True if another client may join, which needs `room`; see room_for()."""
        present = 0 if self.ephemerals is None else self.room_for(self.ephemerals.paths())
        room += max(present, sum(self._rooms.values()))
        return not self._is_closed and self.clients < CLIENTS_MAX and room < ROOM_MAX

    def reserve(self, session: Session, room: int) -> bool:
        """Reserves room for a client's nodes. Returns False if it needs another channel for them."""
        self._rooms.pop(session, None)
        if self.clients > 1 and sum(self._rooms.values()) + room >= ROOM_MAX:
            return False
        self._rooms[session] = room
        return True

    def room_for(self, paths: Iterable[str]) -> int:
        """Returns the bytes of these paths, with their lengths, in ZooKeeper's record of the session's end."""
        return sum(len((self.chroot + path).encode()) + _LENGTH_BYTES for path in paths)

    # Requests

    async def ask(
        self, client: Session, session_id: int, path: str, call: Callable[[Any], Any], *, is_urgent: bool = False
    ) -> Any:
        """Passes one request of session `session_id` to kazoo, and waits for its answer.

        `is_urgent`: it does not wait for other requests. Raises ConnectionLost, and the errors of ZooKeeper.
        """
        if is_urgent:
            self._turns.take_now()
        else:
            await self._turns.take(client.answers)
        answer = self.loop.create_future()
        try:
            result = self.link.submit(session_id, call) if not client.closed else None
        except BaseException:
            self._turns.give()
            raise
        if result is None:
            self._turns.give()
            # The event of the loss is on its way. Without this pause, a caller that retries would delay it.
            await asyncio.sleep(0)
            raise self.lost("it was lost, nothing was sent", outcome="not_done")
        client.answers.add(answer)
        result.rawlink(lambda finished: self.in_loop(self._finish, answer, finished, path))
        timer = self.loop.call_later(self._limit_s(), self._expire, answer, result)
        try:
            return await answer
        finally:
            timer.cancel()
            client.answers.discard(answer)

    def _finish(self, answer: asyncio.Future[Any], result: Any, path: str) -> None:
        # Only here, not when the caller leaves: until now the request was in kazoo's queue.
        self._turns.give()
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
        answer.set_exception(self.lost(f"no answer within {self._limit_s():.1f} s"))
        self.link.drop()

    def _limit_s(self) -> float:
        return self.negotiated_timeout_ms / 1000 * 2 / 3

    def lost(self, reason: str, *, outcome: Any = "unknown") -> ConnectionLost:
        """Returns the error of a request without an answer."""
        return ConnectionLost(self.servers, reason, outcome=outcome)

    def in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Calls back in the loop. Thread-safe."""
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("an answer of ZooKeeper came after the event loop was closed")

    # State

    def _state_changed_in_thread(self, state: str, session_id: int, timeout_ms: int) -> None:
        self.in_loop(self._state_changed, SessionState(state), session_id, timeout_ms)

    def _state_changed(self, state: SessionState, session_id: int, timeout_ms: int) -> None:
        if self._is_closed:
            return
        self.state = state
        if state is SessionState.CONNECTED:
            self.negotiated_timeout_ms = timeout_ms
            if session_id != self.session_id:
                self.session_id = session_id
                self.generation += 1
                if self.ephemerals is not None:
                    self.ephemerals.clear()
            log.info("ZooKeeper at %s: connected, session 0x%x", self.servers, session_id)
        elif state is SessionState.SUSPENDED:
            log.warning("ZooKeeper at %s: connection lost, trying again", self.servers)
        else:
            log.warning("ZooKeeper at %s: the session expired, starting a new one", self.servers)
        if state is SessionState.SUSPENDED and (self._refused is None or self._refused.done()):
            self._refused = Context().run(asyncio.ensure_future, self._leave_refusing_servers())
        for session in list(self.sessions):
            session.state_changed(state)

    async def _leave_refusing_servers(self) -> None:
        attempts = self.link.attempts
        if await is_refused_alone(attempts, lambda: self.state is SessionState.SUSPENDED, self.hosts, self._tls):
            log.warning(
                "ZooKeeper at %s gives sessions, but refuses this one permanently: it was replaced, or restored from a "
                "copy. Beginning a new session", self.servers,
            )  # fmt: skip
            self.link.give_up_session()

    # The end

    async def leave(self, session: Session) -> None:
        """Ends one client: deletes its ephemeral nodes, or ends the session if it is the last client.

        Takes less than a second. Without an answer of ZooKeeper the nodes are deleted later.
        """
        is_client = self.sessions.pop(session, False)
        self._rooms.pop(session, None)
        if is_client and not self.clients:
            await self._close()
        elif is_client and self.ephemerals is not None and self.ephemerals.of(session):
            clearing = Context().run(asyncio.ensure_future, self._clear(session, self.ephemerals))
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
            await asyncio.wait({clearing}, timeout=_CLOSE_GRACE_S)

    async def _clear(self, client: Session, ephemerals: Ephemerals) -> None:
        session = client.twin()
        try:
            while paths := ephemerals.of(client):
                with contextlib.suppress(ConnectionLost):
                    await session.connected()
                    await session.sync()  # a server that lags behind may not know the nodes yet
                    for path in paths:  # the last one first: a member's node is there while it owns partitions
                        await session.remove_of(client, path)
        except MetamqError as error:
            log.warning("nodes of a closed client stay until the session with ZooKeeper ends: %s", error)
        finally:
            await session.close()

    async def _close(self) -> None:
        self._is_closed = True
        _forget(self)
        self.state = SessionState.LOST
        for task in (self._refused, *self._clearing):
            if task is not None:
                task.cancel()
        for session in list(self.sessions):
            settle(session.end())
        stopped = self.loop.create_future()
        self.link.stop(lambda: self.in_loop(settle, stopped))
        try:
            await asyncio.wait({stopped}, timeout=_CLOSE_GRACE_S)
            if not stopped.done():
                self.link.interrupt()
                await asyncio.wait({stopped}, timeout=_CLOSE_LIMIT_S)
        except asyncio.CancelledError:
            self.link.interrupt()
            raise
        if stopped.done():
            self.link.join()
        else:
            log.warning("the connection to ZooKeeper at %s is still closing in the background", self.servers)


_Key = tuple[asyncio.AbstractEventLoop, str, int, Hashable]


class _Shared(threading.local):
    """The channels of this thread's loops: no other thread changes them."""

    def __init__(self) -> None:
        self.channels: dict[_Key, list[Channel]] = {}


_shared = _Shared()


def shared(servers: str, timeout_ms: int, security: Security, identity: Hashable, room: int) -> Channel:
    """Returns a started channel that this loop's clients of the same address, time-out and identity share. It has this
    room for the ephemeral nodes of one more client, in bytes.

    Raises ConfigError for a wrong address, TooManyThreads.
    """
    channels = _shared.channels
    for key in [key for key in channels if key[0].is_closed()]:  # before its clients
        del channels[key]
    key = (asyncio.get_running_loop(), servers, timeout_ms, identity)
    for channel in channels.get(key, ()):
        if channel.takes(room):
            return channel
    channel = Channel(servers, timeout_ms, security, is_shared=True)
    channel.link.start()
    channels.setdefault(key, []).append(channel)
    return channel


def _forget(channel: Channel) -> None:
    for key, some in list(_shared.channels.items()):
        if channel in some:
            some.remove(channel)
            if not some:
                del _shared.channels[key]


def _after_fork_in_child() -> None:
    _shared.channels.clear()


def settle(future: asyncio.Future[None]) -> None:
    """Ends a wait, unless it is over."""
    if not future.done():
        future.set_result(None)


os.register_at_fork(after_in_child=_after_fork_in_child)
