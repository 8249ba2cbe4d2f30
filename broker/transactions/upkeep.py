"""What keeps the journal short: marks, branches written down once more, and the cut.

    every MARK_S with new commits   flush the partitions that they went to, then write a MARK: a restart looks for
                                    batches only behind it, and COMMITs before it are not needed
    journal over CUT_BYTES,         write down once more (MOVE .. MOVED) the branches whose records stand in its older
    and twice what is alive         half; write a MARK; once that is durable, remove the segments before what is needed

The order is the whole of it: the partitions are flushed before a MARK says so, and what replaces an older record is
durable before that is removed. A branch that is moved costs its size once for each time that the journal doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from metamq.broker.flusher import Flusher
from metamq.broker.partition import Partition
from metamq.broker.topics import OWN, Topics
from metamq.broker.transactions.commits import key_of
from metamq.broker.transactions.journal import SEGMENT_BYTES, read_journal
from metamq.broker.transactions.term import Term
from metamq.errors import MetamqError, TopicNotFound
from metamq.tx.store.branch import BranchState
from metamq.tx.store.fold import DECIDED, Entry, JournalState
from metamq.tx.store.records import Add, Mark, Move, Moved, Record
from metamq.tx.store.table import LASTING, State

MARK_S = 5.0
CUT_BYTES = 2 * SEGMENT_BYTES
MOVED_BYTES = 4 * 1024 * 1024
"""Of bodies, in one entry."""


class Upkeep:
    """Used by the broker's loop only, by one task at a time."""

    def __init__(self, topics: Topics, flusher: Flusher) -> None:
        self.cut_bytes = CUT_BYTES
        self.mark_s = MARK_S
        self._topics = topics
        self._flusher = flusher

    async def mark(self, term: Term) -> Entry:
        """Writes a MARK for all commits that are in their partitions. Raises StorageError, and what ended the term."""
        state = term.store.journal
        lsn = min(term.in_flight, default=term.journal.end_lsn)
        partitions = [p for p in self._topics.partitions() if not p.topic.startswith(OWN) and p.closed_by is None]
        ends = {partition: min(partition.log.end_position, partition.log.stable_position) for partition in partitions}
        for partition in self._reached_by(state):
            await self._flusher.settle(partition)
        flushed = [
            (*key_of(partition), min(end, partition.log.flushed_position)) for partition, end in ends.items() if end
        ]
        entry = await self._write(term, Mark(lsn, term.generation, flushed, list(state.memory.items())))
        term.needed_lsn = state.first_needed_lsn(entry.lsn)
        return entry

    def _reached_by(self, state: JournalState) -> list[Partition]:
        found = []
        for place in sorted({body.place[:3] for one in state.unmarked.values() for body in one.bodies}):
            with contextlib.suppress(TopicNotFound):
                found.append(self._topics.find(*place))
        return found

    async def shorten(self, term: Term) -> None:
        """Writes down once more the branches whose records stand in the older half of a journal that is too long, and
        a MARK behind them. Raises as mark()."""
        state, journal = term.store.journal, term.journal
        alive_bytes = sum(branch.bytes for branch in state.branches.values())
        if journal.size_bytes <= max(self.cut_bytes, 2 * alive_bytes):
            return
        log = journal.partition.log
        middle = (log.start_offset + log.end_offset) // 2
        for branch in [b for b in state.branches.values() if 0 <= b.first_lsn < middle]:
            if not branch.busy and branch.state in LASTING:
                self._move(term, branch)
                await asyncio.sleep(0)
        await self.mark(term)

    def _move(self, term: Term, branch: BranchState) -> None:
        """In one turn of the loop: nothing else is written about it meanwhile."""
        heuristic = 0 if branch.state is not State.HEURISTIC else 1 if branch.heuristic_commit else 2
        if branch.state is State.DECIDED:
            heuristic = DECIDED
        begins: list[Record] = [
            Move(
                branch.key,
                branch.prepared_us,
                heuristic,
                branch.messages,
                branch.owner,
                branch.follows,
                branch.followers,
            )
        ]
        bodies: list[memoryview] = []
        add = Add(branch.key, 0, [], branch.owner)
        done = 0
        for body in list(branch.bodies):
            bodies.append(memoryview(term.journal.body(body)))
            add.places.append(body.place)
            if sum(map(len, bodies)) >= MOVED_BYTES:
                self._append(term, [*begins, add], bodies)
                done += len(bodies)
                begins, bodies, add = [], [], Add(branch.key, done, [], branch.owner)
        self._append(term, [*begins, *([add] if bodies else []), Moved(branch.key)], bodies)

    def _append(self, term: Term, records: list[Record], bodies: list[memoryview]) -> None:
        term.store.written(term.journal.append(records, bodies).entry)

    async def _write(self, term: Term, record: Record) -> Entry:
        """Writes a record, and waits until it is durable. Raises what it fails with."""
        written = term.journal.append([record], [])
        durable: asyncio.Future[MetamqError | None] = asyncio.get_running_loop().create_future()
        term.journal.when_durable(written, lambda error: None if durable.done() else durable.set_result(error))
        if (error := await durable) is not None:
            raise error
        term.store.written(written.entry)
        return written.entry


def guards_of(state: JournalState, generation: int) -> Callable[[Partition], int | None]:
    """From which byte of a partition on everything is kept, None: nothing is, on account of what the journal says."""
    if not state.unmarked:
        return lambda partition: None
    ends = {end[:3]: end[3] for end in state.mark.ends} if state.mark.generation == generation else {}
    return lambda partition: ends.get(key_of(partition), 0)


async def state_of(partition: Partition) -> JournalState:
    """What a journal says, as far as that is never taken back. Raises CorruptData, StorageError."""
    state = JournalState()
    for entry in read_journal(partition):
        if entry.lsn >= partition.log.stable_offset:
            break
        state.apply(entry)
        await asyncio.sleep(0)
    return state
