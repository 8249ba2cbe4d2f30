"""The interface between a group member's listener and the consumer that gets its partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, Ownership
from metamq.client.subscriptions import selected
from metamq.errors import ConfigError, MetamqError, OwnershipLost, PartitionNotFound
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.names import is_pattern
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import ROOM_MAX

if TYPE_CHECKING:
    from metamq.zk.session.session import Session


@dataclass(frozen=True, slots=True)
class AssignedPartition:
    """A partition to consume. `claim.committed` is the offset to continue at, or None if the group has committed none.

    The topic id of `claim.committed` may be that of a deleted topic of the same name, and the log may not know its
    epoch. In both cases the offset has no meaning in the present log. Commit with this claim: a commit uses only its
    claim generation. `is_new`: the partition was created after this consumer started, so it has no message from before.
    """

    claim: Ownership
    is_new: bool = False

    @property
    def tp(self) -> TopicPartition:
        """The topic and the partition."""
        return self.claim.tp

    @property
    def committed(self) -> CommittedOffset | None:
        """The committed offset in the offset storage."""
        return self.claim.committed


class Obstacle(NamedTuple):
    """The reason that the end of the data is not known: the error to raise, its start (time.monotonic), and the seconds
    that it is tolerated.
    """

    error: MetamqError
    since: float
    patience_s: float


class AssignmentHandler(Protocol):
    """The consumer of the assigned partitions. All methods are called in the listener's loop and should not raise."""

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        """Starts to consume partitions. They belong to this member until `revoke` returns or `lost` is called."""

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        """Stops consuming partitions. Returns when none of their messages is in flight.

        Returns the last position to commit (offset of the next message, epoch) for each, or None if there is nothing to
        commit. Calls for different partitions may overlap.
        """
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Stops at once, and commits nothing: other members may own the partitions. Also ends a running `revoke`."""

    def failed(self, error: MetamqError) -> None:
        """Called when the listener has stopped permanently, after `lost` for all partitions."""


class Assignment(Protocol):
    """The source of a consumer's partitions, from the view of the consumer."""

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, MetamqError]:
        """Commits. Returns what was refused."""
        ...

    def partition_names(self, topic: str) -> Sequence[str] | None:
        """Returns the known partitions of a topic: None if they are not known, empty if the topic does not exist."""

    def note_progress(self) -> None:
        """Notes that a message is done, or that there is no message to process."""

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """Publishes the offset after the last done message, if other processes cannot read the committed offsets."""

    def unsettled(self) -> Obstacle | None:
        """Returns the reason that the consumer does not have all its partitions yet, or None if it has. Thread-safe."""

    async def confirm(self) -> Obstacle | None:
        """Asks ZooKeeper. Returns None if the consumer has all its partitions, and the members with the others are
        alive.

        Raises MetamqError.
        """


def not_assigned(tp: TopicPartition, topics: Collection[str], assignment: Assignment) -> MetamqError:
    """Returns the error for a partition that a consumer of `topics` does not have."""
    if tp.topic not in selected(topics, (tp.topic,)):
        return ConfigError(f"this consumer does not read topic {tp.topic!r}", hint=f"It reads {', '.join(topics)}.")
    names = assignment.partition_names(tp.topic)
    if names and tp.partition not in names:
        return PartitionNotFound(tp.topic, tp.partition, tuple(names))
    is_gone = names is not None and not names
    return OwnershipLost(*tp, reason="its topic was deleted" if is_gone else "it is not assigned to this consumer")


@dataclass(frozen=True, slots=True)
class RebalanceHealth:
    """The state of a member in its group. `waiting`: partitions of this member in the plan -> the member that still has
    them.

    `idle_reason` is the reason that the member has no partition. `lease_ms`: the milliseconds that it may continue
    without ZooKeeper.
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


def room_of_owners(group: str, topics: Collection[str]) -> Callable[[Session], Awaitable[int]]:
    """Returns a function that counts the room for the owner nodes of all present partitions of these topics.

    It is the maximum if the partitions are unknown: with a pattern, with a topic that is missing, without an answer.
    """

    async def count_room(session: Session) -> int:
        if any(map(is_pattern, topics)):
            return ROOM_MAX
        try:
            configs = await TopicStore(session).get_all(sorted(set(topics)))
        except MetamqError:
            return ROOM_MAX
        room = 0
        for topic, config in configs.items():
            if not isinstance(config, TopicConfig):
                return ROOM_MAX
            for broker_id, count in config.partitions.items():
                longest = session.paths.owner(group, topic, f"{broker_id}-{count}")
                room += count * session.room_for([longest])
        return room

    return count_room
