"""The records of the transaction journal, as values and as bytes.

The journal is a partition log of its own, replicated and flushed like a topic with `replication = "sync"` and
`flush = "ack"`; so a torn tail, damage, and a slave that differs are dealt with where all logs are. One *entry* is one
batch of it: the first value holds records, in msgpack, and each further value is a batch that a client sent (a *body*),
as it will lie in its partition. All records of an entry are there, or none.

    record       says                                                          is needed until
    ADD          these bodies belong to the branch                             the branch is finished
    PREPARE      the branch is promised, with so many messages                 the branch is finished
    COMMIT       the branch is committed; its bodies have these batch ids      a later MARK, and as long as remembered
    ROLLBACK     the branch is gone
    HEURISTIC    an operator has committed it, or rolled it back               FORGET
    DECIDE       as COMMIT, and branches at other brokers follow               FORGET
    FORGET       nobody needs to know of either any more
    MOVE, MOVED  begin and end of a branch that is written down once more      as the records that they stand for
    MARK         every COMMIT so far is in its partitions, and flushed there, but for those that it leaves out; what is
                 needed of the journal itself
    REMEMBERED   branches that were committed, written down once more
    WAITING      bodies of a COMMIT, written down once more                    a MARK covers their partitions

Finished branches leave nothing that could bring them back: whatever ends a branch stands behind all that made it, and
the log is cut from its start only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from metamq.errors import CorruptData
from metamq.wire.xa import Xid

Key = tuple[str, str, int]
"""A partition of this broker: topic, topic id, index."""


class BodyPlace(NamedTuple):
    """Where a body is to go, and how many messages it holds."""

    topic: str
    topic_id: str
    partition: int
    """The index in this broker."""
    messages: int

    @property
    def key(self) -> Key:
        """The partition."""
        return self[:3]


class BranchKey(NamedTuple):
    """What every record about a branch begins with: its id, and which use of the id it is."""

    xid: Xid
    epoch: int


class Add(NamedTuple):
    """Bodies of a branch, which is made by the first of them. `first`: how many it had before."""

    branch: BranchKey
    first: int
    places: list[BodyPlace]
    owner: str


class Prepare(NamedTuple):
    """The branch is prepared."""

    branch: BranchKey
    messages: int
    time_us: int
    follows: tuple[int, ...] = ()
    """(broker id, generation, epoch) of the branch whose decision it follows; empty: a transaction manager's."""


class Commit(NamedTuple):
    """The branch is committed: body n gets the batch id `first_batch_id` + n."""

    branch: BranchKey
    first_batch_id: int
    time_us: int


class RollbackRecord(NamedTuple):
    """The branch is rolled back."""

    branch: BranchKey


class Heuristic(NamedTuple):
    """An operator has decided. With `commit` it is as Commit; the branch is kept until it is forgotten."""

    branch: BranchKey
    commit: bool
    first_batch_id: int
    time_us: int


class Decide(NamedTuple):
    """The branch is committed as by Commit; it is kept, since others follow it."""

    branch: BranchKey
    first_batch_id: int
    time_us: int
    followers: tuple[int, ...]
    """(broker id, epoch, broker id, epoch, ...) of these."""


class Forget(NamedTuple):
    """The decision is not needed any more."""

    branch: BranchKey


class Move(NamedTuple):
    """The branch follows once more: the ADDs up to MOVED take the place of all before."""

    branch: BranchKey
    prepared_us: int
    """When it was prepared; 0 while it is not."""
    decision: int
    """0 none, 1 committed by an operator, 2 rolled back by one, 3 decided, and others follow."""
    messages: int
    owner: str
    follows: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()


class Moved(NamedTuple):
    """The branch is whole again."""

    branch: BranchKey


class Mark(NamedTuple):
    """Every COMMIT before `lsn` is in its partitions: flushed there, and held by every in-sync replica. It says nothing
    of the partitions in `left_out`: for them the MARK before still counts."""

    lsn: int
    needed_lsn: int
    """What lies before it in the journal is not needed by anybody."""
    generation: int
    """Of the broker id: in another one the positions may mean something else."""
    ends: list[tuple[str, str, int, int]]
    """(topic, topic id, index, position): whatever a COMMIT brings that this MARK does not cover lies behind these;
    partitions that are not named were empty."""
    left_out: tuple[Key, ...] = ()


Outcome = tuple[bytes, bytes]
"""A branch that was committed, as REMEMBERED has it: its id, and its epoch and when it was committed (microseconds).
Kept so, too: there are so many of them that making values of each costs as much as transactions do."""
_EPOCH_AND_TIME = struct.Struct(">BQBQ")
_U64 = 0xCF
"""What msgpack has before a number of 8 bytes."""


