"""The name of one partition of one topic. Both the client and the znode modules use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from metamq.zk.names import parse_partition


class TopicPartition(NamedTuple):
    """One partition of one topic. `partition` is "0-3": broker id 0, index 3."""

    topic: str
    partition: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


def partition_order(item: TopicPartition) -> tuple[str, int, int]:
    """Sort key: by topic, then broker id and index as numbers: 0-10 comes after 0-2.

    Raises ConfigError for a partition name that is not "<broker id>-<index>".
    """
    broker_id, index = parse_partition(item.partition)
    return item.topic, broker_id, index


def configured_partitions(partitions: Mapping[int, int]) -> list[str]:
    """The names of a topic's partitions, from broker id -> count, in numeric order: 0-0, ..., 0-10, 1-0."""
    return [f"{broker_id}-{index}" for broker_id in sorted(partitions) for index in range(partitions[broker_id])]
