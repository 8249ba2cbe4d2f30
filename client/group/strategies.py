"""The distribution of partitions: pure functions of (previous plan, members with subscriptions, configured partitions).

    range            each member gets one contiguous run of each topic, in order of member id; Metamorphosis' default.
                     If runs of a topic differ by one, the members get the longer ones in turn, topic by topic: so
                     topics with one partition are spread, too.
    round_robin      all partitions are dealt one by one to the members in order of id.
    consistent_hash  each partition goes to the next point clockwise on a ring of 160 points per member: uneven, but a
                     member that joins or leaves moves no partition between the others.
    sticky           members get equally many partitions, or one more; a partition moves only if that requires it.

The result depends only on values, never on their order: members with the same inputs get the same plan. Partitions are
ordered by number, so 0-10 comes after 0-2. Members of one group may subscribe to different topics. A partition goes
only to subscribers of its topic, and to no member if there are none.
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from metamq.errors import ConfigError
from metamq.words import count
from metamq.zk.partitions import TopicPartition, partition_order

VIRTUAL_NODES = 160

Members = Mapping[str, Collection[str]]
Partitions = Mapping[str, Sequence[str]]
Assignment = Mapping[TopicPartition, str]


def check_strategy(strategy: str) -> str:
    """Returns the name. Raises ConfigError with the existing names if there is no such strategy."""
    if strategy not in STRATEGIES:
        near = difflib.get_close_matches(str(strategy), STRATEGIES)
        suggestion = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"there is no rebalance strategy {strategy!r}", hint=f"There are {', '.join(STRATEGIES)}.{suggestion}"
        )
    return strategy


def plan(previous: Assignment, members: Members, partitions: Partitions, strategy: str) -> dict[TopicPartition, str]:
    """Assigns every partition that has subscribers to exactly one of them.

    `members`: consumer id -> topics; `partitions`: topic -> partition names; `previous`: the previous assignment, which
    only "sticky" uses. Raises ConfigError for a strategy that does not exist.
    """
    assign = STRATEGIES[check_strategy(strategy)]
    subscriptions = {member: frozenset(members[member]) for member in sorted(members)}
    wanted = frozenset().union(*subscriptions.values())
    ordered = sorted(
        (TopicPartition(topic, name) for topic in wanted & partitions.keys() for name in partitions[topic]),
        key=partition_order,
    )
    assignment = assign(previous, subscriptions, ordered)
    return {item: assignment[item] for item in ordered}


Subscriptions = Mapping[str, frozenset[str]]
"""Consumer id -> topics, in order of id."""


def _subscribers(subscriptions: Subscriptions) -> dict[str, list[str]]:
    by_topic: dict[str, list[str]] = defaultdict(list)
    for member, topics in subscriptions.items():
        for topic in topics:
            by_topic[topic].append(member)
    return by_topic


def _range(
    previous: Assignment, subscriptions: Subscriptions, ordered: Sequence[TopicPartition]
) -> dict[TopicPartition, str]:
    by_topic: dict[str, list[TopicPartition]] = defaultdict(list)
    for item in ordered:
        by_topic[item.topic].append(item)
    subscribers = _subscribers(subscriptions)
    turns: dict[tuple[str, ...], int] = defaultdict(int)
    assignment = {}
    for topic, items in by_topic.items():
        members = subscribers[topic]
        size, rest = divmod(len(items), len(members))
        first = turns[tuple(members)]
        turns[tuple(members)] += rest
        start = 0
        for index, member in enumerate(members):
            end = start + size + ((index - first) % len(members) < rest)
            assignment.update(dict.fromkeys(items[start:end], member))
            start = end
    return assignment


def _round_robin(
    previous: Assignment, subscriptions: Subscriptions, ordered: Sequence[TopicPartition]
) -> dict[TopicPartition, str]:
    members = list(subscriptions)
    assignment = {}
    turn = 0
    for item in ordered:
        while item.topic not in subscriptions[members[turn % len(members)]]:
            turn += 1
        assignment[item] = members[turn % len(members)]
        turn += 1
    return assignment


def _consistent_hash(
    previous: Assignment, subscriptions: Subscriptions, ordered: Sequence[TopicPartition]
) -> dict[TopicPartition, str]:
    subscribers = _subscribers(subscriptions)
    rings: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    assignment = {}
    for item in ordered:
        members = tuple(subscribers[item.topic])
        if members not in rings:
            rings[members] = sorted(point for member in members for point in _points(member))
        ring = rings[members]
        place = bisect.bisect_left(ring, (_hash(str(item)), ""))
        assignment[item] = ring[place % len(ring)][1]
    return assignment


def _points(member: str) -> list[tuple[int, str]]:
    return [(_hash(f"{member}#{index}"), member) for index in range(VIRTUAL_NODES)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _sticky(
    previous: Assignment, subscriptions: Subscriptions, ordered: Sequence[TopicPartition]
) -> dict[TopicPartition, str]:
    holdings = _Holdings(subscriptions)
    free = []
    for item in ordered:
        owner = previous.get(item, "")
        if item.topic in subscriptions.get(owner, ()):
            holdings.give(item, owner)
        else:
            free.append(item)
    subscribers = _subscribers(subscriptions)
    # Partitions with few candidates first: the others can even out the loads afterwards.
    for item in sorted(free, key=lambda item: len(subscribers[item.topic])):
        holdings.give(item, min(subscribers[item.topic], key=holdings.load))
    # With equal subscriptions each step takes from a member above its share for one below, so no step is wasted.
    while holdings.even_out():
        pass
    return holdings.assignment()


class _Holdings:
    """The holdings of the members while the sticky plan is made."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._loads = dict.fromkeys(subscriptions, 0)
        self._held: dict[str, dict[str, list[TopicPartition]]] = {
            member: {topic: [] for topic in sorted(topics)} for member, topics in subscriptions.items()
        }

    def load(self, member: str) -> tuple[int, str]:
        return self._loads[member], member

    def give(self, item: TopicPartition, member: str) -> None:
        self._held[member][item.topic].append(item)
        self._loads[member] += 1

    def even_out(self) -> bool:
        """Moves one partition from a member to another with at least two fewer. Returns False if none can be moved."""
        by_load = sorted(self._loads, key=self.load)
        for giver in reversed(by_load):
            for taker in by_load:
                if self._loads[giver] - self._loads[taker] < 2:
                    break
                item = self._take_shared(giver, taker)
                if item is not None:
                    self.give(item, taker)
                    return True
        return False

    def _take_shared(self, giver: str, taker: str) -> TopicPartition | None:
        shared = [topic for topic, items in self._held[giver].items() if items and topic in self._subscriptions[taker]]
        if not shared:
            return None
        self._loads[giver] -= 1
        fullest = max(shared, key=lambda topic: len(self._held[giver][topic]))
        return self._held[giver][fullest].pop()

    def assignment(self) -> dict[TopicPartition, str]:
        return {item: member for member, topics in self._held.items() for items in topics.values() for item in items}


