"""Lanes: connections of one reader's own, with the fetch session that the broker keeps for it, used again by the next.

Spark keeps its Python workers, and runs task after task in them. A lane is taken by one reader at a time, and used in
that reader's thread.
"""

from __future__ import annotations

import os
import reprlib
from itertools import count
from typing import NamedTuple

from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.transport import KEPT_BYTES, another_answered
from metamq.errors import ProtocolError
from metamq.wire import status
from metamq.wire.commands import Command, Get, GetPartition, GetResult, OffsetsEntry, unpack_list
from metamq.wire.rooms import Rooms
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

ANSWER_LATE_S = 10.0
IDLE_MAX = 16
"""Lanes that are kept, to all brokers together: each keeps the memory of its last answers."""


class ReadPosition(NamedTuple):
    """Where in a partition to read on. `epoch` is that of the message before; -1: not known.

    `in_place`: a broker on this machine may tell the file instead of sending what is there.
    """

    tp: TopicPartition
    topic_id: str
    offset: int
    epoch: int
    in_place: bool = False


class LaneKey(NamedTuple):
    """Whom a lane is to."""

    broker_id: int
    host: str
    port: int


class Lane:
    """One connection: ask(), then answer(), and so on. All calls are about one partition until done_with_it()."""

    def __init__(self, connection: BlockingConnection, key: LaneKey) -> None:
        self.key = key
        self.is_asked = False
        """Whether an answer is to come."""
        self.has_files = True
        """Whether files that the broker told of can be read, as far as is known."""
        self.rooms = Rooms(KEPT_BYTES)
        """For what is read in files."""
        self.connection = connection
        self._handles = count(1)
        self._handle = 0
        """Of the partition that is open; 0: none is."""
        self._in_place = False
        """Whether the partition was opened so that the broker may tell a file."""
        self._closed: list[int] = []
        self._limit_s = 0.0

    @property
    def _address(self) -> str:
        return self.connection.address

    @property
    def is_idle(self) -> bool:
        """Whether it can be used by another reader."""
        return not self.is_asked and self.connection.is_idle

    def ask(self, place: ReadPosition, wait_ms: int, bytes_max: int) -> None:
        """Asks the broker for what comes next. Raises ConnectError, Timeout."""
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
        self.is_asked = True

    def answer(self) -> tuple[GetResult | None, memoryview]:
        """What is there; None after a wait in vain. Raises the broker's error, ConnectError, Timeout; ProtocolError for
        an answer to what was not asked."""
        self.is_asked = False
        response = self.connection.receive(timeout_s=self._limit_s)
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        results = unpack_list(GetResult, response.header)
        if not results:
            return None, response.body
        result = results[0]
        if len(results) > 1 or result.handle != self._handle:
            handles = reprlib.repr([one.handle for one in results])
            raise ProtocolError(f"{self._address} answers for the handles {handles}, asked was {self._handle}")
        if result.status != status.OK:
            self.done_with_it()
            raise status.decode_error(result.status, result.error)
        if result.file is not None and not self._in_place:
            raise ProtocolError(f"{self._address} names a file, and was asked to send what is there")
        return result, response.body

    def report(self, entry: OffsetsEntry) -> None:
        """Tells the broker what came damaged. No answer may be under way. Raises ConnectError, Timeout."""
        self.connection.send(Command.OFFSETS, [entry], timeout_s=ANSWER_LATE_S)
        self.connection.receive(timeout_s=ANSWER_LATE_S)

    def done_with_it(self) -> None:
        """The next request opens a partition anew."""
        if self._handle:
            self._closed.append(self._handle)
            self._handle = 0

    def abort(self) -> None:
        """Closes at once."""
        self.connection.abort()


class Lanes:
    """Idle lanes: `kept`, the last one used at the end."""

    def __init__(self) -> None:
        self.kept: list[Lane] = []

    def take(self, key: LaneKey) -> Lane:
        """A lane that nobody else uses. Raises UnsupportedVersion; ConnectError, also when another broker answers."""
        for lane in [one for one in reversed(self.kept) if one.key == key]:
            self.kept.remove(lane)
            if lane.is_idle:
                return lane
            lane.abort()
        connection = BlockingConnection.open(key.host, key.port)
        if connection.broker_id != key.broker_id:
            connection.abort()
            raise another_answered(connection.address, connection.broker_id, key.broker_id)
        return Lane(connection, key)

    def give_back(self, lane: Lane) -> None:
        """For whoever comes next, unless an answer is to come on it. Those that have broken meanwhile are closed."""
        lane.done_with_it()
        before = [*self.kept, lane]
        self.kept = [one for one in before if one.is_idle][-IDLE_MAX:]
        for one in before:
            if one not in self.kept:
                one.abort()


_lanes = Lanes()


def lanes() -> Lanes:
    """Those of this process."""
    return _lanes


def _after_fork_in_child() -> None:
    global _lanes
    _lanes = Lanes()  # the parent goes on using the others


os.register_at_fork(after_in_child=_after_fork_in_child)
