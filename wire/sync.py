"""The frames of replication: the messages between a slave and its master after the slave has joined.

    slave                                     master
      │ JOIN ─────────────────────────────────▶ │  a request: answered by ACCEPT, or by an error
      │ ◀──────────────────────────────  ACCEPT │  from here on both ends push
      │ ATTACH ───────────────────────────────▶ │  the state of the slave's logs
      │ ◀────────────────  ATTACHED (PRODUCERS) │  the decision about each
      │ ◀────────────────────  COPY, DATA, BEAT │
      │ ACK ──────────────────────────────────▶ │

The header of each frame is one of the named tuples here, as a msgpack array. It begins with its kind and with the
sender's epoch: the receiver refuses any other epoch. Bodies are whole batches, as stored in the log, except in
PRODUCERS. `unpack_frame` accepts only declared fields and no negative numbers. docs/wire-protocol.md has the tables.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from metamq.errors import ProtocolError
from metamq.wire import limits
from metamq.wire.headers import unpack_frame

MAGIC = 0x4D51_4841
"""The first number of a JOIN, by which a master recognizes a replica."""

JOIN = 1
ACCEPT = 2
ATTACH = 3
ATTACHED = 4
DATA = 5
COPY = 6
ACK = 7
BEAT = 8
DETACH = 9
HANDOVER = 10
HANDED_OVER = 11
PRODUCERS = 12
LEAVE = 13


class SyncDecision(enum.IntEnum):
    """The decision about one partition of a slave."""

    FROM = 1
    """The master sends it from the position on. If the slave's log goes beyond it, the slave first cuts it there."""
    RESET = 2
    """The slave empties its log, which then begins at the offset and position."""
    WAIT = 3
    """No replication yet: the master or the slave does not know the topic yet. The slave attaches it again later."""
    REFUSE = 4
    """No replication: the slave would lose messages that readers have seen."""


class Join(NamedTuple):
    """The first frame of a slave. `folder` identifies its data folder.

    `generation` is the last broker generation that the slave has followed.
    """

    kind: int
    epoch: int
    magic: int
    broker_id: int
    replica: int
    incarnation: int
    folder: str
    learner: bool
    generation: int


class Accept(NamedTuple):
    """The answer to a JOIN. Either end assumes that the other has failed after three heartbeats of silence."""

    kind: int
    epoch: int
    generation: int
    heartbeat_ms: int


class AttachPartition(NamedTuple):
    """The state of the slave's log of one partition. The slave chooses the handle, which then names the partition."""

    handle: int
    topic: str
    topic_id: str
    partition: int
    start_offset: int
    start_position: int
    end_offset: int
    end_position: int
    stable_offset: int
    epochs: list[tuple[int, int, int]]
    """(epoch, offset, position) of each epoch's start, oldest first; of a longer list the newest ATTACH_EPOCHS_MAX."""


class Attach(NamedTuple):
    """Asks for the replication of partitions. A partition that is already attached begins again."""

    kind: int
    epoch: int
    partitions: list[AttachPartition]


class AttachResult(NamedTuple):
    """The decision about one partition (a SyncDecision), and its reason, for people to read."""

    handle: int
    decision: int
    offset: int
    position: int
    reason: str


class Attached(NamedTuple):
    """The answer to an ATTACH, possibly in parts. Also sent without a request if a partition must begin again."""

    kind: int
    epoch: int
    results: list[AttachResult]


class Data(NamedTuple):
    """Batches of live partitions, in the order in which the master appended them, as the body.

    The first entry has the sequence number `first_seq`, each following one the next number.
    """

    kind: int
    epoch: int
    first_seq: int
    entries: list[tuple[int, int, int, int]]
    """(handle, position, size, 1 if it counts only when flushed, else 0)."""
    stable: list[tuple[int, int, int]]
    """(handle, offset, position) of stable marks that moved."""


class Copy(NamedTuple):
    """Batches of partitions that are being copied: like Data, but without sequence numbers."""

    kind: int
    epoch: int
    entries: list[tuple[int, int, int, int]]
    stable: list[tuple[int, int, int]]


class Ack(NamedTuple):
    """The sequence numbers up to which the slave has written everything, and has flushed batches that need it.

    It is also the slave's heartbeat.
    """

    kind: int
    epoch: int
    held_seq: int
    flushed_seq: int
    copied: list[tuple[int, int, int]]
    """(handle, position written to, position flushed to) of partitions that are being copied."""


class Beat(NamedTuple):
    """The master's heartbeat. `end_seq` is the last sequence number that was sent."""

    kind: int
    epoch: int
    end_seq: int
    stable: list[tuple[int, int, int]]


class Detach(NamedTuple):
    """Partitions that the slave no longer has: their topics were deleted."""

    kind: int
    epoch: int
    handles: list[int]


class HandOver(NamedTuple):
    """Asks the master to write nothing for at most `wait_ms`, and to send everything: the slave will take over."""

    kind: int
    epoch: int
    wait_ms: int


