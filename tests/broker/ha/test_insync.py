"""Whose acknowledgement counts: by value, and against a ZooKeeper that loses answers and carries requests out late."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from metamq.broker.ha.insync import Change, Member, Membership, Stage

MASTER: Member = (0, 1)
ONE: Member = (1, 1)
TWO: Member = (2, 1)
LAG_S = 5.0


def a_membership(*insync: Member) -> Membership:
    return Membership(MASTER, [MASTER, *insync], 0, lag_s=LAG_S)


def joined(membership: Membership, member: Member) -> None:
    membership.live(member)
    membership.caught_up(member)


def test_a_set_that_grows_counts_from_before_the_request() -> None:
    membership = a_membership()
    membership.live(ONE)
    assert membership.required == {ONE}
    assert membership.ask() is None
    membership.caught_up(ONE)
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 0)
    assert membership.required == {ONE}
    assert membership.insync == {MASTER}
    membership.confirmed(1)
    assert membership.insync == {MASTER, ONE}
    assert membership.ask() is None


def test_a_set_that_shrinks_counts_until_after_the_answer() -> None:
    membership = a_membership(ONE, TWO)
    membership.behind(ONE, 10.0, 10.0 + LAG_S)
    assert membership.ask() is None
    membership.behind(ONE, 10.0, 10.1 + LAG_S)
    assert membership.ask() == Change(frozenset({MASTER, TWO}), 0)
    assert membership.required == {ONE, TWO}
    membership.confirmed(1)
    assert membership.required == {TWO}


def test_a_lost_answer_counts_both_ways_until_nothing_can_come_of_it() -> None:
    membership = a_membership(ONE)
    joined(membership, TWO)
    membership.ask()
    membership.lost()
    membership.gone(TWO)
    membership.read([MASTER, ONE], 0)
    assert membership.required == {ONE, TWO}, "the request may be carried out yet"
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 0)
    membership.confirmed(1)
    assert membership.required == {ONE}


def test_a_lost_answer_that_was_yes_is_found_by_reading() -> None:
    membership = a_membership()
    joined(membership, ONE)
    membership.ask()
    membership.lost()
    membership.read([MASTER, ONE], 1)
    assert membership.insync == {MASTER, ONE}
    assert membership.ask() is None


def test_who_is_back_in_time_is_not_taken_out() -> None:
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    membership.behind(ONE, None, 100.0)
    assert membership.ask() is None


def test_who_was_being_taken_out_may_join_again() -> None:
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    membership.ask()
    membership.confirmed(1)
    assert membership.stage(ONE) is None
    joined(membership, ONE)
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 1)


def test_another_incarnation_is_somebody_else() -> None:
    membership = a_membership(ONE)
    again: Member = (1, 2)
    joined(membership, again)
    membership.behind(ONE, 0.0, 100.0)
    assert membership.required == {ONE, again}
    assert membership.ask() == Change(frozenset({MASTER, again}), 0)
    membership.confirmed(1)
    assert membership.required == {again}


def test_a_slave_that_goes_while_it_joins_does_not_count() -> None:
    membership = a_membership()
    joined(membership, ONE)
    membership.gone(ONE)
    assert membership.required == frozenset()
    assert membership.ask() is None


class Keeper:
    """ZooKeeper's node: requests are carried out when their time comes, if the version still is theirs."""

    def __init__(self, members: frozenset[Member]) -> None:
        self.members, self.version = members, 0

    def carry_out(self, change: Change) -> bool:
        if change.version != self.version:
            return False
        self.members, self.version = change.members, self.version + 1
        return True


class Model(RuleBasedStateMachine):
    """Slaves come, go, fall behind; requests are answered, refused, lost, and carried out late or never."""

    membership_class: type[Membership] = Membership

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.keeper = Keeper(frozenset({MASTER, ONE}))
        self.membership = self.membership_class(MASTER, [MASTER, ONE], 0, lag_s=LAG_S)
        self.asked: Change | None = None
        self.late: list[Change] = []
        self.must_read = False

    members = st.sampled_from([ONE, TWO, (1, 2)])

    @rule(member=members)
    def live(self, member: Member) -> None:
        self.membership.live(member)

    @rule(member=members)
    def caught_up(self, member: Member) -> None:
        self.membership.caught_up(member)

    @rule(member=members)
    def gone(self, member: Member) -> None:
        self.membership.gone(member)

    @rule(member=members, long=st.booleans())
    def behind(self, member: Member, long: bool) -> None:
        self.membership.behind(member, 0.0 if long else None, 100.0)

    @precondition(lambda self: self.asked is None and not self.must_read)
    @rule()
    def ask(self) -> None:
        self.asked = self.membership.ask()

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answered(self) -> None:
        assert self.asked is not None
        if self.keeper.carry_out(self.asked):
            self.membership.confirmed(self.keeper.version)
        else:
            self.membership.lost()
            self.must_read = True
        self.asked = None

    @precondition(lambda self: self.asked is not None)
    @rule(carried_out=st.booleans())
    def answer_lost(self, carried_out: bool) -> None:
        assert self.asked is not None
        if not carried_out or not self.keeper.carry_out(self.asked):
            self.late.append(self.asked)
        self.membership.lost()
        self.asked, self.must_read = None, True

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 10))
    def carried_out_late(self, which: int) -> None:
        self.keeper.carry_out(self.late.pop(which % len(self.late)))

    @precondition(lambda self: self.asked is None)
    @rule()
    def read(self) -> None:
        self.membership.read(self.keeper.members, self.keeper.version)
        self.must_read = False

    @invariant()
    def whoever_may_be_promoted_is_required(self) -> None:
        assert self.keeper.members <= self.membership.required | {MASTER}


FEW = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_whoever_stands_in_zookeeper_is_required_here_whatever_happens() -> None:
    run_state_machine_as_test(Model, settings=FEW)


class GrowsFromTheAnswer(Membership):
    @property
    def required(self) -> frozenset[Member]:
        return frozenset(m for m, stage in self._stages.items() if stage in (Stage.IN, Stage.REMOVING))


class ShrinksFromTheRequest(Membership):
    @property
    def required(self) -> frozenset[Member]:
        return frozenset(m for m, stage in self._stages.items() if stage is not Stage.REMOVING)


class ForgetsWhatIsInLimbo(Membership):
    def read(self, members: Any, version: int) -> None:
        super().read(members, version)
        self._in_limbo = False
        for member, stage in list(self._stages.items()):
            if stage is Stage.ADDING:
                del self._stages[member]


@pytest.mark.parametrize("mutant", [GrowsFromTheAnswer, ShrinksFromTheRequest, ForgetsWhatIsInLimbo])
def test_the_model_bites(mutant: type[Membership]) -> None:
    class Mutated(Model):
        membership_class = mutant

    many = settings(max_examples=2000, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutated, settings=many)
