"""How many messages a streaming query is behind, from what Spark reports of its progress. Pure.

A source in Python cannot add figures of its own to a query's progress. What Spark does report of it are two texts: how
far the query is, which is the source's own offset, and where the logs end, as StreamReader.reportLatestOffset() says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from metamq.errors import CorruptData
from metamq.spark_consumers.driver.stream_offsets import from_json
from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class QueryLag:
    """How far a query is behind, when its batch `batch_id` was done."""

    query_id: str
    """The same for as long as the query has its checkpoint."""
    run_id: str
    """Another one after each start."""
    name: str | None
    """As in `writeStream.queryName(…)`."""
    batch_id: int
    partitions: Mapping[TopicPartition, int]
    """Messages that the query has not read, by partition. One that could never be asked for its end is left out."""

    @property
    def messages(self) -> int:
        """Over all partitions."""
        return sum(self.partitions.values())


def messages_behind(sources: Iterable[tuple[str | None, str | None]]) -> dict[TopicPartition, int]:
    """From the (endOffset, latestOffset) of each of a query's sources; those that are not of metamq are passed over.

    Where several sources of one query read a partition, it is as far behind as the last of them.
    """
    found: dict[TopicPartition, int] = {}
    for end, latest in sources:
        for tp, behind in _of_source(end, latest).items():
            found[tp] = max(behind, found.get(tp, 0))
    return found


def _of_source(end: str | None, latest: str | None) -> dict[TopicPartition, int]:
    try:
        offset = from_json(json.loads(end or ""))
        ends = json.loads(latest or "")
    except (ValueError, TypeError, CorruptData):
        return {}
    if offset is None or not isinstance(ends, dict):
        return {}
    return {
        tp: max(ends[tp.topic][tp.partition] - place.offset, 0)
        for tp, place in offset.reached.items()
        if tp.partition in ends.get(tp.topic, {})
    }
