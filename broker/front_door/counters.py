"""Counters of a broker, for metrics and STATS. They count per batch and per answer, never per message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metamq.wire.batch import BatchHeader
    from metamq.wire.commands import GetResult


class Counters:
    """Totals since the start of the broker. They only grow."""

    def __init__(self) -> None:
        self.messages_in: dict[str, int] = defaultdict(int)
        self.bytes_in: dict[str, int] = defaultdict(int)
        self.batches_in: dict[str, int] = defaultdict(int)
        self.bytes_out = 0
        self.fetches = 0
        self.repeats = 0

    def appended(self, topic: str, header: BatchHeader, repeated: bool) -> None:
        """Counts a stored batch, or a batch that came again."""
        if repeated:
            self.repeats += 1
            return
        self.messages_in[topic] += header.count
        self.bytes_in[topic] += header.size
        self.batches_in[topic] += 1

    def fetched(self, results: list[GetResult]) -> None:
        """Counts an answered GET."""
        self.fetches += 1
        self.bytes_out += sum(result.size for result in results if result.file is None)

    def snapshot(self, topics: Collection[str] | None = None) -> dict[str, Any]:
        """Returns all counters as plain values, for these topics only if `topics` is given."""

        def of(counts: Mapping[str, int]) -> dict[str, int]:
            return dict(counts) if topics is None else {t: counts[t] for t in topics if t in counts}

        return {
            "messages_in": of(self.messages_in),
            "bytes_in": of(self.bytes_in),
            "batches_in": of(self.batches_in),
            "bytes_out": self.bytes_out,
            "fetches": self.fetches,
            "repeats": self.repeats,
        }
