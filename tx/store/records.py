"""The records of the transaction journal, as values and as bytes.

The journal is a partition log of its own, replicated and flushed like a topic with `replication = "sync"` and
`flush = "ack"`. So the code of all logs handles a torn tail, damage, and a slave that differs. One *entry* is one batch
of the log. Its first value holds records, in msgpack. Each further value is a batch that a client sent (a *body*), in
the form in which its partition will hold it. An entry is there with all its records, or not at all.

    record       meaning                                                       needed until
    ADD          these bodies belong to the branch.                            the branch is finished.
    PREPARE      the branch is prepared, with this number of messages.         the branch is finished.
    COMMIT       the branch is committed; its bodies have these batch ids.     a later MARK, and while it is remembered.
    ROLLBACK     the branch is rolled back.
    HEURISTIC    an operator has committed it, or rolled it back.              FORGET.
    DECIDE       like COMMIT, and branches at other brokers follow it.         FORGET.
    FORGET       HEURISTIC or DECIDE is not needed any more.
    MOVE, MOVED  begin and end of a branch that is written again.              as long as the records that they replace.
    MARK         every COMMIT so far is in its partitions and flushed there, except for the partitions that the MARK
                 leaves out; it also says from where on the journal is needed.
    REMEMBERED   committed branches, written again.
    WAITING      bodies of a COMMIT, written again.                            a MARK covers their partitions.

A finished branch cannot come back: the record that ends a branch is after all records that made it, and the log is cut
at its start only.
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
    """The partition that a body is for, and its number of messages."""

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
    """The key at the start of every record about a branch: its id and its epoch."""

    xid: Xid
    epoch: int


class Add(NamedTuple):
    """Bodies of a branch. The first ADD makes the branch. `first`: the number of bodies that the branch had before."""

    branch: BranchKey
    first: int
    places: list[BodyPlace]
    owner: str
    principal: str = ""
    """The user or the certificate that began the branch; empty: security was off."""


class Prepare(NamedTuple):
    """The branch is prepared."""

    branch: BranchKey
    messages: int
    time_us: int
    follows: tuple[int, ...] = ()
    """(broker id, decider generation, epoch) of the branch whose decision it follows; empty: a transaction
    manager decides."""


class Commit(NamedTuple):
    """The branch is committed: body n gets the batch id `first_batch_id` + n."""

    branch: BranchKey
    first_batch_id: int
    time_us: int


class RollbackRecord(NamedTuple):
    """The branch is rolled back."""

    branch: BranchKey


class Heuristic(NamedTuple):
    """An operator has decided. With `commit` it has the effect of Commit; the branch is kept until it is forgotten."""

    branch: BranchKey
    commit: bool
    first_batch_id: int
    time_us: int


class Decide(NamedTuple):
    """The branch is committed, as by Commit. It is kept, because other branches follow it."""

    branch: BranchKey
    first_batch_id: int
    time_us: int
    followers: tuple[int, ...]
    """(broker id, epoch, broker id, epoch, ...) of the followers."""


class Forget(NamedTuple):
    """The decision is not needed any more."""

    branch: BranchKey


class Move(NamedTuple):
    """The branch is written again: the ADDs up to MOVED replace all its records before."""

    branch: BranchKey
    prepared_us: int
    """Time of its PREPARE; 0: it is not prepared."""
    decision: int
    """0 none, 1 committed by an operator, 2 rolled back by an operator, 3 decided, and others follow."""
    messages: int
    owner: str
    follows: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    principal: str = ""


class Moved(NamedTuple):
    """The branch is written completely."""

    branch: BranchKey


class Mark(NamedTuple):
    """Every COMMIT before `lsn` is in its partitions: flushed there, and held by every in-sync replica. For the
    partitions in `left_out` the MARK before this one still holds."""

    lsn: int
    needed_lsn: int
    """The journal before this LSN is not needed."""
    generation: int
    """The broker generation. In another one the positions may mean something else."""
    ends: list[tuple[str, str, int, int]]
    """(topic, topic id, index, position): each COMMIT that this MARK does not cover adds its messages after these
    positions. Partitions that are not named were empty."""
    left_out: tuple[Key, ...] = ()


Outcome = tuple[bytes, bytes]
"""A committed branch in the form of REMEMBERED: its id; and its epoch with the time of its commit (microseconds).
In memory it has the same form: there are so many that one Python object for each would cost as much as transactions."""
_EPOCH_AND_TIME = struct.Struct(">BQBQ")
_U64 = 0xCF
"""The byte that msgpack writes before a number of 8 bytes."""


def pack_id(xid: Xid) -> bytes:
    """Returns the first half of an Outcome."""
    return bytes(msgpack.packb(xid))


def pack_outcome(branch: BranchKey, time_us: int) -> Outcome:
    """Returns the Outcome of a branch that was committed at that time."""
    return pack_id(branch.xid), _EPOCH_AND_TIME.pack(_U64, branch.epoch, _U64, time_us)


def epoch_and_time(half: bytes) -> tuple[int, int]:
    """Returns the epoch and the time in the second half of an Outcome."""
    _, epoch, _, time_us = _EPOCH_AND_TIME.unpack(half)
    return epoch, time_us


class Remembered(NamedTuple):
    """Committed branches whose COMMITs may be cut off."""

    outcomes: list[Outcome]


class Waiting(NamedTuple):
    """Bodies of a COMMIT that no MARK covers. Once the last of them is written, they replace all records before."""

    branch: BranchKey
    lsn: int
    """LSN of the COMMIT."""
    first_batch_id: int
    numbers: list[int]
    """The numbers of these bodies in the branch, from 0 on."""
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
"""The number of a MARK that leaves partitions out: a reader that does not know it must not take it for MARK 9."""


def pack(records: Iterable[Record]) -> bytes:
    """Packs the first value of an entry."""
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
    """Unpacks the records of an entry with this number of bodies. Raises CorruptData: the checksum was right, but the
    content is not."""
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
