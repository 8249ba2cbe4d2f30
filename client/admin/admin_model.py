"""The results of Admin: plain, frozen values. Times are in milliseconds since 1970 unless stated otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, TypedDict

from metamq.client.net.branches import BranchDescription
from metamq.errors import MetamqError
from metamq.zk.cluster.topics import Flush, TopicConfig
from metamq.zk.partitions import TopicPartition

Place = Literal["earliest", "latest"] | datetime | int
"""A place in a partition: an end of the log, the first message at or after an aware time, or an offset."""
ResetTo = Place | Mapping[TopicPartition, Place]
"""The target of `reset_offsets`: a place in every partition, or one for each of some partitions."""
TrimPlace = Literal["latest"] | datetime | int
TrimBefore = TrimPlace | Mapping[TopicPartition, TrimPlace]


class TopicSettings(TypedDict, total=False):
    """A topic's settings; metamq.types.TopicConfig describes them."""

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
    """The unfinished branches of transactions. `problems`: broker id -> the reason that it did not answer."""

    branches: tuple[BranchDescription, ...]
    problems: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """One partition. Figures are None while its broker does not answer for it; then `error` is the reason.

    `address` is the address of its master, None while none is registered. Messages with the offsets `start_offset` to
    `stable_offset` (exclusive) can be read. `size_bytes` is the size on disk, `last_append_us` the time of the last
    append in microseconds since 1970; 0 if nothing was ever appended.
    """

    partition: str
    broker_id: int
    address: str | None
    start_offset: int | None = None
    stable_offset: int | None = None
    size_bytes: int | None = None
    error: MetamqError | None = None
    last_append_us: int | None = None

    @property
    def problem(self) -> str:
        """The reason that its broker does not answer for it, or ""."""
        return "" if self.error is None else self.error.problem

    @property
    def live(self) -> bool:
        """True if its broker serves it."""
        return self.stable_offset is not None

    @property
    def messages(self) -> int | None:
        """The number of messages that can be read."""
        if self.stable_offset is None or self.start_offset is None:
            return None
        return self.stable_offset - self.start_offset


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic: its configuration, and the state of its partitions, in numeric order.

    `in_sync`: broker id -> its number of replicas in sync. If that is below the topic's `min_insync`, the broker
    refuses writes.
    """

    config: TopicConfig
    partitions: tuple[PartitionDescription, ...]
    in_sync: Mapping[int, int]

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.config.topic

    @property
    def messages(self) -> int | None:
        """The number of messages that can be read, in the partitions that are live; None if none is live."""
        known = [partition.messages for partition in self.partitions if partition.messages is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A summary of a consumer group. `topics`: those its members subscribe to, and those it has offsets for.

    `owner`: the user or certificate that the group belongs to; None: each client of ZooKeeper may change it.
    """

    group: str
    members: tuple[str, ...]
    topics: tuple[str, ...]
    strategy: str | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group. `partitions` are those that it owns at this moment, empty if there are none.

    `progress_age_ms`: milliseconds since it last finished a message, or had none to process, by its own report. Members
    report every 10 s, so only a much higher age means that a member is stuck. `idle_reason`: the reason that the plan
    gives it no partition, or "".
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
    """A group's offset in one partition. None: nothing is committed, there is no owner, or the broker does not answer.

    `committed` is the next offset to read. `end` is the end of the readable messages. `problem` describes a problem.
    `kept_by` names the storage of the group's offsets if that is not ZooKeeper, as "DatabaseOffsets"; the offsets in it
    are visible only to describe_group(offsets=...). Without it, `progress` is the offset after the messages that are
    done, which the owner publishes every few seconds; the database may have a lower one.
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
        """The number of messages between the group's offset and the end; None if either is unknown.

        An owner without a committed offset has started at the log's start: with another start it commits that first.
        For a partition without an owner, the start of the next owner is unknown, unless the log is empty.
        """
        if self.end is None or self.start is None:
            return None
        place = self.committed if self.progress is None else self.progress
        if place is not None:
            return max(self.end - max(place, self.start), 0)
        is_known = (self.owner is not None and not self.kept_by) or self.end == self.start
        return self.end - self.start if is_known else None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group: its members by id, its partitions in numeric order. `plan_generation`: None before its first plan.

    `owner`: see GroupSummary.
    """

    group: str
    strategy: str | None
    plan_generation: int | None
    members: tuple[MemberDescription, ...]
    partitions: tuple[GroupPartition, ...]
    owner: str | None

    @property
    def lag(self) -> int | None:
        """The lag of all partitions; None if the lag of one is unknown."""
        lags = [partition.lag for partition in self.partitions]
        known = [lag for lag in lags if lag is not None]
        return sum(known) if len(known) == len(lags) else None


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """The current plan: the planned owner of each partition, and its present owner. `text`, or `str()`, explains it."""

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
    """The effect of reset_offsets on one partition: the committed offset before (None: none) and after."""

    topic: str
    partition: str
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class PartitionTrim:
    """The effect of trim() on one partition. It began at the offset `begin_before`, and begins at `begin`.

    `messages` were deleted, or will be, with about `bytes` on each replica's disk; None if that is not known.
    `kept_on_disk`: messages before `begin` that no reader gets, but that share a batch with it. The disk keeps them
    until this batch goes; None in a dry run.
    """

    topic: str
    partition: str
    begin_before: int
    begin: int
    messages: int
    bytes: int | None
    kept_on_disk: int | None = None


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """The effect of delete_offsets or copy_offsets on one partition: the committed offset before and after.

    None: nothing is committed.
    """

    topic: str
    partition: str
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker id. `live`: its master is registered in ZooKeeper; otherwise address, replica and version are None.

    `epoch` is the number of its last master's epoch; a restart begins a new epoch, too.
    """

    broker_id: int
    epoch: int
    live: bool
    host: str | None = None
    port: int | None = None
    replica: int | None = None
    version: str | None = None
    status: str | None = None
    """The address of its status port, as "http://host:8120"; None if it is not known."""

    @property
    def address(self) -> str | None:
        """The "host:port", None if it is not live."""
        return f"{self.host}:{self.port}" if self.live else None


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """One replica of a broker id. `address` is None while it is not registered.

    `role` is "master", "slave", or "waiting": a former master that may lack messages that others hold. `stage`: its
    state at the master with regard to the in-sync set. The lags behind the master are None for the master itself and
    for a slave without a link to it. So is `copying`, the number of its partitions that are not yet up to date with the
    master's appends. `problem`: the reason that it does not answer, waits, or stores nothing. A `learner` is a slave
    that is never in sync. `damaged_count`, of a master: the number of its partitions with damaged logs; `damaged`
    describes the first of them. `refused`, at the master: logs of slaves that are not replicated, because they have
    data that the master lacks.
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
    silent_s: float | None = None
    """Seconds since a slave last heard a master that does not answer; None if it answers, or no slave knows."""
    catch_up_s: float | None = None
    """The least seconds until a slave that is not in sync has all data: at its speed of the last second, if no messages
    are added."""
    status: str | None = None
    """The address of its status port, as "http://host:8120"; None if it is not known."""

    @property
    def state(self) -> str:
        """The state: "down" while it is not registered, "silent" for a registered master that does not answer,
        "catching up" for a slave that copies data, else "up"."""
        if self.address is None:
            return "down"
        if self.problem and self.role == "master":
            return "silent"
        return "catching up" if self.role == "slave" and not self.in_sync and self.copying else "up"

    @property
    def holds_all(self) -> bool:
        """True if it is in sync and runs: as the master, which answers, or as a slave that follows it in all
        partitions.

        A replica that was just killed stays in sync, and registered, until that is noticed. A master that handed over
        is in sync before its logs are verified.
        """
        if not self.in_sync or self.address is None or self.problem:
            return False
        return self.role == "master" or self.copying == 0


