"""BehindTimes: the time since which each slave of a master is behind: it lacks a link, a partition, or a message.

The time continues across links. Otherwise a slave that links again and again, and stores nothing, would stay in sync,
and all writes would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.ha.connection import HAConnection
    from metamq.broker.ha.insync import Member

NOT_SOON = -math.inf
"""The slave counts as behind at once: it does not come back, or not soon."""


@dataclass
class _Lack:
    """The time since which a slave lacks data that it lacked at the end of a link."""

    since: float
    live_at: float | None = None
    """The first time when all partitions were live on a later link. The missing data was sent by then."""


class BehindTimes:
    """The times of all slaves, in seconds of the loop's clock. Used by the broker's loop only."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._away_since: dict[Member, float] = {}
        self._missing_since: dict[tuple[Member, Partition], float] = {}
        self._lacks: dict[Member, _Lack] = {}
        """Kept until the slave has acknowledged the data that it lacked."""

    def link_ended(self, link: HAConnection, away_since: float) -> None:
        """Notes the end of a link. Call it before the link is closed."""
        self._away_since[link.member] = NOT_SOON if link.is_leaving else away_since
        since = link.behind_since()
        if (lack := self._lacks.get(link.member)) is not None:
            lack.live_at = None
        elif since is not None:
            self._lacks[link.member] = _Lack(since)

    def forget_partition(self, partition: Partition) -> None:
        """Forgets a partition that was closed: ZooKeeper does not list it any more."""
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[1] is not partition}

    def keep_only(self, members: Collection[Member]) -> None:
        """Forgets all other members."""
        self._away_since = {member: since for member, since in self._away_since.items() if member in members}
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[0] in members}
        self._lacks = {member: lack for member, lack in self._lacks.items() if member in members}

    def since(self, member: Member, link: HAConnection | None, now: float) -> float | None:
        """Returns the time since which a slave is behind, or None. `link` is the link of its replica."""
        if link is None:
            times: list[float | None] = [self._away_since.setdefault(member, now)]
        elif link.member != member or link.is_leaving:
            return NOT_SOON
        else:
            self._away_since.pop(member, None)
            times = [link.behind_since(), *self._missing(link, now)]
            self._look_if_caught_up(link, now)
        if (lack := self._lacks.get(member)) is not None:
            times.append(lack.since)
        return min((since for since in times if since is not None), default=None)

    def _missing(self, link: HAConnection, now: float) -> list[float]:
        """Returns the times since which partitions are not live on the link."""
        times = []
        for partition in self._topics.partitions():
            place = link.places.get(partition)
            is_damaged_here = partition.closed_by is not None  # no slave can copy it
            if is_damaged_here or (place is not None and place.live):
                self._missing_since.pop((link.member, partition), None)
            else:
                times.append(self._missing_since.setdefault((link.member, partition), now))
        return times

    def _look_if_caught_up(self, link: HAConnection, now: float) -> None:
        lack = self._lacks.get(link.member)
        if lack is None:
            return
        if lack.live_at is None and link.all_live(one for one in self._topics.partitions() if one.closed_by is None):
            lack.live_at = now
        oldest = link.behind_since()
        if lack.live_at is not None and (oldest is None or oldest > lack.live_at):
            del self._lacks[link.member]
