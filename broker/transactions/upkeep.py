"""What keeps the journal short: marks, branches written down once more, and the cut.

    every MARK_S with new commits   flush the partitions that they went to, and wait until every in-sync replica has
                                    what they brought; then write a MARK: a restart, or whoever is promoted, looks for
                                    batches only behind it
    journal over CUT_BYTES,         write down once more what is remembered (REMEMBERED), and the branches whose records
    and twice what is alive         stand in its older half (MOVE .. MOVED); write a MARK

A MARK says what is not needed any more; each replica removes that for itself, once the MARK is durable everywhere. The
order is the whole of it: the partitions are flushed before a MARK says so, and what replaces an older record stands
before it. A branch that is moved costs its size once for each time that the journal doubles.

All of it pauses, and the term may end meanwhile, or the next one begin: whatever it does then raises why.
"""

from __future__ import annotations

import asyncio
import contextlib

from metamq.broker.flusher import Flusher
from metamq.broker.partition import Partition
from metamq.broker.topics import OWN, Topics
from metamq.broker.transactions.commits import Key, key_of
from metamq.broker.transactions.journal import SEGMENT_BYTES
from metamq.broker.transactions.term import Term
from metamq.errors import MetamqError, StorageError, TopicNotFound
from metamq.tx.store.branch import BranchState
from metamq.tx.store.fold import NO_MARK, JournalState, move_of
from metamq.tx.store.records import Add, Mark, Moved, Record, Remembered

MARK_S = 5.0
CUT_BYTES = 2 * SEGMENT_BYTES
MOVED_BYTES = 4 * 1024 * 1024
"""Of bodies, in one entry; a single one may be larger, and is an entry of its own then."""
PLACE_BYTES = 300
"""What a record says of each of them, at the most."""
REMEMBERED_IN_ENTRY = 5000


