"""A group's plan: one node with the assignment of partitions, its inputs, and its generation.

Any member computes it, the first to store it by compare-and-set wins, and all members follow the node. So there is one
plan from one set of inputs, even if members see changes of members and topics at different times.

A small plan is JSON with full names. A larger one has each topic and member name once, and numbers afterwards:

    metamq-plan-2\n, then deflated JSON: {"generation", "strategy", "topics": [[name, id, {broker: partitions}]],
    "subscriptions": [[topic's number]], "members": [[id, subscription's number]],
    "owners": for each topic, for each partition in order: [member's number, or -1]}

An unknown number in the marker means a plan of a newer metamq: the plan stays, and does not count as damaged.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError, CorruptData
from metamq.zk.documents import broker_number, fields, items, number, read_document, skip_unreadable, text, texts
from metamq.zk.errors import BadVersion, NodeExists, NoNode
from metamq.zk.names import is_partition
from metamq.zk.partitions import TopicPartition, configured_partitions

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

Watcher = Callable[[], None]

PLAN_BYTES_MAX = 1_000_000
"""ZooKeeper refuses nodes of 1 MiB, and breaks the connection of a client that tries."""
PLAN_HINT = (
    "Give the group fewer topics or partitions, or shorter names, or split it into groups with fewer topics each."
)
PLAIN_BYTES_MAX = 64 << 10
"""A larger plan is packed. A metamq that cannot read packed plans takes them for damaged and makes another plan."""
PACKED_FORMAT = 2
_UNPACKED_BYTES_MAX = 16 << 20
_MARKER = re.compile(rb"metamq-plan-([0-9]{1,9})\n")
_NEW_ONE = "Its members make a new one."


@dataclass(frozen=True, slots=True)
class TopicInput:
    """The inputs of a plan from one topic: its id, and its configured partitions per broker id."""

    id: str
    partitions: Mapping[int, int]

    @property
    def partition_names(self) -> list[str]:
        """The names of all partitions, in numeric order."""
        return configured_partitions(self.partitions)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All inputs of a plan, except for the previous plan: consumer id -> topics (sorted), topic -> configuration."""

    members: Mapping[str, tuple[str, ...]]
    topics: Mapping[str, TopicInput]


@dataclass(frozen=True, slots=True)
class Plan:
    """The assignment of partitions. `generation` grows by one with each plan of the group."""

    generation: int
    strategy: str
    inputs: PlanInputs
    assignment: Mapping[TopicPartition, str]


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan and the version of its node. `plan` is None if the node cannot be read: then it must be replaced.

    `newer_format`: a newer metamq made the node and can read it, so it must not be replaced. `size_bytes`: its size.
    """

    plan: Plan | None
    version: int
    size_bytes: int = 0
    newer_format: int | None = None

    def check_format(self, group: str) -> None:
        """Raises ConfigError if a newer metamq made the plan."""
        if self.newer_format is not None:
            raise ConfigError(
                f"the plan of group {group!r} has format {self.newer_format}, of a newer metamq; this one reads "
                f"formats up to {PACKED_FORMAT}",
                hint="Upgrade this program to the metamq that the group's other members have.",
            )


class PlanTooLarge(ConfigError):
    """A group's plan, of `size_bytes`, is too large for a node of ZooKeeper."""

    def __init__(self, group: str, size_bytes: int) -> None:
        super().__init__(
            f"the plan of group {group!r} takes {size_bytes:,} bytes, but ZooKeeper holds {PLAN_BYTES_MAX:,}",
            hint=PLAN_HINT,
        )
        self.group = group
        self.size_bytes = size_bytes


async def read_plan(session: Session, group: str, watch: Watcher | None = None) -> StoredPlan | None:
    """The group's plan, or None before the first one; `watch` is called once if it changes."""
    node = await session.get_or_none(session.paths.plan(group), watch=watch)
    if node is None:
        return None
    found = _MARKER.match(node.data)
    if found is not None and int(found[1]) > PACKED_FORMAT:
        return StoredPlan(None, node.version, len(node.data), newer_format=int(found[1]))
    with skip_unreadable(f"group {group}: its plan is made again"):
        return StoredPlan(from_bytes(group, node.data), node.version, len(node.data))
    return StoredPlan(None, node.version, len(node.data))


async def store_plan(session: Session, group: str, plan: Plan, before: StoredPlan | None) -> bool:
    """Stores `plan` if `before` is still the group's plan; False if another member was faster.

    Raises PlanTooLarge, ConnectionLost (it may be stored: read it).
    """
    data = to_bytes(group, plan)
    path = session.paths.plan(group)
    try:
        if before is None:
            await session.create(path, data, makepath=True)
        else:
            await session.set(path, data, before.version)
    except (BadVersion, NodeExists, NoNode):
        return False
    return True


def to_bytes(group: str, plan: Plan) -> bytes:
    """The content of the plan's node. Raises PlanTooLarge."""
    data = to_json(plan)
    if len(data) > PLAIN_BYTES_MAX:
        data = _packed(group, plan)
    if len(data) > PLAN_BYTES_MAX:
        raise PlanTooLarge(group, len(data))
    return data


