"""What the journal says: the state that its records add up to. Pure.

`apply` is called with every entry, in order: while the journal is read by whoever becomes master, and from then on with
each that it writes. So what a restart finds is what was there, by construction; a test compares the two.

The journal is cut from its start, behind a MARK, when every live branch has been written down once more behind it. What
is left then begins somewhere: records of branches that are not known are of finished ones, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

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
from metamq.wire.xa import Xid

COMMITTED, ROLLED_BACK, DECIDED = 1, 2, 3
"""In a Move, of `decision`; 0: none."""


class Entry(NamedTuple):
    """One entry of the journal, and where it stands."""

    lsn: int
    position: int
    records: list[Record]
    sizes: list[int]
    """Bytes of each of its bodies."""


class CommittedBranch(NamedTuple):
    """A commit that may not be in its partitions yet."""

    lsn: int
    first_lsn: int
    """Where the oldest of its records stands."""
    branch: BranchKey
    bodies: dict[int, Body]
    """Those that may not be in their partitions yet, by their number in the branch, in order."""
    first_batch_id: int


BranchRecord = Prepare | Commit | RollbackRecord | Heuristic | Forget | Move | Moved | Decide
COMMITS = Commit, Decide
NO_MARK = Mark(0, 0, 0, [])


class JournalState:
    """What the records so far add up to."""

    def __init__(self, memory: OutcomeMemory | None = None) -> None:
        self.branches: dict[Xid, BranchState] = {}
        self.memory = memory if memory is not None else OutcomeMemory()
        self.unmarked: dict[int, CommittedBranch] = {}
        """Commits that no MARK covers, by LSN, in order."""
        self.mark = NO_MARK
        self.epoch_max = 0
        self._moving: dict[BranchKey, tuple[Move, BranchState]] = {}
        self._rewritten: dict[int, CommittedBranch] = {}
        """Of commits that are being written down once more: what was written so far, by LSN."""

    def apply(self, entry: Entry) -> None:
        """Takes an entry in. Raises CorruptData when something of a promise is missing."""
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
        if moving is not None and record.first == len(moving[1].bodies):  # else that move was broken off
            branch = moving[1]
        if branch is None or branch.epoch != epoch:
            if record.first:
                return  # of a branch whose beginning was cut off: it is finished
            branch = self.branches[xid] = BranchState(xid, epoch, BranchPhase.IDLE, record.owner)
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
                self._takes_the_place(moved)
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
            branch.gives_up_bodies()
        elif isinstance(record, Decide):
            branch.state, branch.prepared_us, branch.deadline_s = BranchPhase.DECIDED, record.time_us, None
            branch.followers = record.followers
            branch.gives_up_bodies()
            branch.sessions.clear()
        else:
            del self.branches[xid]
            self._moving.pop(record.branch, None)

    def _takes_the_place(self, moved: BranchState) -> None:
        """A branch that was written down once more: its bodies lie elsewhere. All else of it may be known to memory
        alone, such as who works in it."""
        known = self.branches.get(moved.xid)
        if known is None or known.epoch != moved.epoch:
            self.branches[moved.xid] = moved
            return
        known.first_lsn, known.bodies = moved.first_lsn, moved.bodies
        known.messages, known.bytes = moved.messages, moved.bytes

    def _mark(self, record: Mark) -> None:
        self.mark = record
        self._rewritten.clear()  # what was broken off may name bodies that this MARK covers
        for committed in [one for one in self.unmarked.values() if one.lsn < record.lsn]:
            waiting = record.left_out and {  # mostly nothing is left out, and no body is looked at
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
        """Whether a COMMIT may still have to be compared with what a partition has."""
        return key in self.mark.left_out or any(lsn >= self.mark.lsn for lsn in reversed(self.unmarked))

    def drop_unprepared(self) -> list[BranchState]:
        """A new master's first step: what was not promised is rolled back. Returns what was dropped."""
        self._moving.clear()
        self._rewritten.clear()
        dropped = [b for b in self.branches.values() if b.state not in LASTING]
        for branch in dropped:
            del self.branches[branch.xid]
        return dropped

    def first_needed_lsn(self, lsn: int, memory_lsn: int, left_out: Collection[Key]) -> int:
        """What lies before it is not needed once a MARK says that all COMMITs before `lsn` are in their partitions, but
        for those that are left out.

        `memory_lsn`: from there on the journal has all that is remembered.
        """
        live = [branch.first_lsn for branch in self.branches.values() if branch.first_lsn >= 0]
        unmarked = [
            committed.first_lsn
            for committed in self.unmarked.values()
            if committed.lsn >= lsn or (left_out and any(b.place.key in left_out for b in committed.bodies.values()))
        ]
        return min([*live, *unmarked, lsn, memory_lsn])


class Retained:
    """What retention has to leave alone on account of the journal, as far as entries have been taken in."""

    def __init__(self) -> None:
        self.mark = NO_MARK
        self.unmarked: list[int] = []
        """LSNs of COMMITs behind that MARK."""

    def is_needed(self, key: Key) -> bool:
        """Whether a COMMIT may still have to be compared with what a partition has."""
        return bool(self.unmarked) or key in self.mark.left_out

    def apply(self, entry: Entry) -> None:
        """Takes an entry in."""
        for record in entry.records:
            if isinstance(record, Mark):
                self.mark = record
                self.unmarked = [lsn for lsn in self.unmarked if lsn >= record.lsn]
            elif isinstance(record, COMMITS) or (isinstance(record, Heuristic) and record.commit):
                self.unmarked.append(entry.lsn)


def _bodies(entry: Entry, number: int, places: list[BodyPlace]) -> list[Body]:
    """Of a record whose first body is this one of the entry, counted from 0."""
    sizes = entry.sizes[number : number + len(places)]
    return [
        Body(entry.position, number + 1 + n, place, size)
        for n, (place, size) in enumerate(zip(places, sizes, strict=True))
    ]


def move_of(branch: BranchState) -> Move:
    """What a branch that is written down once more begins with."""
    decision = 0
    if branch.state is BranchPhase.DECIDED:
        decision = DECIDED
    elif branch.state is BranchPhase.HEURISTIC:
        decision = COMMITTED if branch.heuristic_commit else ROLLED_BACK
    return Move(
        branch.key, branch.prepared_us, decision, branch.messages, branch.owner, branch.follows, branch.followers
    )


def _moved(record: Move, lsn: int) -> BranchState:
    xid, epoch = record.branch
    state = BranchPhase.IDLE
    if record.prepared_us:
        state = BranchPhase.PREPARED
    if record.decision:
        state = BranchPhase.DECIDED if record.decision == DECIDED else BranchPhase.HEURISTIC
    return BranchState(
        xid, epoch, state, record.owner, first_lsn=lsn, prepared_us=record.prepared_us,
        messages=record.messages if record.decision else 0,  # of what is decided no bodies follow
        heuristic_commit=record.decision == COMMITTED, follows=record.follows, followers=record.followers,
    )  # fmt: skip


def _check_whole(branch: BranchState, messages: int) -> None:
    if branch.messages != messages:
        what = f"{branch.xid} is promised with {messages:,} messages, and has {branch.messages:,}"
        raise CorruptData("the transaction journal", what)
