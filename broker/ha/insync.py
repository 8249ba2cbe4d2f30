"""Membership: the replicas whose acknowledgements a master requires, and its requests to change the in-sync set. Pure.

Theory of operation
-------------------
ZooKeeper has the set, and changes it by compare-and-set only. Each member can be promoted without loss. So a message
may be acknowledged, or read, only when every member of the set holds it. The master cannot ask ZooKeeper before each
acknowledgement. Instead it keeps this invariant:

    at every moment, the members in ZooKeeper are among the members that are *required* here

So a new member counts before the request to add it, and a removed member until the answer to its removal. A request
whose answer was lost counts both ways, until it can have no effect any more:

    stage       required   in ZooKeeper   continues to
    OUT         no         no             JOINING, when the slave is sent every append (live), and keeps up
    JOINING     yes        no             ADDING, when it holds all that is stable; OUT, when it is unlinked or behind
    ADDING      yes        perhaps        IN, when confirmed; else back to JOINING
    DROPPING    yes        perhaps        ADDING whose link is gone: OUT, when the request can have no effect
    IN          yes        yes            REMOVING, when it is behind or unlinked for long, or a new incarnation
    REMOVING    yes        perhaps        OUT, when confirmed; else back to IN

_NEXT below has all transitions. A joining slave is required before the request, which holds the stable mark back until
the slave has passed it. So a slave gets in sync under constant load, too. All writes wait for a joining slave. If it
stops acknowledging, it is dropped after the time that a member may be behind.

A lost request can have no effect once the node has another version than the request expects. The master reads such a
version, or its next confirmed request makes it. Until then the lost request is *in limbo*, and the master makes the
next request even if it changes nothing.

A promotion raises the version, too. So all requests of a deposed master are refused. The promoted slave is a member of
the set, and stays required at the deposed master, which therefore can acknowledge nothing.

A member is (replica, incarnation): a replica that came back without messages that it had acknowledged is another
member. The set never has two members of one replica, since they would count as two copies.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from metamq.zk.cluster.registrations import Member

__all__ = ["Change", "Member", "Membership", "Stage"]


class Stage(enum.Enum):
    """The stage of a slave on its way into or out of the in-sync set. A member without a stage is OUT."""

    JOINING = "joining"
    ADDING = "adding"
    DROPPING = "dropping"
    IN = "in sync"
    REMOVING = "removing"


class _Event(enum.Enum):
    LIVE = enum.auto()
    GONE = enum.auto()
    BEHIND = enum.auto()
    REQUESTED_WITH = enum.auto()
    """A change was requested, and the member is in it."""
    REQUESTED_WITHOUT = enum.auto()
    PRESENT = enum.auto()
    """The member is in ZooKeeper, and no earlier request can have an effect any more."""
    ABSENT = enum.auto()


_OUT = None
_NEXT: dict[tuple[Stage | None, _Event], Stage | None] = {
    (_OUT, _Event.LIVE): Stage.JOINING,
    (_OUT, _Event.PRESENT): Stage.IN,
    (Stage.JOINING, _Event.GONE): _OUT,
    (Stage.JOINING, _Event.BEHIND): _OUT,
    (Stage.JOINING, _Event.REQUESTED_WITH): Stage.ADDING,
    (Stage.JOINING, _Event.PRESENT): Stage.IN,
    (Stage.ADDING, _Event.GONE): Stage.DROPPING,
    (Stage.ADDING, _Event.PRESENT): Stage.IN,
    (Stage.ADDING, _Event.ABSENT): Stage.JOINING,
    (Stage.DROPPING, _Event.LIVE): Stage.ADDING,
    (Stage.DROPPING, _Event.PRESENT): Stage.IN,
    (Stage.DROPPING, _Event.ABSENT): _OUT,
    (Stage.IN, _Event.REQUESTED_WITHOUT): Stage.REMOVING,
    (Stage.IN, _Event.ABSENT): _OUT,
    (Stage.REMOVING, _Event.PRESENT): Stage.IN,
    (Stage.REMOVING, _Event.ABSENT): _OUT,
}
"""The next stage by stage and event. An event that is not listed changes nothing."""

_IN_ZOOKEEPER = (Stage.IN, Stage.REMOVING)
_ON_THE_WAY = (Stage.JOINING, Stage.ADDING)


class Change(NamedTuple):
    """A compare-and-set: it sets these members, master included, if the node has this version."""

    members: frozenset[Member]
    version: int


class Membership:
    """The in-sync set of one master in one epoch."""

    def __init__(self, master: Member, insync: Iterable[Member], version: int, *, lag_s: float) -> None:
        """`insync` is the set of the state node at `version`. `lag_s`: seconds that a member may be behind."""
        self.master = master
        self.version = version
        self._lag_s = lag_s
        self._stages: dict[Member, Stage] = {member: Stage.IN for member in insync if member != master}
        self._ready: set[Member] = set()
        """Members on the way in that hold all stable messages."""
        self._behind: set[Member] = set()
        self._replaced: set[Member] = set()
        """Members whose replica has come back as another incarnation."""
        self._request: Change | None = None
        self._in_limbo = False
        self._is_deposed = False

    # -- what counts ------------------------------------------------------------------------------------------------

    @property
    def required(self) -> frozenset[Member]:
        """The members whose acknowledgements are required, without the master."""
        return frozenset(self._stages)

    @property
    def insync(self) -> frozenset[Member]:
        """The set that ZooKeeper confirmed last, with the master."""
        return frozenset(m for m, stage in self._stages.items() if stage in _IN_ZOOKEEPER) | {self.master}

    @property
    def insync_count(self) -> int:
        """The size of `insync`, in a fast way: every append reads it."""
        return 1 + sum([stage in _IN_ZOOKEEPER for stage in self._stages.values()])

    @property
    def is_alone_in_zookeeper(self) -> bool:
        """True if ZooKeeper has no other member, nor can have one by a request that was made before."""
        return all(stage is Stage.JOINING for stage in self._stages.values())

    def stage(self, member: Member) -> Stage | None:
        """Returns the stage of a slave; None: OUT."""
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
        """Notes that a slave is sent every append. Not for learners."""
        for other in self._stages:
            if other[0] == member[0] and other != member:
                self._replaced.add(other)
        self._replaced.discard(member)
        if member not in self._behind:
            self._happens(_Event.LIVE, member)

    def caught_up(self, member: Member) -> None:
        """Notes that a slave holds all stable messages."""
        if self._stages.get(member) in _ON_THE_WAY:
            self._ready.add(member)
        elif member not in self._stages:  # it was dropped, and is back
            self._behind.discard(member)

    def gone(self, member: Member) -> None:
        """Notes that the link of a slave has ended, or that it is not sent every append any more."""
        self._happens(_Event.GONE, member)
        if member not in self._stages:
            self._behind.discard(member)

    def behind(self, member: Member, since: float | None, now: float) -> None:
        """Notes the time since which a slave lacks sent messages, or a link; None: it is not behind.

        This includes slaves that are OUT: a slave that is behind does not begin to join.
        """
        if since is not None and now - since > self._lag_s:
            self._behind.add(member)
            self._happens(_Event.BEHIND, member)
        else:
            self._behind.discard(member)

    # -- requests for changes -----------------------------------------------------------------------------------------

    def ask(self) -> Change | None:
        """Returns the change to request now, or None. A call of confirmed(), refused() or lost() must follow."""
        if self._request is not None or self._is_deposed:
            return None
        wanted = frozenset(filter(self._is_wanted, self._stages)) | {self.master}
        if wanted == self.insync and not self._in_limbo:
            return None
        for member in list(self._stages):
            self._happens(_Event.REQUESTED_WITH if member in wanted else _Event.REQUESTED_WITHOUT, member)
        self._request = Change(wanted, self.version)
        return self._request

    def _is_wanted(self, member: Member) -> bool:
        if member in self._behind or member in self._replaced:
            return False
        return self._stages[member] in _IN_ZOOKEEPER or member in self._ready

    def confirmed(self, version: int) -> None:
        """Notes that ZooKeeper has made the change. No earlier request can have an effect any more."""
        request, self._request = self._request, None
        assert request is not None
        self.read(request.members, version)

    def refused(self, members: Iterable[Member], version: int) -> None:
        """Notes a refusal: the node has this version and these members already, in this master's epoch."""
        self._request = None
        self.read(members, version)

    def lost(self) -> None:
        """Notes that no answer came: the request may have an effect, now or later. The caller must read the state."""
        assert self._request is not None
        self._request = None
        self._in_limbo = True

    def read(self, members: Iterable[Member], version: int) -> None:
        """Notes the members in ZooKeeper in this master's epoch. A version that is not newer has no effect."""
        if version <= self.version or self._is_deposed:
            return
        self.version = version
        self._in_limbo = False
        present = frozenset(members) - {self.master}
        for member in present.union(self._stages):
            self._happens(_Event.PRESENT if member in present else _Event.ABSENT, member)
        self._replaced.intersection_update(self._stages)

    def deposed(self) -> None:
        """Notes another epoch in ZooKeeper. The required members do not change, and no more requests are made."""
        self._is_deposed = True
        self._request = None
