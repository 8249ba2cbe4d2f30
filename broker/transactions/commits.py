"""From the journal into the partitions: each batch of a committed branch once, whatever happens in between.

Invariant: the COMMIT record is durable before the first of its batches is appended, and names their ids. So whoever
becomes master finds in the journal what may be missing in the partitions, and by the ids what is not: commits are
brought in the order of the journal, all of one in one turn of the loop.

It looks for ids from where the last MARK says that each partition ended, and not from anything in the COMMIT: a tail
that was never flushed may be gone after a crash, and what takes its place may lie below where the batch lay before.
Retention leaves alone what lies behind the mark, on every replica.

A partition that is damaged, or whose topic's configuration cannot be read, holds up no other: what it lacks stays in
the journal, for a later try here, or for the slave that is promoted because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from metamq.broker.log import PartitionLog
from metamq.broker.partition import Partition
from metamq.broker.topics import Topics
from metamq.broker.transactions.journal import Appender, JournalStore
from metamq.errors import CorruptData, MetamqError, TopicNotFound
from metamq.tx.store.fold import Committed, JournalState
from metamq.tx.store.records import Place
from metamq.wire.batch import read_header
from metamq.words import count

log = logging.getLogger("metamq.broker")

READ_BYTES = 4 * 1024 * 1024

Key = tuple[str, str, int]
"""Topic, topic id, index."""


def key_of(partition: Partition) -> Key:
    """What the journal calls a partition."""
    return partition.topic, partition.topic_id, partition.index


class Commits:
    """Brings commits into partitions. Used by the broker's loop only, in one term."""

    def __init__(self, journal: JournalStore, topics: Topics, appender: Appender) -> None:
        self._journal = journal
        self._topics = topics
        self._appender = appender
        self.stuck: dict[int, Committed] = {}
        """By LSN, those that lack a partition which is not served, but may be again. No MARK passes them by."""

    def bring(self, committed: Committed, present: Mapping[Key, set[int]] | None = None) -> int:
        """Appends what is not there yet; returns how many batches that was. Raises StorageError, CorruptData.

        `present`: the ids that partitions have already; None when the commit is new.
        """
        brought = 0
        for number, body in enumerate(committed.bodies):
            batch_id = committed.first_batch_id + number
            partition = self._partition(committed, body.place)
            if partition is None or (present is not None and batch_id in present.get(key_of(partition), ())):
                continue
            batch = memoryview(self._journal.body(body))
            try:
                self._appender.append(partition, batch, read_header(batch), batch_id)
                brought += 1
            except CorruptData as error:
                self._topics.is_damaged(partition, error)
                self._waits(committed, error)
        return brought

    def redo(self, state: JournalState) -> Iterator[int]:
        """Brings what a former master had committed and did not bring; yields after each commit."""
        yield from self._redo(state, list(state.unmarked.values()))

    def retry(self, state: JournalState) -> Iterator[int]:
        """Brings what was stuck, as far as its partitions are served again; yields after each commit."""
        stuck, self.stuck = self.stuck, {}
        try:
            yield from self._redo(state, list(stuck.values()))
        except BaseException:
            self.stuck = stuck | self.stuck
            raise

    def _redo(self, state: JournalState, commits: list[Committed]) -> Iterator[int]:
        ends = {(topic, topic_id, index): position for topic, topic_id, index, position in state.mark.ends}
        present: dict[Key, set[int]] = {}
        for committed in commits:
            for body in committed.bodies:
                partition = self._partition(committed, body.place)
                if partition is None or (key := key_of(partition)) in present:
                    continue
                try:
                    present[key] = set(_ids_from(partition.log, ends.get(key, 0)))
                except CorruptData as error:
                    self._topics.is_damaged(partition, error)
            yield self.bring(committed, present)

    def _partition(self, committed: Committed, place: Place) -> Partition | None:
        """Where it is to go; None when the topic was deleted, or is not served at present."""
        try:
            partition = self._topics.find(place.topic, place.topic_id, place.partition)
            if partition.closed_by is None:
                return partition
            reason: MetamqError = partition.closed_by
        except TopicNotFound as error:
            if self._topics.is_gone(place.topic, place.topic_id):
                log.warning("%s of %s is dropped: %s", count(place.messages, "message"), committed.branch.xid, error)
                return None
            reason = error
        except CorruptData as error:
            reason = error
        self._waits(committed, reason)
        return None

    def _waits(self, committed: Committed, reason: MetamqError) -> None:
        if committed.lsn not in self.stuck:
            log.error("what %s has committed waits in the journal: %s", committed.branch.xid, reason)
            self.stuck[committed.lsn] = committed


def _ids_from(partition_log: PartitionLog, position: int) -> Iterator[int]:
    """The ids of the batches from a byte of the log on. Raises CorruptData, StorageError."""
    position = max(position, partition_log.start_position)
    while position < partition_log.end_position:
        run = partition_log.read_position(position, READ_BYTES)
        at = 0
        while at < len(run.data):
            header = read_header(run.data, at)
            yield header.batch_id
            at += header.size
        position = run.end_position
