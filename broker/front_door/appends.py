"""Appends: checks batches and stores them, in the log and at the slaves; for PUTs and for transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.roles.role import MasterRole, ReplicaStatus, Role
from metamq.errors import CorruptData, DiskFull, MessageTooLarge, ProtocolError
from metamq.tx.store.records import BodyPlace
from metamq.wire.batch import BatchHeader, check_from_producer
from metamq.wire.compression import Codec
from metamq.wire.outline import columns_problem

if TYPE_CHECKING:
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Appended, BatchIds, Done, Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.front_door.statistics import Counters
    from metamq.wire.commands import PutEntry
    from metamq.zk.cluster.topics import TopicConfig

SINGLE_MESSAGE_OVERHEAD = 64
"""Bytes of the offsets and the padding in a batch of one message with all columns."""
PROMISE_CHECKED_BYTES = 1024 * 1024
"""For a larger promise the free space is read again. A smaller one fits into the reserve until the next check."""


class Admitted(NamedTuple):
    """A batch that may be stored now."""

    master: MasterRole
    partition: Partition
    config: TopicConfig
    header: BatchHeader


class Appends:
    """Used by the broker's loop only. Implements metamq.broker.transactions.journal.Appender."""

    def __init__(
        self,
        status: ReplicaStatus,
        folder: DataFolder,
        topics: Topics,
        flusher: Flusher,
        ids: BatchIds,
        counters: Counters,
        *,
        batch_bytes_max: int,
        promised_bytes: Callable[[], int],
    ) -> None:
        """`promised_bytes` returns the bytes that prepared branches will bring into partitions."""
        self._status = status
        self._folder = folder
        self._topics = topics
        self._flusher = flusher
        self._ids = ids
        self._counters = counters
        self._batch_bytes_max = batch_bytes_max
        self._promised_bytes = promised_bytes

    def admitted(self, entry: PutEntry, batch: memoryview) -> Admitted:
        """Checks a client's batch. Raises the reason why it is not stored now."""
        master = self._status.writing_master()
        partition = self._topics.find_for_clients(entry.topic, entry.topic_id, entry.partition)
        config = self._topics.config(entry.topic)
        master.transfer.admit(config)
        limit = config.max_message_bytes
        header = check_from_producer(batch, 0, len(batch), self._batch_bytes_max)
        if header.codec == Codec.NONE and (problem := columns_problem(batch, header)) is not None:
            raise CorruptData("batch", problem, hint="Its producer made it so: look there.")
        if header.count == 1 and header.plain_size > limit + SINGLE_MESSAGE_OVERHEAD:
            raise MessageTooLarge(f"a message for topic {entry.topic!r}", header.plain_size, limit)
        return Admitted(master, partition, config, header)

    def store(
        self, role: Role, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None = None
    ) -> Appended:
        """Appends a batch to its log, and gives it to the links to the slaves. Raises as Partition.append."""
        position = partition.log.end_position
        appended = partition.append(batch, header, self._ids, batch_id)
        if isinstance(role, MasterRole) and not appended.repeated:
            role.service.appended(partition, batch, position, appended.end_offset)
        self._counters.appended(partition.topic, header, appended.repeated)
        return appended

    # -- for transactions ---------------------------------------------------------------------------------------------

    def body_place(self, entry: PutEntry, batch: memoryview) -> BodyPlace:
        """Checks a batch of a transaction; returns its destination. Raises as admitted(), and ProtocolError."""
        _master, partition, _config, header = self.admitted(entry, batch)
        if header.producer_id:
            raise ProtocolError("a batch of a transaction has no producer id: its session counts it")
        return BodyPlace(partition.topic, partition.topic_id, partition.index, header.count)

    def admit(self, partition: Partition, promised_bytes: int) -> None:
        """Checks if the broker's own batch can be made durable now. Raises NotEnoughReplicas, DiskFull, Fenced."""
        master = self._status.master()
        if promised_bytes and self._status.disk_full is not None:
            raise self._status.disk_full.with_traceback(None)
        if promised_bytes > PROMISE_CHECKED_BYTES:
            free_bytes = self._folder.free_bytes()
            if free_bytes < promised_bytes + self._promised_bytes():
                raise DiskFull(str(self._folder.path), free_bytes, promised_bytes)
        master.transfer.admit(self._topics.config(partition.topic))

    def append(self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None) -> int:
        """Appends the broker's own batch, also before its epoch has begun; returns the end offset. Raises as
        Partition.append."""
        appended = self.store(self._status.role, partition, batch, header, batch_id)
        self._flusher.appended(partition)
        return appended.end_offset

    def when_durable(self, partition: Partition, end_offset: int, done: Done) -> None:
        """Calls `done` when every in-sync replica has the batch as its topic asks, or with an unknown outcome."""
        role = self._status.role
        if isinstance(role, MasterRole):
            role.transfer.when_acknowledged(partition, self._topics.config(partition.topic), end_offset, done)
        else:
            done(role.refusal.with_unknown_outcome())
