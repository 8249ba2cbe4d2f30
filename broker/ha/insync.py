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
    OUT         no         no             JOINING, when the slave is sent every append (live), and keeps up
    JOINING     yes        no             ADDING, when it holds all that is stable; OUT, when it is away or behind
    ADDING      yes        perhaps        IN, when confirmed; else back to JOINING
    DROPPING    yes        perhaps        ADDING whose link is gone: OUT, when nothing can come of the request
    IN          yes        yes            REMOVING, when it is behind or away for too long, or came back as another one
    REMOVING    yes        perhaps        OUT, when confirmed; else back to IN

_NEXT below has all of it. Being required before it is asked for holds the stable mark back until the slave has passed
it: so a slave comes in under constant load, too. In turn a slave that joins and stops to acknowledge is let go after
the time that a member may be behind, since until then all writes wait for it.

A lost request is certain to have no effect once the node's version is another than the one it was made for: read as
such, or made so by the next request that is confirmed. Until then it is *in limbo*, and the next request is made even
if it changes nothing.

A promotion raises the version, too. So whatever a deposed master asks for is refused, and the promoted slave, a member
of the set, stays among those that the deposed master requires: it has nothing to acknowledge with.

A member is (replica, incarnation): one that came back without what it had acknowledged is somebody else. The set never
has two of one replica, since they would count as two copies.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from metamq.zk.cluster.brokers import Member

__all__ = ["Change", "Member", "Membership", "Stage"]


class Stage(enum.Enum):
    """What a slave is to the in-sync set. A member that is not listed is OUT."""

    JOINING = "joining"
    ADDING = "adding"
    DROPPING = "dropping"
    IN = "in sync"
    REMOVING = "removing"


class _Event(enum.Enum):
    LIVE = enum.auto()
    GONE = enum.auto()
    BEHIND = enum.auto()
    ASKED_WITH = enum.auto()
    """A change was asked for, and the member is in it."""
    ASKED_WITHOUT = enum.auto()
    PRESENT = enum.auto()
    """The member stands in ZooKeeper, and nothing that was asked before can have an effect any more."""
    ABSENT = enum.auto()


_OUT = None
_NEXT: dict[tuple[Stage | None, _Event], Stage | None] = {
    (_OUT, _Event.LIVE): Stage.JOINING,
    (_OUT, _Event.PRESENT): Stage.IN,
    (Stage.JOINING, _Event.GONE): _OUT,
    (Stage.JOINING, _Event.BEHIND): _OUT,
    (Stage.JOINING, _Event.ASKED_WITH): Stage.ADDING,
    (Stage.JOINING, _Event.PRESENT): Stage.IN,
    (Stage.ADDING, _Event.GONE): Stage.DROPPING,
    (Stage.ADDING, _Event.PRESENT): Stage.IN,
    (Stage.ADDING, _Event.ABSENT): Stage.JOINING,
    (Stage.DROPPING, _Event.LIVE): Stage.ADDING,
    (Stage.DROPPING, _Event.PRESENT): Stage.IN,
    (Stage.DROPPING, _Event.ABSENT): _OUT,
    (Stage.IN, _Event.ASKED_WITHOUT): Stage.REMOVING,
    (Stage.IN, _Event.ABSENT): _OUT,
    (Stage.REMOVING, _Event.PRESENT): Stage.IN,
    (Stage.REMOVING, _Event.ABSENT): _OUT,
}
"""What is not listed changes nothing."""

