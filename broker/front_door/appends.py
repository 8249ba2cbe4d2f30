"""Checks batches and stores them, in the log and at the slaves; carries out TX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.roles.role import MasterRole, ReplicaStatus, Role
from metamq.errors import CorruptData, DiskFull, MessageTooLarge, MetamqError, ProtocolError
from metamq.tx.store.records import BodyPlace
from metamq.wire.batch import BatchHeader, check_from_producer
from metamq.wire.compression import Codec
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
    from metamq.wire.commands import PutEntry
    from metamq.wire.connection import Request
    from metamq.zk.cluster.topics import TopicConfig

SINGLE_MESSAGE_OVERHEAD = 64
"""Bytes of the offsets and the padding in a batch of one message with all columns."""
PROMISE_CHECKED_BYTES = 1024 * 1024
"""A larger promise needs a new check of the free space. A smaller one fits into the reserve until the next check."""


class Admitted(NamedTuple):
    """A partition that takes batches of clients now."""

    master: MasterRole
    partition: Partition
    config: TopicConfig

    def check_size(self, header: BatchHeader) -> None:
        """Raises MessageTooLarge if the batch is one message that is larger than its topic allows."""
        limit = self.config.max_message_bytes
        if header.count == 1 and header.plain_size > limit + SINGLE_MESSAGE_OVERHEAD:
            raise MessageTooLarge(f"a message for topic {self.config.topic!r}", header.plain_size, limit)


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

    def checked(self, entry: PutEntry, batch: memoryview) -> BatchHeader:
        """Checks a client's batch by itself. Raises the reason why it is not stored."""
        try:
            header = check_from_producer(batch, 0, len(batch), self.batch_bytes_max)
            if header.codec == Codec.NONE and (problem := columns_problem(batch, header)) is not None:
                raise CorruptData("batch", problem, hint="The producer encoded this batch wrongly: check the producer.")
        except MetamqError:
            self.admitted(*entry[:3])  # its reason comes first: another broker may be the right one
            raise
        return header

    def admitted(self, topic: str, topic_id: str, index: int) -> Admitted:
        """Finds a partition for batches of clients. Raises the reason why it takes none now."""
        master = self.status.writing_master()
        partition = self.topics.find_for_clients(topic, topic_id, index)
        config = self.topics.config(topic)
        master.transfer.admit(config)
        return Admitted(master, partition, config)

    def store(
        self,
        role: Role,
        partition: Partition,
        batches: memoryview,
        headers: Sequence[BatchHeader],
        batch_id: int | None = None,
    ) -> Appended:
        """Appends new batches to their log, and gives them to the links to the slaves. Raises the errors of
        Partition.append."""
        position = partition.log.end_position
        appended = partition.append(batches, headers, self.ids, batch_id)
        if isinstance(role, MasterRole):
            role.service.appended(partition, batches, position, appended.end_offset)
        messages = sum([header.count for header in headers])
        self.counters.appended(partition.topic, len(headers), messages, len(batches))
        return appended

    # -- for transactions ---------------------------------------------------------------------------------------------

    def body_place(self, entry: PutEntry, batch: memoryview) -> BodyPlace:
        """Checks a batch of a transaction; returns its destination. Raises the errors of checked() and admitted(), and
        ProtocolError."""
        place, header = self.admitted(*entry[:3]), self.checked(entry, batch)
        place.check_size(header)
        if header.producer_id:
            raise ProtocolError("a batch of a transaction has no producer id: its session counts it")
        return BodyPlace(*place.partition.key, header.count)

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
        appended = self.store(self.status.role, partition, batch, (header,), batch_id)
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
