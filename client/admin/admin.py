"""The blocking Admin."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Coroutine
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from metamq.client.admin.admin_core import AdminCore
from metamq.client.admin.admin_model import (
    BrokerDescription,
    BrokerReplicas,
    BrokerStatistics,
    GroupDescription,
    GroupExplanation,
    GroupSummary,
    OffsetReset,
    OpenBranches,
    PromotionPlan,
    RemovalPlan,
    ResetTo,
    TopicDescription,
    TopicSettings,
)
from metamq.client.background import background
from metamq.client.checks import not_picklable
from metamq.client.settings import zookeeper_root, zookeeper_servers
from metamq.errors import ClosedError, ForkedError
from metamq.wire.xa import Xid
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.partitions import TopicPartition

T = TypeVar("T")

WAIT_S = 30.0


class Admin:
    """Looks at and changes topics, groups and brokers. Thread-safe.

    zookeeper:  "host:port,host:port/chroot"; None takes $METAMQ_ZOOKEEPER, the TOML file, then 127.0.0.1:2181.
    root:       the znode that all is kept below; None takes $METAMQ_ROOT, the TOML file, then /meta.
    config:     a TOML file.

    All methods raise ConnectError while ZooKeeper is away (with `outcome` "unknown" when a change may have been made;
    look, then repeat), ClosedError after close(), ForkedError in a fork's child; and ConfigError for a name that is
    none. Ctrl-C ends a wait at once.
    """

    def __init__(self, zookeeper: str | None = None, *, config: str | None = None, root: str | None = None) -> None:
        self._core = AdminCore()
        self._closed = True
        self._background = background()
        servers, place = zookeeper_servers(zookeeper, config), zookeeper_root(root, config)
        self._background.run(self._core.open(servers, place))
        self._closed = False

    # Topics

    def create_topic(
        self,
        topic: str,
        partitions: int = 4,
        *,
        brokers: Collection[int] | None = None,
        exist_ok: bool = False,
        timeout_s: float = WAIT_S,
        **settings: Unpack[TopicSettings],
    ) -> TopicConfig:
        """Creates a topic and waits until it can be written to and read.

        `partitions` in all, spread evenly over the live brokers, or over `brokers` (broker ids). `settings`: flush,
        retention_ms, retention_bytes, cleanup, segment_bytes, max_message_bytes, min_insync, replication; see
        metamq.zk.cluster.topics.TopicConfig.

        With exist_ok=True a topic that exists is left as it is, whatever its partitions and settings; brokers that are
        down are not waited for.

        Raises TopicExists, ConfigError (a wrong setting, no live broker), Timeout after `timeout_s`: the topic exists
        then, and its brokers follow when they can.
        """
        return self._run(self._core.create_topic(topic, partitions, brokers, exist_ok, timeout_s, settings))

    def alter(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Collection[int] | None = None,
        timeout_s: float = WAIT_S,
        **settings: Unpack[TopicSettings],
    ) -> TopicConfig:
        """Changes the settings that are given, at run time, and leaves the others as they are.

        `partitions` is the new total; partitions are only ever added, to the live brokers or to `brokers`, and waited
        for. With more partitions most keys go to another one than before.

        Raises TopicNotFound, ConfigError, Timeout as create_topic does.
        """
        return self._run(self._core.alter(topic, partitions, brokers, timeout_s, settings))

    def delete(self, topic: str, *, timeout_s: float = WAIT_S) -> TopicConfig | None:
        """Deletes a topic with all its messages, waits until no broker offers it, and gives its last configuration.

        Also one whose configuration cannot be read: None then.

        Raises TopicNotFound, Timeout after `timeout_s`: it is deleted, and a broker that is down removes the data when
        it comes back.
        """
        return self._run(self._core.delete(topic, timeout_s))

    def topics(self) -> dict[str, TopicConfig]:
        """Every topic's configuration by name, in alphabetical order."""
        return self._run(self._core.topics())

    def describe_topic(self, topic: str) -> TopicDescription:
        """A topic's configuration, and offsets, size and broker of each partition. Raises TopicNotFound.

        Partitions that no broker serves at present are there too, with the reason.
        """
        return self._run(self._core.describe_topic(topic))

    # Groups

    def groups(self) -> dict[str, GroupSummary]:
        """Every consumer group by name, in alphabetical order, with and without members."""
        return self._run(self._core.groups())

    def describe_group(self, group: str) -> GroupDescription:
        """A group's members, and its committed offset, lag and owner in each partition.

        Raises ConfigError for a group that does not exist.
        """
        return self._run(self._core.describe_group(group))

    def explain_group(self, group: str) -> GroupExplanation:
        """Who is to have which partition and why, and where it is not so yet. Raises ConfigError as describe_group."""
        return self._run(self._core.explain_group(group))

    def reset_offsets(self, group: str, topic: str, to: ResetTo, *, dry_run: bool = False) -> tuple[OffsetReset, ...]:
        """Sets where a group goes on in a topic, and gives each partition's offset before and after.

        `to`: "earliest", "latest", an aware datetime (the first message at or after it, the end when there is none), an
        offset for every partition, or {TopicPartition: offset} for some. `dry_run` changes nothing.

        All offsets are found before the first is written. Raises ConfigError when the group does not exist or has
        members, who are named; TopicNotFound, PartitionNotFound, OffsetOutOfRange, ConnectError.
        """
        return self._run(self._core.reset_offsets(group, topic, to, dry_run))

    def evict(self, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
        """Puts a member out of its group though its session lives, and gives the partitions that others get now.

        For members that are stuck: what it did not commit is delivered to the next owners, and its own later commits
        are refused. A member that is well learns of it and raises ClosedError. Raises ConfigError when there is no
        such group or member.
        """
        return self._run(self._core.evict(group, consumer_id))

    def delete_group(self, group: str) -> None:
        """Removes a group, its committed offsets included. Raises ConfigError when there is none, or it has members."""
        self._run(self._core.delete_group(group))

    # Brokers

    def brokers(self) -> dict[int, BrokerDescription]:
        """Every broker by id, those that are down included."""
        return self._run(self._core.brokers())

    def statistics(self, broker_id: int) -> BrokerStatistics:
        """What a broker counts, and figures of its partitions. Raises ConfigError for an unknown one, ConnectError."""
        return self._run(self._core.statistics(broker_id))

    # The end

    def replicas(self) -> dict[int, BrokerReplicas]:
        """Every broker id's replicas: roles, addresses, who is in sync, and how far slaves are behind."""
        return self._run(self._core.replicas())

    def plan_promotion(self, broker_id: int, replica: int) -> PromotionPlan:
        """What promote() would do, and lose. Raises ConfigError when there is no such slave, ConnectError."""
        return self._run(self._core.plan_promotion(broker_id, replica))

    def promote(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> int:
        """Makes a slave the master of its broker id, without a restart; returns the new epoch.

        A living master hands over: nothing is lost, and it becomes a slave. A dead one is not waited for, and becomes
        one when it comes back. A slave that is not in sync is refused with Fenced, unless `accept_loss`: nothing is
        handed over to it, and what it lacks, see plan_promotion(), is lost. Raises ConfigError when there is no such
        slave, ConnectError, Timeout.
        """
        return self._run(self._core.promote(broker_id, replica, accept_loss))

    def plan_removal(self, broker_id: int, replica: int | None = None) -> RemovalPlan:
        """What remove_broker(), or remove_replica() with a replica, would do and lose. Raises as these do."""
        return self._run(self._core.plan_removal(broker_id, replica))

    def remove_broker(self, broker_id: int, *, accept_loss: bool = False) -> RemovalPlan:
        """Removes a broker id that is gone for good: its state, its partitions, and what groups committed in these.

        What was in its partitions is lost. Raises ConfigError when there is no such broker, when one of its replicas is
        registered, and when it has partitions, unless `accept_loss`. It may be repeated.
        """
        return self._run(self._core.remove(broker_id, None, accept_loss))

    def remove_replica(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> RemovalPlan:
        """Removes a slave that is gone for good: from the in-sync set, and as the last slave that its broker id had.

        Raises ConfigError when it is registered, the master, or not known; and when it is the only one that has all
        that was acknowledged, unless `accept_loss`.
        """
        return self._run(self._core.remove(broker_id, replica, accept_loss))

    def export_cluster(self) -> dict[str, Any]:
        """Everything that ZooKeeper holds of the cluster, for `metamq cluster restore`: to be written as JSON.

        What is there only while a process runs is left out; `changed_meanwhile` names what changed while it was read.
        """
        return self._run(self._core.export_cluster())

    # Transactions

    def transactions(self) -> OpenBranches:
        """The branches of transactions that are open at every broker, in whatever state, and who began them.

        Brokers that do not answer are named with the reason: what is open there is not known.
        """
        return self._run(self._core.transactions())

    def commit_branch(self, xid: Xid, broker_id: int) -> None:
        """Commits a prepared branch in the place of its transaction manager, which is told so when it asks.

        Its messages are seen from then on. What was decided is kept until the manager, or forget_branch(), forgets it.
        Raises BranchNotKnown, BranchMisuse when it is not prepared, HeuristicOutcome when somebody has decided before.
        """
        self._run(self._core.commit_branch(xid, broker_id))

    def rollback_branch(self, xid: Xid, broker_id: int) -> None:
        """Rolls back a branch in the place of its transaction manager, as commit_branch() commits one.

        Also one that is not prepared; of that nothing is kept. Raises as commit_branch().
        """
        self._run(self._core.rollback_branch(xid, broker_id))

    def forget_branch(self, xid: Xid, broker_id: int) -> None:
        """Drops what is kept of a decision. Raises BranchNotKnown when there is none of this branch."""
        self._run(self._core.forget_branch(xid, broker_id))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if isinstance(self._core.closed_by, ForkedError):  # the loop is the parent's: nothing would ever run there
            work.close()
            raise self._core.closed_by
        return self._background.run(work)

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def close(self) -> None:
        """Disconnects; further calls do nothing."""
        if not self._closed:
            self._closed = True
            if not isinstance(self._core.closed_by, ForkedError):
                self._background.run(self._core.close())

    def __enter__(self) -> Self:
        if self._core.closed_by is not None:
            raise self._core.closed_by
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or isinstance(self._core.closed_by, ForkedError | ClosedError):
            return
        warnings.warn("an Admin was not closed: use `with` or close()", ResourceWarning, source=self, stacklevel=2)
        core, loop = self._core, self._background.loop
        loop.call_soon_threadsafe(lambda: loop.create_task(core.close()))
