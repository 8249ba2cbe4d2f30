"""Topics that a consumer subscribes to and that do not exist any more: told once, each time one goes."""

from __future__ import annotations

import logging
from collections.abc import Collection

log = logging.getLogger("metamq.client")


class MissingTopics:
    """Those of one consumer, which found all of its topics when it was made. `who` names it in the log."""

    def __init__(self, who: str, topics: Collection[str]) -> None:
        self._who = who
        self._topics = frozenset(topics)
        self._missing: frozenset[str] = frozenset()

    def look(self, present: Collection[str]) -> None:
        """Warns of topics that are gone since the last look; `present` are those that exist."""
        before, self._missing = self._missing, self._topics.difference(present)
        then = "consumes it no more"
        if self._missing == self._topics:
            then = "has no topic left, and waits until one is created again"
        for topic in sorted(self._missing - before):
            log.warning("topic %r was deleted: %s %s", topic, self._who, then)