class Upkeep:
    """Used by the broker's loop only, by one task at a time."""

    def __init__(self, topics: Topics, flusher: Flusher) -> None:
        self.cut_bytes = CUT_BYTES
        self.mark_s = MARK_S
        self._topics = topics
        self._flusher = flusher

    async def mark(self, term: Term) -> None:
        """Writes a MARK for all commits that are in their partitions. Raises StorageError, and what ended the term."""
        if term.commits.stuck:  # they are looked for from where the last MARK says
            return
        state = term.store.journal
        lsn, memory_lsn = min(term.in_flight, default=term.journal.end_lsn), term.memory_lsn
        partitions = [p for p in self._topics.partitions() if not p.topic.startswith(OWN) and p.closed_by is None]
        ends = {partition: min(partition.log.end_position, partition.log.stable_position) for partition in partitions}
        for partition in self._reached_by(state):
            await self._settle(term, partition)
        flushed = [
            (*key_of(partition), min(end, partition.log.flushed_position)) for partition, end in ends.items() if end
        ]
        needed_lsn = state.first_needed_lsn(lsn, memory_lsn)
        await self._write(term, Mark(lsn, needed_lsn, term.generation, flushed))
        term.needed_lsn = term.journal.partition.needed_offset = needed_lsn

    def _reached_by(self, state: JournalState) -> list[Partition]:
        found = []
        for place in sorted({body.place[:3] for one in state.unmarked.values() for body in one.bodies}):
            with contextlib.suppress(TopicNotFound):
                found.append(self._topics.find(*place))
        return found

    async def _settle(self, term: Term, partition: Partition) -> None:
        """Until all that is there now is flushed here, and held by every in-sync replica: whoever of them is promoted
        will not look for it in the journal. Raises StorageError, what closed the partition, and what ended the term."""
        log = partition.log
        end_offset, end_position = log.end_offset, log.end_position
        await self._flusher.settle(partition)
        term.journal.check_term()  # a slave's log may have been cut: that is no failure of its disk
        if partition.closed_by is not None:
            raise partition.closed_by.with_traceback(None)
        if log.flushed_position < end_position:
            raise StorageError(f"{partition.name} was not flushed", hint="The first error of its disk says why.")
        held: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        if partition.when_stable(end_offset, lambda error: None if held.done() else held.set_result(error)):
            return
        if (error := await held) is not None:
            raise error

    async def shorten(self, term: Term) -> None:
        """Writes down once more what is remembered, and the branches whose records stand in the older half of a journal
        that is too long, and a MARK behind them. Where no MARK can follow, or the last one let nothing be cut, that
        is not done again before the journal is twice as long. Raises as mark()."""
        state, journal = term.store.journal, term.journal
        alive_bytes = sum(branch.bytes for branch in state.branches.values())
        if term.commits.stuck or journal.size_bytes <= max(self.cut_bytes, 2 * alive_bytes):
            return
        size_bytes, needed_lsn = term.written_down
        if journal.size_bytes > 2 * size_bytes or term.needed_lsn != needed_lsn:
            journal.admit(0)
            await self._write_down(term)
            term.written_down = journal.size_bytes, term.needed_lsn
            await self.mark(term)
        elif state.first_needed_lsn(min(term.in_flight, default=journal.end_lsn), term.memory_lsn) > needed_lsn:
            await self.mark(term)

    async def _write_down(self, term: Term) -> None:
        state, journal = term.store.journal, term.journal
        log = journal.partition.log
        middle = (log.start_offset + log.end_offset) // 2
        memory_lsn = min(term.in_flight, default=journal.end_lsn)  # a COMMIT under way is not remembered yet
        outcomes = list(state.memory.items())
        for start in range(0, len(outcomes), REMEMBERED_IN_ENTRY):
            self._append(term, [Remembered(outcomes[start : start + REMEMBERED_IN_ENTRY])], [])
            await asyncio.sleep(0)
        term.memory_lsn = memory_lsn
        for branch in [b for b in state.branches.values() if 0 <= b.first_lsn < middle]:
            # It may have ended meanwhile, or been given up.
            if not branch.busy and branch.first_lsn >= 0 and state.branches.get(branch.xid) is branch:
                self._move(term, branch)
                await asyncio.sleep(0)

    def _move(self, term: Term, branch: BranchState) -> None:
        """In one turn of the loop: nothing else is written about it meanwhile."""
        begins: list[Record] = [move_of(branch)]
        bodies: list[memoryview] = []
        add = Add(branch.key, 0, [], branch.owner)
        done = size = 0
        for body in list(branch.bodies):
            stored = memoryview(term.journal.body(body))
            if bodies and size + len(stored) > MOVED_BYTES:
                self._append(term, [*begins, add], bodies)
                done += len(bodies)
                begins, bodies, size, add = [], [], 0, Add(branch.key, done, [], branch.owner)
            bodies.append(stored)
            add.places.append(body.place)
            size += len(stored) + PLACE_BYTES
        self._append(term, [*begins, *([add] if bodies else []), Moved(branch.key)], bodies)

    def _append(self, term: Term, records: list[Record], bodies: list[memoryview]) -> None:
        term.store.written(term.journal.append(records, bodies).entry)

    async def _write(self, term: Term, record: Record) -> None:
        """Writes a record, and waits until it is durable. Raises what it fails with."""
        written = term.journal.append([record], [])
        durable: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        term.journal.when_durable(written, lambda error: None if durable.done() else durable.set_result(error))
        if (error := await durable) is not None:
            raise error
        term.journal.check_term()
        term.store.written(written.entry)


class Guards:
    """From which byte of a partition on everything is kept while there are COMMITs that no MARK covers."""

    def __init__(self) -> None:
        self._known: tuple[Mark, dict[Key, int]] = NO_MARK, {}

    def keep_from(self, mark: Mark, partition: Partition, generation: int) -> int:
        """By the last MARK."""
        if mark.generation != generation:
            return 0
        if self._known[0] is not mark:
            self._known = mark, {end[:3]: end[3] for end in mark.ends}
        return self._known[1].get(key_of(partition), 0)
