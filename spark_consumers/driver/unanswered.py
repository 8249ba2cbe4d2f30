"""Partitions whose broker does not answer a streaming query, and what is to be said of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from metamq.client.admin.admin_brokers import Found
from metamq.errors import OffsetDiverged, TopicNotFound
from metamq.wire.commands import OffsetsResult
from metamq.words import count
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.spark")

WARN_AFTER_S = 30.0


class Unanswered:
    """Since when which partitions are silent. `patience_s`: for how long a broker need not know a topic that is new."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[TopicPartition, float] = {}
        self._told: set[TopicPartition] = set()

    def may_pass(self, now_s: float) -> bool:
        """Whether a partition is silent, and not for so long that it was warned of."""
        return any(now_s - since_s < WARN_AFTER_S for since_s in self._since.values())

    def note(self, answers: Mapping[TopicPartition, Found], now_s: float) -> None:
        """Raises what no waiting helps against; warns once of what does not pass."""
        silent: dict[str, list[TopicPartition]] = defaultdict(list)
        for tp in [tp for tp in self._since if tp not in answers]:
            del self._since[tp]
            self._told.discard(tp)
        for tp, answer in answers.items():
            if isinstance(answer, OffsetsResult | OffsetDiverged):
                self._since.pop(tp, None)
                self._told.discard(tp)
                continue
            since_s = self._since.setdefault(tp, now_s)
            if not answer.retriable:
                may_be_new = isinstance(answer, TopicNotFound) and now_s - since_s <= self._patience_s
                if not may_be_new:
                    raise answer
            if now_s - since_s >= WARN_AFTER_S and tp not in self._told:
                self._told.add(tp)
                silent[str(answer)].append(tp)
        for reason, tps in silent.items():
            what = f"{tps[0]} and {count(len(tps) - 1, 'other partition')}" if len(tps) > 1 else str(tps[0])
            log.warning("what is new in %s has not been known for %d s: %s", what, WARN_AFTER_S, reason)
