"""Decides how a slave's log continues when it is attached to its master. Pure: the decision and the reason in words.

Theory of operation
-------------------
Each log has a list of epochs: (epoch, offset, position) for the beginning of each epoch. An epoch has exactly one
master, which wrote one sequence of batches. A log that has one of these batches is equal to that master's log below it.
So two logs are equal up to the end of the newest common epoch; of its two ends the lower one counts. The slave is cut
there and continues there. This also holds for a slave that is longer than the master, for logs with epochs that the
other lacks, and for epochs without a batch: they have nothing that could differ.

The first entry of a list may be at the log's start, because retention removed the part before it. Any other entry is
the true beginning of its epoch, and must be the same in both lists. If the entries differ, two masters used one epoch.
Then this epoch is ignored, and the next older common epoch counts.

If the logs have no common point from which the master has all data, the slave is emptied and copied again.

Readers have seen the messages below the slave's stable mark. The slave gives them up only under a newer broker
generation than it follows: a new master raises the generation in ZooKeeper if messages may be lost. Otherwise the
partition is refused, and its data stays as it is. Messages that the master's retention has removed do not count as
given up. A slave is also refused if it would continue in the middle of a batch of the master. No correct replica does,
but the master cannot trust the list of another process.

So a slave stores a broker generation as its own only when all its partitions have passed the handshake in it. Within
one generation, every later master has all that readers have seen at a replica. Therefore a member of the in-sync
set is never cut or emptied below a stable mark; tests/broker/ha/test_histories.py tries to break this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from metamq.wire.sync import AttachResult, SyncDecision

if TYPE_CHECKING:
    from metamq.errors import CorruptData

__all__ = ["LogPosition", "Side", "SyncDecision", "SyncVerdict", "decide"]


class LogPosition(NamedTuple):
    """A batch boundary in a log."""

    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Side:
    """One replica's log of a partition. `generation`: the present one of a master, the last followed one of a slave."""

    topic_id: str
    start: LogPosition
    end: LogPosition
    stable_offset: int
    epochs: Sequence[tuple[int, int, int]]
    """(epoch, offset, position), oldest first."""
    generation: int

    @property
    def is_empty(self) -> bool:
        """True if the log has no batch."""
        return self.start == self.end

    def has(self, place: LogPosition) -> bool:
        """Returns True if the place is within the log."""
        return self.start.position <= place.position <= self.end.position


class SyncVerdict(NamedTuple):
    """A decision, its place, its reason, and the level at which to log it."""

    decision: SyncDecision
    offset: int
    position: int
    reason: str
    level: int


def decide(master: Side | None, slave: Side) -> SyncVerdict:
    """Decides how the slave's log continues. `master` is None if the master has no such partition."""
    if master is None:
        return _wait("the master has no such partition yet, or no longer")
    if master.topic_id != slave.topic_id:
        return _wait(
            f"the topic was created again: its id is {slave.topic_id} here and {master.topic_id} at the master, "
            "and one of them does not know that yet"
        )
    agreed = _agreement(master, slave)
    if agreed is not None and master.has(agreed) and slave.has(agreed):
        kept_offset = agreed.offset
        decision, begin, reason = SyncDecision.FROM, agreed, _from_reason(master, slave, agreed)
    else:
        kept_offset = _kept_by_reset(master, slave, agreed)
        decision, begin, reason = SyncDecision.RESET, master.start, _reset_reason(master, slave, agreed)
    seen = slave.stable_offset - kept_offset
    if seen <= 0:
        cut = slave.end.offset - begin.offset if decision is SyncDecision.FROM else 0
        level = logging.WARNING if cut or (decision is SyncDecision.RESET and not slave.is_empty) else logging.DEBUG
        return SyncVerdict(decision, *begin, reason, level)
    if master.generation > slave.generation:
        reason += f"; {_messages(seen)} that readers had seen {_are(seen)} given up (generation {master.generation})"
        return SyncVerdict(decision, *begin, reason, logging.WARNING)
    return SyncVerdict(SyncDecision.REFUSE, *slave.end, _refuse_reason(slave, kept_offset, seen), logging.ERROR)


def refuse_between_batches(slave: Side, verdict: SyncVerdict) -> SyncVerdict:
    """Returns a refusal to continue where no batch of the master begins: the logs differ below that, too."""
    reason = (
        f"it is not replicated, and its data is kept: it would continue at offset {verdict.offset:,}, byte "
        f"{verdict.position:,}, and no batch of the master's begins there. Empty its data folder to copy it again"
    )
    return SyncVerdict(SyncDecision.REFUSE, *slave.end, reason, logging.ERROR)


def begin_where_needed(needed_offset: int, slave: Side, verdict: SyncVerdict, start: LogPosition) -> SyncVerdict:
    """Returns the verdict to continue, or to copy again if the slave lacks a part that its master's log still needs.

    The slave has removed that part because of a MARK that was given up since.
    """
    if slave.start.offset <= needed_offset:
        return verdict
    reason = (
        f"it is copied again from offset {start.offset:,}: it begins at {slave.start.offset:,}, and the messages from "
        f"{needed_offset:,} on are needed"
    )
    return SyncVerdict(SyncDecision.RESET, *start, reason, logging.WARNING)


