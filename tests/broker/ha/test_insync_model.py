"""The in-sync set against ZooKeeper, slaves that hold more and less, and promotions by others; at random.

ZooKeeper here is its state node: a change is carried out if the version is still the one it was asked for, which may be
when it was asked, or any time after its answer was lost. A slave holds so and so many messages. What is asserted after
each step is what the set is for: each member of it may be promoted, at any moment, and lacks nothing that its master
acknowledged before or acknowledges later.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.broker.ha.insync import Change, Member, Membership, Stage
from tests.examples import examples

MASTER: Member = (0, 1)
SLAVES: list[Member] = [(1, 1), (1, 2), (2, 1)]
"""The first two are the same replica, before and after it lost what it had."""


class World:
    """One master's term, from its own point of view and from ZooKeeper's."""

    membership_class: type[Membership] = Membership
    tells_epochs_apart = True

    def __init__(self) -> None:
        self.members = frozenset({MASTER, SLAVES[0]})
        self.version = 0
        self.promoted: Member | None = None
        self.history = {(0, self.members)}
        """What has stood in ZooKeeper in this master's epoch."""
        self.membership = self.membership_class(MASTER, self.members, 0, lag_s=5.0)
        self.asked: Change | None = None
        self.late: list[Change] = []
        self.must_read = False
        self.end = self.stable = 0
        self.held = dict.fromkeys(SLAVES, 0)
        self.linked: set[Member] = set()
        self.joined = self.surprises = 0

    # ZooKeeper

    def carry_out(self, change: Change) -> bool:
        if change.version != self.version:
            return False
        self.members, self.version = change.members, self.version + 1
        self.history.add((self.version, self.members))
        return True

    def promote(self, member: Member, number: int) -> None:
        """Another replica takes over. It hears no more of this master, which may not know for a while."""
        if self.promoted is None and member in self.members:
            self.promoted = member
            self.members, self.version = self.members - {MASTER}, self.version + 1
            self.unlink(member, 0)

    # the master and its slaves

    def link(self, member: Member, number: int) -> None:
        if member != self.promoted:
            for other in [m for m in self.linked if m[0] == member[0]]:
                self.unlink(other, 0)
            self.linked.add(member)

    def unlink(self, member: Member, number: int) -> None:
        if member in self.linked:
            self.linked.discard(member)
            self.membership.gone(member)

    def live(self, member: Member, number: int) -> None:
        if member in self.linked:
            self.membership.live(member)
            self.settle()

    def append(self, member: Member, number: int) -> None:
        self.end += 1 + number
        self.settle()

    def acknowledge(self, member: Member, number: int) -> None:
        if member in self.linked:
            self.held[member] = min(self.held[member] + 2 * number, self.end)
            self.settle()
            if self.held[member] >= self.stable:
                self.membership.caught_up(member)

    def settle(self) -> None:
        """The stable mark: what is acknowledged, and what readers see."""
        required = self.membership.required
        if required <= self.linked:
            self.stable = max(self.stable, min([self.end, *(self.held[member] for member in required)]))

    def behind(self, member: Member, number: int) -> None:
        self.membership.behind(member, 0.0 if number % 2 else None, 100.0)

    # what the master asks for

    def ask(self, member: Member, number: int) -> None:
        if self.asked is None and not self.must_read:
            self.asked = self.membership.ask()

    def answer(self, member: Member, number: int) -> None:
        asked, self.asked = self.asked, None
        if asked is None:
            return
        if self.carry_out(asked):
            self.membership.confirmed(self.version)
        elif self.promoted is None:
            self.membership.refused(self.members, self.version)
        else:
            self.be_deposed()
        self.settle()

    def lose(self, member: Member, number: int) -> None:
        """The answer: the change was carried out, or will be, or never."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        if number % 3 == 0:
            self.carry_out(asked)
        elif number % 3 == 1:
            self.late.append(asked)
        self.membership.lost()
        self.must_read = True
        self.settle()

    def carry_out_late(self, member: Member, number: int) -> None:
        if self.late:
            self.surprises += self.carry_out(self.late.pop(number % len(self.late)))

    def read(self, member: Member, number: int) -> None:
        if self.asked is not None:
            return
        self.must_read = False
        if self.promoted is not None and self.tells_epochs_apart:
            self.be_deposed()
        else:
            self.membership.read(self.members, self.version)
        self.settle()

    def be_deposed(self) -> None:
        self.membership.deposed()

    # what holds

    def check(self) -> None:
        membership = self.membership
        assert (membership.version, membership.insync) in self.history, "it believes in a set that never was"
        assert membership.insync_count == len(membership.insync)
        replicas = [replica for replica, _incarnation in self.members]
        assert len(replicas) == len(set(replicas)), "one replica counts twice"
        if self.promoted is None:
            assert self.members <= membership.required | {MASTER}, "who may be promoted is not required"
            for member in self.members - {MASTER}:
                assert self.held[member] >= self.stable, "a member in sync lacks what was acknowledged"
        else:
            assert self.promoted in membership.required, "the new master is not required by the old one"
            assert self.held[self.promoted] >= self.stable, "the old master acknowledged without the new one"
        self.joined += membership.stage(SLAVES[2]) is Stage.IN


Event = Callable[[World, Member, int], None]
EVENTS: list[Event] = [
    World.link,
    World.link,
    World.unlink,
    World.live,
    World.live,
    World.append,
    World.acknowledge,
    World.acknowledge,
    World.behind,
    World.ask,
    World.ask,
    World.answer,
    World.lose,
    World.carry_out_late,
    World.read,
    World.read,
    World.promote,
]
RARE = [World.promote, World.behind]


def run(events: list[tuple[Event, Member, int]], world_class: type[World] = World) -> World:
    world = world_class()
    for event, member, number in events:
        event(world, member, number)
        world.check()
    return world


def random_events(seed: int) -> list[tuple[Event, Member, int]]:
    chance = random.Random(seed)
    events = []
    for _ in range(120):
        event = chance.choice(EVENTS)
        if event not in RARE or chance.random() < 0.3:
            events.append((event, chance.choice(SLAVES), chance.randrange(4)))
    return events


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(400))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(SLAVES), st.integers(0, 3)), max_size=100))
def test_whoever_stands_in_zookeeper_may_be_promoted_at_any_moment(events: list[tuple[Event, Member, int]]) -> None:
    run(events)


def test_the_histories_come_to_slaves_that_join_and_to_masters_that_are_deposed() -> None:
    worlds = [run(random_events(seed)) for seed in range(300)]
    assert sum(world.joined > 0 for world in worlds) > 10
    assert sum(world.promoted is not None for world in worlds) > 10
    assert sum(world.surprises > 0 for world in worlds) > 3


class GrowsFromTheAnswer(Membership):
    @property
    def required(self) -> frozenset[Member]:
        return super().required & self.insync


class CountsFromTheRequest(Membership):
    """Not from before it: then it is in ZooKeeper without what was acknowledged since it was looked at."""

    @property
    def required(self) -> frozenset[Member]:
        return frozenset(m for m, stage in self._stages.items() if stage is not Stage.JOINING)

    def caught_up(self, member: Member) -> None:
        super().live(member)
        super().caught_up(member)

    def live(self, member: Member) -> None:
        super().live(member)
        self._ready.add(member)


class ShrinksFromTheRequest(Membership):
    @property
    def required(self) -> frozenset[Member]:
        return frozenset(m for m, stage in self._stages.items() if stage is not Stage.REMOVING)


class ForgetsWhatIsInLimbo(Membership):
    """An old version read after a lost answer counts as a no."""

    def read(self, members: object, version: int) -> None:
        super().read(members, version)  # type: ignore[arg-type]
        self._in_limbo = False
        for member, stage in list(self._stages.items()):
            if stage in (Stage.ADDING, Stage.DROPPING):
                del self._stages[member]


class TakesSilenceForConsent(Membership):
    def lost(self) -> None:
        self.confirmed(self.version + 1)


class AsksForWhoIsLive(Membership):
    """Whether or not it holds what is stable."""

    def live(self, member: Member) -> None:
        super().live(member)
        if self.stage(member) is Stage.JOINING:
            self._ready.add(member)


class CountsTheLinked(Membership):
    """9.2-3: who has no link is not waited for."""

    def gone(self, member: Member) -> None:
        self._stages.pop(member, None)


class TakesIncarnationsForOthers(Membership):
    def live(self, member: Member) -> None:
        super().live(member)
        self._replaced.clear()


class BelievesItsSuccessor(Membership):
    """What another epoch has in ZooKeeper is taken for its own."""

    def deposed(self) -> None:
        pass


MUTANTS: list[type[Membership]] = [
    GrowsFromTheAnswer,
    CountsFromTheRequest,
    ShrinksFromTheRequest,
    ForgetsWhatIsInLimbo,
    TakesSilenceForConsent,
    AsksForWhoIsLive,
    CountsTheLinked,
    TakesIncarnationsForOthers,
    BelievesItsSuccessor,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_model_tells_a_fault(mutant: type[Membership]) -> None:
    class Mutated(World):
        membership_class = mutant
        tells_epochs_apart = mutant is not BelievesItsSuccessor

    with pytest.raises(AssertionError):
        run_many(3000, Mutated)


def run_many(count: int, world_class: type[World]) -> None:
    for seed in range(count):
        run(random_events(seed), world_class)
