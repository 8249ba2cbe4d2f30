"""The state that the records of the journal add up to. Pure.

A new master calls `apply` with every entry of the journal, in order. Then it calls `apply` with each entry that it
writes. So a restart finds the state that was there before it; a test compares the two states.

After a MARK the journal is cut at its start: by then every live branch is written again behind the cut. So the journal
may begin with records of branches that are not known: these branches are finished, and their records are ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from metamq.errors import CorruptData
from metamq.tx.store.branch import Body, BranchState
from metamq.tx.store.memory import OutcomeMemory
from metamq.tx.store.records import (
    Add,
    BodyPlace,
    BranchKey,
    Commit,
    Decide,
    Forget,
    Heuristic,
    Key,
    Mark,
    Move,
    Moved,
    Prepare,
    Record,
    Remembered,
    RollbackRecord,
    Waiting,
)
from metamq.tx.store.table import LASTING, BranchPhase

if TYPE_CHECKING:
    from metamq.wire.xa import Xid

COMMITTED, ROLLED_BACK, DECIDED = 1, 2, 3
"""Values of `decision` in a Move; 0: no decision."""


class Entry(NamedTuple):
    """One entry of the journal and its place."""

    lsn: int
    position: int
    records: list[Record]
    sizes: list[int]
    """Bytes of each of its bodies."""


class CommittedBranch(NamedTuple):
    """A commit whose messages may not be in their partitions yet."""

    lsn: int
    first_lsn: int
    """LSN of the branch's oldest record."""
    branch: BranchKey
    bodies: dict[int, Body]
    """The bodies that may not be in their partitions yet, by their number in the branch, in order."""
    first_batch_id: int


BranchRecord = Prepare | Commit | RollbackRecord | Heuristic | Forget | Move | Moved | Decide
COMMITS = Commit, Decide
NO_MARK = Mark(0, 0, 0, [])


class JournalState:
    """The state that the records so far add up to."""

    def __init__(self, memory: OutcomeMemory | None = None) -> None:
        self.branches: dict[Xid, BranchState] = {}
        self.memory = memory if memory is not None else OutcomeMemory()
        self.unmarked: dict[int, CommittedBranch] = {}
        """Commits that no MARK covers, by LSN, in order."""
        self.mark = NO_MARK
        self.epoch_max = 0
        self._moving: dict[BranchKey, tuple[Move, BranchState]] = {}
        self._rewritten: dict[int, CommittedBranch] = {}
        """Commits that are being written again, by LSN, with the bodies that were written so far."""

    def apply(self, entry: Entry) -> None:
        """Applies an entry. Raises CorruptData if a part of a prepared branch is missing."""
        number = 0
        for record in entry.records:
            if isinstance(record, Add):
                self._add(record, entry, number)
                number += len(record.places)
            elif isinstance(record, Mark):
                self._mark(record)
            elif isinstance(record, Waiting):
                self._wait(record, entry, number)
                number += len(record.places)
            elif isinstance(record, Remembered):
                self.memory.restore(record.outcomes)
            else:
                self._of_branch(record, entry)

    def _add(self, record: Add, entry: Entry, number: int) -> None:
        xid, epoch = record.branch
        branch = self.branches.get(xid)
        moving = self._moving.get(record.branch) if self._moving else None
        if moving is not None and record.first == len(moving[1].bodies):  # else that move was not completed
            branch = moving[1]
        if branch is None or branch.epoch != epoch:
            if record.first:
                return  # of a branch whose first records were cut off: it is finished
            branch = BranchState(xid, epoch, BranchPhase.IDLE, record.owner, record.principal)
            self.branches[xid] = branch
            self.epoch_max = max(self.epoch_max, epoch)
        if branch.first_lsn < 0:
            branch.first_lsn = entry.lsn
        for body in _bodies(entry, number, record.places):
            branch.bodies.append(body)
            branch.messages += body.place.messages
            branch.bytes += body.size_bytes

    def _of_branch(self, record: BranchRecord, entry: Entry) -> None:
        xid, epoch = record.branch
        self.epoch_max = max(self.epoch_max, epoch)
        if isinstance(record, Move):
            self._moving[record.branch] = record, _moved(record, entry.lsn)
            return
        if isinstance(record, Moved):
            if record.branch in self._moving:
                move, moved = self._moving.pop(record.branch)
                _check_whole(moved, move.messages)
                self._replace_by_copy(moved)
            return
        branch = self.branches.get(xid)
        if isinstance(record, COMMITS) or (isinstance(record, Heuristic) and record.commit):
            bodies = branch.bodies if branch is not None and branch.epoch == epoch else []
            if branch is not None and bodies:
                self.unmarked[entry.lsn] = CommittedBranch(
                    entry.lsn, branch.first_lsn, record.branch, dict(enumerate(bodies)), record.first_batch_id
                )
        if isinstance(record, COMMITS):
            self.memory.add(record.branch, record.time_us)
        if branch is None or branch.epoch != epoch:
            return
        if isinstance(record, Prepare):
            _check_whole(branch, record.messages)
            branch.state, branch.prepared_us, branch.deadline_s = BranchPhase.PREPARED, record.time_us, None
            branch.follows = record.follows
            branch.sessions.clear()
        elif isinstance(record, Heuristic):
            branch.state, branch.heuristic_commit = BranchPhase.HEURISTIC, record.commit
            branch.drop_bodies()
        elif isinstance(record, Decide):
            branch.state, branch.prepared_us, branch.deadline_s = BranchPhase.DECIDED, record.time_us, None
            branch.followers = record.followers
            branch.drop_bodies()
            branch.sessions.clear()
        else:
            del self.branches[xid]
            self._moving.pop(record.branch, None)

    def _replace_by_copy(self, moved: BranchState) -> None:
        """Replaces a branch by its new copy, whose bodies are at another place of the journal. The rest of the state,
        such as the sessions that work in the branch, may be in memory only, and stays."""
        known = self.branches.get(moved.xid)
        if known is None or known.epoch != moved.epoch:
            self.branches[moved.xid] = moved
            return
        known.first_lsn, known.bodies = moved.first_lsn, moved.bodies
        known.messages, known.bytes = moved.messages, moved.bytes

    def _mark(self, record: Mark) -> None:
        self.mark = record
        self._rewritten.clear()  # an unfinished rewrite may name bodies that this MARK covers
        for committed in [one for one in self.unmarked.values() if one.lsn < record.lsn]:
            waiting = record.left_out and {  # usually no partition is left out: then no body is looked at
                n: body for n, body in committed.bodies.items() if body.place.key in record.left_out
            }
            if waiting:
                self.unmarked[committed.lsn] = committed._replace(bodies=waiting)
            else:
                del self.unmarked[committed.lsn]

    def _wait(self, record: Waiting, entry: Entry, number: int) -> None:
        begun = self._rewritten.pop(record.lsn, None)
        if begun is None:
            begun = CommittedBranch(record.lsn, entry.lsn, record.branch, {}, record.first_batch_id)
        begun.bodies.update(zip(record.numbers, _bodies(entry, number, record.places), strict=True))
        (self.unmarked if record.is_last else self._rewritten)[record.lsn] = begun

    def is_needed(self, key: Key) -> bool:
        """True if a COMMIT may still have to be compared with the partition's log."""
        return key in self.mark.left_out or any(lsn >= self.mark.lsn for lsn in reversed(self.unmarked))

    def drop_unprepared(self) -> list[BranchState]:
        """Drops the branches that are not prepared: a new master's first step rolls them back. Returns them."""
        self._moving.clear()
        self._rewritten.clear()
        dropped = [b for b in self.branches.values() if b.state not in LASTING]
        for branch in dropped:
            del self.branches[branch.xid]
        return dropped

    def first_needed_lsn(self, lsn: int, memory_lsn: int, left_out: Collection[Key]) -> int:
        """Returns the first LSN that is still needed after a MARK. The MARK says that all COMMITs before `lsn` are in
        their partitions, except for the partitions in `left_out`.

        `memory_lsn`: from this LSN on the journal has all remembered outcomes.
        """
        live = [branch.first_lsn for branch in self.branches.values() if branch.first_lsn >= 0]
        unmarked = [
            committed.first_lsn
            for committed in self.unmarked.values()
            if committed.lsn >= lsn or (left_out and any(b.place.key in left_out for b in committed.bodies.values()))
        ]
        return min([*live, *unmarked, lsn, memory_lsn])


