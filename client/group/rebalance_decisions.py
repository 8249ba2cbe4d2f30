"""The decisions of a group member, without I/O: the group's strategy, its next plan, and the actions to follow a plan.

A partition of a member goes through these phases. `ACTIONS` has the action for each phase, which depends on the plan:
it gives the partition to this member or not. `TRANSITIONS` has the next phases. A lost session forgets a partition in
any phase.

    CLAIMED ──► READING ──► STARTING ──► CONSUMING ──► REVOKING ──► RELEASING ──► (forgotten)
       └───────────────────────────────────────────────────────────────▲
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.group import strategies
from metamq.client.subscriptions import selected
from metamq.words import count
from metamq.zk.groups.plans import Plan, PlanInputs, TopicInput
from metamq.zk.partitions import TopicPartition, partition_order

if TYPE_CHECKING:
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.groups.members import Member


TURNS_MAX = 20
"""All members from this place on have the same turn."""


class Phase(enum.Enum):
    """The state of a partition whose owner node belongs to this member."""

    CLAIMED = "owned, the start offset is not known"
    READING = "the start offset is being read from the storage"
    STARTING = "the handler is being notified of it"
    CONSUMING = "the handler consumes it"
    REVOKING = "the handler finishes its in-flight messages"
    RELEASING = "the last offset and the release must be written"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.CLAIMED: frozenset({Phase.READING, Phase.RELEASING}),
    Phase.READING: frozenset({Phase.STARTING, Phase.CLAIMED, Phase.RELEASING}),
    Phase.STARTING: frozenset({Phase.CONSUMING, Phase.RELEASING}),
    Phase.CONSUMING: frozenset({Phase.REVOKING, Phase.RELEASING}),
    Phase.REVOKING: frozenset({Phase.RELEASING}),
    Phase.RELEASING: frozenset(),
}

HANDLER_HAS_IT = frozenset({Phase.STARTING, Phase.CONSUMING, Phase.REVOKING})


class Action(enum.Enum):
    """The action for a partition that this member holds."""

    NOTHING = "nothing"
    START = "start"
    REVOKE = "revoke"
    RELEASE = "release"


# (phase, True if the plan gives the partition to this member) -> action. READING, STARTING and REVOKING end by
# themselves, and are decided again then: a partition that comes back during its release is released first, then
# claimed.
ACTIONS: Mapping[tuple[Phase, bool], Action] = {
    (Phase.CLAIMED, True): Action.START,
    (Phase.CLAIMED, False): Action.RELEASE,
    (Phase.READING, True): Action.NOTHING,
    (Phase.READING, False): Action.NOTHING,
    (Phase.STARTING, True): Action.NOTHING,
    (Phase.STARTING, False): Action.NOTHING,
    (Phase.CONSUMING, True): Action.NOTHING,
    (Phase.CONSUMING, False): Action.REVOKE,
    (Phase.REVOKING, True): Action.NOTHING,
    (Phase.REVOKING, False): Action.NOTHING,
    (Phase.RELEASING, True): Action.RELEASE,
    (Phase.RELEASING, False): Action.RELEASE,
}


class Held(NamedTuple):
    """An owned partition, with the values that decisions need."""

    phase: Phase
    topic_id: str


class RebalanceDecision(NamedTuple):
    """The next actions, each list in numeric order. `wait`: partitions of this member that another one still holds."""

    start: list[TopicPartition]
    revoke: list[TopicPartition]
    release: list[TopicPartition]
    claim: list[TopicPartition]
    wait: list[TopicPartition]


def decide(
    consumer_id: str, plan: Plan | None, held: Mapping[TopicPartition, Held], waiting: Collection[TopicPartition]
) -> RebalanceDecision:
    """Decides the actions of this member to follow `plan`. `waiting` are partitions that another member owns."""
    mine = mine_in(consumer_id, plan)
    actions: dict[Action, list[TopicPartition]] = {action: [] for action in Action}
    for item in sorted(held, key=partition_order):
        # A topic that was deleted and created again has other partitions under the same names.
        wanted = mine.get(item) == held[item].topic_id
        actions[ACTIONS[held[item].phase, wanted]].append(item)
    missing = sorted(mine.keys() - held.keys(), key=partition_order)
    return RebalanceDecision(
        start=actions[Action.START],
        revoke=actions[Action.REVOKE],
        release=actions[Action.RELEASE],
        claim=[item for item in missing if item not in waiting],
        wait=[item for item in missing if item in waiting],
    )


def mine_in(consumer_id: str, plan: Plan | None) -> dict[TopicPartition, str]:
    """Returns the partitions that the plan gives to a member, with their topics' ids."""
    if plan is None:
        return {}
    topics = plan.inputs.topics
    return {item: topics[item.topic].id for item, owner in plan.assignment.items() if owner == consumer_id}


