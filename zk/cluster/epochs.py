"""Epoch numbers: each has one master, ever; and how a replica sees that ZooKeeper was taken back.

Theory of operation
-------------------
Where two logs agree is read off the epochs of their batches (metamq.broker.log.disk.epochs), and the ids of
transactions' batches are unique because their epoch is. Both hold only while

    one epoch number has one master, ever

ZooKeeper alone cannot promise that. It may come back from an older copy, and gives the numbers out once more. So:

1. *Two replicas never take the same number.* Replica r takes numbers of its own class only, those with
   number = r + 1 modulo CLASSES. So a replica that does not know of a promotion, since both it and ZooKeeper are of the
   time before, takes another number than the one that was promoted.
2. *A replica never takes a number twice.* Its data folder keeps the highest epoch that it has served or followed, and
   the number that it takes next is above that. The folder is written before anything is done under the number: so a
   number that a crash makes it forget was used by nobody. A folder that is new, or an older copy, knows that (see
   metamq.broker.data.data_folder), and waits for a person.
3. *What was taken back is seen.* Each replica publishes in its node what its folder knows. A state node that is older
   than what any of them knows was taken back. So was one whose masters went on since, but not through an epoch that a
   replica knows: the node lists who was the master since when, and the number's class tells whose it is. Then nobody
   begins a term, or goes on with one, until a person accepts what is lost; the next number is above all that is known.

Within one epoch the in-sync set changes, and an older set names members that lack what was acknowledged since. So the
master also keeps the version of the state node, durably, before it relies on a change: an older version in the same
epoch was taken back, too. The members of one epoch have the same master, whose folder the version is kept in.

There are 2**24 epoch numbers: 2**20 terms of one broker id. A replica's number is below CLASSES: two replicas 16 apart
would share a class, and take the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

CLASSES = 16
REIGNS_KEPT = 64
GONE = "ZooKeeper was taken back, or this broker was removed by `metamq cluster remove-broker`"
IF_REMOVED = "If it was removed, leave it off, or give it an empty data folder: it is a new broker then"


class KnownState(NamedTuple):
    """What a replica's data folder knows of its broker id's state node."""

    replica: int
    epoch: int
    """The highest that it has served or followed; 0: none."""
    state_version: int
    """Of the state node, as that epoch's master saw it last; -1 when the replica was not its master."""
    generation: int
    """The last that its logs have followed."""


def next_epoch(highest: int, replica: int) -> int:
    """The number of the next term of this replica, above all that are known."""
    return highest + 1 + (replica - highest) % CLASSES


def master_of_epoch(epoch: int) -> int:
    """The replica whose term has this number."""
    return (epoch - 1) % CLASSES


def highest_epoch(epoch: int, claims: Iterable[KnownState]) -> int:
    """The highest epoch that is known: the state node's, or a replica's."""
    return max([epoch, *(claim.epoch for claim in claims)])


Reign = tuple[int, int]
"""(epoch, replica): that replica is the master from that epoch on, up to the next such entry."""


class Known(NamedTuple):
    """What a state node says, as far as it matters here. An epoch of 0 stands for no node at all."""

    epoch: int = 0
    version: int = -1
    reigns: Sequence[Reign] = ()
    """Oldest first. Of epochs before the first nothing is known."""

    def gave_out(self, epoch: int) -> bool:
        """Whether an epoch may be one of those that led to this state."""
        masters = [master for first, master in self.reigns if first <= epoch]
        return not masters or master_of_epoch(epoch) == masters[-1] % CLASSES

    def parted_from(self, epoch: int) -> bool:
        """Whether this state went on past an epoch without having given it out."""
        return epoch < self.epoch and not self.gave_out(epoch)


def with_reign(reigns: Sequence[Reign], epoch: int, master: int) -> tuple[Reign, ...]:
    """With a term that begins."""
    if reigns and reigns[-1][1] == master:
        return tuple(reigns)
    return (*reigns, (epoch, master))[-REIGNS_KEPT:]


def taken_back(known: Known, claims: Iterable[KnownState]) -> str:
    """Why a state node is older than what replicas know, or was once; empty when it is not."""
    epoch, version, _reigns = known
    for claim in sorted(claims, key=lambda claim: (-claim.epoch, -claim.state_version, claim.replica)):
        if claim.epoch > epoch:
            seen = f"replica {claim.replica} has seen epoch {claim.epoch}"
            if epoch == 0:
                return f"{GONE}: ZooKeeper has no epoch of it, and {seen}. {IF_REMOVED}"
            return f"ZooKeeper was taken back: it has epoch {epoch}, and {seen}"
        if claim.epoch == epoch and claim.state_version > version:
            return (
                f"ZooKeeper was taken back: it has version {version} of the state of epoch {epoch}, and replica "
                f"{claim.replica} has seen version {claim.state_version}"
            )
        if not known.gave_out(claim.epoch):
            return (
                f"ZooKeeper was taken back: epoch {claim.epoch}, which replica {claim.replica} has seen, is none of "
                f"those that led to its epoch {epoch}"
            )
    return ""