class Retained:
    """The data that retention must keep because of the journal, as far as the entries were applied."""

    def __init__(self) -> None:
        self.mark = NO_MARK
        self.unmarked: list[int] = []
        """LSNs of the COMMITs after that MARK."""

    def is_needed(self, key: Key) -> bool:
        """True if a COMMIT may still have to be compared with the partition's log."""
        return bool(self.unmarked) or key in self.mark.left_out

    def apply(self, entry: Entry) -> None:
        """Applies an entry."""
        for record in entry.records:
            if isinstance(record, Mark):
                self.mark = record
                self.unmarked = [lsn for lsn in self.unmarked if lsn >= record.lsn]
            elif isinstance(record, COMMITS) or (isinstance(record, Heuristic) and record.commit):
                self.unmarked.append(entry.lsn)


def _bodies(entry: Entry, number: int, places: list[BodyPlace]) -> list[Body]:
    """Returns the bodies of a record. `number`: the index of the record's first body in the entry, from 0 on."""
    sizes = entry.sizes[number : number + len(places)]
    return [
        Body(entry.position, number + 1 + n, place, size)
        for n, (place, size) in enumerate(zip(places, sizes, strict=True))
    ]


def move_of(branch: BranchState) -> Move:
    """Returns the record that begins a branch which is written again."""
    decision = 0
    if branch.state is BranchPhase.DECIDED:
        decision = DECIDED
    elif branch.state is BranchPhase.HEURISTIC:
        decision = COMMITTED if branch.heuristic_commit else ROLLED_BACK
    return Move(
        branch.key, branch.prepared_us, decision, branch.messages, branch.owner, branch.follows, branch.followers,
        branch.principal,
    )  # fmt: skip


def _moved(record: Move, lsn: int) -> BranchState:
    xid, epoch = record.branch
    state = BranchPhase.IDLE
    if record.prepared_us:
        state = BranchPhase.PREPARED
    if record.decision:
        state = BranchPhase.DECIDED if record.decision == DECIDED else BranchPhase.HEURISTIC
    return BranchState(
        xid, epoch, state, record.owner, record.principal, first_lsn=lsn, prepared_us=record.prepared_us,
        messages=record.messages if record.decision else 0,  # no bodies follow for a decided branch
        heuristic_commit=record.decision == COMMITTED, follows=record.follows, followers=record.followers,
    )  # fmt: skip


def _check_whole(branch: BranchState, messages: int) -> None:
    if branch.messages != messages:
        what = f"{branch.xid} is prepared with {messages:,} messages, and has {branch.messages:,}"
        raise CorruptData("the transaction journal", what)
