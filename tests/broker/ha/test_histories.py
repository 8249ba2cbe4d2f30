"""The handshake in random histories: whatever happened to the replicas, after it the slave's log is its master's.

Three replicas of one partition: terms with and without appends, deposed masters that go on appending, crashes that take
tails, promotions of any replica, retention. A replica also keeps a *shadow*: all batches from the very beginning, as if
nothing were ever removed. So a slave's log can be compared with its master's also below where the master's begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.broker.ha import handshake
from metamq.broker.ha.handshake import LogPosition, Side, SyncDecision, SyncVerdict, decide
from metamq.broker.log.disk.epochs import EpochList
from tests.examples import examples

REPLICAS = 3


class Batch(NamedTuple):
    number: int
    """Unlike any other's: two logs are equal when their numbers are."""
    epoch: int
    begin: LogPosition
    end: LogPosition


class Replica:
    def __init__(self, number: int) -> None:
        self.number = number
        self.shadow: list[Batch] = []
        self.start = LogPosition(0, 0)
        self.epochs = EpochList()
        self.stable = 0
        self.generation = 1
        self.incarnation = 1
        self.term: int | None = None
        """The epoch in which it is, or still takes itself for, the master."""
        self.alone = False
        """In that term it was the only one in sync."""
        self.is_linked = False

    @property
    def end(self) -> LogPosition:
        return self.shadow[-1].end if self.shadow else self.start

    @property
    def log(self) -> list[Batch]:
        return [batch for batch in self.shadow if batch.begin >= self.start]

    @property
    def member(self) -> tuple[int, int]:
        return self.number, self.incarnation

    def side(self) -> Side:
        return Side("id", self.start, self.end, self.stable, self.epochs.entries, self.generation)

    def take(self, batch: Batch) -> None:
        assert batch.begin == self.end
        self.epochs = self.epochs.add(batch.epoch, *batch.begin)
        self.shadow.append(batch)

    def cut(self, place: LogPosition) -> None:
        assert self.start <= place <= self.end
        assert place in {self.start, self.end, *(batch.end for batch in self.log)}, "not at a boundary"
        self.shadow = [batch for batch in self.shadow if batch.end <= place]
        self.epochs = self.epochs.cut(place.position)
        self.stable = min(self.stable, place.offset)

    def reset(self, place: LogPosition, shadow_below: list[Batch]) -> None:
        self.shadow, self.start, self.epochs, self.stable = shadow_below, place, EpochList(), place.offset

    def expire(self, count: int, *, remembers: bool) -> None:
        """Retention; `remembers`: an emptied log still knows its last epoch."""
        gone = [batch for batch in self.log[:count] if batch.end.offset <= self.stable]
        if gone:
            self.start = gone[-1].end
            is_forgotten = self.start == self.end and not remembers
            self.epochs = EpochList() if is_forgotten else self.epochs.drop_prefix(*self.start)


class World:
    """The replicas, and what ZooKeeper says of them."""

    raises_epochs = True
    raises_generations = True

    def __init__(self) -> None:
        self.replicas = [Replica(number) for number in range(REPLICAS)]
        self.epoch, self.generation = 0, 1
        self.master = self.replicas[0]
        self.insync = {self.replicas[0].member}
        self.is_up = True
        """The master of the state is there, and serves."""
        self.batches = 0
        self.decisions: list[SyncDecision] = []
        self.begin_term(self.replicas[0])

    def begin_term(self, master: Replica) -> None:
        self.epoch += self.raises_epochs or not self.epoch
        self.master, self.is_up = master, True
        master.term, master.generation = self.epoch, self.generation
        master.alone = self.insync == {master.member}
        for replica in self.replicas:
            replica.is_linked = False
        self.settle()

    # What may happen. Each takes a replica and a number, and does nothing where it cannot be.

    def append(self, replica: Replica, number: int) -> None:
        """Also by a master that does not know yet that it was deposed."""
        if replica.term is None:
            return
        self.batches += 1
        count = 1 + number % 2
        end = LogPosition(replica.end.offset + count, replica.end.position + 8 * count)
        replica.take(Batch(self.batches, replica.term, replica.end, end))
        if replica.alone and (replica is not self.master or self.insync == {replica.member}):
            replica.stable = end.offset

    def copy(self, replica: Replica, number: int) -> None:
        if replica.is_linked:
            for batch in [b for b in self.master.shadow if b.begin >= replica.end][: 1 + number]:
                replica.take(batch)
            self.settle()

    def settle(self) -> None:
        """The stable mark: what every member in sync holds, as far as their links tell."""
        members = [r for r in self.replicas if r.member in self.insync and r is not self.master]
        if self.is_up and all(replica.is_linked for replica in members):
            held = min([self.master.end.offset, *(replica.end.offset for replica in members)])
            self.master.stable = max(self.master.stable, held)
            for replica in self.replicas:
                if replica.is_linked:
                    replica.stable = max(replica.stable, min(self.master.stable, replica.end.offset))

    def join(self, replica: Replica, number: int) -> None:
        if replica.is_linked and replica.end.offset >= self.master.stable:
            self.insync = {member for member in self.insync if member[0] != replica.number} | {replica.member}
            self.master.alone = False
            self.settle()

    def leave(self, replica: Replica, number: int) -> None:
        if replica is not self.master and self.is_up:
            self.insync = {member for member in self.insync if member[0] != replica.number}
            self.master.alone = self.insync == {self.master.member}
            self.settle()

    def attach(self, replica: Replica, number: int) -> None:
        if replica is self.master or not self.is_up or replica.is_linked:
            return
        replica.term = None
        self.attach_now(replica)
        replica.generation, replica.is_linked = self.generation, True
        self.settle()

    def attach_now(self, replica: Replica) -> None:
        master = self.master
        readable = [b for b in replica.log if b.end.offset <= replica.stable and b.begin >= master.start]
        common = common_end(replica, master)
        verdict = decide(master.side(), replica.side())
        self.decisions.append(verdict.decision)
        carry_out(verdict, replica, master)
        theirs = [batch for batch in master.shadow if replica.start <= batch.begin < replica.end]
        assert replica.log == theirs, "not a prefix of the master's"
        assert master.start <= replica.end <= master.end, "the master cannot go on there"
        if replica.member in self.insync:
            assert replica.end.offset >= master.stable, "a member in sync gave up what was acknowledged"
        if self.generation == replica.generation:
            assert set(readable) <= set(replica.log) | set(master.log), "what readers saw is gone"
        if common is not None:
            assert verdict.decision is SyncDecision.FROM, "emptied without need"
            assert (verdict.offset, verdict.position) == common, "cut too much"

    def promote(self, replica: Replica, number: int) -> None:
        if replica is self.master:
            return
        if replica.member in self.insync:
            self.insync.discard(self.master.member)
        else:
            self.generation += self.raises_generations
            self.insync = {replica.member}
        self.begin_term(replica)

    def crash(self, replica: Replica, number: int) -> None:
        """The host loses power, and with it up to `number` batches that were not flushed; it starts again."""
        doomed = replica.log[-number:] if number else []
        replica.incarnation += 1
        if doomed:
            replica.cut(doomed[0].begin)
        self.start(replica)

    def kill(self, replica: Replica, number: int) -> None:
        self.start(replica)

    def start(self, replica: Replica) -> None:
        """As metamq.zk.broker_state.next_term has it."""
        replica.is_linked = False
        replica.term = None
        if replica is not self.master:
            return
        others = {member for member in self.insync if member[0] != replica.number}
        self.is_up = replica.member in self.insync or not others
        if not self.is_up:
            for other in self.replicas:
                other.is_linked = False
        else:
            self.generation += replica.member not in self.insync
            self.insync = {*others, replica.member}
            self.begin_term(replica)

    def expire(self, replica: Replica, number: int) -> None:
        replica.expire(1 + number, remembers=number % 2 == 0)


