"""The sizes of a cluster for a workload, and the use of each limit: pure functions of the workload and MEASURES.

The model, for one broker id, whose master uses one core:

    processor     requests × (request_us + groups × answer_us)
                  + bytes × (produce + groups × consume + slaves × replicate)
    memory        broker_mb + partitions × partition_kb + connections × connection_kb
    disk          bytes a second × seconds of retention, and a quarter more

A cluster has as many broker ids as the processor and the partitions need, at half of their limits. Every client is a
process of its own, with a session and a connection to every broker id, so more clients need a higher `connections_max`,
not more broker ids. Clients in one process share their session. ZooKeeper has the nodes of docs/scaling.md, each
partition of each group with an owner and an offset. Every group reads all topics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from metamq.broker.config import BrokerConfig
from metamq.cli.sizing.measures import MEASURES
from metamq.zk.groups.plans import PLAN_BYTES_MAX
from metamq.zk.server.embedded import MEMORY_BYTES

FULL = 0.5
"""The part of a broker's limits that a cluster uses: the rest is for peaks, and for the end of a broker."""
DISK_RESERVE = 1.25
PATIENCE_S = 60.0
"""Seconds of all members' processors for one rebalance that an operator accepts: a choice, not a measure."""
DESCRIPTORS_MIN = 65_536
CONNECTIONS_MAX = BrokerConfig().connections_max
"""The default of the setting. It counts clients: slaves have connections of their own."""
OFFER_FOLDERS, FOLDERS_OF_GROUP, FOLDERS_OF_TOPIC_IN_GROUP, NODES_OF_BROKER = 2, 5, 2, 4


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload. `partitions`: of each topic; `rate`: messages a second of all topics; `size`: bytes of a message.

    `consumers` are the members of all groups together. `batch`: messages in a request of a producer. `keep_s`: seconds
    of retention. `commit_s`: seconds between two commits of a consumer.
    """

    topics: int
    partitions: int
    rate: float
    size: int
    producers: int
    consumers: int
    groups: int
    replicas: int
    keep_s: float
    batch: int
    commit_s: float

    def times(self, factor: int) -> Workload:
        """Returns this workload with so many times the topics, messages and clients."""
        more = {name: getattr(self, name) * factor for name in ("topics", "rate", "producers", "consumers")}
        return replace(self, **more)

    @property
    def all_partitions(self) -> int:
        """The number of partitions of all topics."""
        return self.topics * self.partitions

    @property
    def clients(self) -> int:
        """The number of producers and consumers."""
        return self.producers + self.consumers

    @property
    def bytes_per_s(self) -> float:
        """The written bytes a second."""
        return self.rate * self.size


@dataclass(frozen=True, slots=True)
class BrokerNeeds:
    """The needs of one broker process. `cores`: the part of a core that a master uses. Bytes, and bytes a second."""

    cores: float
    partitions: int
    connections: int
    connections_max: int
    """The setting: its default, or room for the clients twice."""
    descriptors: int
    memory_bytes: float
    disk_bytes: float
    written_bytes_per_s: float
    sent_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ZooKeeperNeeds:
    """The needs of one ZooKeeper server. `cores`: for commits and sessions. `plan_bytes`: the plan of a group."""

    nodes: int
    sessions: int
    memory_bytes: float
    commits_per_s: float
    cores: float
    plan_bytes: float


@dataclass(frozen=True, slots=True)
class LimitUse:
    """A limit and its use. `is_hard`: more is refused, or waits; otherwise it is the largest size that was measured."""

    what: str
    used: float
    limit: float
    is_hard: bool
    then: str

    @property
    def share(self) -> float:
        """The used part of the limit."""
        return self.used / self.limit


@dataclass(frozen=True, slots=True)
class SizedCluster:
    """The result. `processes` is the number of broker processes, `broker_ids` × replicas."""

    broker_ids: int
    processes: int
    reason: str
    broker: BrokerNeeds
    zookeeper: ZooKeeperNeeds
    client_memory_bytes: float
    limits: tuple[LimitUse, ...]

    @property
    def first(self) -> LimitUse:
        """The limit that the workload reaches first."""
        return next(one for one in self.limits if one.is_hard)

    @property
    def untried(self) -> list[LimitUse]:
        """The sizes that are larger than the measured ones."""
        return [one for one in self.limits if not one.is_hard and one.share > 1]


def measured(name: str) -> float:
    """Returns a measured figure."""
    return MEASURES[name].value


def sized(load: Workload) -> SizedCluster:
    """Returns the cluster for a workload; its limits with the most used one first."""
    by_reason = {
        "the processor": ceil(_processor_s(load) / FULL),
        "the partitions": ceil(load.all_partitions / (measured("partitions_tried") * FULL)),
    }
    reason = max(by_reason, key=lambda name: by_reason[name])
    broker_ids = max(*by_reason.values(), 1)
    broker, zookeeper = _broker(load, broker_ids), _zookeeper(load, broker_ids)
    memory_bytes = 1e3 * (load.consumers * measured("consumer_kb") + load.producers * measured("producer_kb"))
    limits = sorted(_limits(load, broker_ids, broker, zookeeper), key=lambda one: -one.share)
    return SizedCluster(
        broker_ids, broker_ids * load.replicas, reason, broker, zookeeper, memory_bytes, tuple(limits)
    )  # fmt: skip


def _processor_s(load: Workload) -> float:
    """The seconds of a processor that all masters need in each second."""
    request_us = measured("request_us") + load.groups * measured("answer_us")
    per_gb = measured("produce_s_per_gb") + load.groups * measured("consume_s_per_gb")
    per_gb += (load.replicas - 1) * measured("replicate_s_per_gb")
    return load.rate / load.batch * request_us / 1e6 + load.bytes_per_s / 1e9 * per_gb


def _broker(load: Workload, broker_ids: int) -> BrokerNeeds:
    partitions, connections = ceil(load.all_partitions / broker_ids), load.clients + load.replicas - 1
    connections_max = CONNECTIONS_MAX if load.clients <= CONNECTIONS_MAX else ceil(load.clients / FULL)
    memory_kb = measured("broker_mb") * 1e3 + partitions * measured("partition_kb")
    written = load.bytes_per_s / broker_ids
    return BrokerNeeds(
        cores=_processor_s(load) / broker_ids,
        partitions=partitions,
        connections=connections,
        connections_max=connections_max,
        descriptors=max(2 * connections_max, DESCRIPTORS_MIN),  # half of them are for log files
        memory_bytes=1e3 * (memory_kb + connections * measured("connection_kb")),
        disk_bytes=written * load.keep_s * DISK_RESERVE,
        written_bytes_per_s=written,
        sent_bytes_per_s=written * (load.groups + load.replicas - 1),
    )


def _zookeeper(load: Workload, broker_ids: int) -> ZooKeeperNeeds:
    offers = min(broker_ids, load.partitions) * (1 + load.replicas) + OFFER_FOLDERS + 1
    of_groups = load.groups * (2 * load.all_partitions + FOLDERS_OF_TOPIC_IN_GROUP * load.topics + FOLDERS_OF_GROUP)
    of_brokers = broker_ids * (load.replicas + NODES_OF_BROKER)
    nodes = load.topics * offers + of_groups + load.consumers + of_brokers
    # A partition without a new message has no new offset.
    commits = load.groups * min(load.all_partitions / load.commit_s, load.rate)
    members = ceil(load.consumers / load.groups) if load.groups else 0
    sessions = load.clients + broker_ids * load.replicas
    return ZooKeeperNeeds(
        nodes=nodes,
        sessions=sessions,
        memory_bytes=max(2 * nodes * measured("node_bytes"), MEMORY_BYTES),
        commits_per_s=commits,
        cores=commits * measured("commit_us") / 1e6 + sessions * measured("session_us") / 1e6,
        plan_bytes=load.all_partitions * measured("plan_bytes") if members else 0,
    )


def _limits(load: Workload, broker_ids: int, broker: BrokerNeeds, zookeeper: ZooKeeperNeeds) -> list[LimitUse]:
    members = ceil(load.consumers / load.groups) if load.groups else 0
    rebalance_s = members * load.all_partitions * measured("plan_read_us") / 1e6

    def tried(what: str, used: float, name: str, then: str) -> LimitUse:
        return LimitUse(what, used, measured(name), is_hard=False, then=then)

    more = "measure it first: ./dev bench --only scale"
    return [
        LimitUse("processor of a broker id, cores", broker.cores, 1, is_hard=True, then="more broker ids"),
        tried("partitions of a broker id", broker.partitions, "partitions_tried", "more broker ids"),
        LimitUse(
            "connections of clients, by the default of connections_max", load.clients, CONNECTIONS_MAX, is_hard=True,
            then=f"connections_max = {broker.connections_max}, or one client for all threads of a process",
        ),
        tried("connections of a broker id", broker.connections, "connections_tried", more),
        LimitUse(
            "processor of ZooKeeper, cores", zookeeper.cores, 1, is_hard=True,
            then="a longer commit_interval_ms, or several clusters",
        ),
        tried("nodes in ZooKeeper", zookeeper.nodes, "nodes_tried", "fewer groups, or several clusters"),
        LimitUse(
            "bytes of a group's plan", zookeeper.plan_bytes, PLAN_BYTES_MAX, is_hard=True,
            then="groups with fewer topics each",
        ),
        tried("members of a group", members, "members_tried", more),
        LimitUse(
            "members' processors for one new plan, s", rebalance_s, PATIENCE_S, is_hard=True,
            then="groups with fewer topics each",
        ),
        tried("broker ids", broker_ids, "broker_ids_tried", more),
        tried("sessions with ZooKeeper", zookeeper.sessions, "sessions_tried", "one client for a process"),
    ]  # fmt: skip
