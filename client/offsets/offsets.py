"""The storage of a group's committed offsets: the protocol, and the default, ZooKeeper.

A storage fences: it accepts a commit only while the claim of the commit is the partition's last one. The owner nodes in
ZooKeeper decide which member consumes; every storage compares the claim generation.

Delivery is at least once with every storage, because results and offsets are two writes. If the results go to the same
database as the offsets, in one transaction (`DatabaseOffsets`), each message counts exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from metamq.errors import MetamqError
from metamq.zk.groups.ownership import CommittedOffset, Ownership
from metamq.zk.groups.together import commit_all

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.session import Session

__all__ = [
    "ClaimOutcome",
    "CommitOutcome",
    "CommitRequest",
    "CommittedOffset",
    "OffsetStorage",
    "Ownership",
    "ZooKeeperOffsets",
]

CommitOutcome = Ownership | MetamqError
"""The claim after the commit, or the error if the commit was refused."""

ClaimOutcome = CommittedOffset | MetamqError | None
"""The committed offset, or None; or the error if the storage does not accept the claim."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A request to commit `offset`, the offset of the next message to read, for a claimed partition.

    `epoch` is the epoch of the message before it.
    """

    claim: Ownership
    offset: int
    epoch: int

    def with_known(self, committed: CommittedOffset | None) -> CommitRequest:
        """Returns the same request, with `committed` as the content of the storage now."""
        return replace(self, claim=replace(self.claim, committed=committed))


class OffsetStorage(Protocol):
    """Stores committed offsets. Coroutines run in the consumer's loop and must not block it."""

    in_claim_node: bool
    """True if the offsets are in the claim's node in ZooKeeper: then a release commits, too."""

    async def check(self) -> None:
        """Raises MetamqError, with the next step, if the storage cannot be used. Called before all other methods."""

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Fences off earlier owners, and returns the committed offsets. May be repeated for the same claim.

        A claim is refused with OwnershipLost if the storage knows a later one. Raises MetamqError if the storage cannot
        be reached.
        """
        ...

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commits each request on its own; at most one per partition at a time.

        Returns for each partition the claim after the commit, or the error if the commit was refused: OwnershipLost, or
        an error with `outcome` "unknown", after which it may be repeated with the same claim.
        """
        ...

    async def close(self) -> None:
        """Closes connections and files. May be called twice."""


class ZooKeeperOffsets:
    """Offsets in the group's znodes, the default. Each commit is a compare-and-set on the claim's last write."""

    in_claim_node = True

    def __init__(self, session: Session) -> None:
        self._session = session

    async def check(self) -> None:
        """Does nothing: the session is open."""

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Returns the offsets that came with the claims. Makes no request."""
        return {claim.tp: claim.committed for claim in claims}

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commits up to a hundred requests in one transaction; see `OffsetStorage.commit`."""
        outcomes = await commit_all(self._session, [(one.claim, one.offset, one.epoch) for one in requests])
        return {request.claim.tp: outcome for request, outcome in zip(requests, outcomes, strict=True)}

    async def close(self) -> None:
        """Does nothing: the session belongs to the caller."""