def wait_before_damage(damage: CorruptData, verdict: SyncVerdict) -> SyncVerdict:
    """Returns the verdict to continue, or to wait if the copy would reach the damage in the master's log.

    There the copy and the link would end.
    """
    continues = verdict.decision in (SyncDecision.FROM, SyncDecision.RESET)
    if not continues or (damage.position is not None and verdict.position > damage.position):
        return verdict
    return _wait(f"the master's log cannot be copied: {damage.problem}")


def _wait(reason: str) -> SyncVerdict:
    return SyncVerdict(SyncDecision.WAIT, 0, 0, reason, logging.DEBUG)


def _agreement(master: Side, slave: Side) -> LogPosition | None:
    """Returns the place up to which the logs are equal. A log may have lost that place to retention."""
    theirs = {epoch: number for number, (epoch, _offset, _position) in enumerate(master.epochs)}
    for number in reversed(range(len(slave.epochs))):
        epoch, *begins = slave.epochs[number]
        in_master = theirs.get(epoch)
        if in_master is None or not _is_one_epoch(
            LogPosition(*begins), number == 0, LogPosition(*master.epochs[in_master][1:]), in_master == 0
        ):
            continue
        ends = _end_of(slave, number), _end_of(master, in_master)
        if min(ends) == min(ends, key=lambda end: end.position):
            return min(ends)
    # Before a log's first batch nothing can differ. And readers have seen all messages that retention removed from the
    # slave: within a generation the master has had them, too.
    is_masters = slave.generation == master.generation and master.has(slave.start)
    return slave.start if is_masters or slave.start == master.start else None


def _is_one_epoch(slave: LogPosition, slave_is_first: bool, master: LogPosition, master_is_first: bool) -> bool:
    """Returns True if the two beginnings can be those of one epoch, see the module."""
    return (slave <= master or slave_is_first) and (master <= slave or master_is_first)


def _end_of(side: Side, number: int) -> LogPosition:
    return LogPosition(*side.epochs[number + 1][1:]) if number + 1 < len(side.epochs) else side.end


def _kept_by_reset(master: Side, slave: Side, agreed: LogPosition | None) -> int:
    """Returns the offset below which an emptied slave gives up nothing. Removed messages do not count."""
    if slave.stable_offset <= slave.start.offset:  # readers have seen nothing of this log: its end counts
        return master.end.offset
    return max(master.start.offset, agreed.offset if agreed is not None else 0)


def _from_reason(master: Side, slave: Side, agreed: LogPosition) -> str:
    behind = master.end.offset - agreed.offset
    cut = slave.end.offset - agreed.offset
    tail = f"{_messages(behind)} behind the master" if behind else "where the master ends, too"
    if not cut:
        return f"it continues at offset {agreed.offset:,}, {tail}"
    return f"it is cut from offset {slave.end.offset:,} to {agreed.offset:,}, {tail}: {_messages(cut)} that it lacks"


def _reset_reason(master: Side, slave: Side, agreed: LogPosition | None) -> str:
    copied = f"it is copied from offset {master.start.offset:,}, where the master begins"
    if slave.is_empty:
        return f"{copied}: it is empty"
    if slave.end.offset < master.start.offset:
        return f"{copied}: it ends before that, at {slave.end.offset:,}"
    if agreed is None:
        return f"{copied}: they have nothing in common, epochs {_range(slave)} here and {_range(master)} there"
    short = f"it is equal to the master up to offset {agreed.offset:,} only"
    if agreed.offset < slave.start.offset:
        return f"{copied}: {short}, and begins after that, at {slave.start.offset:,}"
    return f"{copied}: {short}"


def _refuse_reason(slave: Side, kept_offset: int, seen: int) -> str:
    return (
        f"it is not replicated, and its data is kept: readers have seen it up to offset {slave.stable_offset:,}, "
        f"the master lacks the last {_messages(seen)} of that, from {kept_offset:,} on, and no operator accepted this "
        f"loss since generation {slave.generation}. Promote this replica with --accept-loss to keep them, or empty its "
        "data folder to give them up"
    )


def _range(side: Side) -> str:
    return f"{side.epochs[0][0]} to {side.epochs[-1][0]}" if side.epochs else "none"


def _messages(count: int) -> str:
    return f"{count:,} message{'s' * (count != 1)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def level_at_slave(result: AttachResult, start_position: int, end_position: int) -> int:
    """Returns the level of logging: DEBUG if the log continues, as thousands do; higher if it is cut or refused."""
    decision = SyncDecision(result.decision)
    if decision is SyncDecision.REFUSE:
        return logging.WARNING
    kept = {SyncDecision.FROM: result.position, SyncDecision.RESET: start_position}
    return logging.INFO if kept.get(decision, end_position) < end_position else logging.DEBUG
