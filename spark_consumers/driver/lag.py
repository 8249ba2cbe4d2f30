"""The lag of a streaming query in messages, from Spark's reports of its progress. Pure.

A source in Python cannot add figures to a query's progress. Spark does report two texts of the source: the source's own
offset, and the ends of the logs, from StreamReader.reportLatestOffset().
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metamq.errors import CorruptData
from metamq.spark_consumers.driver.stream_offsets import from_json

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The lag of a query after its batch `batch_id`."""

    query_id: str
    """The id of the query. It stays the same as long as the query has its checkpoint."""
    run_id: str
    """The id of the run. Each start has another one."""
    name: str | None
    """The name from `writeStream.queryName(…)`."""
    batch_id: int
    partitions: Mapping[TopicPartition, int]
    """Messages that the query has not read, by partition. A partition whose end was never known is left out."""

    @property
    def messages(self) -> int:
        """The messages that the query has not read, in all partitions."""
        return sum(self.partitions.values())


def messages_behind(sources: Iterable[tuple[str | None, str | None]]) -> dict[TopicPartition, int]:
    """Returns the lag from (endOffset, latestOffset) of each of a query's sources; ignores sources of other formats.

    If several sources of one query read a partition, the lag is that of the slowest.
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
