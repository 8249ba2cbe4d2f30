"""Reads one range of a partition for a task, in the task's thread.

While Spark takes one answer the broker already sends the next, into the socket's memory: what is received is checked,
wrapped and handed to the JVM by the core that received it, while it is in that core's cache.

A range is read to its end or not at all: whoever reads it gets every message once, in order. What fails on the way (a
broker that is restarted, a slave that is promoted, a damaged answer) is asked for again from where reading had come to,
at whichever replica has it; only when nothing has come for `poll_timeout_s` the task fails, and Spark runs it again.

A range was there when the driver asked for it. What has gone from the log since then is an error, or is left out where
the user said so.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from metamq.client.background import background
from metamq.client.fetch.damage import report_of
from metamq.client.fetch.fetch_queue import DAMAGED_FETCHES_MAX
from metamq.client.net.cluster import MASTER
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
from metamq.spark_consumers.source.files import NOT_FOR_US, FileReader, NotItsFile, warn_once
from metamq.spark_consumers.source.lanes import Lane, LaneKey, ReadPosition, lanes
from metamq.spark_consumers.source.ranges import OffsetRange
from metamq.spark_consumers.source.replicas import ReplicaAddress, find_replicas, find_topic_id
from metamq.wire.batch import BatchHeader, walk
from metamq.wire.commands import FilePlace, GetResult, unpack
from metamq.wire.limits import BATCH_TARGET_BYTES
from metamq.zk.names import parse_partition

log = logging.getLogger("metamq.spark")

Chunk = list[tuple[BatchHeader, memoryview]]

FETCH_BYTES = BATCH_TARGET_BYTES
"""About one batch as producers make them by default, or many small ones; it fits into the connection's room.

With more, what was received first has left the core's cache before it is used.
"""
FETCH_BYTES_MIN = 64 * 1024
WAIT_MS = 500
DELAY_FIRST_S = 0.05
DELAY_MAX_S = 2.0
REFUSALS_MAX = 3
"""So often a replica may say that it has no such topic before ZooKeeper is asked: it may not know it yet."""


class FetchTask(NamedTuple):
    """All that a task needs to read its range. Goes to executors."""

    wanted: OffsetRange
    replicas: tuple[ReplicaAddress, ...]
    zookeeper: str
    root: str
    epoch: int = -1
    """Of the message before the range; -1: not known."""
    last_epoch: int = -1
    """Of the range's last message as it was planned; -1: not known."""
    fail_on_data_loss: bool = True
    with_slaves: bool = True
    poll_timeout_s: float = 120.0
    in_place: bool = False
    """Whether to read files of a broker on the same machine."""


def fetch(task: FetchTask) -> Iterator[Chunk]:
    """The range's batches, both checksums verified; the first and the last may have messages beyond it.

    Raises OffsetOutOfRange, TopicNotFound and CorruptData for what is lost, else the last error once time is over.
    """
    return Fetching(task).chunks()


