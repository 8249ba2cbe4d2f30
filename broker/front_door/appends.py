"""Carries out PUT and TX: checks batches and stores them, in the log and at the slaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.roles.role import MasterRole, ReplicaStatus, Role
from metamq.errors import CorruptData, DiskFull, MessageTooLarge, MetamqError, ProtocolError, StorageError
from metamq.security.rights import WRITE
from metamq.tx.store.records import BodyPlace
from metamq.wire import status
from metamq.wire.batch import BatchHeader, check_from_producer
from metamq.wire.commands import PutEntry, PutResult
from metamq.wire.compression import Codec
from metamq.wire.headers import unpack_list
from metamq.wire.outline import columns_problem

if TYPE_CHECKING:
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Appended, BatchIds, Done, Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.front_door.statistics import Counters
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.broker.transactions.processor import TransactionalCommandProcessor
    from metamq.security.rights import Access
    from metamq.wire.commands import PutEntry
    from metamq.wire.connection import Request
    from metamq.zk.cluster.topics import TopicConfig

SINGLE_MESSAGE_OVERHEAD = 64
"""Bytes of the offsets and the padding in a batch of one message with all columns."""
PROMISE_CHECKED_BYTES = 1024 * 1024
"""A larger promise needs a new check of the free space. A smaller one fits into the reserve until the next check."""


class Admitted(NamedTuple):
    """A batch that may be stored now."""

    master: MasterRole
    partition: Partition
    config: TopicConfig
    header: BatchHeader


@dataclass(eq=False)
class Appends:
    """Checks and stores batches, in the broker's loop. Implements metamq.broker.transactions.journal.Appender."""

    status: ReplicaStatus
    folder: DataFolder
    topics: Topics
    flusher: Flusher
    ids: BatchIds
    counters: Counters
    _: KW_ONLY
    batch_bytes_max: int
    promised_bytes: Callable[[], int]
    """Returns the bytes that prepared branches will bring into partitions."""

    def admitted(self, entry: PutEntry, batch: memoryview) -> Admitted:
        """Checks a client's batch. Raises the reason why it is not stored now."""
        master = self.status.writing_master()
        partition = self.topics.find_for_clients(entry.topic, entry.topic_id, entry.partition)
        config = self.topics.config(entry.topic)
        master.transfer.admit(config)
        limit = config.max_message_bytes
        header = check_from_producer(batch, 0, len(batch), self.batch_bytes_max)
        if header.codec == Codec.NONE and (problem := columns_problem(batch, header)) is not None:
            raise CorruptData("batch", problem, hint="The producer encoded this batch wrongly: check the producer.")
        if header.count == 1 and header.plain_size > limit + SINGLE_MESSAGE_OVERHEAD:
            raise MessageTooLarge(f"a message for topic {entry.topic!r}", header.plain_size, limit)
        return Admitted(master, partition, config, header)

    def store(
        self, role: Role, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None = None
    ) -> Appended:
        """Appends a batch to its log, and gives it to the links to the slaves. Raises the errors of
        Partition.append."""
        position = partition.log.end_position
        appended = partition.append(batch, header, self.ids, batch_id)
        if isinstance(role, MasterRole) and not appended.repeated:
            role.service.appended(partition, batch, position, appended.end_offset)
        self.counters.appended(partition.topic, header, appended.repeated)
        return appended

    # -- for transactions ---------------------------------------------------------------------------------------------

    def body_place(self, entry: PutEntry, batch: memoryview) -> BodyPlace:
        """Checks a batch of a transaction; returns its destination. Raises the errors of admitted(), and
        ProtocolError."""
        _master, partition, _config, header = self.admitted(entry, batch)
        if header.producer_id:
            raise ProtocolError("a batch of a transaction has no producer id: its session counts it")
        return BodyPlace(partition.topic, partition.topic_id, partition.index, header.count)

    def admit(self, partition: Partition, promised_bytes: int) -> None:
        """Checks if the broker's own batch can be made durable now. Raises NotEnoughReplicas, DiskFull, Fenced."""
        master = self.status.master()
        if promised_bytes and self.status.disk_full is not None:
            raise self.status.disk_full.with_traceback(None)
        if promised_bytes > PROMISE_CHECKED_BYTES:
            free_bytes = self.folder.free_bytes()
            if free_bytes < promised_bytes + self.promised_bytes():
                raise DiskFull(str(self.folder.path), free_bytes, promised_bytes)
        master.transfer.admit(self.topics.config(partition.topic))

    def append(self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None) -> int:
        """Appends the broker's own batch, even before its epoch has begun; returns the end offset. Raises the errors of
        Partition.append."""
        appended = self.store(self.status.role, partition, batch, header, batch_id)
        self.flusher.appended(partition)
        return appended.end_offset

    def when_durable(self, partition: Partition, end_offset: int, done: Done) -> None:
        """Calls `done` when every in-sync replica has the batch as its topic asks, or with an unknown outcome."""
        role = self.status.role
        if isinstance(role, MasterRole):
            role.transfer.when_acknowledged(partition, self.topics.config(partition.topic), end_offset, done)
        else:
            done(role.refusal.with_unknown_outcome())


