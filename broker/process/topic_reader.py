"""The configurations of all topics in ZooKeeper. Only what has changed is read again.

A topic is read with a watch. Its configuration is kept until the watch is called, which happens with each change of the
node, and with each loss of the connection (metamq.zk.session.session). A watch may be called before its own answer is
kept; then the answer is not kept. A deleted topic leaves the list, and what is known of it goes then. Another session
begins with nothing: it may be one with another ZooKeeper.

A kept configuration may be a moment older than the list beside it, like one that was read just before a change. The
watch that is on its way leads to the next read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from metamq.errors import ConfigError, CorruptData
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.session.watches import OneWatch

if TYPE_CHECKING:
    from metamq.zk.cluster.topics import TopicStore
    from metamq.zk.nodes import Listing
    from metamq.zk.session.session import Session

Found = TopicConfig | CorruptData | ConfigError
TOPICS_AT_ONCE = 64
"""Topics that are read at the same time. In sequence, each would take a round trip to ZooKeeper."""


class TopicReader:
    """Reads the list of topics and their configurations. One read() at a time, in the broker's loop."""

    def __init__(self, session: Session, store: TopicStore, changed: Callable[[], None]) -> None:
        """`changed` is called when read() may return something else."""
        self._session = session
        self._store = store
        self._changed = changed
        self._list_watch = OneWatch(changed)
        self._generation = -1
        self._known: dict[str, Found] = {}
        self._stale: set[str] = set()
        """Topics that have changed since their last read began."""

    async def read(self) -> tuple[dict[str, Found], Listing]:
        """Returns the configuration of each topic, or the reason why it is unusable, and the list of topics.

        A topic that was deleted meanwhile is only in the list. Raises ConnectionLost.
        """
        if self._session.generation != self._generation:
            self._generation = self._session.generation
            self._known.clear()
        listing = await self._list_watch.leave(self._store.listing)
        self._known = {topic: self._known[topic] for topic in listing.names if topic in self._known}
        found = dict(self._known)
        unknown = [topic for topic in listing.names if topic not in found]
        for first in range(0, len(unknown), TOPICS_AT_ONCE):
            some = unknown[first : first + TOPICS_AT_ONCE]
            answers = await asyncio.gather(*map(self._read_one, some), return_exceptions=True)
            for topic, answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException) and not isinstance(answer, CorruptData | ConfigError):
                    raise answer
                if answer is not None:
                    found[topic] = answer
        return found, listing

    async def _read_one(self, topic: str) -> Found | None:
        self._stale.discard(topic)
        found: Found | None
        try:
            found = await self._store.get_or_none(topic, partial(self._topic_changed, topic))
        except (CorruptData, ConfigError) as error:
            found = error
        if found is not None and topic not in self._stale:
            self._known[topic] = found
        return found

    def _topic_changed(self, topic: str) -> None:
        self._stale.add(topic)
        self._known.pop(topic, None)
        self._changed()
