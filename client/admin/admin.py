"""The blocking Admin."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, Self, Unpack

from metamq.client.admin import (
    admin_brokers,
    admin_groups,
    admin_removal,
    admin_replicas,
    admin_schemas,
    admin_topics,
    admin_transactions,
    admin_users,
)
from metamq.client.admin.admin_core import WAIT_S, AdminCore, P, T, exported
from metamq.client.background import background
from metamq.client.checks import not_picklable
from metamq.client.settings import cluster_access
from metamq.security.quotas import Quota

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import (
        BrokerDescription,
        BrokerReplicas,
        BrokerStatistics,
        GroupDescription,
        GroupExplanation,
        GroupSummary,
        MasterPlace,
        OffsetChange,
        OffsetReset,
        OpenBranches,
        PartitionTrim,
        PromotionPlan,
        RemovalPlan,
        ResetTo,
        TokenDescription,
        TopicDescription,
        TopicSettings,
        TrimBefore,
    )
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.offsets.offsets_database import DatabaseOffsets
    from metamq.client.schemas.topic import Topic
    from metamq.security.config import SecurityConfig
    from metamq.security.rights import RightDecision, Rule
    from metamq.wire.xa import Xid
    from metamq.zk.cluster.failover import Failover
    from metamq.zk.cluster.schemas import Compatibility, Schema, TopicSchemas
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.partitions import TopicPartition


class Admin:
    """Reads and changes topics, groups and brokers. Thread-safe.

    zookeeper:  "host:port,host:port/chroot"; the default is $METAMQ_ZOOKEEPER, the TOML file, then 127.0.0.1:2181.
    root:       the root znode of metamq; the default is $METAMQ_ROOT, the TOML file, then /meta.
    config:     a TOML file.
    security:   the files for TLS; the default is [security] in the TOML file, $METAMQ_SECURITY_..., then none.

    All methods raise ConnectError if ZooKeeper cannot be reached. Its `outcome` is "unknown" if a change may have been
    made: check it, then repeat the call. They raise ClosedError after close(), ForkedError in a fork's child, and
    ConfigError for a wrong name. Timeouts are in seconds. Ctrl-C ends a wait at once.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
    ) -> None:
        self._core = AdminCore()
        self._closed = True
        self._background = background()
        self._background.run(self._core.open(cluster_access(zookeeper, root, config, security)))
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
        """Creates a topic and waits until it accepts and delivers messages.

        `partitions` is the total, spread evenly over the live brokers, or over `brokers` (broker ids). `settings`:
        flush, retention_ms, retention_bytes, cleanup, segment_bytes, max_message_bytes, min_insync, replication; see
        metamq.types.TopicConfig. A setting that is not given has the cluster's default, see
        set_topic_defaults().

        With exist_ok=True an existing topic stays unchanged, even if its partitions or settings differ, and the call
        does not wait for brokers that are down.

        Raises TopicExists, ConfigError (a wrong setting, no live broker), Timeout after `timeout_s`: then the topic
        exists, and its brokers follow when they can.
        """
        return self._call(admin_topics.create_topic, topic, partitions, brokers, exist_ok, timeout_s, settings)

    def topic_defaults(self) -> TopicSettings:
        """Returns the cluster's defaults for new topics; without a default, metamq's own applies."""
        return self._call(admin_topics.topic_defaults)

    def set_topic_defaults(self, **settings: Unpack[TopicSettings]) -> None:
        """Replaces the cluster's defaults for new topics. Existing topics do not change. Raises ConfigError.

        The call removes the defaults that it does not give. `settings` are those of create_topic().
        """
        self._call(admin_topics.set_topic_defaults, settings)

    def register_schema(
        self,
        topic: str | Topic[Any],
        schema: Schema | None = None,
        *,
        compatibility: Compatibility | None = None,
    ) -> int:
        """Registers the schema of a Topic, or `schema` for a topic's name. Returns its version: 1, 2, and so on.

        A schema that is registered already keeps its version. `compatibility` changes the rule of the topic, which is
        "backward" at first: readers with the new schema read the messages of every older version. "forward": readers
        with older schemas read new messages. "full": both. "none": any schema is accepted.

        Raises SchemaIncompatible, which names the field and its types, ConfigError (a wrong, recursive or too large
        schema), TopicNotFound.
        """
        return self._call(admin_schemas.register_schema, topic, schema, compatibility)

    def check_schema(self, topic: str | Topic[Any], schema: Schema | None = None) -> None:
        """Checks a schema as register_schema() does, and registers nothing. Raises its errors."""
        self._call(admin_schemas.check_schema, topic, schema)

    def load_schemas(self, topic: str | Topic[Any]) -> TopicSchemas:
        """Returns the registered schemas; `versions[0]` is version 1. Raises TopicNotFound.

        A Topic of Avro learns them, and can then read messages of all these versions.
        """
        return self._call(admin_schemas.load_schemas, topic)

    def alter(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Collection[int] | None = None,
        timeout_s: float = WAIT_S,
        **settings: Unpack[TopicSettings],
    ) -> TopicConfig:
        """Changes the given settings at run time. The others stay unchanged.

        `partitions` is the new total. Partitions are only added, to the live brokers or to `brokers`, and the call
        waits for them. After that most keys have another partition than before.

        Raises TopicNotFound, ConfigError, and Timeout as create_topic does.
        """
        return self._call(admin_topics.alter_topic, topic, partitions, brokers, timeout_s, settings)

    def delete(self, topic: str, *, timeout_s: float = WAIT_S) -> TopicConfig | None:
        """Deletes a topic with all its messages. Waits until no broker offers it, and returns its last configuration.

        Returns None for a topic whose configuration cannot be read.

        Raises TopicNotFound, and Timeout after `timeout_s`: then the topic is deleted, and a broker that is down
        removes the data when it comes back.
        """
        return self._call(admin_topics.delete_topic, topic, timeout_s)

    def trim(
        self, topic: str, before: TrimBefore, *, dry_run: bool = False, timeout_s: float = WAIT_S
    ) -> tuple[PartitionTrim, ...]:
        """Deletes the messages before an offset, at once, on every replica. Returns the effect on each partition.

        `before`: an offset, an aware datetime (the first message at or after it, or the end), or "latest": all
        messages. {TopicPartition: one of these} is for some partitions. `dry_run` changes nothing.

        Readers of a deleted message get OffsetOutOfRange, as after retention. The call waits until the messages are
        gone from the disk of each running replica. Others remove them when they start. Messages that share a batch with
        the first one that stays remain on the disk: see PartitionTrim. Nothing goes to the archive. May be repeated.

        Raises TopicNotFound, PartitionNotFound, ConnectError; OffsetOutOfRange beyond the end, ConfigError; Timeout
        after `timeout_s`: then the deletion is stored, and the replica that the error names carries it out later.
        NotAuthorized without the right alter on the topic; without describe on the cluster, but then it is stored.
        """
        return self._call(admin_removal.trim, topic, before, dry_run=dry_run, timeout_s=timeout_s)

    def topics(self) -> dict[str, TopicConfig]:
        """Returns every topic's configuration by name, in alphabetical order."""
        return self._call(admin_topics.all_topics)

    def describe_topic(self, topic: str) -> TopicDescription:
        """Returns a topic's configuration, and offsets, size and broker of each partition. Raises TopicNotFound.

        Partitions that no broker serves at present are included, with the reason.
        """
        return self._call(admin_topics.describe_topic, topic)

    def offsets(self, topic: str, at: ResetTo) -> dict[TopicPartition, int]:
        """Returns the offset of each partition at a place: "earliest", "latest", or an aware datetime.

        For a time it is that of the first message at or after it, or the end.

        Raises TopicNotFound, ConnectError.
        """
        return self._call(admin_groups.find_offsets, topic, at)

    # Groups

    def groups(self) -> dict[str, GroupSummary]:
        """Returns every consumer group by name, in alphabetical order, with and without members."""
        return self._call(admin_groups.all_groups)

    def describe_group(self, group: str, offsets: DatabaseOffsets | None = None) -> GroupDescription:
        """Returns a group's members, and its committed offset, lag and owner in each partition.

        `offsets`: the storage of a group that keeps its offsets in a database; without it they are unknown, and the
        lag is that of the progress that each owner reports. Raises ConfigError for a group that does not exist, or that
        keeps its offsets elsewhere; and MetamqError if the database refuses.
        """
        return self._call(admin_groups.describe_group, group, offsets)

    def explain_group(self, group: str) -> GroupExplanation:
        """Explains a group's plan, and the partitions that are not as planned. Raises ConfigError as describe_group."""
        return self._call(admin_groups.explain_group, group)

    def reset_offsets(
        self, group: str, topic: str, to: ResetTo, *, dry_run: bool = False, offsets: DatabaseOffsets | None = None
    ) -> tuple[OffsetReset, ...]:
        """Sets the offsets at which a group continues in a topic. Returns each partition's offset before and after.

        `to`: "earliest", "latest", an aware datetime (the first message at or after it, or the end), or an offset.
        {TopicPartition: one of these} is for some partitions. `dry_run` changes nothing. `offsets`: the storage of a
        group that keeps its offsets in a database, as its consumers have it. The call then waits until the last owner's
        open transaction ends. After an error some partitions may be set: repeat the call.

        All offsets are found before the first is written. Raises ConfigError if the group does not exist or has
        members, which it names; TopicNotFound, PartitionNotFound, OffsetOutOfRange, ConnectError.
        """
        return self._call(admin_groups.reset_offsets, group, topic, to, dry_run=dry_run, offsets=offsets)

    def delete_offsets(self, group: str, topic: str, *, dry_run: bool = False) -> tuple[OffsetChange, ...]:
        """Deletes a group's offsets in one topic, which may be gone. Returns each partition's offset before.

        The group may have members that read other topics. A member that starts meanwhile waits. `dry_run` changes
        nothing. After an error some offsets may be deleted: repeat the call. Raises ConfigError if there is no such
        group, if it has no offsets there or does not keep them in ZooKeeper, or if members read the topic or own its
        partitions; NotAuthorized, ConnectError.
        """
        return self._call(admin_groups.delete_offsets, group, topic, dry_run=dry_run)

    def copy_offsets(
        self,
        source: str,
        target: str,
        topics: Collection[str] | None = None,
        *,
        overwrite: bool = False,
        dry_run: bool = False,
    ) -> tuple[OffsetChange, ...]:
        """Copies the offsets of group `source` to group `target`, in `topics` or all topics. Returns the target's
        offsets before and after.

        `source` may have members; its offsets are those at the call. `target` is made if it does not exist. Offsets of
        its own are replaced only with `overwrite`. A member that starts meanwhile waits. `dry_run` changes nothing.
        After an error some offsets may be copied: repeat the call. Raises ConfigError if `source` has no offsets, if a
        group does not keep them in ZooKeeper, if members of `target` read the topics or own partitions of them, or if
        `target` has other offsets; TopicNotFound, NotAuthorized, ConnectError.
        """
        return self._call(admin_groups.copy_offsets, source, target, topics, overwrite=overwrite, dry_run=dry_run)

    def evict(self, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
        """Removes a member with a live session from its group. Returns the partitions that other members get now.

        Use it for a member that is stuck. The next owners receive its uncommitted messages, and its own later commits
        are refused. A member that still runs notices it and raises ClosedError. Raises ConfigError if there is no such
        group or member.
        """
        return self._call(admin_groups.evict, group, consumer_id)

    def set_group_owner(self, group: str, principal: str) -> list[str]:
        """Gives a group to the clients of another principal; "*": to all clients. Stop its members first.

        A group belongs to the principal that made it: other clients cannot join it, or change its offsets. Only an
        administrator can give it to a user without a certificate. Returns the paths of another client's nodes in the
        group, which only ZooKeeper's superuser can remove. Raises ConfigError if ZooKeeper does not know its clients,
        or if there is no such group; NotAuthorized.
        """
        return self._call(admin_groups.set_group_owner, group, principal)

    def delete_group(self, group: str) -> None:
        """Removes a group and its committed offsets. Raises ConfigError if it does not exist or has members."""
        self._call(admin_groups.delete_group, group)

    # Brokers

    def brokers(self) -> dict[int, BrokerDescription]:
        """Returns every broker by id, including those that are down."""
        return self._call(admin_brokers.describe_brokers)

    def statistics(self, broker_id: int) -> BrokerStatistics:
        """Returns a broker's counters and figures of its partitions. Raises ConfigError for an unknown id,
        ConnectError."""
        return self._call(admin_brokers.broker_statistics, broker_id)

    def replicas(self) -> dict[int, BrokerReplicas]:
        """Returns every broker id's replicas: roles, addresses, in-sync state, and the lags of the slaves."""
        return self._call(admin_replicas.describe_replicas)

    def plan_promotion(self, broker_id: int, replica: int) -> PromotionPlan:
        """Returns the effects of promote(), losses included. Raises ConfigError without such a slave, ConnectError."""
        return self._call(admin_replicas.plan_promotion, broker_id, replica)

    def promote(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> int:
        """Makes a slave the master of its broker id, without a restart. Returns the new epoch.

        A live master hands over: nothing is lost, and it becomes a slave. The call does not wait for a crashed master,
        which becomes a slave when it comes back. A slave that is not in sync is refused with Fenced. With `accept_loss`
        it becomes the master without a hand-over, and the messages that it lacks are lost, see plan_promotion(). Raises
        ConfigError if there is no such slave, ConnectError, Timeout.
        """
        return self._call(admin_replicas.promote, broker_id, replica, accept_loss)

    def failover(self, broker_id: int) -> Failover:
        """Returns the failover of a broker id: its mode, and the last switches. Raises ConfigError."""
        return self._call(admin_replicas.failover_of, broker_id)

    def set_failover(
        self, broker_id: int, *, mode: str | None = None, paused: bool | None = None, preferred: int | None = None
    ) -> Failover:
        """Changes the failover of a broker id, and returns it. An argument that is not given changes nothing.

        mode:       "auto": an in-sync slave takes over by itself. "manual": an operator promotes.
        paused:     True stops automatic switches for maintenance, False allows them again.
        preferred:  the replica that becomes the master again, by a hand-over, after it was in sync for its setting
                    `failover_return_ms` (2 minutes), if failover is auto and not paused; -1: none.

        Raises ConfigError for an unknown broker id or a wrong value.
        """
        return self._call(admin_replicas.set_failover, broker_id, mode, paused, preferred)

    def users(self) -> list[str]:
        """Returns the names of the users who log in by password, in order."""
        return self._call(admin_users.all_users)

    def set_user(self, name: str, password: str) -> None:
        """Adds a user, or changes its password. Open connections stay; new ones need the new password.

        Raises ConfigError for a wrong name, or a password of less than 8 characters.
        """
        self._call(admin_users.set_user, name, password)

    def remove_user(self, name: str) -> None:
        """Removes a user. Open connections stay. Raises ConfigError if there is no such user."""
        self._call(admin_users.remove_user, name)

    def rules(self) -> list[Rule]:
        """Returns the rules of rights, in order."""
        return self._call(admin_users.all_rules)

    def add_rules(self, effect: str, principal: str, right: str, *resources: str) -> list[Rule]:
        """Adds a rule for each resource, and returns these rules. They apply within a second, also to open connections.

        effect:     "allow" or "deny". A `deny` overrides any `allow`. Without a rule nothing is allowed.
        principal:  the name of a user or of a certificate; "*": all of them.
        right:      "read" or "write" of topics; "describe", "promote" or "recover" of the cluster.
        resources:  as "topic:orders", "topic:orders-*" or "cluster".

        Raises ConfigError, which names the wrong argument.
        """
        rules = admin_users.parsed_rules(effect, principal, right, resources)
        self._call(admin_users.add_rules, rules)
        return list(rules)

    def remove_rules(self, effect: str, principal: str, right: str, *resources: str) -> list[Rule]:
        """Removes the rule for each resource. Arguments as for add_rules(). Raises ConfigError if there is none."""
        rules = admin_users.parsed_rules(effect, principal, right, resources)
        self._call(admin_users.remove_rules, rules)
        return list(rules)

    def explain_right(self, principal: str, right: str, resource: str) -> RightDecision:
        """Decides by the present rules if the principal has the right, and names the rule. Raises ConfigError."""
        return self._call(admin_users.explain, principal, right, resource)

    def tokens(self) -> list[TokenDescription]:
        """Returns the tokens that programs have made for others, for example for their tasks of Spark."""
        return self._call(admin_users.all_tokens)

    def end_tokens(self, principal: str) -> int:
        """Ends all tokens of a principal, within a second. Returns their number. Raises ConfigError for a name that no
        principal can have. remove_user() and set_user() end the tokens of a user, too."""
        return self._call(admin_users.end_tokens, principal)

    def quotas(self) -> dict[str, Quota]:
        """Returns the quota of each principal that has one, by its name; "*" is the quota of the others."""
        return self._call(admin_users.all_quotas)

    def set_quota(self, principal: str, *, write_bytes_s: int = 0, read_bytes_s: int = 0, requests_s: int = 0) -> Quota:
        """Sets the limits of a principal at each broker, per second, and returns the quota. 0: no limit.

        It replaces the former quota of the principal, and applies within a second, also to open connections.
        `principal` is a user or a certificate; "*": each one without a quota of its own. Raises ConfigError.
        """
        quota = Quota(write_bytes_s, read_bytes_s, requests_s)
        self._call(admin_users.set_quota, principal, quota)
        return quota

    def remove_quota(self, principal: str) -> None:
        """Removes the quota of a principal. The quota of "*" then applies. Raises ConfigError if it has none."""
        self._call(admin_users.remove_quota, principal)

    def plan_balance(self) -> list[MasterPlace]:
        """Returns, for each broker id whose master answers, the replica that should be the master.

        Masters are spread over hosts as evenly as the replicas that are in sync allow, and few of them move.
        To carry it out, call set_failover(preferred=...) and promote() for each: `metamq ha balance` does so.
        """
        return self._call(admin_replicas.plan_balance)

    def plan_removal(self, broker_id: int, replica: int | None = None) -> RemovalPlan:
        """Returns the effects of remove_broker(), or of remove_replica() with a replica. Raises like these methods."""
        return self._call(admin_removal.plan_removal, broker_id, replica)

    def remove_broker(self, broker_id: int, *, accept_loss: bool = False) -> RemovalPlan:
        """Removes a broker id that is gone permanently: its state, its partitions, and the groups' offsets in them.

        The messages in its partitions are lost. Raises ConfigError if there is no such broker, if one of its replicas
        is registered, and if it has partitions, unless `accept_loss`. May be repeated.
        """
        return self._call(admin_removal.remove, broker_id, None, accept_loss)

    def remove_replica(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> RemovalPlan:
        """Removes a slave that is gone permanently: from the in-sync set, and as the last slave that its broker id had.

        Raises ConfigError if it is registered, the master, or unknown; and if it is the only replica that has all
        acknowledged messages, unless `accept_loss`.
        """
        return self._call(admin_removal.remove, broker_id, replica, accept_loss)

    def export_cluster(self) -> dict[str, Any]:
        """Returns all data of the cluster in ZooKeeper. Write it to a JSON file for `metamq cluster restore`.

        Data that exists only while a process runs is left out. `changed_meanwhile` names the data that changed during
        the export.
        """
        return self._call(exported)

    # Transactions

    def transactions(self) -> OpenBranches:
        """Returns the open branches of transactions at every broker, in any state, and the sessions that began them.

        Brokers that do not answer are named with the reason: their open branches are unknown.
        """
        return self._call(admin_transactions.open_branches)

    def commit_branch(self, xid: Xid, broker_id: int) -> None:
        """Commits a prepared branch in place of its transaction manager, which gets the outcome when it asks.

        Its messages are visible from then on. The broker keeps the decision until the manager or forget_branch() drops
        it. Raises BranchNotKnown, BranchMisuse if the branch is not prepared, HeuristicOutcome if it was decided
        before.
        """
        self._call(admin_transactions.commit_branch, xid, broker_id)

    def rollback_branch(self, xid: Xid, broker_id: int) -> None:
        """Rolls back a branch in place of its transaction manager. The counterpart of commit_branch().

        The branch does not have to be prepared. The broker keeps no decision about a branch that was not prepared.
        Raises as commit_branch().
        """
        self._call(admin_transactions.rollback_branch, xid, broker_id)

    def forget_branch(self, xid: Xid, broker_id: int) -> None:
        """Drops the kept decision of a branch. Raises BranchNotKnown if there is none."""
        self._call(admin_transactions.forget_branch, xid, broker_id)

    def _call(
        self, work: Callable[Concatenate[ClusterClient, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._core.closed_by is not None:  # in a fork's child the loop does not run
            raise self._core.closed_by
        return self._background.run(self._core.call(work, *args, **kwargs))

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    # The end

    def close(self) -> None:
        """Disconnects. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            if not self._core.is_forked:
                self._background.run(self._core.close())

    def __enter__(self) -> Self:
        if self._core.closed_by is not None:
            raise self._core.closed_by
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._core.closed_by is not None:
            return
        warnings.warn("an Admin was not closed: use `with` or close()", ResourceWarning, source=self, stacklevel=2)
        core, loop = self._core, self._background.loop
        loop.call_soon_threadsafe(lambda: loop.create_task(core.close()))
