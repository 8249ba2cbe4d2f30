"""JournalStore: the transaction journal on disk. It is a partition log, under a name that no topic can have.

So the journal reuses the features of logs: torn tails and damage, group commit, replication to every slave, the stable
mark, epochs. The journal is always `sync` and flushed before it is acknowledged, whatever the settings of topics. An
LSN is an offset of that log. An entry has one offset per value: one for its records and one for each body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from metamq.tx.store.fold import Entry, Retained
from metamq.tx.store.records import Record, pack, unpack
from metamq.wire.batch import HEADER_BYTES, BatchHeader, read_header, walk
from metamq.wire.columns import decode, encode
from metamq.zk.cluster.topics import TopicConfig

if TYPE_CHECKING:
    from metamq.broker.data.partition import BatchIds, Done, Partition
    from metamq.errors import MetamqError
    from metamq.tx.store.branch import Body

TOPIC = "~transactions"
TOPIC_ID = "0" * 16
SEGMENT_BYTES = 64 * 1024 * 1024
READ_BYTES = 4 * 1024 * 1024
RECENT_BYTES, RECENT_ENTRIES = 32 * 1024, 128


def journal_config(broker_id: int, min_insync: int = 1) -> TopicConfig:
    """The settings of the journal. Retention never cuts it; only its owner does."""
    return TopicConfig(
        TOPIC, {broker_id: 1}, TOPIC_ID, flush="ack", retention_ms=None, segment_bytes=SEGMENT_BYTES,
        replication="sync", min_insync=min_insync,
    )  # fmt: skip


class Appender(Protocol):
    """Appends batches to partitions, here and on the slaves."""

    def admit(self, partition: Partition, promised_bytes: int) -> None:
        """Checks that a durable append is possible now. It promises `promised_bytes` more to partitions.

        Raises NotEnoughReplicas, DiskFull, Fenced: then the caller must not store anything.
        """

    def append(self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None) -> int:
        """Appends a batch; returns its end. Raises StorageError, CorruptData, and the partition's closing error."""
        ...

    def when_durable(self, partition: Partition, end_offset: int, done: Done) -> None:
        """Calls `done` when every in-sync replica has flushed it, or with the error why this is unknown."""


class Written(NamedTuple):
    """An appended entry, and its end."""

    entry: Entry
    end_offset: int


