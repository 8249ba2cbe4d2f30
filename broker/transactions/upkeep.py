"""Keeps the journal short: writes MARKs, rewrites old records of live branches, and cuts the journal.

    every MARK_S with new commits   flush their partitions, and wait until every in-sync replica has the new batches;
                                    then write a MARK: after a restart or a promotion, the search for batches starts
                                    behind it
    journal over CUT_BYTES,         rewrite the remembered outcomes (REMEMBERED) and the records of the older half:
    and twice its live data         branches (MOVE .. MOVED), batches that wait for partitions (WAITING); write a MARK

A MARK leaves out partitions that are not served, or for which commits wait. For those the previous MARK still counts:
entries that it did not cover are kept, and the search starts where the partition ended by that MARK. So a stuck commit
keeps only its own bodies in the journal.

A MARK says which entries are no longer needed. Each replica removes them when the MARK is durable everywhere. The order
is essential: the partitions are flushed before the MARK is written, and rewritten records come before it. A branch is
rewritten once each time that the journal doubles.

All these methods pause. Meanwhile the epoch may end, or the next one may begin: then they raise the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from metamq.broker.data.partition import Partition
from metamq.broker.transactions.journal import SEGMENT_BYTES
from metamq.errors import MetamqError, StorageError
from metamq.tx.store.fold import NO_MARK, CommittedBranch, JournalState, move_of
from metamq.tx.store.records import Add, Key, Mark, Moved, Record, Remembered, Waiting
from metamq.zk.names import OWN

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.topics import Topics
    from metamq.broker.transactions.journal import JournalStore
    from metamq.broker.transactions.term import TransactionTerm
    from metamq.tx.store.branch import Body, BranchState

MARK_S = 5.0
CUT_BYTES = 2 * SEGMENT_BYTES
MOVED_BYTES = 4 * 1024 * 1024
"""Bytes of bodies in one entry; a larger body gets an entry of its own."""
PLACE_BYTES = 300
"""Maximum bytes of a record per body."""
REMEMBERED_IN_ENTRY = 5000


class Upkeep:
    """Writes MARKs and cuts the journal. Only the broker's loop uses it, with one task at a time."""

    def __init__(self, topics: Topics, flusher: Flusher) -> None:
        self.cut_bytes = CUT_BYTES
        self.mark_s = MARK_S
        self._topics = topics
        self._flusher = flusher

    async def mark(self, term: TransactionTerm) -> None:
        """Writes a MARK for all commits that are in their partitions, unless it says nothing new. Raises StorageError,
        and the error that ended the epoch."""
        state = term.store.journal
        lsn, memory_lsn = min(term.in_flight, default=term.journal.end_lsn), term.memory_lsn
        partitions = {p.key: p for p in self._topics.partitions() if not p.topic.startswith(OWN)}
        reach = {
            key: min(partition.log.end_position, partition.log.stable_position)
            for key, partition in partitions.items()
            if partition.closed_by is None
        }
        left_out = set(term.commits.lacking)
        for key in sorted(
            {body.place.key for one in state.unmarked.values() for body in one.bodies.values()} - left_out
        ):
            if not await self._settle(term, key):
                left_out.add(key)
        needed_lsn = state.first_needed_lsn(lsn, memory_lsn, left_out)
        is_news = left_out != set(state.mark.left_out) or any(state.mark.lsn <= one < lsn for one in state.unmarked)
        if not is_news and needed_lsn <= term.needed_lsn:
            return
        ends = {end[:3]: end[3] for end in state.mark.ends if end[:3] in partitions or end[:3] in left_out}
        ends |= {
            key: min(end, partitions[key].log.flushed_position) for key, end in reach.items() if key not in left_out
        }
        named = [(*key, end) for key, end in ends.items() if end]
        await self._write(term, Mark(lsn, needed_lsn, term.generation, named, tuple(sorted(left_out))))
        assert term.commits.stuck.keys() <= state.unmarked.keys(), "waiting commits are still in the journal"
        term.needed_lsn = term.journal.partition.needed_offset = needed_lsn

    async def _settle(self, term: TransactionTerm, key: Key) -> bool:
        """Waits until everything that a partition has now is flushed here, and stored by every in-sync replica: after a
        promotion, a replica does not search for it in the journal. Returns False if the partition is not served. Raises
        StorageError, and the error that ended the epoch."""
        partition = term.commits.find(key)
        if not isinstance(partition, Partition):
            return partition is None
        log = partition.log
        end_offset, end_position = log.end_offset, log.end_position
        await self._flusher.settle(partition)
        term.journal.check_term()  # a slave's log may have been cut, which is not a failure of its disk
        if partition.closed_by is not None:
            return False
        if log.flushed_position < end_position:
            raise StorageError(f"{partition.name} was not flushed", hint="The first error of its disk has the reason.")
        held: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        if partition.when_stable(end_offset, lambda error: None if held.done() else held.set_result(error)):
            return True
        if (error := await held) is not None:
            raise error
        return True

    async def found_is_durable(self, journal: JournalStore) -> None:
        """Waits until every in-sync replica has the journal as the epoch found it. Raises the error that prevents it.

        A process that was killed may have left an end that is not flushed.
        """
        journal.check_term()
        await self._flusher.settle(journal.partition)
        journal.check_term()
        if journal.partition.closed_by is not None:
            raise journal.partition.closed_by.with_traceback(None)
        durable: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        journal.when_settled(lambda error: None if durable.done() else durable.set_result(error))
        if (error := await durable) is not None:
            raise error

    async def shorten(self, term: TransactionTerm) -> None:
        """Rewrites the remembered outcomes and the needed records of the older half of a journal that is too long, and
        writes a MARK behind them. If no MARK can follow, or the last one allowed no cut, this is done again only when
        the journal is twice as long. Raises the errors of mark()."""
        state, journal = term.store.journal, term.journal
        waiting_bytes = sum(body.size_bytes for one in _waiting(state) for body in one.bodies.values())
        alive_bytes = waiting_bytes + sum(branch.bytes for branch in state.branches.values())
        if journal.size_bytes <= max(self.cut_bytes, 2 * alive_bytes):
            return
        size_bytes, needed_lsn = term.written_down
        if journal.size_bytes > 2 * size_bytes or term.needed_lsn != needed_lsn:
            journal.admit(0)
            await self._write_down(term)
            term.written_down = journal.size_bytes, term.needed_lsn
            await self.mark(term)
            return
        lsn, left_out = min(term.in_flight, default=journal.end_lsn), {*state.mark.left_out, *term.commits.lacking}
        if state.first_needed_lsn(lsn, term.memory_lsn, left_out) > needed_lsn:
            await self.mark(term)

    async def _write_down(self, term: TransactionTerm) -> None:
        state, journal = term.store.journal, term.journal
        log = journal.partition.log
        middle = (log.start_offset + log.end_offset) // 2
        memory_lsn = min(term.in_flight, default=journal.end_lsn)  # a COMMIT in flight is not remembered yet
        outcomes = list(state.memory.items())
        for start in range(0, len(outcomes), REMEMBERED_IN_ENTRY):
            self._append(term, [Remembered(outcomes[start : start + REMEMBERED_IN_ENTRY])], [])
            await asyncio.sleep(0)
        term.memory_lsn = memory_lsn
        for branch in [b for b in state.branches.values() if 0 <= b.first_lsn < middle]:
            # The branch may have ended meanwhile, or been rolled back.
            if not branch.busy and branch.first_lsn >= 0 and state.branches.get(branch.xid) is branch:
                self._move(term, branch)
                await asyncio.sleep(0)
        for committed in [one for one in _waiting(state) if one.first_lsn < middle]:
            self._keep_waiting(term, committed)
            await asyncio.sleep(0)

    def _move(self, term: TransactionTerm, branch: BranchState) -> None:
        """Rewrites a branch in one turn of the loop, without another record of it in between.

        MOVED is in one entry with the last of the bodies. So an interrupted move has fewer bodies than the branch, and
        later bodies do not seem to continue it.
        """
        records: list[Record] = [move_of(branch)]
        moved = Moved(branch.key)
        if not branch.bodies:
            self._append(term, [*records, moved], [])
        for start, bodies, data in _in_entries(term, list(branch.bodies)):
            records.append(Add(branch.key, start, [body.place for body in bodies], branch.owner, branch.principal))
            if start + len(bodies) == len(branch.bodies):
                records.append(moved)
            self._append(term, records, data)
            records = []

    def _keep_waiting(self, term: TransactionTerm, committed: CommittedBranch) -> None:
        """Rewrites a waiting commit in one turn of the loop: none of its batches may be applied meanwhile."""
        numbers = list(committed.bodies)
        for start, bodies, data in _in_entries(term, list(committed.bodies.values())):
            end = start + len(bodies)
            record = Waiting(
                committed.branch, committed.lsn, committed.first_batch_id, numbers[start:end],
                [body.place for body in bodies], is_last=end == len(numbers),
            )  # fmt: skip
            self._append(term, [record], data)

    def _append(self, term: TransactionTerm, records: list[Record], bodies: list[memoryview]) -> None:
        term.store.written(term.journal.append(records, bodies).entry)

    async def _write(self, term: TransactionTerm, record: Record) -> None:
        """Writes a record, and waits until it is durable. Raises the error that prevents this."""
        written = term.journal.append([record], [])
        durable: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        term.journal.when_durable(written, lambda error: None if durable.done() else durable.set_result(error))
        if (error := await durable) is not None:
            raise error
        term.journal.check_term()
        term.store.written(written.entry)