@dataclass(eq=False)
class PutProcessor:
    """Carries out PUT. Used by the broker's loop only. `failed` is called if the disk fails: the broker must end.

    Each batch of a PUT succeeds or fails by itself. The PUT is answered when the last of them has its result.
    """

    appends: Appends
    flusher: Flusher
    failed: Callable[[MetamqError], None]

    def put(self, request: Request, connection: BrokerProtocol) -> None:
        """Stores the batches of a PUT. Raises ProtocolError if the PUT itself is wrong."""
        entries = unpack_list(PutEntry, request.header)
        if not entries:
            raise ProtocolError("a PUT without a batch")
        if sum(entry.size for entry in entries) != len(request.body) or any(entry.size <= 0 for entry in entries):
            raise ProtocolError(f"the batches' sizes do not add up to the body's {len(request.body)} bytes")
        put = PendingPut(request, connection, len(entries))
        access = connection.access
        position = 0
        for number, entry in enumerate(entries):
            batch = request.body[position : position + entry.size]
            position += entry.size
            try:
                access.check_topic(WRITE, entry.topic)
                self._append(put, number, entry, batch, access)
            except MetamqError as error:
                if isinstance(error, StorageError) and not error.retriable:
                    self.failed(error)
                put.done(number, error)

    def _append(self, put: PendingPut, number: int, entry: PutEntry, batch: memoryview, access: Access) -> None:
        master, partition, config, header = self.appends.admitted(entry, batch)
        access.check_producer(header.producer_id, entry.topic)
        master.check_order(partition)
        appended = self.appends.store(master, partition, batch, header)
        put.stored(number, appended.base_offset, appended.time_us)
        master.transfer.when_acknowledged(partition, config, appended.end_offset, lambda error: put.done(number, error))
        self.flusher.appended(partition)


class PendingPut:
    """The results of a PUT. It answers when the last result is there. Only the first result of an entry counts."""

    __slots__ = ("_connection", "_left", "_request", "_results")

    def __init__(self, request: Request, connection: BrokerProtocol, count: int) -> None:
        self._request = request
        self._connection = connection
        self._left = set(range(count))
        self._results: list[PutResult] = [PutResult(status.OK, -1, -1, None)] * count

    def stored(self, number: int, base_offset: int, append_time_us: int) -> None:
        """Notes the place of an entry. The entry still waits for its acknowledgement."""
        self._results[number] = PutResult(status.OK, base_offset, append_time_us, None)

    def done(self, number: int, error: MetamqError | None) -> None:
        """Notes the final result of an entry."""
        if number not in self._left:  # a flush that cannot begin fails an entry that waits for it, or was answered
            return
        self._left.discard(number)
        if error is not None:
            code, fields = status.encode_error(error)
            self._results[number] = PutResult(code, -1, -1, fields)
        if not self._left:
            self._connection.answer(self._request, self._results)


@dataclass(eq=False)
class TxProcessor:
    """Carries out TX. Used by the broker's loop only."""

    replica: ReplicaStatus
    transactions: TransactionalCommandProcessor

    def tx(self, request: Request, connection: BrokerProtocol) -> None:
        """Carries out a TX, unless this master is leaving.

        Raises Fenced, NotAuthorized, and as TransactionalCommandProcessor.tx().
        """
        if (leaving := self.replica.leaving) is not None:
            raise leaving.with_traceback(None)
        self.transactions.tx(request, connection)