def pack_id(xid: Xid) -> bytes:
    """The first half of an Outcome."""
    return bytes(msgpack.packb(xid))


def pack_outcome(branch: BranchKey, time_us: int) -> Outcome:
    """The branch was committed then."""
    return pack_id(branch.xid), _EPOCH_AND_TIME.pack(_U64, branch.epoch, _U64, time_us)


def epoch_and_time(half: bytes) -> tuple[int, int]:
    """What the second half of an Outcome says."""
    _, epoch, _, time_us = _EPOCH_AND_TIME.unpack(half)
    return epoch, time_us


class Remembered(NamedTuple):
    """Branches that were committed: their COMMITs may be cut off."""

    outcomes: list[Outcome]


class Waiting(NamedTuple):
    """Bodies of a COMMIT that no MARK covers. With the last of them they take the place of all that stands before."""

    branch: BranchKey
    lsn: int
    """Of the COMMIT."""
    first_batch_id: int
    numbers: list[int]
    """Which of the branch's bodies they are, from 0 on."""
    places: list[BodyPlace]
    is_last: bool


Record = (
    Add | Prepare | Commit | RollbackRecord | Heuristic | Forget | Move | Moved | Mark | Decide | Remembered | Waiting
)
_KINDS: dict[int, type[Any]] = {
    1: Add,
    2: Prepare,
    3: Commit,
    4: RollbackRecord,
    5: Heuristic,
    6: Forget,
    7: Move,
    8: Moved,
    9: Mark,
    10: Decide,
    11: Remembered,
    12: Waiting,
    13: Mark,
}
_NUMBERS = {kind: number for number, kind in reversed(_KINDS.items())}
_LEAVES_OUT = 13
"""A MARK that leaves something out: whoever does not know that may not read it as another."""


def pack(records: Iterable[Record]) -> bytes:
    """The first value of an entry."""
    several = [*records]
    if any(isinstance(record, Remembered) for record in several):
        return _array_of([_pack_one(record) for record in several])
    return bytes(msgpack.packb([[_number(record), *record] for record in several]))


def _number(record: Record) -> int:
    return _LEAVES_OUT if isinstance(record, Mark) and record.left_out else _NUMBERS[type(record)]


def _pack_one(record: Record) -> bytes:
    number = _number(record)
    if isinstance(record, Remembered):
        outcomes = _array_of([b"\x92\x92%b%b" % outcome for outcome in record.outcomes])
        return _array_of([msgpack.packb(number), outcomes])
    return bytes(msgpack.packb([number, *record]))


def _array_of(packed: Sequence[bytes]) -> bytes:
    return b"".join([msgpack.Packer().pack_array_header(len(packed)), *packed])


def unpack(value: bytes, bodies: int) -> list[Record]:
    """The records of an entry that has so many bodies. Raises CorruptData: its checksum was right, its author wrong."""
    try:
        found = [_unpack_one(packed) for packed in msgpack.unpackb(value)]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException, struct.error) as error:
        raise CorruptData("a transaction journal's entry", f"{type(error).__name__}: {error}") from None
    named = sum(len(record.places) for record in found if isinstance(record, Add | Waiting))
    if named != bodies:
        raise CorruptData("a transaction journal's entry", f"it has {bodies} bodies and names {named}")
    return found


def _unpack_one(packed: Sequence[Any]) -> Record:
    kind = _KINDS[packed[0]]
    fields = list(packed[1 : 1 + len(kind._fields)])
    if kind is Mark:
        fields[3] = [tuple(end) for end in fields[3]]
        fields[4:] = [tuple(tuple(key) for key in keys) for keys in fields[4:]]
    elif kind is Remembered:
        fields[0] = [pack_outcome(_branch(branch), time_us) for branch, time_us in fields[0]]
    else:
        fields[0] = _branch(fields[0])
    if kind in (Add, Waiting):
        at = kind._fields.index("places")
        fields[at] = [BodyPlace(*place) for place in fields[at]]
    for name in ("follows", "followers"):
        if name in kind._fields and len(fields) > (at := kind._fields.index(name)):
            fields[at] = tuple(fields[at])
    record: Record = kind(*fields)
    return record


def _branch(packed: Sequence[Any]) -> BranchKey:
    (format_id, gtrid, bqual), epoch = packed
    return BranchKey(Xid(format_id, gtrid, bqual), epoch)
