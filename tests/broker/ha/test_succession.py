"""The decision to take over from a master that is gone: by value, and in a model of slaves that see old nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.roles.succession import (
    FLAPPING_MS,
    NO_PROCESS,
    PAUSE_FIRST_MS,
    PREFERRED,
    PUBLISH_MS,
    SESSION_ENDED,
    TURN_MS,
    Candidate,
    Situation,
    Step,
    StepDecision,
    decide,
    pause_ms,
    ranking,
    why_gone,
)
from metamq.broker.roles.successor import Successor
from metamq.errors import MetamqError
from metamq.zk.cluster.brokers import BrokerState
from metamq.zk.cluster.failover import Failover

STATE = BrokerState(epoch=17, master=0, insync=((0, 1), (1, 1), (2, 1)), generation=1)
BOTH = (Candidate(1, 100), Candidate(2, 100))


@pytest.mark.parametrize(
    ("has_node", "link_epoch", "is_refused", "reason"),
    [
        (True, 17, False, ""),
        (True, 17, True, NO_PROCESS),
        (True, 16, True, ""),  # another master was refused, or this one before its restart
        (True, 0, True, ""),
        (False, 16, False, SESSION_ENDED),
        (False, 17, True, SESSION_ENDED),
    ],
)
def test_a_refusal_counts_only_in_the_epoch_of_the_link(
    has_node: bool, link_epoch: int, is_refused: bool, reason: str
) -> None:
    assert why_gone(17, has_node, link_epoch, is_refused) == reason


def situation(**changes: Any) -> Situation:
    given = Situation(Failover("auto"), STATE, (1, 1), "", SESSION_ENDED, 0, BOTH)
    return given._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, Step.TAKE_OVER),
        ({"gone": NO_PROCESS}, Step.TAKE_OVER),
        ({"failover": Failover("manual")}, Step.STAY),
        ({"failover": Failover("auto", paused=True)}, Step.STAY),
        ({"failover": Failover()}, Step.STAY),
        ({"gone": ""}, Step.STAY),
        ({"me": (1, 2)}, Step.STAY),  # another incarnation
        ({"me": (3, 1), "candidates": ()}, Step.STAY),
        ({"gone": "", "failover": Failover("auto", preferred=1)}, Step.WAIT),
        ({"gone": "", "failover": Failover("auto", preferred=1), "in_sync_ms": 120_000}, Step.TAKE_OVER),
        ({"gone": "", "failover": Failover("auto", preferred=2), "in_sync_ms": 120_000}, Step.STAY),
        ({"obstacle": "the disk is full"}, Step.WAIT),
        ({"obstacle": "the disk is full", "gone": ""}, Step.STAY),
        ({"candidates": (Candidate(1, None),)}, Step.TAKE_OVER),
        ({"candidates": (Candidate(1, None), Candidate(2, 100))}, Step.PUBLISH),
        ({"candidates": (Candidate(1, None), Candidate(2, 100)), "gone_ms": 60_000}, Step.PUBLISH),
        ({"candidates": (Candidate(1, 100), Candidate(2, None))}, Step.WAIT),
        ({"candidates": (Candidate(1, 100), Candidate(2, None)), "gone_ms": PUBLISH_MS}, Step.TAKE_OVER),
        ({"candidates": (Candidate(1, 99), Candidate(2, 100))}, Step.WAIT),
        ({"candidates": (Candidate(1, 99), Candidate(2, 100)), "gone_ms": PUBLISH_MS + TURN_MS - 1}, Step.WAIT),
        ({"candidates": (Candidate(1, 99), Candidate(2, 100)), "gone_ms": PUBLISH_MS + TURN_MS}, Step.TAKE_OVER),
        ({"failover": Failover("auto", preferred=2)}, Step.WAIT),
        ({"failover": Failover("auto", preferred=1)}, Step.TAKE_OVER),
        (
            {"failover": Failover("auto", preferred=2), "candidates": (Candidate(1, 101), Candidate(2, 100))},
            Step.TAKE_OVER,
        ),
        ({"switches_ago_ms": (0, 0)}, Step.TAKE_OVER),
        ({"switches_ago_ms": (0, 10, 20)}, Step.WAIT),
        ({"switches_ago_ms": (PAUSE_FIRST_MS, PAUSE_FIRST_MS, PAUSE_FIRST_MS)}, Step.TAKE_OVER),
        ({"switches_ago_ms": (FLAPPING_MS,) * 9}, Step.TAKE_OVER),
    ],
)
def test_the_decision_for_each_situation(changes: dict[str, Any], step: Step) -> None:
    decision = decide(situation(**changes))
    assert decision.step is step
    assert decision.reason
    assert (decision.again_ms is not None) == (step is Step.WAIT)


def test_a_pause_against_flapping_doubles_up_to_a_limit() -> None:
    assert [pause_ms([0] * count, 9000) for count in range(7)] == [0, 0, 0, 2000, 4000, 8000, 9000]
    assert pause_ms([0] * 100, 9000) == 9000


def test_the_ranking_prefers_bytes_then_the_operators_choice_then_the_number() -> None:
    one, two, three, silent = Candidate(1, 5), Candidate(2, 5), Candidate(3, 6), Candidate(4, None)
    assert ranking([silent, two, one, three], None) == [3, 1, 2]
    assert ranking([silent, two, one, three], 2) == [3, 2, 1]


def test_a_refused_hand_over_ends_nothing_and_the_preferred_replica_waits_again() -> None:
    asked = []

    async def refuse(promote: Any, noticed: Any) -> None:
        asked.append((promote.cause, noticed.is_gone))
        raise MetamqError("the master does not hand over: replica 1 did not hold everything within 3000 ms")

    async def take_over() -> None:
        none: Any = None
        successor = Successor(none, none, none, none, lambda: none, refuse, lambda: None)
        successor._in_sync_since = 1.0
        assert await successor._carry_out(StepDecision(Step.TAKE_OVER, PREFERRED), STATE)
        assert successor._in_sync_since > asyncio.get_running_loop().time()

    asyncio.run(take_over())
    assert asked == [(PREFERRED, False)]


class Model:
    """ZooKeeper's state node, and slaves that decide by copies of it that may be old."""

    def __init__(self, failover: Failover, bytes_of: dict[int, int]) -> None:
        self.failover = failover
        self.version = 0
        self.state = STATE
        self.bytes_of = bytes_of
        self.published: dict[int, int] = {}
        self.views: dict[int, tuple[int, BrokerState, dict[int, int]]] = {}
        self.masters: list[tuple[int, int]] = []
        """(version, replica) of each take-over."""

    def look(self, replica: int) -> None:
        """A fresh read."""
        self.views[replica] = self.version, self.state, dict(self.published)

    def act(self, replica: int, gone_ms: int, obstacles: set[int], *, loses_answer: bool) -> StepDecision:
        """Decides by the last read, and does it."""
        version, state, published = self.views[replica]
        is_gone = state.master == STATE.master
        decision = decide(
            Situation(
                self.failover,
                state,
                (replica, 1),
                "an obstacle" if replica in obstacles else "",
                SESSION_ENDED if is_gone else "",
                gone_ms,
                tuple(Candidate(one, published.get(one)) for one, _ in STATE.insync if one != STATE.master),
            )
        )
        if decision.step is Step.PUBLISH:
            self.published[replica] = self.bytes_of[replica]
        if decision.step is Step.TAKE_OVER and version == self.version:  # the compare-and-set
            self.masters.append((version, replica))
            self.state = replace(STATE, master=replica, epoch=STATE.epoch + 16)
            self.version += 1
            if not loses_answer:
                self.look(replica)
        return decision


