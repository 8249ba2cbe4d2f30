"""The end of a loop with `idle_timeout_s`, by value: what it waits for, when it asks, what it raises."""

from __future__ import annotations

from math import inf

import pytest

from metamq.client.consumer.loop_end import ASK_AGAIN_S, LOOK_S, LoopDecision, LoopStep, decide
from metamq.client.group.assignment import Obstacle
from metamq.client.net.peers import EXPIRY_MARGIN_MS, lives, sharers
from metamq.errors import MetamqError
from metamq.zk.groups.plans import Plan, PlanInputs
from metamq.zk.partitions import TopicPartition

IDLE_S = 5.0


def since(began: float, patience_s: float = 30.0) -> Obstacle:
    return Obstacle(MetamqError("it does not answer"), began, patience_s)


@pytest.mark.parametrize(
    ("now", "obstacle", "doubt", "ask_from", "decision"),
    [
        (103.0, None, None, 0.0, LoopDecision(LoopStep.WAIT, 2.0, 100.0)),
        (105.0, None, None, 0.0, LoopDecision(LoopStep.ASK, 0.0, 100.0)),
        (129.9, since(100.0), None, 0.0, LoopDecision(LoopStep.WAIT, LOOK_S, 129.9)),
        (130.0, since(100.0), None, 0.0, LoopDecision(LoopStep.RAISE, 0.0, 100.0)),
        (9e9, since(100.0, inf), None, 0.0, LoopDecision(LoopStep.WAIT, LOOK_S, 9e9)),
        (105.0, None, since(104.0), 105.0 + ASK_AGAIN_S, LoopDecision(LoopStep.WAIT, ASK_AGAIN_S, 100.0)),
        (106.0, None, since(104.0), 105.5, LoopDecision(LoopStep.ASK, -0.5, 100.0)),
        (134.0, None, since(104.0), 0.0, LoopDecision(LoopStep.RAISE, 0.0, 100.0)),
        (134.0, since(120.0), since(104.0), 0.0, LoopDecision(LoopStep.RAISE, 0.0, 100.0)),
    ],
)
def test_a_loop_waits_asks_or_raises(
    now: float, obstacle: Obstacle | None, doubt: Obstacle | None, ask_from: float, decision: LoopDecision
) -> None:
    assert decide(now, IDLE_S, 100.0, obstacle, doubt, ask_from) == decision


def test_no_idle_time_passes_during_an_obstacle() -> None:
    idle_since = decide(110.0, IDLE_S, 100.0, since(109.0), None, 0.0).idle_since
    assert decide(110.1, IDLE_S, idle_since, None, None, 0.0).step is LoopStep.WAIT
    assert decide(115.0, IDLE_S, idle_since, None, None, 0.0).step is LoopStep.ASK


@pytest.mark.parametrize(
    ("written", "waited_s", "is_alive"),
    [
        (41, 0.0, False),
        (42, 0.0, False),
        (43, 0.0, True),
        (41, 10.0 + EXPIRY_MARGIN_MS / 1000, False),
        (41, 12.1, True),
    ],
)
def test_a_member_lives_that_wrote_after_we_joined_or_outlives_its_session(
    written: int, waited_s: float, is_alive: bool
) -> None:
    assert lives(joined=42, written=written, waited_s=waited_s, session_timeout_ms=10_000) == is_alive


def test_only_members_with_partitions_of_our_topics_have_to_live() -> None:
    owners = {("ours", "0-0"): "b", ("ours", "0-1"): "me", ("ours", "0-2"): "a", ("theirs", "0-0"): "c"}
    plan = Plan(1, "range", PlanInputs({}, {}), {TopicPartition(*tp): owner for tp, owner in owners.items()})
    assert sharers("me", ["ours"], plan) == ["a", "b"]
