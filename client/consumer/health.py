"""The results of `consumer.health()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metamq.client.fetch.inbox import PartitionState
from metamq.client.group.assignment import RebalanceHealth
from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionHealth:
    """The state of one partition of a consumer. Before the first answer, offsets are -1 and the lag is None."""

    next_offset: int
    done_offset: int
    committed_offset: int | None
    lag: int | None
    in_hand: bool
    """True while the application processes a message or batch of the partition."""
    paused: bool
    last_error: str
    """The reason that the partition is not fetched now, or "". While a slave is read, it is the master's reason."""


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """The state of one consumer. `group` is None for a consumer that does not share its partitions."""

    partitions: Mapping[TopicPartition, PartitionHealth]
    delivering: bool
    """False while ZooKeeper has not answered for longer than the lease."""
    buffered_bytes: int
    last_fetch_s: float | None
    """Seconds since a broker last answered."""
    lost_messages: int
    """Messages that retention removed before they were read."""
    group: RebalanceHealth | None


def health_of(state: PartitionState, last_error: str) -> PartitionHealth:
    """Returns the state of one partition. The caller holds the inbox's lock."""
    return PartitionHealth(
        next_offset=state.next_offset,
        done_offset=state.done_offset(),
        committed_offset=state.committed_offset,
        lag=state.lag(),
        in_hand=state.in_flight is not None,
        paused=state.paused,
        last_error=last_error,
    )
