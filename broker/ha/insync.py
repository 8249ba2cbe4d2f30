"""Membership: whose acknowledgement counts at a master, and which change of the in-sync set it asks for. Pure.

Theory of operation
-------------------
The set stands in ZooKeeper, is changed by compare-and-set only, and whoever is in it may be promoted without loss.
So a message may be acknowledged, or read, only when every member of the set holds it. The master cannot look into
ZooKeeper before each acknowledgement; it keeps to this instead:

    at every moment, the members in ZooKeeper are among those that are *required* here

A set that grows therefore counts from before the request, one that shrinks from after the answer, and a request whose
answer was lost counts both ways until it is certain that it can have no effect any more:

    stage       required   in ZooKeeper   goes on to
    OUT         no         no             JOINING, when the slave is sent every append (live)
    JOINING     yes        no             ADDING, when it holds all that is stable; OUT, when its link is gone
    ADDING      yes        perhaps        IN, when confirmed; else back to JOINING or OUT
    IN          yes        yes            REMOVING, when it is behind, or away, for too long
    REMOVING    yes        perhaps        OUT, when confirmed; else back to IN

Being required before it is asked for holds the stable mark back until the slave has passed it: so a slave comes in
under constant load, too. A lost request is certain to have no effect once the node's version is another than the one
it was made for: read as such, or made so by the next request that is confirmed. Until then it is *in limbo*, and the
next request is made even if it changes nothing.

A member is (replica, incarnation): one that came back without what it had acknowledged is somebody else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

Member = tuple[int, int]
"""(replica, incarnation)."""


class Stage(enum.Enum):
    """What a slave is to the in-sync set. A member that is not listed is OUT."""

    JOINING = "joining"
    ADDING = "adding"
    IN = "in sync"
    REMOVING = "removing"


_IN_ZOOKEEPER = (Stage.IN, Stage.REMOVING)


class Change(NamedTuple):
    """A compare-and-set to ask for: these members, master included, where the node has this version."""

    members: frozenset[Member]
    version: int


class Membership:
    """The in-sync set of one master in one term."""

    def __init__(self, master: Member, insync: Iterable[Member], version: int, *, lag_s: float) -> None:
        """As the state node has it at `version`. `lag_s`: how long a member may be behind."""
        self.master = master
        self.version = version
        self._lag_s = lag_s
        self._stages: dict[Member, Stage] = {member: Stage.IN for member in insync if member != master}
        self._ready: set[Member] = set()
        """Joining, and holding all that is stable."""
        self._leaving: set[Member] = set()
        self._asked: Change | None = None
        self._in_limbo = False

    # -- what counts ------------------------------------------------------------------------------------------------

    @property
    def required(self) -> frozenset[Member]:
        """Whose acknowledgement counts, the master apart."""
        return frozenset(self._stages)

    @property
    def insync(self) -> frozenset[Member]:
        """The set as ZooKeeper last confirmed it, the master included."""
        return frozenset(m for m, stage in self._stages.items() if stage in _IN_ZOOKEEPER) | {self.master}

    def stage(self, member: Member) -> Stage | None:
        """What a slave is at present; None: OUT."""
        return self._stages.get(member)

    # -- what happens to slaves ---------------------------------------------------------------------------------------

    def live(self, member: Member) -> None:
        """A slave is sent every append. Not for learners."""
        self._stages.setdefault(member, Stage.JOINING)

    def caught_up(self, member: Member) -> None:
        """It holds all that is stable."""
        if self._stages.get(member) is Stage.JOINING:
            self._ready.add(member)

    def gone(self, member: Member) -> None:
        """Its link is gone, or it is not sent every append any more."""
        self._ready.discard(member)
        if self._stages.get(member) is Stage.JOINING:
            del self._stages[member]

    def behind(self, member: Member, since: float | None, now: float) -> None:
        """Since when a member has not held what was sent, or has had no link; None: it is not behind."""
        if since is not None and now - since > self._lag_s:
            self._leaving.add(member)
        else:
            self._leaving.discard(member)

    # -- asking for changes -------------------------------------------------------------------------------------------

    def ask(self) -> Change | None:
        """The change to ask for now, or None; confirmed() or lost() follows."""
        if self._asked is not None:
            return None
        wanted = {self.master}
        for member, stage in self._stages.items():
            stays = stage in _IN_ZOOKEEPER and member not in self._leaving
            if stays or member in self._ready:
                wanted.add(member)
        if wanted == self.insync and not self._in_limbo:
            return None
        for member, stage in self._stages.items():
            if member in wanted and stage is Stage.JOINING:
                self._stages[member] = Stage.ADDING
            elif member not in wanted and stage is Stage.IN:
                self._stages[member] = Stage.REMOVING
        self._asked = Change(frozenset(wanted), self.version)
        return self._asked

    def confirmed(self, version: int) -> None:
        """ZooKeeper has what was asked for; nothing that was asked before can have an effect any more."""
        assert self._asked is not None
        self._adopt(self._asked.members, version)

    def lost(self) -> None:
        """It was refused, or no answer came: it may have an effect, now or later. The state is to be read next."""
        assert self._asked is not None
        self._asked = None
        self._in_limbo = True

    def read(self, members: Iterable[Member], version: int) -> None:
        """What stands in ZooKeeper under this master's epoch."""
        if version > self.version:
            self._adopt(frozenset(members), version)

    def _adopt(self, members: frozenset[Member], version: int) -> None:
        assert version > self.version
        self.version = version
        self._asked = None
        self._in_limbo = False
        for member, stage in list(self._stages.items()):
            if member not in members:
                if stage is Stage.ADDING and member in self._ready:
                    self._stages[member] = Stage.JOINING
                elif stage is not Stage.JOINING:
                    del self._stages[member]
        for member in members - {self.master}:
            self._stages[member] = Stage.IN
            self._ready.discard(member)
        self._leaving &= members
