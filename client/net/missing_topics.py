"""Subscribed topics that do not exist any more: a warning once, each time a topic is deleted."""

from __future__ import annotations

import logging
from collections.abc import Collection

log = logging.getLogger("metamq.client")


class MissingTopics:
    """The missing topics of one consumer, which found all its topics at first. `consumer` is its name in the log."""

    def __init__(self, consumer: str, topics: Collection[str]) -> None:
        self._consumer = consumer
        self._topics = frozenset(topics)
        self._missing: frozenset[str] = frozenset()

    def look(self, present: Collection[str]) -> None:
        """Warns of topics that were deleted since the last call. `present` are the topics that exist."""
        before, self._missing = self._missing, self._topics.difference(present)
        then = "no longer consumes it"
        if self._missing == self._topics:
            then = "has no topic left, and waits until one is created again"
        for topic in sorted(self._missing - before):
            log.warning("topic %r was deleted: %s %s", topic, self._consumer, then)
