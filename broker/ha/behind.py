"""BehindTimes: the time since which each slave of a master is behind: it lacks a link, a partition, or a message.

The time runs on across links. A slave that links again and again, and stores nothing, would else stay in sync, and all
writes would wait for it."""

from __future__ import annotations

import math
from collections.abc import Collection

from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import Topics
from metamq.broker.ha.connection import HAConnection
from metamq.broker.ha.insync import Member

NOT_SOON = -math.inf
"""The slave counts as behind at once: it does not come back, or not soon."""


class BehindTimes:
    """The times of all slaves, in seconds of the loop's clock. Used by the broker's loop only."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._away_since: dict[Member, float] = {}
        self._missing_since: dict[tuple[Member, Partition], float] = {}
        self._lacks_since: dict[Member, float] = {}
        """Kept until a later link has brought what was lacking."""

    def link_ended(self, link: HAConnection, away_since: float) -> None:
        """Notes the end of a link. Call it before the link is closed."""
        self._away_since[link.member] = NOT_SOON if link.is_leaving else away_since
        lacks_since = link.behind_since()
        if lacks_since is not None:
            self._lacks_since.setdefault(link.member, lacks_since)

    def forget_partition(self, partition: Partition) -> None:
        """Forgets a partition that was closed: its topic was deleted."""
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[1] is not partition}

    def keep_only(self, members: Collection[Member]) -> None:
        """Forgets all other members."""
        self._away_since = {member: since for member, since in self._away_since.items() if member in members}
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[0] in members}
        self._lacks_since = {member: since for member, since in self._lacks_since.items() if member in members}

    def since(self, member: Member, link: HAConnection | None, now: float) -> float | None:
        """Returns the time since which a slave is behind, or None. `link` is the link of its replica."""
        if link is None:
            return self._away_since.setdefault(member, now)
        if link.member != member or link.is_leaving:
            return NOT_SOON
        self._away_since.pop(member, None)
        times = [link.behind_since()]
        if member in self._lacks_since and link.has_caught_up(self._topics.partitions(), now):
            del self._lacks_since[member]
        times.append(self._lacks_since.get(member))
        for partition in self._topics.partitions():
            place = link.places.get(partition)
            is_damaged_here = partition.closed_by is not None  # no slave can copy it
            if is_damaged_here or (place is not None and place.live):
                self._missing_since.pop((member, partition), None)
            else:
                times.append(self._missing_since.setdefault((member, partition), now))
        return min((since for since in times if since is not None), default=None)
