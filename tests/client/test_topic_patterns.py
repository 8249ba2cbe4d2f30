"""Consumers that subscribe to topics by a pattern: those that exist, and those that are created later."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.group.rebalance_decisions import has_no_topic, next_plan, topics_by_member, why_idle, without_growth
from metamq.client.subscriptions import selected
from metamq.errors import ConfigError
from metamq.security.rights import LEVEL_PREFIX
from metamq.zk.groups.plans import PlanInputs, TopicInput, from_bytes, to_bytes
from metamq.zk.partitions import TopicPartition
from tests.client.idle import all_of

if TYPE_CHECKING:
    from tests.client.conftest import Shop

TOPICS = ("orders.eu", "orders.us", "orders.eu.dead-letter", "orders.eu.delayed", "bills", LEVEL_PREFIX + "3")


@pytest.fixture
def prefix() -> str:
    """The beginning of the names of a test's topics."""
    return f"p{uuid.uuid4().hex[:12]}"


def create(shop: Shop, name: str, count: int = 3, partitions: int = 1) -> str:
    shop.admin.create_topic(name, partitions)
    shop.numbers(name, count)
    return name


@pytest.mark.parametrize(
    ("subscribed", "found"),
    [
        (["orders.*"], {"orders.eu", "orders.us"}),
        (["orders.?s", "bills"], {"orders.us", "bills"}),
        (["orders.[eu][us]*"], {"orders.eu", "orders.us"}),
        (["*"], {"orders.eu", "orders.us", "bills"}),
        (["orders"], {"orders"}),
        (["orders.eu.dead-letter", "x*"], {"orders.eu.dead-letter"}),
        ([], set()),
    ],
)
def test_what_a_pattern_selects(subscribed: list[str], found: set[str]) -> None:
    assert selected(subscribed, TOPICS) == found


@given(st.dictionaries(st.sampled_from("ABC"), st.sets(st.sampled_from(["a*", "*b", "ab", "c", "ca"])), min_size=1))
def test_the_plan_of_a_pattern_is_that_of_the_names_which_it_selects(members: dict[str, set[str]]) -> None:
    topics = {name: TopicInput(f"{number:016x}", {0: 2}) for number, name in enumerate(("ab", "aa", "bb", "ca"))}
    by_pattern = PlanInputs({one: tuple(sorted(topics_)) for one, topics_ in members.items()}, topics)
    named = PlanInputs({one: tuple(sorted(names)) for one, names in topics_by_member(by_pattern).items()}, topics)
    plan = next_plan(None, "range", by_pattern)
    assert plan.assignment == next_plan(None, "range", named).assignment
    assert from_bytes("g", to_bytes("g", plan)) == plan
    smaller = PlanInputs(by_pattern.members, {"ab": topics["ab"]})
    assert without_growth(smaller, by_pattern) == PlanInputs(
        by_pattern.members, {"ab": topics["ab"]} if "ab" in selected(set().union(*members.values()), topics) else {}
    )
    for one in members:
        is_idle = one not in plan.assignment.values()
        assert bool(why_idle(one, plan)) is is_idle
        assert has_no_topic(one, plan) is (not named.members[one])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"topics": ["^orders-.*"]}, "'orders-*' here"),
        ({"topics": ["orders.*, bills.*"]}, "it matches no name"),
        ({"topics": ["orders.[0-9"]}, "it matches no name"),
        ({"topics": ["orders.*$"]}, "it matches no name"),
        ({"topics": "orders-*", "group": None}, "Give group="),
    ],
)
def test_what_is_refused(shop: Shop, group: str, arguments: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shop.cluster.consumer(**{"group": group, **arguments})
    assert hint in str(caught.value)


def test_topics_that_match_now_and_later(shop: Shop, group: str, prefix: str) -> None:
    first = create(shop, f"{prefix}.a")
    create(shop, f"other-{prefix}.a")
    with shop.consumer(f"{prefix}.*", group, idle_timeout_s=0.5) as consumer:
        assert {message.topic for message in all_of(consumer, 3)} == {first}
        second = create(shop, f"{prefix}.b", partitions=2)
        shop.until(lambda: len(consumer.health().partitions) == 3)
        assert [message.value for message in all_of(consumer, 3)] == [b"0", b"1", b"2"]
        shop.admin.delete(first)
        shop.until(lambda: {tp.topic for tp in consumer.health().partitions} == {second})
        (summary,) = (one for one in shop.admin.groups().values() if one.group == group)
        assert second in summary.topics
        assert f"{prefix}.*" not in summary.topics
        assert shop.committed(group).keys() >= {TopicPartition(second, "0-0"), TopicPartition(second, "0-1")}
        assert second in str(shop.admin.explain_group(group))
        with pytest.raises(ConfigError, match="has members that read topic"):
            shop.admin.delete_offsets(group, second)


def test_a_pattern_without_a_topic_waits_for_one(shop: Shop, group: str, prefix: str) -> None:
    with shop.consumer(f"{prefix}.*", group) as consumer:
        shop.until(lambda: "none of its topics exists" in str(consumer.health().group))
        create(shop, f"{prefix}.a")
        assert next(iter(consumer)).value == b"0"


def test_members_share_what_their_patterns_select(shop: Shop, group: str, prefix: str) -> None:
    names = [create(shop, f"{prefix}.{letter}", 2, partitions=2) for letter in "abc"]
    with shop.consumer(f"{prefix}.*", group) as one, shop.consumer(f"{prefix}.[ab]", group) as two:

        def shares() -> tuple[int, int]:
            return len(one.health().partitions), len(two.health().partitions)

        shop.until(lambda: shares() == (4, 2))
        assert {tp.topic for tp in two.health().partitions} <= set(names[:2])
        create(shop, f"{prefix}.d", partitions=2)
        shop.until(lambda: shares() == (6, 2))


@pytest.mark.parametrize("with_group", [True, False])
def test_what_is_created_later_is_read_from_its_beginning(
    shop: Shop, group: str, prefix: str, with_group: bool
) -> None:
    """Also with start="latest": its first messages are newer than the consumer."""
    topic = create(shop, f"{prefix}.a")
    member = group if with_group else None
    topics = f"{prefix}.*" if with_group else topic

    def grow() -> str:
        if with_group:
            return create(shop, f"{prefix}.b")
        shop.admin.alter(topic, partitions=2)
        shop.send(topic, [b"0", b"1", b"2"], "0-1")
        return topic

    with shop.consumer(topics, member, start="latest") as consumer:
        shop.until(lambda: [one.next_offset for one in consumer.health().partitions.values()] == [3])
        grown = grow()
        messages = iter(consumer)
        assert [(message.topic, message.value) for _, message in zip(range(3), messages, strict=False)] == [
            (grown, b"0"),
            (grown, b"1"),
            (grown, b"2"),
        ]


def test_a_later_member_continues_there(shop: Shop, group: str, prefix: str) -> None:
    create(shop, f"{prefix}.a")
    with shop.consumer(f"{prefix}.*", group, start="latest") as first:
        shop.until(lambda: [one.next_offset for one in first.health().partitions.values()] == [3])
        topic = create(shop, f"{prefix}.b")
        shop.until(lambda: shop.committed(group).get(TopicPartition(topic, "0-0")) is not None)
    with shop.consumer(f"{prefix}.*", group, start="latest", idle_timeout_s=0.5) as second:
        assert [(message.topic, message.value) for message in all_of(second, 3)] == [
            (topic, b"%d" % number) for number in range(3)
        ]