_Strategy = Callable[[Assignment, Subscriptions, Sequence[TopicPartition]], dict[TopicPartition, str]]

STRATEGIES: dict[str, _Strategy] = {
    "range": _range,
    "round_robin": _round_robin,
    "consistent_hash": _consistent_hash,
    "sticky": _sticky,
}

_REASONS = {
    "range": "each topic is cut into contiguous runs, one per subscriber in order of id; longer ones are given in turn",
    "round_robin": "all partitions, in order, go to one member after another that subscribes to the topic",
    "consistent_hash": f"each partition goes to the next point on a ring of {VIRTUAL_NODES} points per subscriber",
    "sticky": "owners keep their partitions; a member with two more than another one gives one, until there is none",
}


def explain(members: Members, partitions: Partitions, strategy: str, assignment: Assignment) -> str:
    """Describes a plan: its inputs, its rule, and the partitions of each member with the reason. Several lines."""
    lines = [f"Strategy {strategy}: {_REASONS[check_strategy(strategy)]}.", "", "Topics"]
    for topic in sorted(partitions):
        readers = sum(topic in topics for topics in members.values())
        lines.append(f"  {topic}: {count(len(partitions[topic]), 'partition')}, {count(readers, 'subscriber')}")
    lines += ["", "Members"]
    for member in sorted(members):
        mine = sorted((item for item, owner in assignment.items() if owner == member), key=partition_order)
        why = "" if mine else _why_none(member, members, sticky_helps(member, assignment, members, partitions))
        lines.append(f"  {member}: {count(len(mine), 'partition')}{why}")
        by_topic: dict[str, list[str]] = defaultdict(list)
        for item in mine:
            by_topic[item.topic].append(item.partition)
        lines += [f"    {topic}: {' '.join(names)}" for topic, names in by_topic.items()]
    orphans = [topic for topic in sorted(partitions) if not any(topic in topics for topics in members.values())]
    if orphans:
        lines += ["", f"Read by no member: {', '.join(orphans)}"]
    return "\n".join(lines)


def _why_none(member: str, members: Members, sticky_gives_some: bool) -> str:
    if not members[member]:
        return ", it subscribes to no topic"
    if sticky_gives_some:
        return ", strategy 'sticky' would give it some"
    return ", its topics have no partition that falls to it; more members than partitions leave some without"


def sticky_helps(member: str, assignment: Assignment, members: Members, partitions: Partitions) -> bool:
    """Returns True if strategy "sticky" would give partitions to a member that has none now."""
    return member in plan(assignment, members, partitions, "sticky").values()