def _waiting(state: JournalState) -> list[CommittedBranch]:
    """Commits that the last MARK does not cover completely: they may wait for long."""
    return [committed for committed in state.unmarked.values() if committed.lsn < state.mark.lsn]


def _in_entries(
    term: TransactionTerm, bodies: Sequence[Body]
) -> Iterator[tuple[int, Sequence[Body], list[memoryview]]]:
    """(number of the first body, bodies, their stored bytes), for one entry at a time."""
    start = size = 0
    data: list[memoryview] = []
    for number, body in enumerate(bodies):
        stored = memoryview(term.journal.body(body))
        if data and size + len(stored) > MOVED_BYTES:
            yield start, bodies[start:number], data
            start, size, data = number, 0, []
        data.append(stored)
        size += len(stored) + PLACE_BYTES
    if data:
        yield start, bodies[start:], data


class Guards:
    """The positions from which partitions are kept while a COMMIT is not covered by a MARK."""

    def __init__(self) -> None:
        self._known: tuple[Mark, dict[Key, int]] = NO_MARK, {}

    def keep_from(self, mark: Mark, partition: Partition, generation: int) -> int:
        """The position by the last MARK, from which the partition must be kept."""
        if mark.generation != generation:
            return 0
        if self._known[0] is not mark:
            self._known = mark, {end[:3]: end[3] for end in mark.ends}
        return self._known[1].get(partition.key, 0)
