"""Partitions whose broker does not answer a streaming query, and the warnings about them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metamq.errors import OffsetDiverged, TopicNotFound
from metamq.wire.commands import OffsetsResult
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.admin.admin_brokers import Found
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.spark")

WARN_AFTER_S = 30.0


class Unanswered:
    """The silent partitions, and since when. `patience_s`: seconds in which a broker may not yet know a new topic."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[TopicPartition, float] = {}
        self._warned: set[TopicPartition] = set()

    def may_pass(self, now_s: float) -> bool:
        """True if a partition is silent, and no warning about it is due yet."""
        return any(now_s - since_s < WARN_AFTER_S for since_s in self._since.values())

    def note(self, answers: Mapping[TopicPartition, Found], now_s: float) -> None:
        """Raises an error that does not pass; warns once about a partition that is silent for too long."""
        silent: dict[str, list[TopicPartition]] = defaultdict(list)
        for tp in [tp for tp in self._since if tp not in answers]:
            del self._since[tp]
            self._warned.discard(tp)
        for tp, answer in answers.items():
            if isinstance(answer, OffsetsResult | OffsetDiverged):
                self._since.pop(tp, None)
                self._warned.discard(tp)
                continue
            since_s = self._since.setdefault(tp, now_s)
            if not answer.retriable:
                may_be_new = isinstance(answer, TopicNotFound) and now_s - since_s <= self._patience_s
                if not may_be_new:
                    raise answer
            if now_s - since_s >= WARN_AFTER_S and tp not in self._warned:
                self._warned.add(tp)
                silent[str(answer)].append(tp)
        for reason, tps in silent.items():
            what = f"{tps[0]} and {count(len(tps) - 1, 'other partition')}" if len(tps) > 1 else str(tps[0])
            log.warning("the new messages of %s have been unknown for %d s: %s", what, WARN_AFTER_S, reason)
