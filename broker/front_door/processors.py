"""What the broker does with each command: one function a command, looked up in a table.

A request is answered once. PUT answers when every batch in it is stored as its topic's policy asks, which may be after
an fsync; OFFSETS in slices (metamq.broker.front_door.look_ups). The other commands answer at once, but for GET, whose
long poll the fetch session keeps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import metamq
from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import Appended, BatchIds, Done, Partition
from metamq.broker.data.topics import OWN, Topics
from metamq.broker.front_door.counters import Counters
from metamq.broker.front_door.look_ups import LookUps
from metamq.broker.front_door.slices import Slices
from metamq.broker.ha.group_transfer import GroupTransferService
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.errors import (
    ClosedError,
    CorruptData,
    DiskFull,
    Fenced,
    MessageTooLarge,
    MetamqError,
    ProtocolError,
    StorageError,
    TopicNotFound,
)
from metamq.tx.store.records import BodyPlace
from metamq.wire import status, sync
from metamq.wire.batch import BatchHeader, check_from_producer
from metamq.wire.commands import (
    Command,
    HelloReply,
    OffsetsEntry,
    Promote,
    Promoted,
    PutEntry,
    PutResult,
    Stats,
    unpack,
    unpack_list,
)
from metamq.wire.compression import Codec
from metamq.wire.connection import Request
from metamq.wire.limits import FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, PROTOCOL_VERSION_MAX, STATS_PARTITIONS_MAX
from metamq.wire.outline import columns_problem
from metamq.zk.cluster.topics import TopicConfig

if TYPE_CHECKING:
    from metamq.broker.data.scrubber import Scrubber
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.ha.keeper import RoleKeeper
    from metamq.broker.ha.service import HAService
    from metamq.zk.cluster.brokers import Mastership

log = logging.getLogger("metamq.broker")

SINGLE_MESSAGE_OVERHEAD = 64  # offsets and padding of a batch of one message with all columns
ROOM_ASKED_BYTES = 1024 * 1024
"""A branch that is prepared with more asks whether the disk has room for it."""
DAMAGED_TOLD_MAX = 10
"""Partitions whose damage is described in an answer to STATS."""


class Processors:
    """The commands, over the broker's topics. Used by the broker's loop only."""

    def __init__(
        self,
        folder: DataFolder,
        topics: Topics,
        flusher: Flusher,
        ids: BatchIds,
        counters: Counters,
        *,
        batch_bytes_max: int,
        failed: Callable[[MetamqError], None],
    ) -> None:
        self._folder = folder
        self._topics = topics
        self._flusher = flusher
        self._ids = ids
        self._batch_bytes_max = batch_bytes_max
        self._failed = failed
        self.counters = counters
        self.transactions = TransactionalCommandProcessor(
            folder.broker_id, topics, flusher, ids, self, self._check_entry, failed
        )
        self.disk_full: DiskFull | None = None
        self.fenced: Fenced | None = None
        """This master hands over, or is one no more."""
        self.stopping: Fenced | None = None
        self.ha: HAService | None = None
        """Replication, while this is the master."""
        self.transfer: GroupTransferService | None = None
        """When PUTs are acknowledged, while this is the master."""
        self.not_master = Fenced(f"broker {folder.broker_id}", "it is starting")
        """What PUTs and slaves are told while it is not."""
        self.scrubber: Scrubber | None = None
        """Verifies what readers say came damaged; set by the server."""
        self.keeper: RoleKeeper | None = None
        """What role this replica plays; set by the server."""
        self.slices = Slices()
        """Work of requests that may take long."""
        self._promotions: set[asyncio.Task[Mastership]] = set()
        self._table: dict[int, Callable[[Request, BrokerProtocol], None]] = {
            Command.PUT: self._put,
            Command.GET: self._get,
            Command.OFFSETS: LookUps(self.find, self, self.slices).offsets,
            Command.STATS: self._stats,
            Command.SYNC: self._join,
            Command.PROMOTE: self._promote,
            Command.TX: self._tx,
            Command.BRANCHES: lambda request, connection: self.transactions.branches(request, connection),
        }

    @property
    def is_master(self) -> bool:
        """Whether this replica is the master."""
        return self.ha is not None

    @property
    def epoch(self) -> int:
        """The term of the master that the logs here are of."""
        return self._ids.epoch if self.keeper is None else self.keeper.followed_epoch

    def preferred_replica(self, partition: Partition, position: int) -> int:
        """The replica that a reader at this byte had better ask next, -1: this one."""
        return self.keeper.preferred_replica(partition, position) if self.keeper is not None else -1

    def found_damage(self, partition: Partition, error: CorruptData) -> None:
        """A log is damaged: a slave copies it again, a master goes on with what can be read, and says so."""
        if self.is_master:
            self._topics.has_damage(partition, error)
        else:
            self._topics.is_damaged(partition, error)

    def reported(self, entry: OffsetsEntry) -> None:
        """A reader, or a slave, says that a batch came damaged: it is verified. Raises what Topics.find() does."""
        if self.scrubber is not None:
            self.scrubber.report(self._topics.find(entry.topic, entry.topic_id, entry.partition), entry.damaged)

    def greeting(self) -> HelloReply:
        """What this broker answers to HELLO."""
        return HelloReply(
            version=PROTOCOL_VERSION_MAX,
            broker_id=self._folder.broker_id,
            epoch=self._ids.epoch,
            message_bytes_max=MESSAGE_BYTES_MAX,
            batch_bytes_max=self._batch_bytes_max,
            frame_bytes_max=FRAME_BYTES_MAX,
            server=f"metamq {metamq.__version__}",
        )

    def process(self, request: Request, connection: BrokerProtocol) -> None:
        """Starts on a request. Raises what is to be answered as the request's error."""
        handler = self._table.get(request.command)
        if handler is None:
            known = ", ".join(f"{command} {Command(command).name}" for command in self._table)
            raise ProtocolError(f"command {request.command} is not known to this broker", hint=f"It knows {known}.")
        if request.body and request.command not in (Command.PUT, Command.TX):
            raise ProtocolError(f"{Command(request.command).name} has no body, got {len(request.body):,} bytes")
        handler(request, connection)

    def _get(self, request: Request, connection: BrokerProtocol) -> None:
        connection.fetches.get(request)

    def _put(self, request: Request, connection: BrokerProtocol) -> None:
        entries = unpack_list(PutEntry, request.header)
        if not entries:
            raise ProtocolError("a PUT without a batch")
        if sum(entry.size for entry in entries) != len(request.body) or any(entry.size <= 0 for entry in entries):
            raise ProtocolError(f"the batches' sizes do not add up to the body's {len(request.body)} bytes")
        put = _PendingPut(request, connection, len(entries))
        position = 0
        for number, entry in enumerate(entries):
            batch = request.body[position : position + entry.size]
            position += entry.size
            try:
                self._append(put, number, entry, batch)
            except MetamqError as error:
                if isinstance(error, StorageError) and not error.retriable:
                    self._failed(error)
                put.done(number, error)

    @property
    def refuse_writes(self) -> DiskFull | Fenced | None:
        """Why PUTs are refused at present, or None. Each reason has its owner: one that ends leaves the others."""
        return self.stopping or self.fenced or self.disk_full

    def find(self, topic: str, topic_id: str, index: int) -> Partition:
        """A partition that clients may read and write. Raises TopicNotFound, PartitionNotFound, CorruptData."""
        if topic.startswith(OWN):
            raise TopicNotFound(topic)
        return self._topics.find(topic, topic_id, index)

    def _admitted(self, entry: PutEntry, batch: memoryview) -> tuple[Partition, TopicConfig, BatchHeader]:
        """A batch that may be stored at present, and where. Raises why not."""
        if (refusal := self.refuse_writes) is not None:
            raise refusal
        if self.transfer is None:
            raise self.not_master.with_traceback(None)
        partition = self.find(entry.topic, entry.topic_id, entry.partition)
        config = self._topics.config(entry.topic)
        self.transfer.admit(config)
        limit = config.max_message_bytes
        header = check_from_producer(batch, 0, len(batch), self._batch_bytes_max)
        if header.codec == Codec.NONE and (problem := columns_problem(batch, header)) is not None:
            raise CorruptData("batch", problem, hint="Its producer made it so: look there.")
        if header.count == 1 and header.plain_size > limit + SINGLE_MESSAGE_OVERHEAD:
            raise MessageTooLarge(f"a message for topic {entry.topic!r}", header.plain_size, limit)
        return partition, config, header

    def _append(self, put: _PendingPut, number: int, entry: PutEntry, batch: memoryview) -> None:
        partition, config, header = self._admitted(entry, batch)
        assert self.transfer is not None
        appended = self._store(partition, batch, header)
        put.stored(number, appended.base_offset, appended.time_us)
        self.transfer.when_acknowledged(partition, config, appended.end_offset, lambda error: put.done(number, error))
        self._flusher.appended(partition)

    def _store(
        self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None = None
    ) -> Appended:
        """Into the log, and on its way to the slaves."""
        position = partition.log.end_position
        appended = partition.append(batch, header, self._ids, batch_id)
        if self.ha is not None and not appended.repeated:
            self.ha.appended(partition, batch, position, appended.end_offset)
        self.counters.appended(partition.topic, header, appended.repeated)
        return appended

    # -- what transactions need ---------------------------------------------------------------------------------------

    def _tx(self, request: Request, connection: BrokerProtocol) -> None:
        if self.stopping is not None or self.fenced is not None:
            raise (self.stopping or self.fenced or self.not_master).with_traceback(None)
        self.transactions.tx(request, connection)

    def _check_entry(self, entry: PutEntry, batch: memoryview) -> BodyPlace:
        partition, _config, header = self._admitted(entry, batch)
        if header.producer_id:
            raise ProtocolError("a batch of a transaction has no producer id: its session counts it")
        return BodyPlace(partition.topic, partition.topic_id, partition.index, header.count)

    def admit(self, partition: Partition, promised_bytes: int) -> None:
        """Before an append of the broker's own that is to be durable. Raises NotEnoughReplicas, DiskFull, Fenced."""
        if self.transfer is None:
            raise self.not_master.with_traceback(None)
        if promised_bytes and self.disk_full is not None:
            raise self.disk_full.with_traceback(None)
        if (
            promised_bytes > ROOM_ASKED_BYTES
        ):  # what is smaller fits into the reserve, until the disk is looked at again
            free_bytes = self._folder.free_bytes()
            if free_bytes < promised_bytes + self.transactions.figures.promised_bytes:
                raise DiskFull(str(self._folder.path), free_bytes, promised_bytes)
        self.transfer.admit(self._topics.config(partition.topic))

    def append(self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None) -> int:
        """Appends a batch of the broker's own; returns where it ends. Raises as Partition.append."""
        appended = self._store(partition, batch, header, batch_id)
        self._flusher.appended(partition)
        return appended.end_offset

    def when_durable(self, partition: Partition, end_offset: int, done: Done) -> None:
        """Calls `done` once every in-sync replica holds it as its topic asks, or with why nobody knows."""
        if self.transfer is None:
            done(self.not_master.with_unknown_outcome())
            return
        self.transfer.when_acknowledged(partition, self._topics.config(partition.topic), end_offset, done)

    # -- replication --------------------------------------------------------------------------------------------------

    def _join(self, request: Request, connection: BrokerProtocol) -> None:
        """A slave's JOIN: makes the connection its link."""
        if self.ha is None:
            raise self.not_master.with_traceback(None)
        if connection.is_link:
            raise ProtocolError("a connection that joins is a link already")
        join = sync.unpack_from_slave(request.header)
        if not isinstance(join, sync.Join):
            raise ProtocolError(f"a SYNC request is a Join, got {type(join).__name__}")
        connection.become_link(request, *self.ha.join(join, connection), self.ha)

    def _promote(self, request: Request, connection: BrokerProtocol) -> None:
        """Makes this replica the master; answers when it is, or why it is not."""
        assert self.keeper is not None
        accept_loss = unpack(Promote, request.header).accept_loss
        promotion = asyncio.ensure_future(self.keeper.promote(accept_loss=accept_loss))

        def answer(task: asyncio.Task[Mastership]) -> None:
            self._promotions.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                error = ClosedError("broker")
            if error is None:
                state = task.result().state
                connection.answer(request, Promoted(state.epoch, state.generation))
            elif isinstance(error, MetamqError):
                connection.answer_error(request, error)
            else:
                log.error("a promotion failed", exc_info=error)
                connection.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

        self._promotions.add(promotion)
        promotion.add_done_callback(answer)

    def _stats(self, request: Request, connection: BrokerProtocol) -> None:
        start = Stats("", 0) if request.header is None else unpack(Stats, request.header)
        page, following = page_of(self._topics.open, start, STATS_PARTITIONS_MAX)
        counters = self.counters.snapshot({partition.topic for partition in page})
        connection.answer(request, {**self._statistics(page), "counters": counters, "next": following})

    def statistics(self) -> dict[str, Any]:
        """What STATS answers, of all topics and partitions in one."""
        return {**self._statistics(self._topics.partitions()), "counters": self.counters.snapshot()}

    def _statistics(self, partitions: Iterable[Partition]) -> dict[str, Any]:
        damage = self._topics.damage()
        return {
            "broker_id": self._folder.broker_id,
            "replica": self._folder.replica,
            "incarnation": self._folder.incarnation,
            "epoch": self._ids.epoch,
            "version": metamq.__version__,
            "time_ms": time.time_ns() // 1_000_000,
            "writes_refused": str(self.refuse_writes) if self.refuse_writes else None,
            "replication": self.keeper.statistics() if self.keeper is not None else {},
            "transactions": self.transactions.figures._asdict(),
            "scrub": self.scrubber.statistics() if self.scrubber is not None else {},
            "damaged_count": len(damage),
            "damaged": [str(error) for error in list(damage.values())[:DAMAGED_TOLD_MAX]],
            "partitions": [_partition_statistics(one) for one in partitions if not one.topic.startswith(OWN)],
        }


