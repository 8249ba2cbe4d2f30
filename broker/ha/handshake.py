"""What becomes of a slave's log when it is attached to its master: one pure function, and the reason in words.

Theory of operation
-------------------
Each log has a list of epochs, (epoch, offset, position) where each begins in it. An epoch has one master ever, which
wrote one sequence of batches; whoever has one of them has below it what that master had. So two logs are equal up to
the end of the newest epoch that both have, the nearer of its two ends. The slave is cut there and goes on there: also
when it is longer than the master, when both have epochs that the other lacks, and over epochs in which nothing was
written, since those have no batch that could differ. The first entry of a list may stand at the log's start, because
retention took what was before it; any other is where the epoch began, and is to be the same in both lists. If it is
not, two masters used one epoch: then nothing is believed of it, and the next older one counts.

Where the two have nothing in common that the master could go on from, the slave is emptied and copied anew.

What the slave's readers have seen, below its stable mark, is given up only under a newer generation than the slave
has followed so far: ZooKeeper raises it when somebody accepted a loss. Otherwise the partition is refused, and the
data is left as it is. What the master's retention has removed is not given up by this. Refused is also who would go on
in the middle of a batch of the master's: no replica does, but a list is another one's word.

So a slave is to store a generation as its own only when all its partitions have been through the handshake in it:
within a generation all that readers have seen of a replica is the same at every later master. A member of the in-sync
set is therefore never cut or emptied below a stable mark; tests/broker/ha/test_histories.py tries to make it so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from metamq.errors import CorruptData
from metamq.wire.sync import AttachResult, SyncDecision

__all__ = ["LogPosition", "Side", "SyncDecision", "SyncVerdict", "decide"]


class LogPosition(NamedTuple):
    """A batch boundary in a log."""

    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Side:
    """One replica's log of a partition. `generation` is the master's present one, the slave's last."""

    topic_id: str
    start: LogPosition
    end: LogPosition
    stable_offset: int
    epochs: Sequence[tuple[int, int, int]]
    """(epoch, offset, position), oldest first."""
    generation: int

    @property
    def is_empty(self) -> bool:
        """There is no batch in it, whatever was."""
        return self.start == self.end

    def has(self, place: LogPosition) -> bool:
        """Whether the log reaches there from both sides."""
        return self.start.position <= place.position <= self.end.position


class SyncVerdict(NamedTuple):
    """What is to be done, where, and why; `level` is logging's."""

    decision: SyncDecision
    offset: int
    position: int
    reason: str
    level: int


