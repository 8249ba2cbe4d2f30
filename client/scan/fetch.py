"""Reads one range of a partition, in the thread that wants it: a task of Spark, or a thread of a scan.

While the reader takes one answer, the broker already sends the next one into the socket's memory. The core that
receives an answer also checks it and passes it on (Spark: to the JVM), while the data is in that core's cache.

A task reads its range to the end, or fails. It gets every message once, in order. After an error (a broker that is
restarted, a slave that is promoted, a damaged answer) it continues from its offset, at any replica that has it. If
nothing comes for `poll_timeout_s`, the task fails, and Spark runs it again.

The range existed when it was planned. If messages of it are lost since then, that is an error, or with
`fail_on_data_loss=False` they are left out.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.background import background
from metamq.client.fetch.damage import report_of
from metamq.client.fetch.fetch_queue import DAMAGED_FETCHES_MAX
from metamq.client.net.cluster import MASTER
from metamq.client.scan.connection_pool import ConnectionKey, PooledConnection, ReadPosition, connection_pool
from metamq.client.scan.files import NOT_FOR_US, FileReader, NotItsFile, warn_once
from metamq.client.scan.replicas import ReplicaAddress, find_replicas, find_topic_id
from metamq.errors import (
    ConnectError,
    CorruptData,
    Fenced,
    MetamqError,
    OffsetDiverged,
    OffsetOutOfRange,
    Timeout,
    TopicNotFound,
)
from metamq.wire.batch import BatchHeader, walk
from metamq.wire.commands import FilePlace, GetResult
from metamq.wire.headers import unpack
from metamq.wire.limits import BATCH_TARGET_BYTES
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.scan.ranges import OffsetRange
    from metamq.client.settings import ClusterAccess

log = logging.getLogger("metamq.client")

Chunk = list[tuple[BatchHeader, memoryview]]

FETCH_BYTES = BATCH_TARGET_BYTES
"""About one batch of a producer with default settings, or many small ones; it fits into the connection's buffer.

With more, the first bytes have left the core's cache before they are used.
"""
FETCH_BYTES_MIN = 64 * 1024
WAIT_MS = 500
DELAY_FIRST_S = 0.05
DELAY_MAX_S = 2.0
REFUSALS_MAX = 3
"""The task asks ZooKeeper after this number of refusals of an unknown topic. Replicas may not know a new topic yet."""


class FetchTask(NamedTuple):
    """All data that a task needs to read its range. Goes to Spark's executors."""

    wanted: OffsetRange
    replicas: tuple[ReplicaAddress, ...]
    access: ClusterAccess
    epoch: int = -1
    """Epoch of the message before the range; -1: unknown."""
    last_epoch: int = -1
    """Epoch of the range's last message when it was planned; -1: unknown."""
    fail_on_data_loss: bool = True
    with_slaves: bool = True
    poll_timeout_s: float = 120.0
    in_place: bool = False
    """True if the task may read files of a broker on the same machine."""
    loss_setting: str = "failOnDataLoss=false"
    """The setting that continues without lost messages, for errors."""


def fetch(task: FetchTask, stopped: threading.Event | None = None) -> Iterator[Chunk]:
    """Yields the range's batches, with verified checksums; the first and the last may have messages outside of it.

    Ends early after another thread has set `stopped`: at once in a pause, else after the present request.
    Raises OffsetOutOfRange, TopicNotFound and CorruptData for lost messages; the last error after the time-out.
    """
    return Fetching(task, stopped).chunks()


