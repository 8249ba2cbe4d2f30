"""Applies committed branches from the journal to the partitions: each batch once, whatever happens in between.

Invariant: the COMMIT record has the ids of its batches, and is durable before the first of them is appended: on every
in-sync replica. So a new master finds in the journal which batches may be missing in the partitions, and the ids show
which are there. A commit is applied when it is durable, completely in one turn of the loop. Only its stuck batches are
applied later. A new master cannot know if the end of its journal is durable. It applies those commits when it is.

The search for ids starts where each partition ended by the last MARK, not at a place from the COMMIT: after a crash an
unflushed tail may be gone, and a batch that replaces it may be below the place of the old one. Retention keeps
everything behind the mark, on every replica.

If a partition is damaged, or its topic's configuration cannot be read, the other partitions continue. Its batches stay
in the journal, for a later attempt here or for the slave that is promoted because of it. MARKs leave that partition
out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.data.partition import Partition
from metamq.broker.log.disk.files import SHORTAGES
from metamq.errors import CorruptData, MetamqError, TopicNotFound
from metamq.wire.batch import read_header, walk
from metamq.words import count

if TYPE_CHECKING:
    from metamq.broker.data.topics import Topics
    from metamq.broker.log.partition_log import PartitionLog
    from metamq.broker.transactions.journal import Appender, JournalStore
    from metamq.tx.store.branch import Body
    from metamq.tx.store.fold import CommittedBranch, JournalState
    from metamq.tx.store.records import Key

log = logging.getLogger("metamq.broker")

SCAN_BYTES = 256 * 1024
"""Bytes of a partition that are scanned in one turn of the loop."""


class Stuck(NamedTuple):
    """The part of a commit that waits for partitions that are not served."""

    numbers: frozenset[int]
    """Numbers of the waiting bodies. The other bodies are in their partitions and are not searched again this epoch."""
    keys: frozenset[Key]


class CommitApplier:
    """Applies commits to partitions. Only the broker's loop uses it, during one epoch."""

    def __init__(self, journal: JournalStore, topics: Topics, appender: Appender) -> None:
        self._journal = journal
        self._topics = topics
        self._appender = appender
        self.stuck: dict[int, Stuck] = {}
        """The commits, by LSN, with a partition that is not served at the moment. No MARK covers that partition."""
        self.lacking: Counter[Key] = Counter()
        """The partitions for which commits wait, and the number of these commits."""

    def apply(self, committed: CommittedBranch, present: Mapping[Partition, set[int]] | None = None) -> int:
        """Appends the missing batches; returns their number. Raises StorageError, CorruptData, and the error that
        ended the epoch; the next epoch then applies the rest.

        `present`: the ids that partitions already have; None if the commit is new.
        """
        self._journal.check_term()
        applied = 0
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
                waiting[number] = f"{partition.name} lacks batches of an earlier commit"
            elif present is not None and partition not in present:
                waiting[number] = f"{partition.name} has just become available again"
            elif present is None or batch_id not in present[partition]:
                problem = self._append(partition, body, batch_id)
                applied += problem is None
                if problem is not None:
                    waiting[number] = problem
                    blocked.add(body.place.key)
        for topic, messages in gone.items():
            what = count(messages, "message")
            log.warning("%s of %s dropped: topic %r is gone", what, committed.branch.xid, topic)
        self._note(committed, waiting)
        return applied

    def _append(self, partition: Partition, body: Body, batch_id: int) -> MetamqError | None:
        """Appends a batch, or returns why it must wait. Raises StorageError, and CorruptData of the journal."""
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
        """The partitions that lack batches of an earlier commit: no later commit may overtake those."""
        return {key for lsn, stuck in self.stuck.items() if lsn < committed.lsn for key in stuck.keys}

    def redo(self, state: JournalState, start: int, end: int) -> Iterator[int]:
        """Applies the commits of these LSNs that a former master did not apply completely. Yields the number of batches
        after each commit, and 0 in between as a point to pause."""
        yield from self._redo(state, sorted(lsn for lsn in state.unmarked if start <= lsn < end))

    def retry(self, state: JournalState) -> Iterator[int]:
        """Applies stuck commits whose partitions are served again; yields like redo()."""
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
                    for ids in _ids_from(partition.log, ends.get(partition.key, 0)):
                        found.update(ids)
                        yield 0
                        self._journal.check_term()  # a slave's log may have been cut meanwhile
                        if partition.closed_by is not None:
                            break
                    else:  # this turn read it to its end; later batches have other ids
                        present[partition] = found
                except CorruptData as error:
                    self._topics.is_damaged(partition, error)
            yield self.apply(committed, present)

    def _wanted(self, committed: CommittedBranch) -> Iterable[int]:
        """The numbers of the bodies that may be missing in their partitions."""
        stuck = self.stuck.get(committed.lsn)
        return sorted(stuck.numbers) if stuck is not None else committed.bodies

    def find(self, key: Key) -> Partition | MetamqError | None:
        """A partition, or the reason why it is not served; None if the topic was deleted."""
        topic, topic_id, _index = key
        try:
            partition = self._topics.find(*key)
        except TopicNotFound as error:
            return None if self._topics.is_gone(topic, topic_id) else error
        except CorruptData as error:
            return error
        return partition if partition.closed_by is None else partition.closed_by

    def _note(self, committed: CommittedBranch, waiting: dict[int, object]) -> None:
        known = self.stuck.pop(committed.lsn, None)
        if known is None and not waiting:
            return
        keys = frozenset(committed.bodies[number].place.key for number in waiting)
        self.lacking.update(keys)
        self.lacking.subtract(known.keys if known is not None else ())
        self.lacking = +self.lacking
        if not waiting:
            return
        if known is None:
            reason = next(iter(waiting.values()))
            log.error("the commit of %s waits in the journal: %s", committed.branch.xid, reason)
        self.stuck[committed.lsn] = Stuck(frozenset(waiting), keys)


def log_completed(applied: Sequence[int], dropped: int) -> None:
    """Logs the work of a new master for former ones. `applied`: the numbers that redo() yielded."""
    commits = sum(1 for batches in applied if batches)
    if commits or dropped:
        unprepared = f", {count(dropped, 'branch')} not prepared and dropped" if dropped else ""
        log.info("transactions: %s of a former master completed%s", count(commits, "commit"), unprepared)


def _ids_from(partition_log: PartitionLog, position: int) -> Iterator[list[int]]:
    """The ids of the batches from a position on, one chunk at a time. Raises CorruptData, StorageError."""
    while (position := max(position, partition_log.start_position)) < partition_log.end_position:
        run = partition_log.read_position(position, SCAN_BYTES)
        yield [header.batch_id for _at, header in walk(run.data)]
        position = run.end_position
