"""What `consumer.health()` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metamq.client.fetch.inbox import PartitionState
from metamq.client.group.assignment import RebalanceHealth
from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionHealth:
    """One partition of a consumer. Offsets are -1, lag is None, before the first answer."""

    next_offset: int
    done_offset: int
    committed_offset: int | None
    lag: int | None
    in_hand: bool
    """A message or batch of it is being handled."""
    paused: bool
    last_error: str
    """Why it is not fetched at present, empty when it is. While slaves are read, why the master is not."""


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """One consumer. `group` is None for a consumer that shares with nobody."""

    partitions: Mapping[TopicPartition, PartitionHealth]
    delivering: bool
    """False while cut off from ZooKeeper for longer than the lease."""
    buffered_bytes: int
    last_fetch_s: float | None
    """Seconds since a broker last answered."""
    lost_messages: int
    """Messages that retention removed before they were read."""
    group: RebalanceHealth | None


def health_of(state: PartitionState, last_error: str) -> PartitionHealth:
    """How one partition goes. The inbox is locked."""
    return PartitionHealth(
        next_offset=state.next_offset,
        done_offset=state.done_offset(),
        committed_offset=state.committed_offset,
        lag=state.lag(),
        in_hand=state.hand is not None,
        paused=state.paused,
        last_error=last_error,
    )
