"""What a member decides, by value."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from random import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.group.rebalance_decisions import (
    ACTIONS,
    TRANSITIONS,
    TURNS_MAX,
    Held,
    Phase,
    RebalanceDecision,
    decide,
    group_strategy,
    hint_for_idle,
    next_plan,
    plan_inputs,
    topic_inputs,
    turn,
    why_idle,
    without_growth,
)
from metamq.errors import CorruptData
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.groups import plans
from metamq.zk.groups.members import Member
from metamq.zk.groups.plans import Plan, PlanInputs, TopicInput
from metamq.zk.partitions import TopicPartition, configured_partitions

ID = "a" * 16
NEW_ID = "b" * 16


def tp(index: int) -> TopicPartition:
    return TopicPartition("t", f"0-{index}")


def plan_with(assignment: Mapping[TopicPartition, str], topic_id: str = ID) -> Plan:
    inputs = PlanInputs({"me": ("t",), "other": ("t",)}, {"t": TopicInput(topic_id, {0: 20})})
    return Plan(1, "range", inputs, assignment)


def member(consumer_id: str, strategy: str = "range", joined: int = 1, topics: tuple[str, ...] = ("t",)) -> Member:
    return Member(consumer_id, topics, strategy, "here", 1, 0, 0, 0, "0", 10_000, joined)


def test_every_phase_has_an_action_and_every_transition_leads_to_release() -> None:
    assert set(ACTIONS) == {(phase, wanted) for phase in Phase for wanted in (True, False)}
    assert set(TRANSITIONS) == set(Phase)
    for phase in Phase:
        assert phase is Phase.RELEASING or Phase.RELEASING in TRANSITIONS[phase]


def test_nothing_is_done_without_a_plan_but_to_give_up_what_is_held() -> None:
    assert decide("me", None, {}, ()) == RebalanceDecision([], [], [], [], [])
    assert decide("me", None, {tp(0): Held(Phase.CONSUMING, ID)}, ()).revoke == [tp(0)]


def test_only_what_changes_hands_is_touched() -> None:
    plan = plan_with({tp(0): "me", tp(1): "other", tp(2): "me", tp(10): "me", tp(3): "me"})
    held = {tp(0): Held(Phase.CONSUMING, ID), tp(1): Held(Phase.CONSUMING, ID)}
    assert decide("me", plan, held, waiting={tp(3)}) == RebalanceDecision(
        start=[], revoke=[tp(1)], release=[], claim=[tp(2), tp(10)], wait=[tp(3)]
    )


def test_a_topic_made_anew_is_given_up_before_it_is_claimed() -> None:
    plan = plan_with({tp(0): "me"}, NEW_ID)
    assert decide("me", plan, {tp(0): Held(Phase.CONSUMING, ID)}, ()) == RebalanceDecision([], [tp(0)], [], [], [])
    assert decide("me", plan, {tp(0): Held(Phase.RELEASING, ID)}, ()) == RebalanceDecision([], [], [tp(0)], [], [])
    assert decide("me", plan, {}, ()) == RebalanceDecision([], [], [], [tp(0)], [])


@given(
    st.dictionaries(st.integers(0, 19), st.sampled_from(["me", "other"])),
    st.dictionaries(st.integers(0, 19), st.tuples(st.sampled_from(Phase), st.sampled_from([ID, NEW_ID]))),
    st.sets(st.integers(0, 19)),
)
def test_following_a_plan_step_by_step_ends_with_what_it_gives(
    owners: dict[int, str], holdings: dict[int, tuple[Phase, str]], waiting_for: set[int]
) -> None:
    plan = plan_with({tp(index): owner for index, owner in owners.items()})
    held = {tp(index): Held(*holding) for index, holding in holdings.items()}
    waiting = {tp(index) for index in waiting_for}
    ends = {Phase.READING: Phase.STARTING, Phase.STARTING: Phase.CONSUMING, Phase.REVOKING: Phase.RELEASING}
    for _ in range(10):
        decision = decide("me", plan, held, waiting)
        for item in decision.revoke:
            held[item] = held[item]._replace(phase=Phase.REVOKING)
        for item in decision.start:
            held[item] = held[item]._replace(phase=Phase.READING)
        for item in decision.release:
            del held[item]
        for item in decision.claim:
            held[item] = Held(Phase.CLAIMED, ID)
        for item, holding in held.items():
            held[item] = holding._replace(phase=ends.get(holding.phase, holding.phase))
        waiting.clear()
    assert held == {tp(i): Held(Phase.CONSUMING, ID) for i, owner in owners.items() if owner == "me"}


def test_the_first_member_sets_the_strategy_and_it_stays_while_one_that_asked_for_it_does() -> None:
    first, second = member("z", "sticky", joined=1), member("a", "range", joined=2)
    assert group_strategy(None, {"a": second, "z": first}) == "sticky"
    plan = Plan(1, "range", PlanInputs({"a": ("t",)}, {}), {})
    assert group_strategy(plan, {"a": second, "z": first}) == "range"
    # A plan of members that are all gone, or that came back asking for something else.
    assert group_strategy(plan, {"z": first}) == "sticky"
    assert group_strategy(plan, {"a": member("a", "sticky", joined=9)}) == "sticky"


def test_inputs_name_existing_topics_of_members_with_the_strategy_only() -> None:
    present = {
        "one": member("one", topics=("t", "gone", "t")),
        "two": member("two", strategy="sticky", topics=("other",)),
    }
    configs = [TopicConfig("t", {1: 2, 0: 1}, id=ID), TopicConfig("other", {0: 1}), None]
    topics = topic_inputs(configs, [], None)
    assert plan_inputs("range", present, topics) == PlanInputs(
        {"one": ("gone", "t")}, {"t": TopicInput(ID, {0: 1, 1: 2})}
    )


def test_a_topic_that_cannot_be_read_stays_as_the_plan_before_has_it() -> None:
    before = Plan(1, "range", PlanInputs({"a": ("t", "u")}, {"t": TopicInput(ID, {0: 4})}), {})
    assert topic_inputs([None], ["t", "u"], before) == {"t": TopicInput(ID, {0: 4})}
    assert topic_inputs([], ["t"], None) == {}


def test_members_of_the_plan_have_the_first_turns_and_new_ones_follow() -> None:
    plan = Plan(1, "range", PlanInputs({"m": ("t",), "z": ("t",)}, {}), {})

    def turns(*names: str) -> dict[str, int]:
        return {name: turn(name, ("t",), "range", names, plan) for name in names}

    assert turns("a", "m", "z", "zz") == {"m": 0, "z": 1, "a": 2, "zz": 3}
    assert turns("a", "z", "zz") == {"z": 0, "a": 1, "zz": 2}, "without the member that left"
    assert turn("b", ("t",), "range", ["a", "b"], None) == 1
    assert turn("z", ("t", "u"), "range", ["m", "z"], plan) == 0, "only this member sees what it subscribes to"
    assert turn("z", ("t",), "sticky", ["m", "z"], plan) == 0
    assert max(turns(*(f"n{number}" for number in range(100))).values()) == TURNS_MAX


def test_the_next_plan_follows_the_one_before() -> None:
    inputs = PlanInputs({"a": ("t",), "b": ("t",)}, {"t": TopicInput(ID, {0: 4})})
    first = next_plan(None, "sticky", inputs)
    assert first.generation == 1
    joined = PlanInputs({**inputs.members, "c": ("t",)}, inputs.topics)
    second = next_plan(first, "sticky", joined)
    assert second.generation == 2
    assert sum(first.assignment[item] != owner for item, owner in second.assignment.items()) == 1


def test_a_member_without_partitions_is_told_why() -> None:
    inputs = PlanInputs({"a": ("t",), "b": ("t",), "c": ("u",)}, {"t": TopicInput(ID, {0: 1})})
    plan = next_plan(None, "range", inputs)
    assert why_idle("a", plan) == ""
    assert why_idle("b", plan) == "2 members share 1 partition of 1 topic, by strategy range"
    assert why_idle("c", plan) == "none of its topics exists: u"
    assert why_idle("nobody", plan) == ""
    topics = {"t": TopicInput(ID, {0: 1}), "u": TopicInput(ID, {0: 1, 3: 1})}
    plan = next_plan(None, "round_robin", PlanInputs(dict.fromkeys("abcd", ("t", "u")), topics))
    assert why_idle("d", plan) == "4 members share 3 partitions of 2 topics, by strategy round_robin"
    assert hint_for_idle("d", plan) == "Add partitions, or start no more members than there are partitions"
    inputs = PlanInputs(dict.fromkeys("ab", ("t",)), {"t": TopicInput(ID, {0: 2})})
    fewer = Plan(1, "consistent_hash", inputs, {TopicPartition("t", name): "a" for name in ("0-0", "0-1")})
    assert hint_for_idle("b", fewer).startswith("Stop all members, then start them with strategy='sticky'")


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.frozensets(st.sampled_from(["t", "u"])).map(lambda s: tuple(sorted(s)))
    ),
    st.dictionaries(st.sampled_from(["t", "u"]), st.dictionaries(st.integers(0, 9), st.integers(1, 12), min_size=1)),
)
def test_a_plan_survives_its_node(members: dict[str, tuple[str, ...]], topics: dict[str, dict[int, int]]) -> None:
    inputs = PlanInputs(members, {topic: TopicInput(ID, partitions) for topic, partitions in topics.items()})
    plan = next_plan(None, "round_robin", inputs)
    assert plans.from_json("etl", plans.to_json(plan)) == plan
    assert plans.from_bytes("etl", plans.to_bytes("etl", plan)) == plan
    assert plans.to_bytes("etl", plan) == plans.to_json(plan), "members of yesterday can read a small one"
    assert plans.from_bytes("etl", plans._packed("etl", plan)) == plan


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"generation": 1}'])
def test_a_damaged_plan_is_named(data: bytes) -> None:
    with pytest.raises(CorruptData, match="plan of group 'etl'"):
        plans.from_json("etl", data)


def test_a_large_plan_fits_into_a_node() -> None:
    topics = {f"topic-{number}": TopicInput(ID, {0: 50, 1: 50}) for number in range(100)}
    inputs = PlanInputs({f"{'host.example-' * 3}{number}": tuple(topics) for number in range(100)}, topics)
    plan = next_plan(None, "range", inputs)
    assert len(plan.assignment) == sum(len(configured_partitions(given.partitions)) for given in topics.values())
    assert len(plans.to_json(plan)) < plans.PLAN_BYTES_MAX


def test_many_long_names_fit_into_a_node() -> None:
    """In clear they take 1.6 MB."""
    topics = {f"{'t' * 196}-{number:03}": TopicInput(f"{random():.14f}", {0: 1}) for number in range(500)}
    inputs = PlanInputs({f"{'host.example-' * 3}{number}": tuple(topics) for number in range(14)}, topics)
    plan = next_plan(None, "consistent_hash", inputs)
    assert len(plans.to_json(plan)) > plans.PLAN_BYTES_MAX
    data = plans.to_bytes("etl", plan)
    assert len(data) < 50_000
    assert plans.from_bytes("etl", data) == plan


@pytest.mark.parametrize("end", [0, 1, 30, -1])
def test_a_packed_plan_that_ends_early_is_damaged(end: int) -> None:
    plan = next_plan(None, "range", PlanInputs({"a": ("t",)}, {"t": TopicInput(ID, {0: 3})}))
    packed = plans._packed("etl", plan)
    start = packed.index(b"\n") + 1
    with pytest.raises(CorruptData, match="plan of group 'etl'"):
        plans.from_bytes("etl", packed[: start + end] if end >= 0 else packed[:end])


def test_a_packed_plan_that_unpacks_to_too_much_is_damaged() -> None:
    bomb = b"metamq-plan-2\n" + zlib.compress(b" " * (plans._UNPACKED_BYTES_MAX + 1))
    with pytest.raises(CorruptData, match="or unpacks to more than"):
        plans.from_bytes("etl", bomb)
    few = {"generation": 1, "strategy": "range", "topics": [["t", ID, {"0": 1 << 20}]] * 2, "subscriptions": [],
           "members": [], "owners": [[]]}  # fmt: skip
    with pytest.raises(CorruptData, match="it has 0 owners for 1048576 partitions"):
        plans.from_bytes("etl", b"metamq-plan-2\n" + zlib.compress(json.dumps(few).encode()))


@given(
    st.dictionaries(st.sampled_from("abc"), st.frozensets(st.sampled_from("tuv")).map(lambda s: tuple(sorted(s)))),
    st.dictionaries(st.sampled_from("tuv"), st.tuples(st.sampled_from("12"), st.integers(1, 3))),
    st.dictionaries(st.sampled_from("abc"), st.frozensets(st.sampled_from("tuv")).map(lambda s: tuple(sorted(s)))),
    st.dictionaries(st.sampled_from("tuv"), st.tuples(st.sampled_from("12"), st.integers(1, 3))),
)
def test_without_growth_nothing_is_new_and_nothing_is_kept_that_is_gone(
    members: dict[str, tuple[str, ...]],
    topics: dict[str, tuple[str, int]],
    members_now: dict[str, tuple[str, ...]],
    topics_now: dict[str, tuple[str, int]],
) -> None:
    def inputs(members: dict[str, tuple[str, ...]], topics: dict[str, tuple[str, int]]) -> PlanInputs:
        return PlanInputs(members, {topic: TopicInput(id, {0: many}) for topic, (id, many) in topics.items()})

    before, now = inputs(members, topics), inputs(members_now, topics_now)
    smaller = without_growth(before, now)
    assert smaller.members.keys() == before.members.keys() & now.members.keys()
    for member, subscribed in smaller.members.items():
        assert set(subscribed) == set(before.members[member]) & set(now.members[member])
    for topic, kept in smaller.topics.items():
        assert kept.id == now.topics[topic].id
        assert kept in (before.topics[topic], now.topics[topic])
    assert without_growth(smaller, now) == smaller, "a member that looks again finds nothing to do"
