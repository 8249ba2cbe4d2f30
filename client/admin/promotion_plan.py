"""What a promotion would lose, decided from what the replicas have. Pure: no I/O.

The ends of two logs tell what one lacks only where both replicas have followed the same last term. A replica that
stopped before that may have a longer log, with messages that were never acknowledged, and still lack what a later
master acknowledged. And two slaves cannot tell what was acknowledged without both of them. So a number is given only
to a replica that knows the last term, where one that has what was acknowledged answers: the master of that term, or a
replica in sync.

Where the state node went on from an older copy of itself, two replicas may have been masters at once, each with
messages that were acknowledged. No number tells which of them to keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from metamq.zk.cluster.epochs import Known, master_of_epoch

TWO_MASTERS = (
    "two replicas were masters at once, after ZooKeeper was taken back, and each may have what the other lacks"
)
NO_ANSWER = "no other replica answers"


class Has(NamedTuple):
    """What a replica that answers has. `epoch`: of the last term that it knows; `ends`: offsets, by partition."""

    replica: int
    epoch: int
    ends: Mapping[tuple[str, int], int]
    is_in_sync: bool = False


class Loss(NamedTuple):
    """`lost`: messages by topic; None where that cannot be known. Then `unknown` says why, and `promote_instead` is the
    replica that has what was acknowledged, and may be down; None where no other one has it, or that is not known."""

    lost: Mapping[str, int] | None
    unknown: str = ""
    promote_instead: int | None = None


def loss_of(mine: Has, others: Sequence[Has], state: Known, claimed: int = 0) -> Loss:
    """What is lost with this replica as the master. `claimed`: the highest epoch that a replica claims in ZooKeeper."""
    everyone = [mine, *others]
    if any(state.diverged_from(one.epoch) for one in everyone):
        return Loss(None, TWO_MASTERS)
    last = max(state.epoch, claimed, *(one.epoch for one in everyone))
    master = master_of_epoch(last)
    whole = [one.replica for one in everyone if one.is_in_sync or (one.epoch == last and one.replica == master)]
    if mine.epoch == last and whole and others:
        return Loss(_more(mine, others))
    instead = whole[0] if whole else master
    if instead == mine.replica:
        return Loss(None, NO_ANSWER)
    return Loss(None, f"replica {instead} has what was acknowledged, and this one may lack any of it", instead)


def _more(mine: Has, others: Sequence[Has]) -> dict[str, int]:
    """What the others have more, the most of them in each partition."""
    ends: dict[tuple[str, int], int] = defaultdict(int)
    for other in others:
        for place, end in other.ends.items():
            ends[place] = max(ends[place], end)
    lost: dict[str, int] = defaultdict(int)
    for (topic, index), end in ends.items():
        lost[topic] += max(end - mine.ends.get((topic, index), 0), 0)
    return {topic: count for topic, count in sorted(lost.items()) if count}