def decide(master: Side | None, slave: Side) -> SyncVerdict:
    """What becomes of the slave's log. `master` is None when the master has no such partition."""
    if master is None:
        return _wait("the master has no such partition yet, or no longer")
    if master.topic_id != slave.topic_id:
        return _wait(
            f"the topic was made anew: its id is {slave.topic_id} here and {master.topic_id} at the master, "
            "and one of them has still to learn that"
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
    """Instead of one to go on where no batch of the master's begins: what is below that is not the master's, either."""
    reason = (
        f"it is not replicated, and left as it is: it would go on at offset {verdict.offset:,}, byte "
        f"{verdict.position:,}, and no batch of the master's begins there. Empty its data folder to copy it anew"
    )
    return SyncVerdict(SyncDecision.REFUSE, *slave.end, reason, logging.ERROR)


def begin_where_needed(needed_offset: int, slave: Side, verdict: SyncVerdict, start: LogPosition) -> SyncVerdict:
    """The verdict to go on, or to begin anew where the slave lacks what its master's log still needs: the slave has cut
    it off by the word of something that was given up since."""
    if slave.start.offset <= needed_offset:
        return verdict
    reason = (
        f"it begins anew at offset {start.offset:,}: it begins at {slave.start.offset:,}, and what lies from "
        f"{needed_offset:,} on is needed"
    )
    return SyncVerdict(SyncDecision.RESET, *start, reason, logging.WARNING)


def wait_before_damage(damage: CorruptData, verdict: SyncVerdict) -> SyncVerdict:
    """The verdict to go on, unless the copy would come to what is damaged in the master's log: it would end there, and
    the link with it."""
    goes_on = verdict.decision in (SyncDecision.FROM, SyncDecision.RESET)
    if not goes_on or (damage.position is not None and verdict.position > damage.position):
        return verdict
    return _wait(f"the master's log cannot be copied: {damage.problem}")


def _wait(reason: str) -> SyncVerdict:
    return SyncVerdict(SyncDecision.WAIT, 0, 0, reason, logging.DEBUG)


def _agreement(master: Side, slave: Side) -> LogPosition | None:
    """Up to where the two logs are known to be equal; it may lie outside of one, behind what it still has."""
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
    # In front of a log's first batch there is nothing that could differ. And readers have seen all that retention took
    # from the slave: within a generation that is the master's, too.
    is_masters = slave.generation == master.generation and master.has(slave.start)
    return slave.start if is_masters or slave.start == master.start else None


def _is_one_epoch(slave: LogPosition, slave_is_first: bool, master: LogPosition, master_is_first: bool) -> bool:
    """Whether the places where the two lists have an epoch begin are those of one epoch. See the module."""
    return (slave <= master or slave_is_first) and (master <= slave or master_is_first)


def _end_of(side: Side, number: int) -> LogPosition:
    return LogPosition(*side.epochs[number + 1][1:]) if number + 1 < len(side.epochs) else side.end


def _kept_by_reset(master: Side, slave: Side, agreed: LogPosition | None) -> int:
    """Up to which offset nothing is given up by emptying the slave. Below the master's start, retention was there."""
    if slave.stable_offset <= slave.start.offset:  # it has nothing that readers could have seen: the end has to tell
        return master.end.offset
    return max(master.start.offset, agreed.offset if agreed is not None else 0)


def _from_reason(master: Side, slave: Side, agreed: LogPosition) -> str:
    behind = master.end.offset - agreed.offset
    cut = slave.end.offset - agreed.offset
    tail = f"{_messages(behind)} behind the master" if behind else "where the master ends, too"
    if not cut:
        return f"it goes on at offset {agreed.offset:,}, {tail}"
    return f"it is cut from offset {slave.end.offset:,} to {agreed.offset:,}, {tail}: {_messages(cut)} that it has not"


def _reset_reason(master: Side, slave: Side, agreed: LogPosition | None) -> str:
    anew = f"it begins anew at offset {master.start.offset:,}, where the master begins"
    if slave.is_empty:
        return f"{anew}: it is empty"
    if slave.end.offset < master.start.offset:
        return f"{anew}: it ends before that, at {slave.end.offset:,}"
    if agreed is None:
        return f"{anew}: they have nothing in common, epochs {_range(slave)} here and {_range(master)} there"
    short = f"it is equal to the master up to offset {agreed.offset:,} only"
    if agreed.offset < slave.start.offset:
        return f"{anew}: {short}, and begins behind that, at {slave.start.offset:,}"
    return f"{anew}: {short}"


def _refuse_reason(slave: Side, kept_offset: int, seen: int) -> str:
    return (
        f"it is not replicated, and left as it is: readers have seen it up to offset {slave.stable_offset:,}, "
        f"the master lacks the last {_messages(seen)} of that, from {kept_offset:,} on, and nobody accepted their loss "
        f"since generation {slave.generation}. Promote this replica with --accept-loss to keep them, or empty its "
        "data folder to give them up"
    )


def _range(side: Side) -> str:
    return f"{side.epochs[0][0]} to {side.epochs[-1][0]}" if side.epochs else "none"


def _messages(count: int) -> str:
    return f"{count:,} message{'s' * (count != 1)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def level_at_slave(result: AttachResult, start_position: int, end_position: int) -> int:
    """Of logging's: what a slave's log loses is worth a line, that thousands of them just go on is not."""
    decision = SyncDecision(result.decision)
    if decision is SyncDecision.REFUSE:
        return logging.WARNING
    kept = {SyncDecision.FROM: result.position, SyncDecision.RESET: start_position}
    return logging.INFO if kept.get(decision, end_position) < end_position else logging.DEBUG
