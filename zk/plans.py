"""A group's plan: one node that says who gets what, from which inputs, and with which generation.

Anyone computes it, the first to store it wins by compare-and-set, and all follow what stands in the node. So there is
one plan, made from one set of inputs, even while members see members and topics change at different moments.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.zk.documents import broker_number, fields, items, number, passing_over, read_document, text, texts
from metamq.zk.errors import BadVersion, NodeExists, NoNode
from metamq.zk.names import is_partition
from metamq.zk.partitions import TopicPartition, configured_partitions

if TYPE_CHECKING:
    from metamq.zk.session import Session

Watcher = Callable[[], None]

PLAN_BYTES_MAX = 1_000_000
"""ZooKeeper refuses nodes of 1 MiB, and breaks the connection of who tries."""


@dataclass(frozen=True, slots=True)
class TopicInput:
    """What a plan needs to know of a topic: its id and the partitions configured per broker id."""

    id: str
    partitions: Mapping[int, int]

    @property
    def partition_names(self) -> list[str]:
        """Every partition's name, in numeric order."""
        return configured_partitions(self.partitions)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan depends on besides the plan before: consumer id -> topics (sorted), topic -> its configuration."""

    members: Mapping[str, tuple[str, ...]]
    topics: Mapping[str, TopicInput]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who gets what. `generation` grows by one with each plan of the group."""

    generation: int
    strategy: str
    inputs: PlanInputs
    assignment: Mapping[TopicPartition, str]


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan and the version of its node; None where nobody can read what stands there: it is to be replaced."""

    plan: Plan | None
    version: int


async def read_plan(session: Session, group: str, watch: Watcher | None = None) -> StoredPlan | None:
    """The group's plan, None before its first; `watch` is called once there is another."""
    node = await session.get_or_none(session.paths.plan(group), watch=watch)
    if node is None:
        return None
    with passing_over(f"group {group}: its plan is made anew"):
        return StoredPlan(from_json(group, node.data), node.version)
    return StoredPlan(None, node.version)


async def store_plan(session: Session, group: str, plan: Plan, before: StoredPlan | None) -> bool:
    """Store `plan` if `before` is still the group's plan; False when somebody else was faster.

    Raises ConfigError when the plan is too large for a node, ConnectionLost (it may be stored: read).
    """
    data = to_json(plan)
    if len(data) > PLAN_BYTES_MAX:
        raise ConfigError(
            f"the plan of group {group!r} takes {len(data):,} bytes, ZooKeeper holds {PLAN_BYTES_MAX:,}",
            hint="Split the group: fewer topics, partitions or members in each.",
        )
    path = session.paths.plan(group)
    try:
        if before is None:
            await session.create(path, data, makepath=True)
        else:
            await session.set(path, data, before.version)
    except (BadVersion, NodeExists, NoNode):
        return False
    return True


def to_json(plan: Plan) -> bytes:
    """What the plan's node holds."""
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
    """Read what a plan's node holds. Raises CorruptData."""
    what = f"the plan of group {group!r} in ZooKeeper"
    return read_document(what, data, _read, hint="Its members make a new one.")


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
        raise ValueError("it assigns what is no partition")
    return Plan(number(document["generation"]), text(document["strategy"]), PlanInputs(members, topics), assignment)


def _counts(partitions: Any) -> dict[int, int]:
    return {broker_number(name): number(count, 0, 1 << 20) for name, count in fields(partitions).items()}