def from_bytes(group: str, data: bytes) -> Plan:
    """Reads the content of a plan's node, in either form. Raises CorruptData."""
    found = _MARKER.match(data)
    if found is None:
        return from_json(group, data)
    what = f"the plan of group {group!r} in ZooKeeper"
    if int(found[1]) != PACKED_FORMAT:
        raise CorruptData(what, f"it has format {int(found[1])}", hint=_NEW_ONE)
    inflater = zlib.decompressobj()
    try:
        document = inflater.decompress(data[found.end() :], _UNPACKED_BYTES_MAX)
    except zlib.error as error:
        raise CorruptData(what, str(error), hint=_NEW_ONE) from None
    if not inflater.eof:
        raise CorruptData(what, f"it ends early, or unpacks to more than {_UNPACKED_BYTES_MAX:,} bytes", hint=_NEW_ONE)
    return read_document(what, document, _read_packed, hint=_NEW_ONE, bytes_max=_UNPACKED_BYTES_MAX)


def _packed(group: str, plan: Plan) -> bytes:
    topics, members = sorted(plan.inputs.topics), sorted(plan.inputs.members)
    # Topics that members subscribe to and that do not exist have numbers, too.
    wanted = {topic for subscribed in plan.inputs.members.values() for topic in subscribed}
    names = [*topics, *sorted(wanted.difference(topics))]
    topic_numbers = {topic: number for number, topic in enumerate(names)}
    member_numbers = {member: number for number, member in enumerate(members)}
    subscriptions = sorted(set(plan.inputs.members.values()))
    subscription_numbers = {topics: number for number, topics in enumerate(subscriptions)}
    given = [(topic, plan.inputs.topics[topic]) for topic in topics]
    owners = [
        [member_numbers.get(plan.assignment.get(TopicPartition(topic, name), ""), -1) for name in its.partition_names]
        for topic, its in given
    ]
    assert sum(owner >= 0 for of_topic in owners for owner in of_topic) == len(plan.assignment), "a partition is lost"
    document = {
        "generation": plan.generation,
        "strategy": plan.strategy,
        "topics": [
            *(
                [topic, its.id, {str(broker): many for broker, many in sorted(its.partitions.items())}]
                for topic, its in given
            ),
            *([name] for name in names[len(topics) :]),
        ],
        "subscriptions": [[topic_numbers[topic] for topic in subscribed] for subscribed in subscriptions],
        "members": [[member, subscription_numbers[plan.inputs.members[member]]] for member in members],
        "owners": owners,
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    if len(data) > _UNPACKED_BYTES_MAX:
        raise PlanTooLarge(group, len(data))
    return b"metamq-plan-%d\n" % PACKED_FORMAT + zlib.compress(data)


def _read_packed(document: dict[str, Any]) -> Plan:
    names = [text(items(topic)[0]) for topic in items(document["topics"])]
    topics = {
        text(topic[0]): TopicInput(text(topic[1]), _counts(topic[2])) for topic in document["topics"] if len(topic) > 1
    }
    subscriptions = [
        tuple(names[number(topic, 0, len(names) - 1)] for topic in items(subscribed))
        for subscribed in items(document["subscriptions"])
    ]
    members = {
        text(member): subscriptions[number(subscribed, 0, len(subscriptions) - 1)]
        for member, subscribed in items(document["members"])
    }
    ids = list(members)
    assignment = {}
    for (topic, its), owners in zip(topics.items(), items(document["owners"]), strict=True):
        if sum(its.partitions.values()) != len(items(owners)):  # checked before the names are made
            raise ValueError(f"it has {len(owners)} owners for {sum(its.partitions.values())} partitions of {topic!r}")
        for name, owner in zip(its.partition_names, owners, strict=True):
            if number(owner, -1, len(ids) - 1) >= 0:
                assignment[TopicPartition(topic, name)] = ids[owner]
    return Plan(number(document["generation"]), text(document["strategy"]), PlanInputs(members, topics), assignment)


def to_json(plan: Plan) -> bytes:
    """The content of the node of a small plan."""
    per_topic: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for item, consumer_id in plan.assignment.items():
        per_topic[item.topic][consumer_id].append(item.partition)
    topics = {
        topic: [given.id, {str(broker_id): count for broker_id, count in sorted(given.partitions.items())}]
        for topic, given in sorted(plan.inputs.topics.items())
    }
    members = {member: list(topics) for member, topics in sorted(plan.inputs.members.items())}
    document = {
        "generation": plan.generation,
        "strategy": plan.strategy,
        "inputs": {"members": members, "topics": topics},
        "assignment": per_topic,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def from_json(group: str, data: bytes) -> Plan:
    """Reads the content of the node of a small plan. Raises CorruptData."""
    what = f"the plan of group {group!r} in ZooKeeper"
    return read_document(what, data, _read, hint=_NEW_ONE)


def _read(document: dict[str, Any]) -> Plan:
    members = {member: texts(topics) for member, topics in fields(document["inputs"]["members"]).items()}
    topics = {
        topic: TopicInput(text(topic_id), _counts(partitions))
        for topic, (topic_id, partitions) in fields(document["inputs"]["topics"]).items()
    }
    assignment = {
        TopicPartition(topic, text(name)): consumer_id
        for topic, owners in fields(document["assignment"]).items()
        for consumer_id, names in fields(owners).items()
        for name in items(names)
    }
    if not {tp.topic for tp in assignment} <= topics.keys():
        raise ValueError("it assigns partitions of topics that it does not know")
    if not all(is_partition(tp.partition) for tp in assignment):
        raise ValueError("it assigns a name that is not a partition")
    return Plan(number(document["generation"]), text(document["strategy"]), PlanInputs(members, topics), assignment)


def _counts(partitions: Any) -> dict[int, int]:
    return {broker_number(name): number(count, 0, 1 << 20) for name, count in fields(partitions).items()}