def group_strategy(previous: Plan | None, members: Mapping[str, Member]) -> str:
    """Returns the group's strategy: the plan's strategy while a member of the plan is present that requests it.

    Otherwise the strategy of the member that joined first.
    """
    if previous is not None:
        stays = any(
            member.strategy == previous.strategy and consumer_id in previous.inputs.members
            for consumer_id, member in members.items()
        )
        if stays:
            return previous.strategy
    first = min(members.values(), key=lambda member: (member.joined, member.consumer_id))
    return first.strategy


def turn(consumer_id: str, topics: tuple[str, ...], strategy: str, names: Collection[str], plan: Plan | None) -> int:
    """Returns the turn of a member at making the next plan, from 0. `names` are the present members.

    Members of the plan come first, by id. A member that the plan has with other topics or another strategy has the
    first turn, too: the others cannot see that by the names.
    """
    known = plan.inputs.members if plan is not None else {}
    if plan is not None and (plan.strategy != strategy or known.get(consumer_id, topics) != topics):
        return 0
    place = sum((name not in known, name) < (consumer_id not in known, consumer_id) for name in names)
    return min(place, TURNS_MAX)


def topic_inputs(
    configs: Iterable[TopicConfig | None], unreadable: Iterable[str], before: Plan | None
) -> dict[str, TopicInput]:
    """Returns the inputs of a plan from topics. `unreadable` ones are as the plan before has them."""
    given = {one.topic: TopicInput(one.id, dict(one.partitions)) for one in configs if one is not None}
    known = before.inputs.topics if before is not None else {}
    return given | {topic: known[topic] for topic in unreadable if topic in known}


def plan_inputs(strategy: str, members: Mapping[str, Member], topics: Mapping[str, TopicInput]) -> PlanInputs:
    """Returns the inputs of a plan, without members that request another strategy; they notice that by themselves."""
    taking_part = {
        consumer_id: tuple(sorted(set(member.topics)))
        for consumer_id, member in sorted(members.items())
        if member.strategy == strategy
    }
    wanted = selected({one for subscribed in taking_part.values() for one in subscribed}, topics)
    return PlanInputs(taking_part, {topic: topics[topic] for topic in sorted(wanted & topics.keys())})


def without_growth(before: PlanInputs, now: PlanInputs) -> PlanInputs:
    """Returns `now` without the additions since `before`: members, their topics, topics, partitions. Idempotent."""
    members = {
        member: tuple(topic for topic in subscribed if topic in now.members[member])
        for member, subscribed in before.members.items()
        if member in now.members
    }
    wanted = selected({one for subscribed in members.values() for one in subscribed}, before.topics)
    topics = {
        topic: given if given.id == now.topics[topic].id else now.topics[topic]
        for topic, given in before.topics.items()
        if topic in wanted and topic in now.topics
    }
    return PlanInputs(members, topics)


def next_plan(previous: Plan | None, strategy: str, inputs: PlanInputs) -> Plan:
    """Returns the plan that follows `previous` with these inputs. Raises ConfigError for an unknown strategy."""
    assignment = strategies.plan(
        previous.assignment if previous else {},
        topics_by_member(inputs),
        {topic: given.partition_names for topic, given in inputs.topics.items()},
        strategy,
    )
    return Plan(previous.generation + 1 if previous else 1, strategy, inputs, assignment)


def topics_by_member(inputs: PlanInputs) -> dict[str, frozenset[str]]:
    """Returns the members of a plan, each with its topics that existed when the plan was made."""
    existing = inputs.topics.keys()
    return {member: selected(subscribed, existing) & existing for member, subscribed in inputs.members.items()}


def has_no_topic(consumer_id: str, plan: Plan) -> bool:
    """Returns True if none of a member's topics existed when the plan was made."""
    subscribed = plan.inputs.members.get(consumer_id)
    return subscribed is not None and plan.inputs.topics.keys().isdisjoint(selected(subscribed, plan.inputs.topics))


def why_idle(consumer_id: str, plan: Plan) -> str:
    """Returns the reason that the plan gives a member no partition, or "" if it gives some or does not know it."""
    members = topics_by_member(plan.inputs)
    if consumer_id not in members or consumer_id in plan.assignment.values():
        return ""
    topics = members[consumer_id]
    present = [plan.inputs.topics[topic] for topic in topics]
    partitions = sum(sum(topic.partitions.values()) for topic in present)
    if not topics:
        return f"none of its topics exists: {', '.join(plan.inputs.members[consumer_id])}"
    rivals = sum(not topics.isdisjoint(others) for others in members.values())
    share = f"{count(rivals, 'member')} share {count(partitions, 'partition')}"
    return f"{share} of {count(len(present), 'topic')}, by strategy {plan.strategy}"


def hint_for_idle(consumer_id: str, plan: Plan) -> str:
    """Returns the step that gives partitions to a member that has none."""
    if has_no_topic(consumer_id, plan):
        return "It waits until one is created"
    partitions = {topic: given.partition_names for topic, given in plan.inputs.topics.items()}
    if strategies.sticky_helps(consumer_id, plan.assignment, topics_by_member(plan.inputs), partitions):
        return "Stop all members, then start them with strategy='sticky', which would give it some"
    return "Add partitions, or start no more members than there are partitions"
