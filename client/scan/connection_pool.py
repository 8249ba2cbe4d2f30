"""Connections, each for one reader at a time, and with its fetch session at the broker. The next reader reuses them.

Spark keeps its Python workers for many tasks, and a process may scan many times. One reader at a time has a pooled
connection, and uses it in its own thread. The pool itself is for any thread.
"""

from __future__ import annotations

import atexit
import os
import reprlib
import threading
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.transport import KEPT_BYTES, another_answered
from metamq.errors import ProtocolError
from metamq.security.tls import client_security
from metamq.wire import status
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import Command, Get, GetPartition, GetResult, OffsetsEntry
from metamq.wire.headers import unpack_list
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig
    from metamq.zk.partitions import TopicPartition

ANSWER_LATE_S = 10.0
IDLE_MAX = 16
"""The most idle connections that are kept, to all brokers together. Each keeps the memory of its last answers."""


class ReadPosition(NamedTuple):
    """The place in a partition from which to read on. `epoch` is that of the message before; -1: unknown.

    `in_place`: a broker on this machine may send the place in a file instead of the data.
    """

    tp: TopicPartition
    topic_id: str
    offset: int
    epoch: int
    in_place: bool = False


class ConnectionKey(NamedTuple):
    """The broker of a connection."""

    broker_id: int
    host: str
    port: int
    security: SecurityConfig


class PooledConnection:
    """One connection: ask(), then answer(), and so on. All calls are about one partition until close_partition()."""

    def __init__(self, connection: BlockingConnection, key: ConnectionKey) -> None:
        self.key = key
        self.answer_is_due = False
        """True while an answer is outstanding."""
        self.has_files = True
        """False if the broker's files cannot be read here."""
        self.buffers = BufferPool(KEPT_BYTES)
        """The memory for data that is read from files."""
        self.connection = connection
        self._handles = count(1)
        self._handle = 0
        """Handle of the open partition; 0: none."""
        self._in_place = False
        """True if the partition was opened so that the broker may send the place in a file."""
        self._closed: list[int] = []
        self._limit_s = 0.0

    @property
    def _address(self) -> str:
        return self.connection.address

    @property
    def is_idle(self) -> bool:
        """True if another reader can use the connection."""
        return not self.answer_is_due and self.connection.is_idle

    def ask(self, place: ReadPosition, wait_ms: int, bytes_max: int) -> None:
        """Requests the next messages. Raises ConnectError, Timeout."""
        opened = []
        if not self._handle:
            self._handle = next(self._handles)
            _broker_id, index = parse_partition(place.tp.partition)
            tp, topic_id, _offset, epoch, in_place = place
            self._in_place = in_place
            opened.append(GetPartition(self._handle, tp.topic, topic_id, index, epoch, in_place))
        closed, self._closed = self._closed, []
        poll = Get(wait_ms, 1, bytes_max, bytes_max, opened, [(self._handle, place.offset)], closed)
        self._limit_s = wait_ms / 1000 + ANSWER_LATE_S
        self.connection.send(Command.GET, poll, timeout_s=self._limit_s)
        self.answer_is_due = True

    def answer(self) -> tuple[GetResult | None, memoryview]:
        """Returns the answer; None if no message came in time. Raises the broker's error, ConnectError, Timeout;
        ProtocolError for an answer to another request."""
        self.answer_is_due = False
        response = self.connection.receive(timeout_s=self._limit_s)
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        results = unpack_list(GetResult, response.header)
        if not results:
            return None, response.body
        result = results[0]
        if len(results) > 1 or result.handle != self._handle:
            handles = reprlib.repr([one.handle for one in results])
            raise ProtocolError(f"{self._address} answers for the handles {handles}, not for {self._handle}")
        if result.status != status.OK:
            self.close_partition()
            raise status.decode_error(result.status, result.error)
        if result.file is not None and not self._in_place:
            raise ProtocolError(f"{self._address} names a file, but the request was for the data")
        return result, response.body

    def report(self, entry: OffsetsEntry) -> None:
        """Reports damaged data to the broker. No answer may be outstanding. Raises ConnectError, Timeout."""
        self.connection.send(Command.OFFSETS, [entry], timeout_s=ANSWER_LATE_S)
        self.connection.receive(timeout_s=ANSWER_LATE_S)

    def close_partition(self) -> None:
        """Closes the partition: the next request opens one."""
        if self._handle:
            self._closed.append(self._handle)
            self._handle = 0

    def abort(self) -> None:
        """Closes the connection at once."""
        self.connection.abort()


class ConnectionPool:
    """Idle connections: `kept`, with the last used one at the end."""

    def __init__(self) -> None:
        self.kept: list[PooledConnection] = []
        self._lock = threading.Lock()

    def take(self, key: ConnectionKey) -> PooledConnection:
        """Returns a connection for one reader. Raises UnsupportedVersion; ConnectError, also if another broker
        answers."""
        while (pooled := self._last(key)) is not None:
            if pooled.is_idle:
                return pooled
            pooled.abort()
        security = client_security(key.security).brokers
        connection = BlockingConnection.open(key.host, key.port, security=security)
        if connection.broker_id != key.broker_id:
            connection.abort()
            raise another_answered(connection.address, connection.broker_id, key.broker_id)
        return PooledConnection(connection, key)

    def _last(self, key: ConnectionKey) -> PooledConnection | None:
        with self._lock:
            at = next((at for at in reversed(range(len(self.kept))) if self.kept[at].key == key), None)
            return None if at is None else self.kept.pop(at)

    def give_back(self, pooled: PooledConnection) -> None:
        """Keeps a connection for the next reader, unless an answer is outstanding. Closes broken ones."""
        pooled.close_partition()
        with self._lock:
            before = [*self.kept, pooled]
            self.kept = kept = [one for one in before if one.is_idle][-IDLE_MAX:]
        for one in before:
            if one not in kept:
                one.abort()


_pool = ConnectionPool()


def connection_pool() -> ConnectionPool:
    """Returns the pool of this process."""
    return _pool


@atexit.register
def _close_at_exit() -> None:
    while _pool.kept:
        _pool.kept.pop().abort()


def _after_fork_in_child() -> None:
    global _pool
    _pool = ConnectionPool()  # the parent still uses the others


os.register_at_fork(after_in_child=_after_fork_in_child)
