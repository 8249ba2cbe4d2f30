"""The loss of a promotion, decided from the logs of the replicas. Pure: no I/O.

The ends of two logs show the missing messages only if both replicas have followed the same last epoch. A replica that
stopped earlier may have a longer log, with messages that were never acknowledged, and still lack messages that a later
master acknowledged. And two slaves cannot know the acknowledgements that needed neither of them. So the plan has a
number only if the replica knows the last epoch, and if a replica with all acknowledged messages answers: the master of
that epoch, or a replica in sync.

If the state node in ZooKeeper was restored from an older copy, two replicas may have been masters at once, each with
acknowledged messages. No number shows which of them to keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from metamq.zk.cluster.epochs import Known, master_of_epoch

TWO_MASTERS = (
    "two replicas were masters at once, after ZooKeeper was taken back, and each may have messages that the other lacks"
)
NO_ANSWER = "no other replica answers"


class Has(NamedTuple):
    """The log of a replica that answers. `epoch`: the last one that it knows; `ends`: offsets by partition."""

    replica: int
    epoch: int
    ends: Mapping[tuple[str, int], int]
    is_in_sync: bool = False


class Loss(NamedTuple):
    """`lost`: messages by topic, or None if they cannot be known. Then `unknown` is the reason, and `promote_instead`
    is the replica that has all acknowledged messages, and may be down; None if there is no such replica, or it is not
    known.
    """

    lost: Mapping[str, int] | None
    unknown: str = ""
    promote_instead: int | None = None


def loss_of(mine: Has, others: Sequence[Has], state: Known, claimed: int = 0) -> Loss:
    """Returns the loss if this replica becomes the master. `claimed`: the highest epoch that a replica claims."""
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
    return Loss(None, f"replica {instead} has all acknowledged messages, and this one may lack any of them", instead)


def _more(mine: Has, others: Sequence[Has]) -> dict[str, int]:
    """Returns the number of messages that this replica lacks, by topic. The longest other log of each partition
    counts."""
    ends: dict[tuple[str, int], int] = defaultdict(int)
    for other in others:
        for place, end in other.ends.items():
            ends[place] = max(ends[place], end)
    lost: dict[str, int] = defaultdict(int)
    for (topic, index), end in ends.items():
        lost[topic] += max(end - mine.ends.get((topic, index), 0), 0)
    return {topic: count for topic, count in sorted(lost.items()) if count}
