"""Where a group keeps its committed offsets: the protocol, and the default, ZooKeeper.

A storage fences: a commit is carried out only while the claim that it comes with is the partition's last one. The owner
nodes in ZooKeeper decide who consumes; the generation of the claim is what every storage compares.

Delivery is at least once with every storage: results and offsets are two writes, unless the results go to the same
database as the offsets, in one transaction (`DatabaseOffsets`): then each message counts exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from metamq.errors import MetamqError
from metamq.zk.groups import ownership
from metamq.zk.groups.ownership import CommittedOffset, Ownership
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
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
"""The claim as it stands after the commit, or why it was refused."""

ClaimOutcome = CommittedOffset | MetamqError | None
"""What is committed, None for nothing, or why the storage does not accept the claim."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Commit `offset`, the next message to read, for a claimed partition.

    `epoch` is the master's term that wrote the message before it.
    """

    claim: Ownership
    offset: int
    epoch: int

    def with_known(self, committed: CommittedOffset | None) -> CommitRequest:
        """The same commit, on the knowledge that `committed` is what the storage holds now."""
        return replace(self, claim=replace(self.claim, committed=committed))


class OffsetStorage(Protocol):
    """Keeps committed offsets. Coroutines run in the consumer's loop and must not block it."""

    in_claim_node: bool
    """True when offsets live in the node that ZooKeeper claims are made with, so that a release commits as well."""

    async def check(self) -> None:
        """Raise MetamqError, with the next step, when the storage cannot be used. Called before anything else."""

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Fence off earlier owners, and say what is committed. May be repeated for one claim.

        A claim is refused with OwnershipLost when a later one is known. Raises MetamqError when the storage is out of
        reach.
        """

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commit each request on its own, at most one per partition at a time.

        Gives for each partition the claim as it stands after the commit, or why it was refused: OwnershipLost, or an
        error with `outcome` "unknown", after which it may be repeated with the claim of before.
        """

    async def close(self) -> None:
        """Let go of connections and files. May be called twice."""


class ZooKeeperOffsets:
    """Offsets in the group's znodes, the default. Each commit is a compare-and-set on what the claim wrote."""

    in_claim_node = True

    def __init__(self, session: Session) -> None:
        self._session = session

    async def check(self) -> None:
        """Nothing to do: the session was opened."""

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """What is committed came with the claim; no request is made."""
        return {claim.tp: claim.committed for claim in claims}

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commit all concurrently; see `OffsetStorage.commit`."""
        outcomes = await asyncio.gather(*(self._commit_one(request) for request in requests))
        return {request.claim.tp: outcome for request, outcome in zip(requests, outcomes, strict=True)}

    async def _commit_one(self, request: CommitRequest) -> CommitOutcome:
        try:
            return await ownership.commit(self._session, request.claim, request.offset, request.epoch)
        except MetamqError as error:
            return error

    async def close(self) -> None:
        """Nothing to do: the session is the caller's."""