class Fetching:
    """One range being fetched."""

    def __init__(self, task: FetchTask) -> None:
        self._task = task
        self._wanted = task.wanted
        self._broker_id, _index = parse_partition(task.wanted.tp.partition)
        self._offset = task.wanted.start
        self._epoch = task.epoch
        self._message_bytes = 1024
        """About how large a message is; what is asked for follows from it."""
        self._replicas = list(task.replicas)
        self.lane: Lane | None = None
        """Where the next answer comes from."""
        self._number = MASTER
        """Which replica the lane is to."""
        self._data = ""
        """The data folder of that replica; empty where it is not known."""
        self._preferred: int | None = None
        self._short: set[int] = set()
        """Slaves whose logs end before the range: others are asked first."""
        self._may_have_moved = False
        """Whether ZooKeeper is to be asked where the replicas are now."""
        self._delay_s = 0.0
        self._damaged = 0
        self._refused = 0
        self._progress_s = 0.0
        self._ended_early_s: float | None = None
        """Since when the master says that its log ends before the range."""
        self._in_place = task.in_place
        self._file: FileReader | None = None
        """What is read at present, instead of asking."""

    def chunks(self) -> Iterator[Chunk]:
        """As fetch()."""
        try:
            self._made_progress()
            while self._offset < self._wanted.end:
                chunk = self._next_chunk()
                if chunk:
                    yield chunk
                    self._progress_s = time.monotonic()  # Spark may have taken its time
            if self.lane is not None:
                lanes().give_back(self.lane)
                self.lane = None
        finally:
            self._close_file()
            self._drop_lane()

    def _made_progress(self) -> None:
        self._progress_s = time.monotonic()
        self._delay_s = 0.0
        self._may_have_moved = False
        self._damaged = self._refused = 0
        self._short.clear()
        self._ended_early_s = None

    def _next_chunk(self) -> Chunk:
        """What comes next; nothing after a failure, which is dealt with. Raises when it is no use to go on."""
        if self._file is not None:
            return self._next_of_file(self._file)
        try:
            lane = self._connected()
            if not lane.is_asked:
                self._ask(lane)
            result, data = lane.answer()
            if result is not None and result.file is not None:
                self._open_file(lane, result)
                return []
        except MetamqError as error:
            self._failed(error)
            return []
        chunk, damage = self._taken(data, self._task.last_epoch)
        if chunk:
            self._made_progress()
        if damage is not None:
            self._report(lane, damage)
            self._failed(damage)
        elif not chunk:
            self._nothing_came(result)
        elif result is not None and result.preferred_replica >= 0:
            self._prefer(result.preferred_replica)
        self._ask_ahead()
        return chunk

    def _report(self, lane: Lane, damage: MetamqError) -> None:
        """Has the broker verify what came damaged of it."""
        if isinstance(damage, CorruptData):
            with contextlib.suppress(MetamqError):
                lane.report(report_of(self._wanted.tp, self._wanted.topic_id, self._offset))

    def _open_file(self, lane: Lane, result: GetResult) -> None:
        """Goes on there; or with another answer where it cannot be read. Raises ProtocolError."""
        place = unpack(FilePlace, result.file)
        try:
            self._file = FileReader(place, result.size, lane.rooms, self._data)
        except OSError as error:
            is_strange = isinstance(error, NotItsFile)
            tell = warn_once if is_strange else log.info
            tell("%s is read through the broker: %s", self._wanted.tp, error)
            lane.has_files = not is_strange and error.errno not in NOT_FOR_US
            self._in_place = False
            lane.done_with_it()

    def _next_of_file(self, file: FileReader) -> Chunk:
        """What comes next of the file. At its end the broker is asked again, and is to send what cannot be read."""
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
            if self.lane is not None:
                self.lane.done_with_it()
        return chunk

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ask(self, lane: Lane) -> None:
        in_place = self._in_place and lane.has_files and lane.connection.is_near and bool(self._data)
        place = ReadPosition(self._wanted.tp, self._wanted.topic_id, self._offset, self._epoch, in_place)
        lane.ask(place, WAIT_MS, self._bytes_to_ask_for())

    def _ask_ahead(self) -> None:
        """For what comes next, before Spark is given what came."""
        if self.lane is not None and self._offset < self._wanted.end:
            try:
                self._ask(self.lane)
            except MetamqError as error:
                log.info("%s is asked again from offset %d on: %s", self._wanted.tp, self._offset, error)
                self._drop_lane()

    def _bytes_to_ask_for(self) -> int:
        rest = (self._wanted.end - self._offset) * self._message_bytes
        return min(max(rest + rest // 8, FETCH_BYTES_MIN), FETCH_BYTES)

    def _taken(self, data: memoryview, last_epoch: int) -> tuple[Chunk, MetamqError | None]:
        """The batches of the range in an answer, up to where it is damaged, or goes on in another history."""
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
            return chunk, damage
        return chunk, None

    def _parted(self, header: BatchHeader) -> OffsetDiverged:
        """What a batch shows that is newer than any the range was planned with."""
        tp, _topic_id, start, end = self._wanted
        return OffsetDiverged(str(tp), end, start, header.end_offset, header.base_offset, self._epoch)

    def _connected(self) -> Lane:
        if self.lane is not None:
            return self.lane
        if self._may_have_moved or not self._replicas:
            self._look_up()
        order = sorted(self._replicas, key=lambda one: (one.number != self._preferred, one.number in self._short))
        error: MetamqError = ConnectError(
            self._broker(),
            "it is not registered in ZooKeeper",
            hint="Is it running? `metamq doctor` looks at every part.",
        )
        for replica in order:
            try:
                self.lane = lanes().take(LaneKey(self._broker_id, replica.host, replica.port))
            except MetamqError as refused:
                error = refused
            else:
                self._number, self._data = replica.number, replica.data
                return self.lane
        raise error

    def _broker(self) -> str:
        return f"broker {self._broker_id}"

    def _look_up(self) -> bool:
        """Finds where the replicas are now; False while ZooKeeper cannot be asked."""
        task, topic = self._task, self._wanted.tp.topic
        try:
            found = background().run(
                find_replicas(task.zookeeper, task.root, self._broker_id, topic, with_slaves=task.with_slaves)
            )
        except MetamqError as error:  # they may be where they were
            log.info("where broker %d is cannot be looked up at present: %s", self._broker_id, error)
            return False
        self._replicas = list(found)
        return True

    def _topic_is_gone(self) -> bool:
        """Whether ZooKeeper says so, too; False while it cannot be asked."""
        task = self._task
        try:
            found = background().run(find_topic_id(task.zookeeper, task.root, self._wanted.tp.topic))
            return found != self._wanted.topic_id
        except MetamqError as error:
            log.info("whether topic %r is there cannot be looked up at present: %s", self._wanted.tp.topic, error)
            return False

    def _drop_lane(self) -> None:
        if self.lane is not None:
            self.lane.abort()
            self.lane = None

    def _prefer(self, number: int) -> None:
        """Go on at another replica, if it is one that is known."""
        if number != self._number and any(replica.number == number for replica in self._replicas):
            self._change_to(number)

    def _change_to(self, number: int) -> None:
        self._preferred = number
        if self.lane is not None:
            lanes().give_back(self.lane)
            self.lane = None

    def _nothing_came(self, result: GetResult | None) -> None:
        """The log ends before the range does: that of a slave, or of a master that is about to show more of it.

        What a slave does not have may be lost or not: only a master that keeps to it has the last word. Who was the
        master when the range was planned may be a slave by now: so ZooKeeper is asked before, too.
        """
        if self._number != MASTER:
            self._short.add(self._number)
            if self._preferred != MASTER:
                self._change_to(MASTER)
            else:
                self._failed(ConnectError(self._broker(), "its master cannot be reached, and slaves have less"))
            return
        if result is not None and result.preferred_replica >= 0 and not result.size:  # as only slaves answer
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
            reason = "the query was planned with messages that the log does not have any more"
            lost = OffsetOutOfRange(str(self._wanted.tp), self._wanted.end, self._offset, stable, reason)
            self._lost(lost, self._wanted.end)

    def _no_master(self) -> Fenced:
        reason = "its log ends before the range, and nothing says that it is the master: that may have more"
        return Fenced(f"who answers for {self._broker()}", reason)

    def _is_at_master(self) -> bool:
        """Whether the lane is to whom the master was known to be at the last look-up, or the planning."""
        at = self.lane.key[1:] if self.lane is not None else None
        return any(replica.number == MASTER and (replica.host, replica.port) == at for replica in self._replicas)

    def _time_is_over(self) -> bool:
        return time.monotonic() - self._progress_s > self._task.poll_timeout_s

    def _failed(self, error: MetamqError) -> None:
        """Raises what cannot be helped; else waits a moment, longer each time."""
        if isinstance(error, OffsetDiverged):  # a streaming query's driver goes on from where the logs agree
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
        self._drop_lane()
        self._preferred = None
        if isinstance(error, Fenced):
            self._preferred, self._ended_early_s = MASTER, None
        # After a broken connection, or damage, another replica may do: not every task has to ask ZooKeeper then.
        self._may_have_moved = self._delay_s > 0 or not isinstance(error, ConnectError | CorruptData)
        self._delay_s = min(max(self._delay_s * 2, DELAY_FIRST_S), DELAY_MAX_S)
        time.sleep(self._delay_s * random.uniform(0.8, 1.2))

    def _lost(self, error: MetamqError, go_on_at: int) -> None:
        """Raises, or leaves out what is gone."""
        if self._task.fail_on_data_loss:
            if isinstance(error, OffsetOutOfRange):
                error.hint = "To go on without what is gone: failOnDataLoss=false."
            raise error
        go_on_at = min(go_on_at, self._wanted.end)
        log.warning(
            "%s: offsets %d to %d are left out, failOnDataLoss is false: %s",
            self._wanted.tp, self._offset, go_on_at, error,
        )  # fmt: skip
        self._offset, self._epoch = go_on_at, -1
        if self.lane is not None:
            self.lane.done_with_it()
        self._made_progress()