class JournalStore:
    """The journal of a master, during one epoch. Only the broker's loop uses it."""

    def __init__(self, partition: Partition, ids: BatchIds, appender: Appender) -> None:
        self.partition = partition
        self._ids = ids
        self._appender = appender
        self._last_read: tuple[int, list[memoryview]] = -1, []
        self._recent: dict[int, list[bytes]] = {}
        """Bodies of small entries by position, oldest first: most are committed soon, and not read from disk."""
        self._held: tuple[list[Record], list[memoryview]] = [], []
        """The records and bodies at the start of the next entry."""
        self.ended: MetamqError | None = None
        """The error that ended the epoch."""
        self.found_offset = partition.log.end_offset
        """Its end when the epoch began."""
        self.durable_offset = partition.log.stable_offset
        """The end of the part that was known then to be on every in-sync replica."""

    def check_term(self) -> None:
        """Raises the error that ended the epoch: a task that began in it may still run in the next one."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    @property
    def end_lsn(self) -> int:
        """The LSN of the next entry."""
        return self.partition.log.end_offset

    @property
    def size_bytes(self) -> int:
        """Size of the journal."""
        return self.partition.log.size_bytes

    def admit(self, promised_bytes: int) -> None:
        """Checks that an entry can be made durable now. Raises NotEnoughReplicas, DiskFull, Fenced."""
        self._appender.admit(self.partition, promised_bytes)

    def is_durable(self, written: Written) -> bool:
        """True if an entry is on the disk of every in-sync replica."""
        return self.partition.closed_by is None and self.partition.log.stable_offset >= written.end_offset

    def hold(self, records: list[Record], bodies: list[memoryview]) -> Entry:
        """Holds records and their bodies for the start of the next entry. The caller must append that entry in the same
        turn of the loop, since nothing is written yet."""
        self.append_held()
        self._held = records, bodies
        log = self.partition.log
        return Entry(log.end_offset, log.end_position, records, [len(body) for body in bodies])

    @property
    def holds(self) -> bool:
        """True if records are held."""
        return bool(self._held[0])

    def append_held(self) -> None:
        """Appends the held records as an entry of their own. Raises the errors of append()."""
        if self._held[0]:
            self.append([], [])

    def append(self, records: list[Record], bodies: list[memoryview]) -> Written:
        """Appends an entry, with the held records first; the result has only the new ones. It is not durable yet.

        Raises StorageError, CorruptData, MessageTooLarge, and the error that ended the epoch; held records are then
        dropped."""
        self.check_term()
        if bodies:  # bodies are numbered within their entry
            self.append_held()
        log = self.partition.log
        held, self._held = self._held, ([], [])
        stored = held[1] or bodies
        values: list[bytes | memoryview] = [pack([*held[0], *records]), *stored]
        batch = memoryview(encode(values, base_timestamp_us=time.time_ns() // 1000))
        lsn, position = log.end_offset, log.end_position
        end_offset = self._appender.append(self.partition, batch, read_header(batch), None)
        if stored and len(batch) <= RECENT_BYTES:
            self._recent[position] = [bytes(body) for body in stored]
            if len(self._recent) > RECENT_ENTRIES:
                del self._recent[next(iter(self._recent))]
        return Written(Entry(lsn, position, records, [len(body) for body in bodies]), end_offset)

    def when_durable(self, written: Written, done: Done) -> None:
        """Calls `done` when the entry is durable, or with the error why this is unknown; possibly at once."""
        self._appender.when_durable(self.partition, written.end_offset, done)

    def when_settled(self, done: Done) -> None:
        """Calls `done` when every in-sync replica has the journal as the epoch found it, or with the error that ended
        the epoch. Their number does not matter: no other replica takes over without a loss."""
        if self.partition.when_stable(self.found_offset, done):
            done(None)

    def body(self, body: Body) -> bytearray:
        """A copy of a stored body. Raises CorruptData, StorageError."""
        if (recent := self._recent.get(body.position)) is not None:
            return bytearray(recent[body.number - 1])  # an entry begins with its records
        position, values = self._last_read
        if position != body.position:
            run = self.partition.log.read_position(body.position, HEADER_BYTES)
            _at, header = next(iter(walk(run.data)))
            values = _values(run.data, header)
            self._last_read = body.position, values
        return bytearray(values[body.number])


def read_journal(partition: Partition) -> Iterator[Entry]:
    """All entries of a journal, oldest first. Raises CorruptData, StorageError."""
    log = partition.log
    position = log.start_position
    while position < log.end_position:
        run = log.read_position(position, READ_BYTES)
        for at, header in walk(run.data):
            yield _entry(run.data[at : at + header.size], header, position + at)
        position = run.end_position


def _entry(batch: memoryview, header: BatchHeader, position: int) -> Entry:
    values = _values(batch, header)
    sizes = [len(value) for value in values[1:]]
    return Entry(header.base_offset, position, unpack(bytes(values[0]), len(sizes)), sizes)


class Follower:
    """Reads a journal as it grows, at any replica, up to the stable mark. Only the loop uses it."""

    def __init__(self) -> None:
        self.retained = Retained()
        self._partition: Partition | None = None
        self._cuts = 0
        self._position = 0

    async def catch_up(self, partition: Partition) -> Retained:
        """The records that retention must keep. Reads the entries since the last call. Raises CorruptData,
        StorageError, and the error that closed the partition."""
        log = partition.log
        while True:
            if (partition, partition.cuts) != (self._partition, self._cuts):  # the entries that were read may be gone
                self.retained, self._position = Retained(), log.start_position
                self._partition, self._cuts = partition, partition.cuts
            self._position = max(self._position, log.start_position)
            if self._position >= log.stable_position:
                return self.retained
            run = log.read_position(self._position, READ_BYTES)
            reached = self._position
            for at, header in walk(run.data):
                if header.base_offset >= log.stable_offset:
                    break
                self.retained.apply(_entry(run.data[at : at + header.size], header, self._position + at))
                reached = self._position + at + header.size
            assert reached > self._position  # else this would never end
            self._position = reached
            await asyncio.sleep(0)


def _values(batch: memoryview, header: BatchHeader) -> list[memoryview]:
    column = decode(batch, header).values
    offsets = column.offsets.tolist()
    return [column.data[start:end] for start, end in pairwise(offsets)]