def common_end(one: Replica, other: Replica) -> LogPosition | None:
    """Up to where two logs are equal; None when they have no batch in common."""
    common = None
    start = max(one.start, other.start)
    for mine, theirs in zip(*([b for b in replica.log if b.begin >= start] for replica in (one, other)), strict=False):
        if mine != theirs:
            break
        common = mine.end
    return common


def carry_out(verdict: SyncVerdict, slave: Replica, master: Replica) -> None:
    place = LogPosition(verdict.offset, verdict.position)
    assert verdict.decision in (SyncDecision.FROM, SyncDecision.RESET), verdict.reason
    below = [batch for batch in master.shadow if batch.end <= place]
    if verdict.decision is SyncDecision.RESET:
        slave.reset(place, below)
    else:
        slave.cut(place)
        if place == slave.start:  # nothing of its own is left
            slave.shadow = below


Event = Callable[[World, Replica, int], None]
EVENTS: list[Event] = [
    World.append,
    World.append,
    World.copy,
    World.copy,
    World.join,
    World.leave,
    World.attach,
    World.attach,
    World.promote,
    World.crash,
    World.kill,
    World.expire,
]


def run(events: list[tuple[Event, int, int]]) -> World:
    world = World()
    for event, replica, number in events:
        event(world, world.replicas[replica], number)
    for replica in world.replicas:
        world.attach(replica, 0)
    return world


def random_events(seed: int) -> list[tuple[Event, int, int]]:
    chance = random.Random(seed)
    return [(chance.choice(EVENTS), chance.randrange(REPLICAS), chance.randrange(4)) for _ in range(60)]


def run_many(count: int) -> set[SyncDecision]:
    return {decision for seed in range(count) for decision in run(random_events(seed)).decisions}


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, REPLICAS - 1), st.integers(0, 3)), max_size=80))
def test_after_the_handshake_a_slaves_log_is_its_masters(events: list[tuple[Event, int, int]]) -> None:
    run(events)


def test_the_histories_come_to_every_outcome() -> None:
    assert run_many(100) == {SyncDecision.FROM, SyncDecision.RESET}


def ends_with_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake, "_end_of", lambda side, number: side.end)


def farther_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake, "min", max, raising=False)


def oldest_common_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake, "reversed", lambda numbers: numbers, raising=False)


def cut_outside_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Side, "has", lambda self, place: True)


def no_lists(patch: pytest.MonkeyPatch) -> None:
    """As a slave that only looks how long the logs are."""
    patch.setattr(handshake, "_agreement", lambda master, slave: min(master.end, slave.end))


def readers_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """Not in the handshake: stable marks that do not wait for all in sync, so that promotions take back (S1-4)."""
    patch.setattr(World, "settle", lambda self: setattr(self.master, "stable", self.master.end.offset))


def epochs_only_by_promotions(patch: pytest.MonkeyPatch) -> None:
    """Not in the handshake: a master that starts again keeps its epoch (S1-2)."""
    patch.setattr(World, "raises_epochs", False)


def losses_that_nobody_accepted(patch: pytest.MonkeyPatch) -> None:
    """Not in the handshake: a promotion from outside of the set leaves the generation as it is."""
    patch.setattr(World, "raises_generations", False)


@pytest.mark.parametrize(
    "fault",
    [
        ends_with_the_log,
        farther_end,
        oldest_common_epoch,
        cut_outside_of_the_log,
        no_lists,
        readers_do_not_count,
        epochs_only_by_promotions,
        losses_that_nobody_accepted,
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_histories_tell_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_many(500)
