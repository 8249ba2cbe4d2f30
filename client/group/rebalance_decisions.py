"""What a group member decides, without I/O: the group's strategy, its next plan, and what to do to follow a plan.

A partition that a member has to do with goes through these phases; `ACTIONS` says what to do in each, given whether the
plan wants it here, and `TRANSITIONS` what may follow. Losing the session forgets a partition in any phase.

    CLAIMED ──► READING ──► STARTING ──► CONSUMING ──► REVOKING ──► RELEASING ──► (forgotten)
       └───────────────────────────────────────────────────────────────▲
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from metamq.client.group import strategies
from metamq.words import count
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.groups.members import Member
from metamq.zk.groups.plans import Plan, PlanInputs, TopicInput
from metamq.zk.partitions import TopicPartition, partition_order


class Phase(enum.Enum):
    """What is going on with a partition of which we own the owner node."""

    CLAIMED = "ours, where to start is not known"
    READING = "the storage is being asked where to start"
    STARTING = "the handler is being told of it"
    CONSUMING = "the handler consumes it"
    REVOKING = "the handler finishes what it has in hand"
    RELEASING = "the last offset and the release are to be written"


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
    """What to do about a partition that we hold."""

    NOTHING = "nothing"
    START = "start"
    REVOKE = "revoke"
    RELEASE = "release"


# (phase, whether the plan wants the partition here) -> action. READING, STARTING and REVOKING end by themselves, and
# are looked at again then: a partition that comes back while it is given up is given up all the same, then claimed.
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
    """A partition that we own, as far as decisions go."""

    phase: Phase
    topic_id: str


class RebalanceDecision(NamedTuple):
    """What to do now, each in numeric order. `wait`: ours by the plan, but somebody else still holds it."""

    start: list[TopicPartition]
    revoke: list[TopicPartition]
    release: list[TopicPartition]
    claim: list[TopicPartition]
    wait: list[TopicPartition]


def decide(
    consumer_id: str,
    plan: Plan | None,
    held: Mapping[TopicPartition, Held],
    waiting: Collection[TopicPartition],
) -> RebalanceDecision:
    """What this member has to do to follow `plan`; `waiting` are partitions that another member was found to own."""
    mine = mine_in(consumer_id, plan)
    actions: dict[Action, list[TopicPartition]] = {action: [] for action in Action}
    for item in sorted(held, key=partition_order):
        # A topic made anew has other partitions under the same names.
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
    """The partitions that the plan gives to a member, with their topics' ids."""
    if plan is None:
        return {}
    topics = plan.inputs.topics
    return {item: topics[item.topic].id for item, owner in plan.assignment.items() if owner == consumer_id}


def group_strategy(previous: Plan | None, members: Mapping[str, Member]) -> str:
    """The strategy that holds for the group: that of the plan while a member of it that asked for it is there.

    Otherwise that of the member which joined first.
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


def subscribed_topics(members: Iterable[Member]) -> list[str]:
    """Every topic that somebody subscribes to, sorted."""
    return sorted({topic for member in members for topic in member.topics})


def plan_inputs(
    strategy: str,
    members: Mapping[str, Member],
    topics: Iterable[TopicConfig | None],
    kept: Mapping[str, TopicInput] | None = None,
) -> PlanInputs:
    """What a plan is made from. Members that ask for another strategy take no part; they find out by themselves.

    `kept`: topics whose configuration cannot be read, as the plan before has them.
    """
    taking_part = {
        consumer_id: tuple(sorted(set(member.topics)))
        for consumer_id, member in sorted(members.items())
        if member.strategy == strategy
    }
    wanted = {topic for subscribed in taking_part.values() for topic in subscribed}
    present = {config.topic: config for config in topics if config is not None and config.topic in wanted}
    given = {topic: TopicInput(config.id, dict(config.partitions)) for topic, config in present.items()}
    given |= {topic: before for topic, before in (kept or {}).items() if topic in wanted}
    return PlanInputs(taking_part, dict(sorted(given.items())))


def without_growth(before: PlanInputs, now: PlanInputs) -> PlanInputs:
    """`now` without what came since `before`: members, topics of members, topics, partitions. Twice is as once."""
    members = {
        member: tuple(topic for topic in subscribed if topic in now.members[member])
        for member, subscribed in before.members.items()
        if member in now.members
    }
    wanted = {topic for subscribed in members.values() for topic in subscribed}
    topics = {
        topic: given if given.id == now.topics[topic].id else now.topics[topic]
        for topic, given in before.topics.items()
        if topic in wanted and topic in now.topics
    }
    return PlanInputs(members, topics)


def next_plan(previous: Plan | None, strategy: str, inputs: PlanInputs) -> Plan:
    """The plan that follows `previous` when the inputs are these. Raises ConfigError for an unknown strategy."""
    assignment = strategies.plan(
        previous.assignment if previous else {},
        inputs.members,
        {topic: given.partition_names for topic, given in inputs.topics.items()},
        strategy,
    )
    return Plan(previous.generation + 1 if previous else 1, strategy, inputs, assignment)


def has_no_topic(consumer_id: str, plan: Plan) -> bool:
    """Whether none of the topics that a member subscribes to was there when the plan was made."""
    topics = plan.inputs.members.get(consumer_id)
    return topics is not None and plan.inputs.topics.keys().isdisjoint(topics)


def why_idle(consumer_id: str, plan: Plan) -> str:
    """Why the plan gives a member nothing; nothing when it gives it something, or does not know it."""
    topics = plan.inputs.members.get(consumer_id)
    if topics is None or consumer_id in plan.assignment.values():
        return ""
    present = [plan.inputs.topics[topic] for topic in topics if topic in plan.inputs.topics]
    partitions = sum(sum(topic.partitions.values()) for topic in present)
    if has_no_topic(consumer_id, plan):
        return f"none of its topics exists: {', '.join(topics)}"
    rivals = sum(not set(topics).isdisjoint(subscribed) for subscribed in plan.inputs.members.values())
    share = f"{count(rivals, 'member')} share {count(partitions, 'partition')}"
    return f"{share} of {count(len(present), 'topic')}, by strategy {plan.strategy}"