class Fetching:
    """The fetch of one range."""

    def __init__(self, task: FetchTask, stopped: threading.Event | None = None) -> None:
        self._task = task
        self._stopped = stopped or threading.Event()
        self._wanted = task.wanted
        self._broker_id, _index = parse_partition(task.wanted.tp.partition)
        self._offset = task.wanted.start
        self._epoch = task.epoch
        self._message_bytes = 1024
        """Approximate size of a message; the size of requests follows from it."""
        self._replicas = list(task.replicas)
        self.pooled: PooledConnection | None = None
        """The connection from which the next answer comes."""
        self._number = MASTER
        """The replica at the other end of the connection."""
        self._data = ""
        """The data folder of that replica; empty: unknown."""
        self._preferred: int | None = None
        self._short: set[int] = set()
        """Slaves whose logs end before the range: other replicas are tried first."""
        self._may_have_moved = False
        """True if ZooKeeper must be asked for the replicas' addresses."""
        self._delay_s = 0.0
        self._damaged = 0
        self._refused = 0
        self._progress_s = 0.0
        self._ended_early_s: float | None = None
        """Time since which the master's log ends before the range."""
        self._in_place = task.in_place
        self._file: FileReader | None = None
        """The open file. While there is one, the task reads it, and sends no requests."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the batches; see fetch()."""
        try:
            self._made_progress()
            while self._offset < self._wanted.end and not self._stopped.is_set():
                chunk = self._next_chunk()
                if chunk:
                    yield chunk
                    self._progress_s = time.monotonic()  # the reader may have taken long for the chunk
            if self.pooled is not None:
                connection_pool().give_back(self.pooled)
                self.pooled = None
        finally:
            self._close_file()
            self._drop_connection()

    def _made_progress(self) -> None:
        self._progress_s = time.monotonic()
        self._delay_s = 0.0
        self._may_have_moved = False
        self._damaged = self._refused = 0
        self._short.clear()
        self._ended_early_s = None

    def _next_chunk(self) -> Chunk:
        """Returns the next batches; an empty list after an error that was handled. Raises a lasting error."""
        if self._file is not None:
            return self._next_of_file(self._file)
        try:
            pooled = self._connected()
            if not pooled.answer_is_due:
                self._ask(pooled)
            result, data = pooled.answer()
            if result is not None and result.file is not None:
                self._open_file(pooled, result)
                return []
        except MetamqError as error:
            self._failed(error)
            return []
        chunk, damage = self._taken(data, self._task.last_epoch)
        if chunk:
            self._made_progress()
        if damage is not None:
            self._report(pooled, damage)
            self._failed(damage)
        elif not chunk:
            self._nothing_came(result)
        elif result is not None and result.preferred_replica >= 0:
            self._prefer(result.preferred_replica)
        self._ask_ahead()
        return chunk

    def _report(self, pooled: PooledConnection, damage: MetamqError) -> None:
        """Makes the broker verify the data that arrived damaged."""
        if isinstance(damage, CorruptData):
            with contextlib.suppress(MetamqError):
                pooled.report(report_of(self._wanted.tp, self._wanted.topic_id, self._offset))

    def _open_file(self, pooled: PooledConnection, result: GetResult) -> None:
        """Reads on in the file. If the file cannot be read, the next answer has the data. Raises ProtocolError."""
        place = unpack(FilePlace, result.file)
        try:
            self._file = FileReader(place, result.size, pooled.buffers, self._data)
        except OSError as error:
            is_strange = isinstance(error, NotItsFile)
            log_line = warn_once if is_strange else log.info
            log_line("%s is read through the broker: %s", self._wanted.tp, error)
            pooled.has_files = not is_strange and error.errno not in NOT_FOR_US
            self._in_place = False
            pooled.close_partition()

    def _next_of_file(self, file: FileReader) -> Chunk:
        """Returns the next batches of the file. At its end, or after an error, the next request goes to the broker."""
        chunk: Chunk = []
        damage: Exception | None = None
        try:
            last_epoch = file.epoch if self._task.last_epoch < 0 else min(file.epoch, self._task.last_epoch)
            chunk, damage = self._taken(file.read(self._bytes_to_ask_for()), last_epoch)
        except OSError as error:
            damage = error
        if chunk:
            self._made_progress()
            file.skip(sum(header.size for header, _data in chunk))
            if damage is None:
                return chunk
        self._close_file()
        if damage is not None or not file.has_given:
            log.info("%s is read through the broker from offset %d on: %s", self._wanted.tp, self._offset, damage)
            self._in_place = False
            if self.pooled is not None:
                self.pooled.close_partition()
        return chunk

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ask(self, pooled: PooledConnection) -> None:
        in_place = self._in_place and pooled.has_files and pooled.connection.is_near and bool(self._data)
        place = ReadPosition(self._wanted.tp, self._wanted.topic_id, self._offset, self._epoch, in_place)
        pooled.ask(place, WAIT_MS, self._bytes_to_ask_for())

    def _ask_ahead(self) -> None:
        """Requests the next messages before the reader gets the present ones."""
        if self.pooled is not None and self._offset < self._wanted.end:
            try:
                self._ask(self.pooled)
            except MetamqError as error:
                log.info("%s is requested again from offset %d on: %s", self._wanted.tp, self._offset, error)
                self._drop_connection()

    def _bytes_to_ask_for(self) -> int:
        rest = (self._wanted.end - self._offset) * self._message_bytes
        return min(max(rest + rest // 8, FETCH_BYTES_MIN), FETCH_BYTES)

    def _taken(self, data: memoryview, last_epoch: int) -> tuple[Chunk, MetamqError | None]:
        """Returns the answer's batches of the range, up to damage or to a batch of another history, and the error."""
        chunk: Chunk = []
        try:
            for position, header in walk(data):
                if header.end_offset <= self._offset:
                    continue
                if header.base_offset > self._offset:
                    reason = f"after offset {self._offset} comes {header.base_offset}"
                    return chunk, CorruptData(f"an answer for {self._wanted.tp}", reason)
                if header.epoch > last_epoch >= 0 or header.epoch < self._epoch:
                    return chunk, self._parted(header)
                chunk.append((header, data[position : position + header.size]))
                self._offset, self._epoch = header.end_offset, header.epoch
                self._message_bytes = max(header.size // header.count, 1)
                if self._offset >= self._wanted.end:
                    break
        except CorruptData as damage:
            place = f"the batch of {self._wanted.tp} with offset {self._offset}"
            return chunk, CorruptData(place, damage.reason)
        return chunk, None

    def _parted(self, header: BatchHeader) -> OffsetDiverged:
        """Returns the error for a batch that is newer than the plan of the range."""
        tp, _topic_id, start, end = self._wanted
        return OffsetDiverged(str(tp), end, start, header.end_offset, header.base_offset, self._epoch)

    def _connected(self) -> PooledConnection:
        if self.pooled is not None:
            return self.pooled
        if self._may_have_moved or not self._replicas:
            self._look_up()
        order = sorted(self._replicas, key=lambda one: (one.number != self._preferred, one.number in self._short))
        error: MetamqError = ConnectError(
            self._broker(),
            "it is not registered in ZooKeeper",
            hint="Check that it runs: `metamq doctor`.",
        )
        security = self._task.access.security
        for replica in order:
            key = ConnectionKey(self._broker_id, replica.host, replica.port, security)
            try:
                self.pooled = connection_pool().take(key)
            except MetamqError as refused:
                error = refused
            else:
                self._number, self._data = replica.number, replica.data
                return self.pooled
        raise error

    def _broker(self) -> str:
        return f"broker {self._broker_id}"

    def _look_up(self) -> bool:
        """Looks up the replicas' addresses. Returns False while ZooKeeper is unreachable."""
        task, topic = self._task, self._wanted.tp.topic
        try:
            found = background().run(find_replicas(task.access, self._broker_id, topic, with_slaves=task.with_slaves))
        except MetamqError as error:  # the old addresses may still be right
            log.info("the address of broker %d cannot be looked up at present: %s", self._broker_id, error)
            return False
        self._replicas = list(found)
        return True

    def _topic_is_gone(self) -> bool:
        """True if the topic is also gone in ZooKeeper; False while ZooKeeper is unreachable."""
        task = self._task
        try:
            found = background().run(find_topic_id(task.access, self._wanted.tp.topic))
            return found != self._wanted.topic_id
        except MetamqError as error:
            log.info("topic %r cannot be looked up at present: %s", self._wanted.tp.topic, error)
            return False

    def _drop_connection(self) -> None:
        if self.pooled is not None:
            self.pooled.abort()
            self.pooled = None

    def _prefer(self, number: int) -> None:
        """Changes to another replica, if its address is known."""
        if number != self._number and any(replica.number == number for replica in self._replicas):
            self._change_to(number)

    def _change_to(self, number: int) -> None:
        self._preferred = number
        if self.pooled is not None:
            connection_pool().give_back(self.pooled)
            self.pooled = None

    def _nothing_came(self, result: GetResult | None) -> None:
        """Handles an empty answer: the log of this replica ends before the range does.

        A slave may not have the messages yet. A master may not show them yet. Only a replica that stays the master can
        say that messages are lost. The master of the plan may be a slave by now, so the task asks ZooKeeper first.
        """
        if self._number != MASTER:
            self._short.add(self._number)
            if self._preferred != MASTER:
                self._change_to(MASTER)
            else:
                self._failed(ConnectError(self._broker(), "its master cannot be reached, and slaves have less"))
            return
        if result is not None and result.preferred_replica >= 0 and not result.size:  # only slaves answer like this
            self._failed(self._no_master())
            return
        now = time.monotonic()
        is_first = self._ended_early_s is None
        if self._ended_early_s is None:
            self._ended_early_s = now
        is_last = now - self._ended_early_s > self._task.poll_timeout_s
        if is_first or is_last:
            is_known = self._look_up()
            if not self._is_at_master() or (is_last and not is_known):
                self._failed(self._no_master())
                return
        if is_last:
            stable = result.stable_offset if result is not None else self._offset
            reason = "the range was planned with messages that the log does not have any more"
            lost = OffsetOutOfRange(str(self._wanted.tp), self._wanted.end, self._offset, stable, reason)
            self._lost(lost, self._wanted.end)

    def _no_master(self) -> Fenced:
        reason = "its log ends before the range, and another replica may be the master, and have more"
        return Fenced(f"the replica that answers for {self._broker()}", reason)

    def _is_at_master(self) -> bool:
        """True if the connection is to the master as known from the last look-up, or from the plan."""
        at = (self.pooled.key.host, self.pooled.key.port) if self.pooled is not None else None
        return any(replica.number == MASTER and (replica.host, replica.port) == at for replica in self._replicas)

    def _time_is_over(self) -> bool:
        return time.monotonic() - self._progress_s > self._task.poll_timeout_s

    def _failed(self, error: MetamqError) -> None:
        """Raises a lasting error; otherwise waits, longer each time."""
        if isinstance(error, OffsetDiverged):  # a streaming query's driver continues from where the logs agree
            self._lost(error, self._wanted.end)
            return
        if isinstance(error, OffsetOutOfRange):
            self._lost(error, error.start if error.start > self._offset else self._wanted.end)
            return
        if isinstance(error, TopicNotFound):
            self._refused += 1
            if self._refused >= REFUSALS_MAX and self._topic_is_gone():
                self._lost(error, self._wanted.end)
                return
        elif isinstance(error, CorruptData):
            self._damaged += 1
            if self._damaged >= DAMAGED_FETCHES_MAX:
                raise error
        elif not isinstance(error, ConnectError | Fenced | Timeout) and not error.retriable:
            raise error
        if self._time_is_over():
            raise error
        log.info("%s from offset %d is tried again: %s", self._wanted.tp, self._offset, error)
        self._drop_connection()
        self._preferred = None
        if isinstance(error, Fenced):
            self._preferred, self._ended_early_s = MASTER, None
        # After a broken connection, or damage, another replica may answer, so not every task has to ask ZooKeeper.
        self._may_have_moved = self._delay_s > 0 or not isinstance(error, ConnectError | CorruptData)
        self._delay_s = min(max(self._delay_s * 2, DELAY_FIRST_S), DELAY_MAX_S)
        self._stopped.wait(self._delay_s * random.uniform(0.8, 1.2))

    def _lost(self, error: MetamqError, go_on_at: int) -> None:
        """Raises the error, or skips the lost messages."""
        if self._task.fail_on_data_loss:
            if isinstance(error, OffsetOutOfRange):
                error.hint = f"To continue without the lost messages: {self._task.loss_setting}."
            raise error
        go_on_at = min(go_on_at, self._wanted.end)
        log.warning(
            "%s: offsets %d to %d are left out, as %s allows: %s",
            self._wanted.tp, self._offset, go_on_at, self._task.loss_setting, error,
        )  # fmt: skip
        self._offset, self._epoch = go_on_at, -1
        if self.pooled is not None:
            self.pooled.close_partition()
        self._made_progress()
