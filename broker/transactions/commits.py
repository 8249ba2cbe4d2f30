"""From the journal into the partitions: each batch of a committed branch once, whatever happens in between.

Invariant: the COMMIT record is durable before the first of its batches is appended, and names their ids. So whoever
becomes master finds in the journal what may be missing in the partitions, and by the ids what is not. Commits are
brought as they become durable, all of one in one turn of the loop, but for what is stuck: that is brought later.

It looks for ids from where the last MARK says that each partition ended, and not from anything in the COMMIT: a tail
that was never flushed may be gone after a crash, and what takes its place may lie below where the batch lay before.
Retention leaves alone what lies behind the mark, on every replica.

A partition that is damaged, or whose topic's configuration cannot be read, holds up no other: what it lacks stays in
the journal, for a later try here, or for the slave that is promoted because of it. MARKs leave that partition out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import Topics
from metamq.broker.log import PartitionLog
from metamq.broker.log.disk.files import SHORTAGES
from metamq.broker.transactions.journal import Appender, JournalStore
from metamq.errors import CorruptData, MetamqError, TopicNotFound
from metamq.tx.store.branch import Body
from metamq.tx.store.fold import CommittedBranch, JournalState
from metamq.tx.store.records import Key
from metamq.wire.batch import read_header, walk
from metamq.words import count

log = logging.getLogger("metamq.broker")

SCAN_BYTES = 256 * 1024
"""Of a partition, in one turn of the loop."""


def key_of(partition: Partition) -> Key:
    """What the journal calls a partition."""
    return partition.topic, partition.topic_id, partition.index


class Stuck(NamedTuple):
    """What of a commit waits for partitions that are not served."""

    numbers: frozenset[int]
    """Of the bodies that wait. The others are in their partitions: nobody looks for them again in this term."""
    keys: frozenset[Key]


class CommitApplier:
    """Brings commits into partitions. Used by the broker's loop only, in one term."""

    def __init__(self, journal: JournalStore, topics: Topics, appender: Appender) -> None:
        self._journal = journal
        self._topics = topics
        self._appender = appender
        self.stuck: dict[int, Stuck] = {}
        """By LSN, those that lack a partition which is not served, but may be again. No MARK covers that partition."""

    def lacking(self) -> set[Key]:
        """The partitions that something waits for."""
        return {key for stuck in self.stuck.values() for key in stuck.keys}

    def bring(self, committed: CommittedBranch, present: Mapping[Partition, set[int]] | None = None) -> int:
        """Appends what is not there yet; returns how many batches that was. Raises StorageError, CorruptData, and what
        ended the term: what it has not brought, the next one does.

        `present`: the ids that partitions have already; None when the commit is new.
        """
        self._journal.check_term()
        brought = 0
        waiting: dict[int, object] = {}
        gone: Counter[str] = Counter()
        blocked = self._blocked_before(committed)
        for number in self._wanted(committed):
            body, batch_id = committed.bodies[number], committed.first_batch_id + number
            partition = self.find(body.place.key)
            if partition is None:
                gone[body.place.topic] += body.place.messages
            elif isinstance(partition, MetamqError):
                waiting[number] = partition
            elif body.place.key in blocked:
                waiting[number] = f"{partition.name} lacks what was committed before"
            elif present is not None and partition not in present:
                waiting[number] = f"{partition.name} came back only now"
            elif present is None or batch_id not in present[partition]:
                problem = self._append(partition, body, batch_id)
                brought += problem is None
                if problem is not None:
                    waiting[number] = problem
                    blocked.add(body.place.key)
        for topic, messages in gone.items():
            what = count(messages, "message")
            log.warning("%s of %s dropped: topic %r is gone", what, committed.branch.xid, topic)
        self._note(committed, waiting)
        return brought

    def _append(self, partition: Partition, body: Body, batch_id: int) -> MetamqError | None:
        """Appends a batch, or tells why it has to wait. Raises StorageError, and CorruptData of the journal."""
        try:
            batch = memoryview(self._journal.body(body))
        except SHORTAGES as error:
            return error
        try:
            self._appender.append(partition, batch, read_header(batch), batch_id)
        except SHORTAGES as error:
            return error
        except CorruptData as error:
            self._topics.is_damaged(partition, error)
            return error
        return None

    def _blocked_before(self, committed: CommittedBranch) -> set[Key]:
        """Partitions that lack what was committed before: nothing of a later commit is to overtake that."""
        return {key for lsn, stuck in self.stuck.items() if lsn < committed.lsn for key in stuck.keys}

    def redo(self, state: JournalState) -> Iterator[int]:
        """Brings what a former master had committed and did not bring; yields how many batches that was, after each
        commit, and 0 in between, where it may pause."""
        yield from self._redo(state, sorted(state.unmarked))

    def retry(self, state: JournalState) -> Iterator[int]:
        """Brings what was stuck, as far as its partitions are served again; yields as redo()."""
        yield from self._redo(state, sorted(self.stuck))

    def _redo(self, state: JournalState, lsns: list[int]) -> Iterator[int]:
        ends = {(topic, topic_id, index): position for topic, topic_id, index, position in state.mark.ends}
        present: dict[Partition, set[int]] = {}
        for committed in [state.unmarked[lsn] for lsn in lsns]:
            for number in self._wanted(committed):
                partition = self.find(committed.bodies[number].place.key)
                if not isinstance(partition, Partition) or partition in present:
                    continue
                found: set[int] = set()
                try:
                    for ids in _ids_from(partition.log, ends.get(key_of(partition), 0)):
                        found.update(ids)
                        yield 0
                        self._journal.check_term()  # the log of a slave may be cut meanwhile
                        if partition.closed_by is not None:
                            break
                    else:  # in this turn of the loop it was read to its end; what comes later has other ids
                        present[partition] = found
                except CorruptData as error:
                    self._topics.is_damaged(partition, error)
            yield self.bring(committed, present)

    def _wanted(self, committed: CommittedBranch) -> Iterable[int]:
        """Which of its bodies are not known to be in their partitions."""
        stuck = self.stuck.get(committed.lsn)
        return sorted(stuck.numbers) if stuck is not None else committed.bodies

    def find(self, key: Key) -> Partition | MetamqError | None:
        """A partition, or why it is not served at present; None when the topic was deleted."""
        topic, topic_id, _index = key
        try:
            partition = self._topics.find(*key)
        except TopicNotFound as error:
            return None if self._topics.is_gone(topic, topic_id) else error
        except CorruptData as error:
            return error
        return partition if partition.closed_by is None else partition.closed_by

    def _note(self, committed: CommittedBranch, waiting: dict[int, object]) -> None:
        if not waiting:
            self.stuck.pop(committed.lsn, None)
            return
        if committed.lsn not in self.stuck:
            reason = next(iter(waiting.values()))
            log.error("what %s has committed waits in the journal: %s", committed.branch.xid, reason)
        keys = frozenset(committed.bodies[number].place.key for number in waiting)
        self.stuck[committed.lsn] = Stuck(frozenset(waiting), keys)


def _ids_from(partition_log: PartitionLog, position: int) -> Iterator[list[int]]:
    """The ids of the batches from a byte of the log on, some at a time. Raises CorruptData, StorageError."""
    while (position := max(position, partition_log.start_position)) < partition_log.end_position:
        run = partition_log.read_position(position, SCAN_BYTES)
        yield [header.batch_id for _at, header in walk(run.data)]
        position = run.end_position
