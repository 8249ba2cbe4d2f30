"""The figures of `metamq top`: rates of brokers, topics and groups from two samples, as tables or JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from metamq.cli.show.units import show_bytes

if TYPE_CHECKING:
    Pair = tuple["BrokerStatistics", "BrokerStatistics"]

    from metamq.client.admin.admin_model import BrokerDescription, BrokerStatistics, GroupDescription
    from metamq.zk.cluster.topics import TopicConfig

ORDERS = ("rate", "size", "name")
"""The columns to sort by. The size of a group is its lag."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a cluster at one moment. `statistics` has the brokers that answered, `problems` the reasons of the
    others. A group is None if its figures are not known."""

    at_s: float
    brokers: Mapping[int, BrokerDescription]
    topics: Mapping[str, TopicConfig]
    statistics: Mapping[int, BrokerStatistics]
    groups: Mapping[str, GroupDescription | None]
    problems: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class BrokerLoad:
    """One broker id. Rates are per second; None if they are not known."""

    broker_id: int
    address: str | None
    state: str
    messages_s: float | None = None
    bytes_in_s: float | None = None
    bytes_out_s: float | None = None
    partitions: int | None = None
    size_bytes: int | None = None
    status: str | None = None
    """The address of the master's status port."""


@dataclass(frozen=True, slots=True)
class TopicLoad:
    """One topic. Rates are over the brokers that answered; messages and size are None unless all of its brokers did."""

    topic: str
    partitions: int
    messages_s: float | None
    bytes_in_s: float | None
    messages: int | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One group. `done_s`: messages that it committed per second. The lag is None if one partition's is not known."""

    group: str
    members: int | None
    done_s: float | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """The figures between two samples, `seconds` apart."""

    seconds: float
    brokers: Sequence[BrokerLoad]
    topics: Sequence[TopicLoad]
    groups: Sequence[GroupLoad]

    def document(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        return asdict(self)


def figures(before: Sample, after: Sample) -> ClusterLoad:
    """Returns the figures; rates between the two samples."""
    pairs: dict[int, Pair] = {
        broker_id: (before.statistics[broker_id], now)
        for broker_id, now in after.statistics.items()
        if broker_id in before.statistics and _same_run(before.statistics[broker_id], now)
    }
    return ClusterLoad(
        round(after.at_s - before.at_s, 3),
        [_broker(one, after, pairs.get(one.broker_id)) for one in after.brokers.values()],
        _topics(after, list(pairs.values())),
        [_group(name, one, before.groups.get(name), after.at_s - before.at_s) for name, one in after.groups.items()],
    )


def _same_run(before: BrokerStatistics, now: BrokerStatistics) -> bool:
    """Returns True if no restart set the counters to 0 in between."""
    same = (before.epoch, before.replica) == (now.epoch, now.replica)
    return same and before.time_ms < now.time_ms and before.bytes_out <= now.bytes_out


def _broker(one: BrokerDescription, after: Sample, pair: Pair | None) -> BrokerLoad:
    now = after.statistics.get(one.broker_id)
    if now is None:
        return BrokerLoad(one.broker_id, one.address, after.problems.get(one.broker_id, "down"))
    before = pair[0] if pair is not None else None
    return BrokerLoad(
        one.broker_id,
        one.address,
        f"refuses writes: {now.writes_refused}" if now.writes_refused else "live",
        _rise(before, now, lambda one: sum(one.messages_in.values())),
        _rise(before, now, lambda one: sum(one.bytes_in.values())),
        _rise(before, now, lambda one: one.bytes_out),
        len(now.partitions),
        sum(part.size_bytes for part in now.partitions),
        one.status,
    )


def _rise(
    before: BrokerStatistics | None, now: BrokerStatistics, counter: Callable[[BrokerStatistics], int]
) -> float | None:
    """Returns the rise of a counter per second."""
    if before is None:
        return None
    return round(max(counter(now) - counter(before), 0) * 1000 / (now.time_ms - before.time_ms), 3)


def _of_topic(counter: str, topic: str) -> Callable[[BrokerStatistics], int]:
    return lambda one: int(getattr(one, counter).get(topic, 0))


def _topics(after: Sample, pairs: Sequence[Pair]) -> list[TopicLoad]:
    messages_s: dict[str, float] = defaultdict(float)
    bytes_in_s: dict[str, float] = defaultdict(float)
    for before, now in pairs:
        for topic in {part.topic for part in now.partitions}:
            messages_s[topic] += _rise(before, now, _of_topic("messages_in", topic)) or 0
            bytes_in_s[topic] += _rise(before, now, _of_topic("bytes_in", topic)) or 0
    messages: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for one in after.statistics.values():
        for part in one.partitions:
            messages[part.topic] += part.stable_offset - part.start_offset
            sizes[part.topic] += part.size_bytes
    return [
        TopicLoad(
            name,
            sum(config.partitions.values()),
            messages_s.get(name),
            bytes_in_s.get(name),
            messages[name] if config.partitions.keys() <= after.statistics.keys() else None,
            sizes[name] if config.partitions.keys() <= after.statistics.keys() else None,
        )
        for name, config in after.topics.items()
    ]


def _group(name: str, now: GroupDescription | None, before: GroupDescription | None, seconds: float) -> GroupLoad:
    if now is None:
        return GroupLoad(name, None, None, None)
    rate = None
    if before is not None and seconds > 0:
        committed = {(part.topic, part.partition): part.committed for part in before.partitions}
        moved = [
            part.committed - was
            for part in now.partitions
            if part.committed is not None and (was := committed.get((part.topic, part.partition))) is not None
        ]
        rate = round(max(sum(moved), 0) / seconds, 3)
    return GroupLoad(name, len(now.members), rate, now.lag)


Rows = list[list[object]]
Section = tuple[str, list[str], Rows]


def ordered(found: ClusterLoad, order: str) -> ClusterLoad:
    """Returns the figures with topics and groups in this order."""
    by_topic: dict[str, Callable[[TopicLoad], Any]] = {
        "rate": lambda one: (-(one.messages_s or 0), one.topic),
        "size": lambda one: (-(one.size_bytes or 0), one.topic),
        "name": lambda one: one.topic,
    }
    by_group: dict[str, Callable[[GroupLoad], Any]] = {
        "rate": lambda one: (-(one.done_s or 0), one.group),
        "size": lambda one: (-(one.lag or 0), one.group),
        "name": lambda one: one.group,
    }
    topics, groups = sorted(found.topics, key=by_topic[order]), sorted(found.groups, key=by_group[order])
    return replace(found, topics=topics, groups=groups)


def sections(found: ClusterLoad, order: str) -> list[Section]:
    """Returns the name, the headings and the sorted rows of each section: brokers, topics, groups."""
    found = ordered(found, order)
    return [
        (
            "brokers",
            ["BROKER", "ADDRESS", "MSG/S", "IN/S", "OUT/S", "PARTS", "SIZE", "STATE"],
            [
                [
                    str(one.broker_id), one.address, _rate(one.messages_s), _bytes(one.bytes_in_s),
                    _bytes(one.bytes_out_s), one.partitions, _bytes(one.size_bytes), one.state,
                ]
                for one in found.brokers
            ],
        ),
        (
            "topics",
            ["TOPIC", "PARTS", "MSG/S", "IN/S", "MESSAGES", "SIZE"],
            [
                [
                    one.topic, one.partitions, _rate(one.messages_s), _bytes(one.bytes_in_s),
                    one.messages, _bytes(one.size_bytes),
                ]
                for one in found.topics
            ],
        ),
        (
            "groups",
            ["GROUP", "MEMBERS", "DONE/S", "LAG"],
            [
                [one.group, one.members, _rate(one.done_s), one.lag]
                for one in found.groups
            ],
        ),
    ]  # fmt: skip


def _rate(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _bytes(size: float | None) -> str | None:
    return None if size is None else show_bytes(round(size))
