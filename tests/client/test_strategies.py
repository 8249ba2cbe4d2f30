"""Plans are pure: total, exactly once, to subscribers only, balanced as promised, whatever the order of the inputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.group.strategies import STRATEGIES, Assignment, check_strategy, explain, plan
from metamq.errors import ConfigError
from metamq.zk.partitions import TopicPartition, configured_partitions, partition_order

TOPICS = ("bids", "clicks", "flights", "rides")

partition_counts = st.dictionaries(st.integers(0, 3), st.integers(1, 12), min_size=1, max_size=3)
topics = st.dictionaries(st.sampled_from(TOPICS), partition_counts, max_size=4).map(
    lambda counts: {topic: configured_partitions(partitions) for topic, partitions in counts.items()}
)
consumer_ids = st.integers(0, 20).map(lambda number: f"consumer-{number}")
members_of_any_topics = st.dictionaries(consumer_ids, st.frozensets(st.sampled_from(TOPICS)), max_size=8)
members_of_all_topics = st.dictionaries(consumer_ids, st.just(frozenset(TOPICS)), min_size=1, max_size=8)
strategy_names = st.sampled_from(sorted(STRATEGIES))


def loads(assignment: Assignment, members: Mapping[str, object]) -> Counter[str]:
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(assignment.values())
    return counts


def moved(before: Assignment, after: Assignment) -> set[TopicPartition]:
    return {item for item in after if before.get(item) != after[item]}


@given(members_of_any_topics, topics, strategy_names, st.integers(0, 2**32))
def test_each_partition_with_a_subscriber_goes_to_exactly_one_of_them(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], strategy: str, seed: int
) -> None:
    chance = random.Random(seed)
    everything = [TopicPartition(topic, name) for topic, names in partitions.items() for name in names]
    previous = {item: f"consumer-{chance.randrange(25)}" for item in everything if chance.random() < 0.7}
    assignment = plan(previous, members, partitions, strategy)
    subscribed = frozenset().union(*members.values())
    assert set(assignment) == {item for item in everything if item.topic in subscribed}
    for item, owner in assignment.items():
        assert item.topic in members[owner]


@given(members_of_any_topics, topics, strategy_names, st.integers(0, 2**32))
def test_the_order_of_the_inputs_does_not_matter(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], strategy: str, seed: int
) -> None:
    chance = random.Random(seed)

    def shuffled_dict(values: Mapping[str, object]) -> dict[str, object]:
        return dict(chance.sample(list(values.items()), len(values)))

    def shuffled(values: Sequence[str]) -> list[str]:
        return chance.sample(values, len(values))

    previous = plan({}, members, partitions, "round_robin")
    again = plan(
        dict(chance.sample(list(previous.items()), len(previous))),
        {member: shuffled(sorted(topics)) for member, topics in shuffled_dict(members).items()},  # type: ignore[call-overload]
        {topic: shuffled(names) for topic, names in shuffled_dict(partitions).items()},  # type: ignore[arg-type]
        strategy,
    )
    assert list(again.items()) == list(plan(previous, members, partitions, strategy).items())


@given(members_of_all_topics, topics, st.sampled_from(["round_robin", "sticky"]))
def test_equal_subscriptions_are_balanced_within_one(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], strategy: str
) -> None:
    counts = loads(plan({}, members, partitions, strategy), members)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(members_of_any_topics, topics)
def test_range_gives_each_subscriber_of_a_topic_a_run_of_its_share(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]]
) -> None:
    assignment = plan({}, members, partitions, "range")
    for topic, names in partitions.items():
        subscribers = sorted(member for member, topics in members.items() if topic in topics)
        runs = [[name for name in names if assignment.get(TopicPartition(topic, name)) == m] for m in subscribers]
        if subscribers:
            assert [name for run in runs for name in run] == names
            size, longer = divmod(len(names), len(subscribers))
            assert sorted(len(run) - size for run in runs) == [0] * (len(runs) - longer) + [1] * longer
    if len(set(members.values())) == 1:
        assert max(loads(assignment, members).values()) - min(loads(assignment, members).values()) <= 1


def test_range_is_the_formula_of_metamorphosis_in_numeric_order() -> None:
    names = configured_partitions({0: 11})
    assignment = plan({}, {"c": {"t"}, "a": {"t"}, "b": {"t"}}, {"t": names}, "range")
    assert [assignment[TopicPartition("t", f"0-{index}")] for index in range(11)] == [*"aaaabbbbccc"]


@given(members_of_all_topics, topics, st.integers(0, 2**32))
def test_sticky_moves_no_partition_that_balance_does_not_force_to(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], seed: int
) -> None:
    chance = random.Random(seed)
    everything = [TopicPartition(topic, name) for topic, names in partitions.items() for name in names]
    owners = [*members, "left", "left too"]
    previous = {item: chance.choice(owners) for item in everything if chance.random() < 0.9}
    assignment = plan(previous, members, partitions, "sticky")
    held = loads({item: owner for item, owner in previous.items() if owner in members}, members)
    # The fewest moves: everybody keeps as much as its share allows, larger shares going to those who hold most.
    size, longer = divmod(len(everything), len(members))
    kept = sum(min(count, size + (place < longer)) for place, count in enumerate(sorted(held.values(), reverse=True)))
    assert len(moved(previous, assignment)) == len(everything) - kept
    assert max(loads(assignment, members).values(), default=0) <= size + (longer > 0)


@given(members_of_any_topics, topics, st.integers(0, 2**32))
def test_sticky_leaves_no_partition_where_a_subscriber_has_two_fewer(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], seed: int
) -> None:
    chance = random.Random(seed)
    everything = [TopicPartition(topic, name) for topic, names in partitions.items() for name in names]
    previous = {item: f"consumer-{chance.randrange(21)}" for item in everything}
    assignment = plan(previous, members, partitions, "sticky")
    counts = loads(assignment, members)
    for item, owner in assignment.items():
        assert all(counts[owner] - counts[m] < 2 for m, topics in members.items() if item.topic in topics)
    assert plan(assignment, members, partitions, "sticky") == assignment


def test_range_spreads_topics_with_one_partition_and_keeps_even_topics_aligned() -> None:
    members = {name: frozenset(f"t{number:03}" for number in range(400)) for name in "abcdefghijklmnopqrst"}
    single = {topic: ["0-0"] for topic in members["a"]}
    assert set(Counter(plan({}, members, single, "range").values()).values()) == {20}
    pair = {"orders": ["0-0", "0-1", "0-2", "0-3"], "payments": ["0-0", "0-1", "0-2", "0-3"], "refunds": ["0-0"]}
    two = {name: frozenset(pair) for name in "ab"}
    assignment = plan({}, two, pair, "range")
    for name in pair["orders"]:
        assert assignment[TopicPartition("orders", name)] == assignment[TopicPartition("payments", name)]
    uneven = {topic: ["0-0", "0-1", "0-2"] for topic in ("x", "y")}
    assignment = plan({}, {name: frozenset(uneven) for name in "ab"}, uneven, "range")
    assert [assignment[TopicPartition(*place)] for place in [("x", "0-1"), ("y", "0-1")]] == ["a", "b"]
    assert Counter(assignment.values()) == {"a": 3, "b": 3}


def test_explain_names_the_strategy_that_would_help() -> None:
    partitions = {"t": [f"0-{number}" for number in range(4)]}
    for number in range(1_000):  # names for which the ring leaves one out
        members = {f"{name}{number}": {"t"} for name in "abc"}
        assignment = plan({}, members, partitions, "consistent_hash")
        if len(set(assignment.values())) < 3:
            break
    assert len(set(assignment.values())) < 3
    text = explain(members, partitions, "consistent_hash", assignment)
    assert text.count(": 0 partitions, strategy 'sticky' would give it some") == 3 - len(set(assignment.values()))


@given(members_of_any_topics, topics, st.sampled_from(["sticky", "consistent_hash"]), st.sampled_from(TOPICS))
def test_who_leaves_moves_only_its_own_partitions(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]], strategy: str, topic: str
) -> None:
    equal = dict.fromkeys(members, frozenset({topic}))
    if len(equal) < 2:
        return
    before = plan({}, equal, partitions, strategy)
    leaver = min(equal)
    after = plan(before, {m: t for m, t in equal.items() if m != leaver}, partitions, strategy)
    assert moved(before, after) == {item for item, owner in before.items() if owner == leaver}


@pytest.mark.slow
@given(members_of_any_topics, topics)
def test_who_joins_a_hash_ring_takes_from_all_and_moves_nothing_between_others(
    members: dict[str, frozenset[str]], partitions: dict[str, list[str]]
) -> None:
    before = plan({}, members, partitions, "consistent_hash")
    after = plan(before, members | {"newcomer": frozenset(TOPICS)}, partitions, "consistent_hash")
    assert {after[item] for item in moved(before, after)} <= {"newcomer"}


def test_a_hundred_members_and_a_thousand_partitions_take_well_below_a_second() -> None:
    members = {f"member-{number:03}": frozenset(TOPICS) for number in range(100)}
    partitions = {topic: configured_partitions({0: 125, 1: 125}) for topic in TOPICS}
    for strategy in STRATEGIES:
        previous = plan({}, dict(list(members.items())[:50]), partitions, strategy)
        assert len(plan(previous, members, partitions, strategy)) == 1000


def test_an_unknown_strategy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'stiky'.*range, round_robin, consistent_hash, sticky.*mean 'sticky'"):
        check_strategy("stiky")


def test_partition_order_is_numeric() -> None:
    names = ["10-0", "0-10", "0-9", "2-1"]
    ordered = sorted((TopicPartition("t", name) for name in names), key=partition_order)
    assert [item.partition for item in ordered] == ["0-9", "0-10", "2-1", "10-0"]


def test_explain_tells_inputs_rule_and_result() -> None:
    members = {"a": {"flights"}, "b": {"flights"}, "c": {"rides"}, "d": {"rides"}}
    partitions = {"flights": ["0-0", "0-1", "0-10"], "rides": ["0-0"], "bids": ["0-0"]}
    assignment = plan({}, members, partitions, "range")
    assert explain(members, partitions, "range", assignment) == (
        "Strategy range: each topic is cut into contiguous runs, one per subscriber in order of id; longer ones are"
        " given in turn.\n"
        "\n"
        "Topics\n"
        "  bids: 1 partition, 0 subscribers\n"
        "  flights: 3 partitions, 2 subscribers\n"
        "  rides: 1 partition, 2 subscribers\n"
        "\n"
        "Members\n"
        "  a: 2 partitions\n"
        "    flights: 0-0 0-1\n"
        "  b: 1 partition\n"
        "    flights: 0-10\n"
        "  c: 1 partition\n"
        "    rides: 0-0\n"
        "  d: 0 partitions, its topics have no partition that falls to it; more members than partitions leave some"
        " without\n"
        "\n"
        "Read by no member: bids"
    )
