"""The role of this replica as readers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamq.broker.data.topics import OWN, Topics
from metamq.broker.ha.role import MasterRole, ReplicaStatus
from metamq.errors import CorruptData, Fenced, TopicNotFound

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition


def find_for_clients(topics: Topics, topic: str, topic_id: str, index: int) -> Partition:
    """Returns a partition that clients may read and write. Raises TopicNotFound, PartitionNotFound, CorruptData."""
    if topic.startswith(OWN):
        raise TopicNotFound(topic)
    return topics.find(topic, topic_id, index)


class ReplicaReadRole:
    """Implements metamq.broker.front_door.fetch_session.ServingRole. Used by the broker's loop only."""

    def __init__(self, status: ReplicaStatus, topics: Topics, far_bytes: int) -> None:
        """`far_bytes`: readers further behind the end are sent to a slave; 0: none is."""
        self._status = status
        self._topics = topics
        self._far_bytes = far_bytes

    @property
    def is_master(self) -> bool:
        """True if this replica is the master."""
        return isinstance(self._status.role, MasterRole)

    @property
    def epoch(self) -> int:
        """The epoch of the logs here."""
        return self._status.role.followed_epoch

    def not_master(self) -> Fenced:
        """Returns the refusal of a request that only a master serves. This replica is not the master."""
        role = self._status.role
        assert not isinstance(role, MasterRole)
        return role.refusal.with_traceback(None)

    def find(self, topic: str, topic_id: str, index: int) -> Partition:
        """See find_for_clients."""
        return find_for_clients(self._topics, topic, topic_id, index)

    def preferred_replica(self, partition: Partition, position: int) -> int:
        """Returns the replica that a reader at this byte asks next; -1 is this one."""
        return self._status.role.preferred_replica(partition, position, self._far_bytes)

    def found_damage(self, partition: Partition, error: CorruptData) -> None:
        """Reports a damaged log: a slave copies it again, a master serves the rest of it and logs the damage."""
        if self.is_master:
            self._topics.has_damage(partition, error)
        else:
            self._topics.is_damaged(partition, error)
