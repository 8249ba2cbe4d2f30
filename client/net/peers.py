"""Checks that the other members of a group are alive. The end of a member's loop depends on it.

A killed member stays in its group until its session ends, and keeps its share of the plan until then. A consumer that
starts in this time must not take its own share for all partitions. So the other members must prove that they are alive:

    by their node, which they write after this member has joined: members do so at each new plan
    by time: their node still exists when the session of a member that died earlier has expired

A member that dies later was alive when this member joined: its partitions at that time go to the remaining members.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from metamq.client.subscriptions import selected

if TYPE_CHECKING:
    from metamq.zk.groups.members import Member
    from metamq.zk.groups.plans import Plan
    from metamq.zk.session.session import Session

EXPIRY_MARGIN_MS = 2_000
"""ZooKeeper expires sessions by ticks, so a little after their time-out."""


def lives(joined: int, written: int, waited_s: float, session_timeout_ms: int) -> bool:
    """True if a member whose node exists is alive. `written` and `joined` are transaction ids of ZooKeeper: of the last
    write of that node, and of our own joining. `waited_s` is the time in seconds since we joined.
    """
    return written > joined or waited_s * 1000 > session_timeout_ms + EXPIRY_MARGIN_MS


def sharers(consumer_id: str, topics: Collection[str], plan: Plan) -> list[str]:
    """Returns the other members that have partitions of these topics in the plan, sorted."""
    wanted = selected(topics, plan.inputs.topics)
    return sorted({owner for tp, owner in plan.assignment.items() if tp.topic in wanted} - {consumer_id})


class Peers:
    """The other members of a group from the view of one member."""

    def __init__(self, session: Session, group: str, consumer_id: str, topics: Collection[str]) -> None:
        self._session = session
        self._group = group
        self._id = consumer_id
        self._topics = tuple(topics)
        self._since = time.monotonic()
        self._known: dict[str, int] = {}
        """The members that are alive, with the transaction id of their joining."""

    def restart_wait(self) -> None:
        """Restarts the wait after a reconnect: a restarted ZooKeeper server renews the time-out of every session."""
        self._since = time.monotonic()

    async def unproven(self, plan: Plan, present: Mapping[str, Member]) -> Member | str | None:
        """Returns a member that has partitions and may have crashed, or the name of a member that left; None if all are
        alive.

        Raises ConnectionLost.
        """
        myself = present.get(self._id)
        if myself is None:
            return self._id
        others = sharers(self._id, self._topics, plan)
        to_check = [
            other for other in others if other not in present or self._known.get(other) != present[other].joined
        ]
        paths = [self._session.paths.member(self._group, other) for other in to_check]
        stats = await asyncio.gather(*map(self._session.exists, paths))
        waited_s = time.monotonic() - self._since
        for other, stat in zip(to_check, stats, strict=True):
            if stat is None or other not in present:
                return other
            if not lives(myself.joined, stat.mzxid, waited_s, present[other].session_timeout_ms):
                return present[other]
            self._known[other] = present[other].joined
        return None