@dataclass(frozen=True, slots=True)
class BrokerReplicas:
    """A broker id and its replicas. `generation` rises when messages that readers saw may have been lost.

    `taken_back`: the reason that ZooKeeper's state is older than its replicas' knowledge, or "". While there is a
    reason, no replica counts as in sync.

    `failover` is "auto", "manual", "paused", or "unknown" if its node in ZooKeeper cannot be read. `successor`: the
    replica that would take over by itself if the master ended now, or None; then `no_successor` is the reason. If the
    master does not answer, `successor_waits` is the reason why the successor waits; "" if it does not wait or answer.
    """

    broker_id: int
    epoch: int
    generation: int
    replicas: tuple[ReplicaDescription, ...]
    taken_back: str = ""
    failover: str = "manual"
    successor: int | None = None
    no_successor: str = ""
    successor_waits: str = ""


@dataclass(frozen=True, slots=True)
class MasterPlace:
    """The master that a broker id has, and the one that it should have. They are the same if it does not move."""

    broker_id: int
    former: int
    former_host: str
    replica: int
    host: str

    @property
    def moves(self) -> bool:
        """True if another replica should be the master."""
        return self.replica != self.former


@dataclass(frozen=True, slots=True)
class PromotionPlan:
    """The effects of a promotion. `lost`: messages by topic that the slave lacks; None if that cannot be known.

    `master` is `replica` itself if `replica` is the former master, which waits. `in_sync_and_down`: other replicas,
    whose folders hold all acknowledged messages. If `lost` is None, `unknown` is the reason, and `promote_instead` is
    the replica that has all acknowledged messages, and may be down; None if it is not known, or there is none.
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
    """The effects of the removal of a replica, or of a whole broker id (`replica` is None).

    `in_sync`: the replica is removed from the in-sync set. `forgets_slaves`: the broker id has no slaves any more.
    `partitions`: topic -> the number of its partitions that are removed with the broker id; `emptied`: topics that have
    no others and are removed, too. `offsets`: the number of removed committed offsets of groups. `loss` describes the
    loss; "" means none.
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
        """The name of the removed broker or replica, for messages."""
        broker = f"broker {self.broker_id}"
        return broker if self.replica is None else f"replica {self.replica} of {broker}"


@dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One partition of a broker. `last_append_us`: microseconds since 1970, 0 if nothing was ever appended."""

    topic: str
    partition: str
    start_offset: int
    stable_offset: int
    end_offset: int
    size_bytes: int
    last_append_us: int


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """A broker's counters since its start; a mapping has them per topic. `time_ms` is the broker's clock."""

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
    """The number of the incarnation. It rises when the replica may lack messages that it acknowledged."""
    partitions: tuple[PartitionStatistics, ...]
    delayed: int = 0
    """Delayed messages that wait at this master."""
    next_delayed_us: int = 0
    """The time at which the next of them is due, in microseconds since 1970; 0 if it is not known."""


class TokenDescription(NamedTuple):
    """A token that gives others a part of a principal's rights, for example tasks of Spark."""

    principal: str
    token_id: str
    rights: tuple[tuple[str, str], ...]
    """(right, topic). The topic "*" is all topics on which the principal has the right."""
    expires_ms: int
    """Milliseconds since 1970."""
