"""What passes between a group member's listener and the consumer that it assigns partitions to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, Ownership
from metamq.errors import ConfigError, MetamqError, OwnershipLost, PartitionNotFound
from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class AssignedPartition:
    """A partition to consume. `claim.committed` is where to go on, None when the group has committed nothing.

    Its topic id may be that of a deleted topic of the same name, and its epoch one that the log does not know: neither
    position means anything in the present log. Commit with this claim; only its generation matters there.
    """

    claim: Ownership

    @property
    def tp(self) -> TopicPartition:
        """Topic and partition."""
        return self.claim.tp

    @property
    def committed(self) -> CommittedOffset | None:
        """What the offset storage holds."""
        return self.claim.committed


class Obstacle(NamedTuple):
    """Why it is not known whether there is more to read: the error to raise, since when (time.monotonic), and how long
    that is borne."""

    error: MetamqError
    since: float
    patience_s: float


class AssignmentHandler(Protocol):
    """Consumes what the listener assigns. All methods are called in the listener's loop and should not raise."""

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        """Start to consume them. They are ours until `revoke` returns or `lost` is called."""

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        """Stop consuming them and return when nothing of them is in hand any more.

        Gives for each the last position to commit (offset of the next message, epoch), None when there is nothing to
        commit. Calls for different partitions may overlap.
        """

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """They may be another member's already: stop at once, commit nothing. Also ends a `revoke` under way."""

    def failed(self, error: MetamqError) -> None:
        """The listener has stopped for good; `lost` was called for everything before."""


class Assignment(Protocol):
    """Who assigns partitions to the consumer, as the consumer sees it."""

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, MetamqError]:
        """Commit; gives what was refused."""

    def partition_names(self, topic: str) -> Sequence[str] | None:
        """The partitions that a topic has, as far as is known: None when it is not, none when there is no topic."""

    def note_progress(self) -> None:
        """To be called whenever a message is done or there is none."""

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """Tells others the offset after the last message that is done, where they cannot see what is committed."""

    def unsettled(self) -> Obstacle | None:
        """Why the consumer has not, or not yet, all partitions that are its own; None: it has. Any thread."""

    async def confirm(self) -> Obstacle | None:
        """Asks ZooKeeper. None: the consumer has all that is its own, and those that have the rest live.

        Raises MetamqError.
        """


def not_assigned(tp: TopicPartition, topics: Collection[str], assignment: Assignment) -> MetamqError:
    """What to say of a partition that a consumer of `topics` does not have."""
    if tp.topic not in topics:
        return ConfigError(f"this consumer does not read topic {tp.topic!r}", hint=f"It reads {', '.join(topics)}.")
    names = assignment.partition_names(tp.topic)
    if names and tp.partition not in names:
        return PartitionNotFound(tp.topic, tp.partition, tuple(names))
    is_gone = names is not None and not names
    return OwnershipLost(*tp, reason="its topic was deleted" if is_gone else "it is not assigned to this consumer")


@dataclass(frozen=True, slots=True)
class RebalanceHealth:
    """How a member stands in its group. `waiting`: partitions that are ours by the plan -> the member that has them.

    `idle_reason` says why the member has no partition. `lease_ms`: how long it may go on when cut off from ZooKeeper.
    """

    state: str
    plan_generation: int | None
    strategy: str
    assigned: tuple[TopicPartition, ...]
    revoking: tuple[TopicPartition, ...]
    waiting: Mapping[TopicPartition, str]
    idle_reason: str
    last_error: str
    lease_ms: float
