"""What Admin answers with: plain, frozen values. Times are in milliseconds since 1970 unless they say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypedDict

from metamq.client.net.branches import BranchDescription
from metamq.zk.cluster.topics import Flush, TopicConfig
from metamq.zk.partitions import TopicPartition

ResetTo = Literal["earliest", "latest"] | datetime | int | Mapping[TopicPartition, int]
"""Where `reset_offsets` goes: an end of the log, the first message at or after an aware time, one offset for every
partition, or an offset for each of some partitions."""


class TopicSettings(TypedDict, total=False):
    """A topic's settings, as metamq.zk.cluster.topics.TopicConfig explains them."""

    flush: Flush
    retention_ms: int | None
    retention_bytes: int | None
    cleanup: Literal["delete", "archive"]
    segment_bytes: int
    max_message_bytes: int
    min_insync: int
    replication: Literal["async", "sync"]


@dataclass(frozen=True, slots=True)
class OpenBranches:
    """Branches of transactions that are not finished; `problems` says of broker ids why they could not be asked."""

    branches: tuple[BranchDescription, ...]
    problems: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """One partition. Figures are None while its broker does not answer for it; `problem` then says why.

    `address` is where its master listens, None while none is registered. Messages with the offsets `start_offset` to
    `stable_offset` (exclusive) can be read. `size_bytes` is on disk.
    """

    partition: str
    broker_id: int
    address: str | None
    start_offset: int | None = None
    stable_offset: int | None = None
    size_bytes: int | None = None
    problem: str = ""

    @property
    def live(self) -> bool:
        """Whether its broker serves it."""
        return self.stable_offset is not None

    @property
    def messages(self) -> int | None:
        """How many messages can be read."""
        if self.stable_offset is None or self.start_offset is None:
            return None
        return self.stable_offset - self.start_offset


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic: its configuration, and how its partitions are, in numeric order.

    `in_sync`: how many replicas of each broker id are. With fewer than the topic's `min_insync`, it refuses writes.
    """

    config: TopicConfig
    partitions: tuple[PartitionDescription, ...]
    in_sync: Mapping[int, int]

    @property
    def topic(self) -> str:
        """Its name."""
        return self.config.topic

    @property
    def messages(self) -> int:
        """Messages that can be read, in the partitions that are live."""
        return sum(partition.messages or 0 for partition in self.partitions)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A consumer group in few words. `topics`: those its members subscribe to, and those it has offsets for."""

    group: str
    members: tuple[str, ...]
    topics: tuple[str, ...]
    strategy: str | None


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group. `partitions` are those it owns at this moment, none for one that is left over.

    `progress_age_ms`: how long ago it last finished a message or found none, as it told; members tell every 10 s, so
    only an age well beyond that says that it is stuck. `idle_reason`: why the plan gives it no partition, empty if it
    gives it some.
    """

    consumer_id: str
    host: str
    pid: int
    version: str
    strategy: str
    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]
    since_ms: int
    progress_age_ms: int
    idle_reason: str


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """A group's place in one partition. None: nothing committed, nobody owns it, or the broker does not answer.

    `committed` is the next offset to read; `end` is the end of what can be read; `problem` says what is amiss.
    `kept_by` names what the group keeps its offset in where that is not ZooKeeper, as "DatabaseOffsets"; what is
    committed there is not seen here. `progress` is how far its owner last said to be then, every few seconds.
    """

    topic: str
    partition: str
    committed: int | None
    start: int | None
    end: int | None
    owner: str | None
    host: str | None
    problem: str = ""
    kept_by: str = ""
    progress: int | None = None

    @property
    def lag(self) -> int | None:
        """Messages between the group's place and the end; None where either is not known.

        An owner without a committed offset has begun at the log's start: one that begins elsewhere commits that first.
        Where nobody owns the partition, nobody knows where its next owner begins, unless the log is empty.
        """
        if self.end is None or self.start is None:
            return None
        place = self.progress if self.kept_by else self.committed
        if place is not None:
            return max(self.end - max(place, self.start), 0)
        is_known = (self.owner is not None and not self.kept_by) or self.end == self.start
        return self.end - self.start if is_known else None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group: its members by id, its partitions in numeric order. `plan_generation`: None before its first plan."""

    group: str
    strategy: str | None
    plan_generation: int | None
    members: tuple[MemberDescription, ...]
    partitions: tuple[GroupPartition, ...]

    @property
    def lag(self) -> int | None:
        """Of all partitions; None where that of one is not known."""
        lags = [partition.lag for partition in self.partitions]
        known = [lag for lag in lags if lag is not None]
        return sum(known) if len(known) == len(lags) else None


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """The plan that stands: who is to have what, and who has it. `text` tells it in words, as `str()` does."""

    group: str
    strategy: str
    generation: int
    members: Mapping[str, tuple[str, ...]]
    assignment: Mapping[TopicPartition, str]
    owners: Mapping[TopicPartition, str]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class OffsetReset:
    """What reset_offsets does to one partition: the committed offset before (None: nothing) and after."""

    topic: str
    partition: str
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker id. `live`: its master is registered in ZooKeeper; address, replica and version are None otherwise.

    `epoch` counts the terms of its masters, restarts included.
    """

    broker_id: int
    epoch: int
    live: bool
    host: str | None = None
    port: int | None = None
    replica: int | None = None
    version: str | None = None

    @property
    def address(self) -> str | None:
        """ "host:port", None when it is not live."""
        return f"{self.host}:{self.port}" if self.live else None


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """One replica of a broker id. `address` is None while it is not registered.

    `role` is "master", "slave", or "waiting": one that was the master, and may lack what others hold. `stage`: what it
    is to the in-sync set at its master. The lags, behind the master, are None for the master itself and for a slave
    without a link to it; so is `copying`, how many of its partitions are not yet up to what the master appends.
    `problem`: why it does not answer, waits, or stores nothing. A `learner` is a slave that is never in sync.
    `damaged_count`, of a master: its partitions whose logs are damaged; `damaged` describes the first of them.
    `refused`: at the master, logs of slaves that are not replicated, since they have what its own lack.
    """

    broker_id: int
    replica: int
    role: str
    address: str | None
    in_sync: bool
    version: str | None
    stage: str
    copying: int | None
    lag_messages: int | None
    lag_bytes: int | None
    lag_ms: int | None
    problem: str
    learner: bool
    damaged_count: int = 0
    damaged: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """ "up", "down" while it is not registered, "silent" for a master that is registered and does not answer."""
        if self.address is None:
            return "down"
        return "silent" if self.problem and self.role == "master" else "up"

    @property
    def holds_all(self) -> bool:
        """Whether it is in sync and runs: as the master, which answers, or as a slave with a link to it for all it has.

        One that was just killed stays in sync, and registered, until that is noticed; a master that handed over is in
        sync before it is seen whether its logs are whole.
        """
        if not self.in_sync or self.address is None or self.problem:
            return False
        return self.role == "master" or self.copying == 0


@dataclass(frozen=True, slots=True)
class BrokerReplicas:
    """A broker id and its replicas. `generation` rises when messages that readers saw may have been given up.

    `taken_back`: why ZooKeeper's state is older than what its replicas know; empty when it is not. Nobody counts as in
    sync then.
    """

    broker_id: int
    epoch: int
    generation: int
    replicas: tuple[ReplicaDescription, ...]
    taken_back: str = ""


@dataclass(frozen=True, slots=True)
class PromotionPlan:
    """What a promotion would do. `lost`: messages by topic that the slave lacks; None when that cannot be known.

    `master` is `replica` itself where that is the master of before, which waits. `in_sync_and_down`: other replicas,
    whose folders hold what was acknowledged. Where `lost` is None, `unknown` says why, and `promote_instead` is the
    replica that has what was acknowledged, and may be down; None where that is not known, or no other one has it.
    """

    broker_id: int
    replica: int
    master: int
    master_lives: bool
    in_sync: bool
    lost: Mapping[str, int] | None
    learner: bool
    in_sync_and_down: tuple[int, ...]
    unknown: str = ""
    promote_instead: int | None = None


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What the removal of a replica, or of a whole broker id (`replica` is None), would do.

    `in_sync`: the replica is taken out of the in-sync set. `forgets_slaves`: the broker id has no slaves any more.
    `partitions`: topic -> how many of its partitions go with the broker id; `emptied`: topics that have no other, and
    go, too. `offsets`: committed offsets of groups that are removed. `loss` says what is lost; empty: nothing.
    """

    broker_id: int
    replica: int | None
    in_sync: bool
    forgets_slaves: bool
    partitions: Mapping[str, int]
    emptied: tuple[str, ...]
    offsets: int
    loss: str

    @property
    def who(self) -> str:
        """What is removed, for people."""
        broker = f"broker {self.broker_id}"
        return broker if self.replica is None else f"replica {self.replica} of {broker}"


@dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One partition of a broker. `last_append_us`: microseconds since 1970, 0 when nothing was ever appended."""

    topic: str
    partition: str
    start_offset: int
    stable_offset: int
    end_offset: int
    size_bytes: int
    last_append_us: int


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """What a broker counts, since its start; per topic where it is a mapping. `time_ms` is the broker's clock."""

    broker_id: int
    epoch: int
    version: str
    time_ms: int
    writes_refused: str | None
    messages_in: Mapping[str, int]
    bytes_in: Mapping[str, int]
    batches_in: Mapping[str, int]
    bytes_out: int
    fetches: int
    repeats: int
    replica: int
    incarnation: int
    """Raised when the replica may lack what it acknowledged."""
    partitions: tuple[PartitionStatistics, ...]