def page_of(
    topics: Mapping[str, Mapping[int, Partition]], start: Stats, size: int
) -> tuple[list[Partition], Stats | None]:
    """At most `size` partitions from `start` on, in order, and where the next page begins; None at the end.

    What is made or removed between two pages moves no other partition from one page to the next.
    """
    page: list[Partition] = []
    for topic in sorted(name for name in topics if name >= start.topic):
        first = start.partition if topic == start.topic else 0
        for index in sorted(index for index in topics[topic] if index >= first):
            if len(page) == size:
                return page, Stats(topic, index)
            page.append(topics[topic][index])
    return page, None


def _partition_statistics(partition: Partition) -> dict[str, Any]:
    log = partition.log
    return {
        "topic": partition.topic,
        "partition": partition.index,
        "start_offset": log.start_offset,
        "stable_offset": log.stable_offset,
        "end_offset": log.end_offset,
        "size_bytes": log.size_bytes,
        "last_append_us": log.last_append_us,
    }


class _PendingPut:
    """A PUT's results as they come in; answers when the last is there. The first result of an entry counts."""

    __slots__ = ("_connection", "_left", "_request", "_results")

    def __init__(self, request: Request, connection: BrokerProtocol, count: int) -> None:
        self._request = request
        self._connection = connection
        self._left = set(range(count))
        self._results: list[PutResult] = [PutResult(status.OK, -1, -1, None)] * count

    def stored(self, number: int, base_offset: int, append_time_us: int) -> None:
        self._results[number] = PutResult(status.OK, base_offset, append_time_us, None)

    def done(self, number: int, error: MetamqError | None) -> None:
        if number not in self._left:  # a flush that cannot begin fails an entry that waits for it, or was answered
            return
        self._left.discard(number)
        if error is not None:
            code, fields = status.encode_error(error)
            self._results[number] = PutResult(code, -1, -1, fields)
        if not self._left:
            self._connection.answer(self._request, self._results)
