"""Epoch numbers, of which each has only one master ever; and the detection of a ZooKeeper that was taken back.

Theory of operation
-------------------
The epochs of batches show where two logs agree (metamq.broker.log.disk.epochs), and the ids of transactions' batches
are unique because their epoch is. Both are true only as long as

    one epoch number has one master, ever

ZooKeeper alone cannot guarantee that. It may be restored from an older copy, and then gives the numbers out again. So:

1. *Two replicas never take the same number.* Replica r takes only numbers of its own class, those with
   number = r + 1 modulo CLASSES. A replica may not know of a promotion, if both it and ZooKeeper are in an older state.
   Even then it takes another number than the promoted replica.
2. *A replica never takes a number twice.* Its data folder stores the highest epoch that it has served or followed, and
   its next number is above that. The folder is written before any action under the number. So if a crash makes it
   forget a number, no replica has used that number. A folder that is new, or an older copy, knows that (see
   metamq.broker.data.data_folder), and waits for an operator.
3. *A ZooKeeper that was taken back is detected.* Each replica publishes in its node the epochs that its folder knows. A
   state node that is older than the knowledge of any replica was taken back. The same is true if its masters continued
   since, but not through an epoch that a replica knows: the node lists the masters with their first epochs, and the
   number's class says which replica it belongs to. Then no replica begins or continues an epoch until an operator
   accepts the loss. The next number is above all known ones.

Within one epoch the in-sync set changes, and an older set names members that lack messages acknowledged since. So the
master also stores the version of the state node, durably, before it relies on a change. An older version in the same
epoch means that ZooKeeper was taken back, too. The members of one epoch have the same master, whose folder has the
version.

There are 2**24 epoch numbers. A new epoch is at most CLASSES above the last one, so a broker id has at least 2**20
epochs. A replica's number must be below CLASSES: two replicas 16 apart would share a class and take the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

CLASSES = 16
REIGNS_KEPT = 64
GONE = "ZooKeeper was taken back, or this broker was removed by `metamq cluster remove-broker`"
IF_REMOVED = "If it was removed, do not start it, or give it an empty data folder: then it is a new broker"


class KnownState(NamedTuple):
    """A replica's knowledge, from its data folder, of its broker id's state node."""

    replica: int
    epoch: int
    """The highest epoch that it has served or followed; 0: none."""
    state_version: int
    """The last version of the state node that it saw as that epoch's master; -1 if it was not its master."""
    generation: int
    """The last generation that its logs have followed."""


def next_epoch(highest: int, replica: int) -> int:
    """The next epoch number of this replica, above all known ones."""
    return highest + 1 + (replica - highest) % CLASSES


def master_of_epoch(epoch: int) -> int:
    """The replica to which this epoch number belongs."""
    return (epoch - 1) % CLASSES


def highest_epoch(epoch: int, claims: Iterable[KnownState]) -> int:
    """The highest known epoch: that of the state node, or of a replica."""
    return max([epoch, *(claim.epoch for claim in claims)])


Reign = tuple[int, int]
"""(epoch, replica): the replica is the master from that epoch on, up to the next entry."""


class Known(NamedTuple):
    """The epochs that a state node knows. An epoch of 0 means that there is no node."""

    epoch: int = 0
    version: int = -1
    reigns: Sequence[Reign] = ()
    """The masters with their first epochs, oldest first. Epochs before the first entry are unknown."""

    def gave_out(self, epoch: int) -> bool:
        """True if an epoch may be one of those that led to this state."""
        masters = [master for first, master in self.reigns if first <= epoch]
        return not masters or master_of_epoch(epoch) == masters[-1] % CLASSES

    def diverged_from(self, epoch: int) -> bool:
        """True if this state is beyond an epoch without having given it out."""
        return epoch < self.epoch and not self.gave_out(epoch)


def with_reign(reigns: Sequence[Reign], epoch: int, master: int) -> tuple[Reign, ...]:
    """Adds a new epoch to the list of masters."""
    if reigns and reigns[-1][1] == master:
        return tuple(reigns)
    return (*reigns, (epoch, master))[-REIGNS_KEPT:]


def taken_back(known: Known, claims: Iterable[KnownState]) -> str:
    """The reason why a state node is older than replicas know, or once was; empty if it is not."""
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
                f"ZooKeeper was taken back: epoch {claim.epoch}, which replica {claim.replica} has seen, is not one of "
                f"those that led to its epoch {epoch}"
            )
    return ""