class HandedOver(NamedTuple):
    """The answer to a HandOver. If `reason` is empty, nothing follows `end_seq`, and the slave has everything.

    Otherwise `reason` says why the master does not hand over.
    """

    kind: int
    epoch: int
    end_seq: int
    reason: str


class Leave(NamedTuple):
    """The slave stops: the master must not wait for it. It acknowledges until it closes the link."""

    kind: int
    epoch: int


class Producers(NamedTuple):
    """The batches that producers stored below the start of the master's log. A new copy has no other source for them.

    The body is a snapshot of producer states as of the log's start, as in docs/log-format.md. It comes before the first
    Copy of the partition.
    """

    kind: int
    epoch: int
    handle: int


FromSlave = Join | Attach | Ack | Detach | HandOver | Leave
FromMaster = Accept | Attached | Data | Copy | Beat | HandedOver | Producers

FROM_SLAVE: dict[int, type[FromSlave]] = {
    JOIN: Join,
    ATTACH: Attach,
    ACK: Ack,
    DETACH: Detach,
    HANDOVER: HandOver,
    LEAVE: Leave,
}
FROM_MASTER: dict[int, type[FromMaster]] = {
    ACCEPT: Accept,
    ATTACHED: Attached,
    DATA: Data,
    COPY: Copy,
    BEAT: Beat,
    HANDED_OVER: HandedOver,
    PRODUCERS: Producers,
}

_DECISIONS = frozenset(SyncDecision)

F = TypeVar("F", FromSlave, FromMaster)


def unpack_from_slave(header: Any) -> FromSlave:
    """Unpacks a frame from a slave. Raises ProtocolError."""
    frame = _unpack(FROM_SLAVE, header)
    if isinstance(frame, Attach):
        partitions = [unpack_frame(AttachPartition, entry) for entry in frame.partitions]
        if any(len(entry.epochs) > limits.ATTACH_EPOCHS_MAX for entry in partitions):
            raise ProtocolError(f"a partition has more than {limits.ATTACH_EPOCHS_MAX:,} epochs in an Attach")
        return frame._replace(partitions=partitions)
    if isinstance(frame, HandOver) and frame.wait_ms > limits.HAND_OVER_MS_MAX:
        raise ProtocolError(f"a HandOver waits for at most {limits.HAND_OVER_MS_MAX:,} ms, got {frame.wait_ms:,}")
    if isinstance(frame, Join) and frame.magic != MAGIC:
        raise ProtocolError(f"the magic of a Join must be {MAGIC:#x}, got {frame.magic:#x}")
    return frame


def unpack_from_master(header: Any) -> FromMaster:
    """Unpacks a frame from a master. Raises ProtocolError."""
    frame = _unpack(FROM_MASTER, header)
    if isinstance(frame, Attached):
        results = [unpack_frame(AttachResult, entry) for entry in frame.results]
        unknown = [entry.decision for entry in results if entry.decision not in _DECISIONS]
        if unknown:
            raise ProtocolError(f"an Attached has the unknown decision {unknown[0]}")
        return frame._replace(results=results)
    return frame


def _unpack(kinds: dict[int, type[F]], header: Any) -> F:
    kind = header[0] if isinstance(header, list) and header else None
    cls = kinds.get(kind) if type(kind) is int else None
    if cls is None:
        names = ", ".join(f"{number} {cls.__name__}" for number, cls in kinds.items())
        raise ProtocolError(f"a SYNC frame begins with its kind ({names}), got {reprlib.repr(header)}")
    return unpack_frame(cls, header)


def bodies(entries: Iterable[Sequence[int]], body: memoryview) -> list[memoryview]:
    """The part of a body for each entry of Data or Copy. Raises ProtocolError unless the sizes add up to the body."""
    pieces = []
    at = 0
    for _handle, _position, size, _flush in entries:
        if not 0 < size <= len(body) - at:
            break
        pieces.append(body[at : at + size])
        at += size
    else:
        if at == len(body):
            return pieces
    sizes = [entry[2] for entry in entries]
    raise ProtocolError(f"a body of {len(body):,} bytes is not made up of {reprlib.repr(sizes)}")


def attach_frames(epoch: int, partitions: Iterable[AttachPartition]) -> Iterator[Attach]:
    """The ATTACH frames for any number of partitions. Omits epochs beyond the newest ATTACH_EPOCHS_MAX."""
    part: list[AttachPartition] = []
    epochs = 0
    for partition in partitions:
        kept = partition.epochs[-limits.ATTACH_EPOCHS_MAX :]
        if part and (len(part) == limits.ENTRIES_TARGET or epochs + len(kept) > limits.ATTACH_EPOCHS_TARGET):
            yield Attach(ATTACH, epoch, part)
            part, epochs = [], 0
        part.append(partition._replace(epochs=kept))
        epochs += len(kept)
    if part:
        yield Attach(ATTACH, epoch, part)


def attach_result(handle: int, decision: SyncDecision, offset: int, position: int, reason: str) -> AttachResult:
    """One entry of ATTACHED. Its text is cut at the length of error texts."""
    return AttachResult(handle, decision, offset, position, reason[: limits.ERROR_TEXT_CHARS_MAX])