@given(
    failover=st.builds(Failover, st.sampled_from(["auto", "manual"]), st.booleans(), st.sampled_from([None, 1, 2])),
    bytes_of=st.fixed_dictionaries({1: st.integers(0, 3), 2: st.integers(0, 3)}),
    obstacles=st.sets(st.sampled_from([1, 2])),
    steps=st.lists(st.tuples(st.sampled_from([1, 2]), st.booleans(), st.booleans(), st.integers(0, 500)), max_size=30),
)
def test_at_most_one_takes_over_and_one_does_if_it_may(
    failover: Failover, bytes_of: dict[int, int], obstacles: set[int], steps: list[tuple[int, bool, bool, int]]
) -> None:
    """Reads may be old, answers lost. Each slave looks in the end, and then one of those without an obstacle leads."""
    model = Model(failover, bytes_of)
    model.look(1)
    model.look(2)
    now_ms = 0
    for replica, looks, loses_answer, passed_ms in steps:
        now_ms += passed_ms
        if looks:
            model.look(replica)
        model.act(replica, now_ms, obstacles, loses_answer=loses_answer)
    for _ in range(4):
        now_ms += PUBLISH_MS + TURN_MS
        for replica in (1, 2):
            model.look(replica)
            model.act(replica, now_ms, obstacles, loses_answer=False)
    assert len(model.masters) == (failover.is_on and len(obstacles) < 2)
    assert all(replica not in obstacles for _, replica in model.masters)


@given(bytes_of=st.fixed_dictionaries({1: st.integers(0, 3), 2: st.integers(0, 3)}), first=st.sampled_from([1, 2]))
def test_slaves_that_read_in_time_choose_the_one_with_the_most(bytes_of: dict[int, int], first: int) -> None:
    model = Model(Failover("auto"), bytes_of)
    for now_ms in (0, 10, 20, 30):
        for replica in (first, 3 - first):
            model.look(replica)
            model.act(replica, now_ms, set(), loses_answer=False)
    (leader,) = [replica for _, replica in model.masters]
    assert bytes_of[leader] == max(bytes_of.values())