_IN_ZOOKEEPER = (Stage.IN, Stage.REMOVING)
_ON_THE_WAY = (Stage.JOINING, Stage.ADDING)


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
        """On the way in, and holding all that is stable."""
        self._behind: set[Member] = set()
        self._replaced: set[Member] = set()
        """Another incarnation of theirs has come."""
        self._asked: Change | None = None
        self._in_limbo = False
        self._is_deposed = False

    # -- what counts ------------------------------------------------------------------------------------------------

    @property
    def required(self) -> frozenset[Member]:
        """Whose acknowledgement counts, the master apart."""
        return frozenset(self._stages)

    @property
    def insync(self) -> frozenset[Member]:
        """The set as ZooKeeper last confirmed it, the master included."""
        return frozenset(m for m, stage in self._stages.items() if stage in _IN_ZOOKEEPER) | {self.master}

    @property
    def insync_count(self) -> int:
        """How many they are: every append asks."""
        return 1 + sum([stage in _IN_ZOOKEEPER for stage in self._stages.values()])

    def stage(self, member: Member) -> Stage | None:
        """What a slave is at present; None: OUT."""
        return self._stages.get(member)

    def _happens(self, event: _Event, member: Member) -> None:
        if self._is_deposed:
            return
        stage = self._stages.get(member)
        following = _NEXT.get((stage, event), stage)
        if following is not None:
            self._stages[member] = following
        elif stage is not None:
            del self._stages[member]
        if following not in _ON_THE_WAY:
            self._ready.discard(member)

    # -- what happens to slaves ---------------------------------------------------------------------------------------

    def live(self, member: Member) -> None:
        """A slave is sent every append. Not for learners."""
        for other in self._stages:
            if other[0] == member[0] and other != member:
                self._replaced.add(other)
        self._replaced.discard(member)
        if member not in self._behind:
            self._happens(_Event.LIVE, member)

    def caught_up(self, member: Member) -> None:
        """It holds all that is stable."""
        if self._stages.get(member) in _ON_THE_WAY:
            self._ready.add(member)
        elif member not in self._stages:  # whatever it was let go for, it is back
            self._behind.discard(member)

    def gone(self, member: Member) -> None:
        """Its link is gone, or it is not sent every append any more."""
        self._happens(_Event.GONE, member)
        if member not in self._stages:
            self._behind.discard(member)

    def behind(self, member: Member, since: float | None, now: float) -> None:
        """Since when a slave has not held what was sent, or has had no link; None: it is not behind.

        Also to be told of slaves that are OUT: one that is behind does not begin to join.
        """
        if since is not None and now - since > self._lag_s:
            self._behind.add(member)
            self._happens(_Event.BEHIND, member)
        else:
            self._behind.discard(member)

    # -- asking for changes -------------------------------------------------------------------------------------------

    def ask(self) -> Change | None:
        """The change to ask for now, or None; confirmed(), refused() or lost() follows."""
        if self._asked is not None or self._is_deposed:
            return None
        wanted = frozenset(filter(self._is_wanted, self._stages)) | {self.master}
        if wanted == self.insync and not self._in_limbo:
            return None
        for member in list(self._stages):
            self._happens(_Event.ASKED_WITH if member in wanted else _Event.ASKED_WITHOUT, member)
        self._asked = Change(wanted, self.version)
        return self._asked

    def _is_wanted(self, member: Member) -> bool:
        if member in self._behind or member in self._replaced:
            return False
        return self._stages[member] in _IN_ZOOKEEPER or member in self._ready

    def confirmed(self, version: int) -> None:
        """ZooKeeper has what was asked for; nothing that was asked before can have an effect any more."""
        asked, self._asked = self._asked, None
        assert asked is not None
        self.read(asked.members, version)

    def refused(self, members: Iterable[Member], version: int) -> None:
        """The node had another version already: this is what stands there, under this master's epoch."""
        self._asked = None
        self.read(members, version)

    def lost(self) -> None:
        """No answer came: it may have an effect, now or later. The state is to be read next."""
        assert self._asked is not None
        self._asked = None
        self._in_limbo = True

    def read(self, members: Iterable[Member], version: int) -> None:
        """What stands in ZooKeeper under this master's epoch. The version of before tells nothing new."""
        if version <= self.version or self._is_deposed:
            return
        self.version = version
        self._in_limbo = False
        present = frozenset(members) - {self.master}
        for member in present.union(self._stages):
            self._happens(_Event.PRESENT if member in present else _Event.ABSENT, member)
        self._replaced.intersection_update(self._stages)

    def deposed(self) -> None:
        """ZooKeeper has another epoch. What counts stays as it is, and nothing is asked for or concluded any more."""
        self._is_deposed = True
        self._asked = None
