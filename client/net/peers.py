"""Whether the other members of a group live, which the end of a member's loop rests on.

A member that was killed stays in its group until its session ends, and has a share of the plan until then. A consumer
that is started meanwhile must not take its own share for all there is. So the others have to show that they live:

    by their node, which they write after this member has joined: members do so at each new plan
    by time: their node is there still when the session of one that died before is over

One that dies later was alive when this member joined: what it had then goes to the members that are left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from metamq.zk.groups.members import Member
from metamq.zk.groups.plans import Plan

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

EXPIRY_MARGIN_MS = 2_000
"""ZooKeeper expires sessions by ticks, so a little after their time-out."""


def lives(joined: int, written: int, waited_s: float, session_timeout_ms: int) -> bool:
    """Whether a member whose node is there lives: the node was last `written`, and we `joined`, by those transactions;
    it has been there for `waited_s` since."""
    return written > joined or waited_s * 1000 > session_timeout_ms + EXPIRY_MARGIN_MS


def sharers(consumer_id: str, topics: Iterable[str], plan: Plan) -> list[str]:
    """The other members that the plan gives partitions of these topics, sorted."""
    wanted = set(topics)
    return sorted({owner for tp, owner in plan.assignment.items() if tp.topic in wanted} - {consumer_id})


class Peers:
    """The other members, as one member sees them."""

    def __init__(self, session: Session, group: str, consumer_id: str, topics: Iterable[str]) -> None:
        self._session = session
        self._group = group
        self._id = consumer_id
        self._topics = tuple(topics)
        self._since = time.monotonic()
        self._known: dict[str, int] = {}
        """Those that live: by which transaction they joined."""

    def wait_anew(self) -> None:
        """The connection is new: a server that was started anew gives every session its whole time again."""
        self._since = time.monotonic()

    async def unproven(self, plan: Plan, present: Mapping[str, Member]) -> Member | str | None:
        """A member that has partitions and may be dead, or the name of one that has left; None: all live.

        Raises ConnectionLost.
        """
        myself = present.get(self._id)
        if myself is None:
            return self._id
        others = sharers(self._id, self._topics, plan)
        asked = [other for other in others if other not in present or self._known.get(other) != present[other].joined]
        paths = [self._session.paths.member(self._group, other) for other in asked]
        stats = await asyncio.gather(*map(self._session.exists, paths))
        waited_s = time.monotonic() - self._since
        for other, stat in zip(asked, stats, strict=True):
            if stat is None or other not in present:
                return other
            if not lives(myself.joined, stat.mzxid, waited_s, present[other].session_timeout_ms):
                return present[other]
            self._known[other] = present[other].joined
        return None
