"""The asyncio Admin."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self, Unpack

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
from metamq.client.admin.admin_core import WAIT_S, AdminCore, exported
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
    """Reads and changes topics, groups and brokers; see metamq.Admin.

    Not thread-safe: use it only in the loop that opens it.

        async with Admin() as admin:
            await admin.create_topic("flights", partitions=4)

    A cancelled call does not revoke a request that was sent: the change may still be made.
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
        self._access = cluster_access(zookeeper, root, config, security)

    async def open(self) -> Self:
        """Connects to ZooKeeper; `async with` calls it. Raises ConnectError."""
        await self._core.open(self._access)
        return self

    async def create_topic(
        self,
        topic: str,
        partitions: int = 4,
        *,
        brokers: Collection[int] | None = None,
        exist_ok: bool = False,
        timeout_s: float = WAIT_S,
        **settings: Unpack[TopicSettings],
    ) -> TopicConfig:
        """See metamq.Admin.create_topic."""
        return await self._core.call(
            admin_topics.create_topic, topic, partitions, brokers, exist_ok, timeout_s, settings
        )

    async def topic_defaults(self) -> TopicSettings:
        """See metamq.Admin.topic_defaults."""
        return await self._core.call(admin_topics.topic_defaults)

    async def set_topic_defaults(self, **settings: Unpack[TopicSettings]) -> None:
        """See metamq.Admin.set_topic_defaults."""
        await self._core.call(admin_topics.set_topic_defaults, settings)

    async def register_schema(
        self,
        topic: str | Topic[Any],
        schema: Schema | None = None,
        *,
        compatibility: Compatibility | None = None,
    ) -> int:
        """See metamq.Admin.register_schema."""
        return await self._core.call(admin_schemas.register_schema, topic, schema, compatibility)

    async def check_schema(self, topic: str | Topic[Any], schema: Schema | None = None) -> None:
        """See metamq.Admin.check_schema."""
        await self._core.call(admin_schemas.check_schema, topic, schema)

    async def load_schemas(self, topic: str | Topic[Any]) -> TopicSchemas:
        """See metamq.Admin.load_schemas."""
        return await self._core.call(admin_schemas.load_schemas, topic)

    async def alter(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Collection[int] | None = None,
        timeout_s: float = WAIT_S,
        **settings: Unpack[TopicSettings],
    ) -> TopicConfig:
        """See metamq.Admin.alter."""
        return await self._core.call(admin_topics.alter_topic, topic, partitions, brokers, timeout_s, settings)

    async def delete(self, topic: str, *, timeout_s: float = WAIT_S) -> TopicConfig | None:
        """See metamq.Admin.delete."""
        return await self._core.call(admin_topics.delete_topic, topic, timeout_s)

    async def trim(
        self, topic: str, before: TrimBefore, *, dry_run: bool = False, timeout_s: float = WAIT_S
    ) -> tuple[PartitionTrim, ...]:
        """See metamq.Admin.trim."""
        return await self._core.call(admin_removal.trim, topic, before, dry_run=dry_run, timeout_s=timeout_s)

    async def topics(self) -> dict[str, TopicConfig]:
        """See metamq.Admin.topics."""
        return await self._core.call(admin_topics.all_topics)

    async def describe_topic(self, topic: str) -> TopicDescription:
        """See metamq.Admin.describe_topic."""
        return await self._core.call(admin_topics.describe_topic, topic)

    async def offsets(self, topic: str, at: ResetTo) -> dict[TopicPartition, int]:
        """See metamq.Admin.offsets."""
        return await self._core.call(admin_groups.find_offsets, topic, at)

    async def groups(self) -> dict[str, GroupSummary]:
        """See metamq.Admin.groups."""
        return await self._core.call(admin_groups.all_groups)

    async def describe_group(self, group: str, offsets: DatabaseOffsets | None = None) -> GroupDescription:
        """See metamq.Admin.describe_group."""
        return await self._core.call(admin_groups.describe_group, group, offsets)

    async def explain_group(self, group: str) -> GroupExplanation:
        """See metamq.Admin.explain_group."""
        return await self._core.call(admin_groups.explain_group, group)

    async def reset_offsets(
        self, group: str, topic: str, to: ResetTo, *, dry_run: bool = False, offsets: DatabaseOffsets | None = None
    ) -> tuple[OffsetReset, ...]:
        """See metamq.Admin.reset_offsets."""
        return await self._core.call(admin_groups.reset_offsets, group, topic, to, dry_run=dry_run, offsets=offsets)

    async def delete_offsets(self, group: str, topic: str, *, dry_run: bool = False) -> tuple[OffsetChange, ...]:
        """See metamq.Admin.delete_offsets."""
        return await self._core.call(admin_groups.delete_offsets, group, topic, dry_run=dry_run)

    async def copy_offsets(
        self,
        source: str,
        target: str,
        topics: Collection[str] | None = None,
        *,
        overwrite: bool = False,
        dry_run: bool = False,
    ) -> tuple[OffsetChange, ...]:
        """See metamq.Admin.copy_offsets."""
        return await self._core.call(
            admin_groups.copy_offsets, source, target, topics, overwrite=overwrite, dry_run=dry_run
        )

    async def evict(self, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
        """See metamq.Admin.evict."""
        return await self._core.call(admin_groups.evict, group, consumer_id)

    async def set_group_owner(self, group: str, principal: str) -> list[str]:
        """See metamq.Admin.set_group_owner."""
        return await self._core.call(admin_groups.set_group_owner, group, principal)

    async def delete_group(self, group: str) -> None:
        """See metamq.Admin.delete_group."""
        await self._core.call(admin_groups.delete_group, group)

    async def brokers(self) -> dict[int, BrokerDescription]:
        """See metamq.Admin.brokers."""
        return await self._core.call(admin_brokers.describe_brokers)

    async def statistics(self, broker_id: int) -> BrokerStatistics:
        """See metamq.Admin.statistics."""
        return await self._core.call(admin_brokers.broker_statistics, broker_id)

    async def replicas(self) -> dict[int, BrokerReplicas]:
        """See metamq.Admin.replicas."""
        return await self._core.call(admin_replicas.describe_replicas)

    async def plan_promotion(self, broker_id: int, replica: int) -> PromotionPlan:
        """See metamq.Admin.plan_promotion."""
        return await self._core.call(admin_replicas.plan_promotion, broker_id, replica)

    async def promote(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> int:
        """See metamq.Admin.promote."""
        return await self._core.call(admin_replicas.promote, broker_id, replica, accept_loss)

    async def failover(self, broker_id: int) -> Failover:
        """See metamq.Admin.failover."""
        return await self._core.call(admin_replicas.failover_of, broker_id)

    async def set_failover(
        self, broker_id: int, *, mode: str | None = None, paused: bool | None = None, preferred: int | None = None
    ) -> Failover:
        """See metamq.Admin.set_failover."""
        return await self._core.call(admin_replicas.set_failover, broker_id, mode, paused, preferred)

    async def users(self) -> list[str]:
        """See metamq.Admin.users."""
        return await self._core.call(admin_users.all_users)

    async def set_user(self, name: str, password: str) -> None:
        """See metamq.Admin.set_user."""
        await self._core.call(admin_users.set_user, name, password)

    async def remove_user(self, name: str) -> None:
        """See metamq.Admin.remove_user."""
        await self._core.call(admin_users.remove_user, name)

    async def rules(self) -> list[Rule]:
        """See metamq.Admin.rules."""
        return await self._core.call(admin_users.all_rules)

    async def add_rules(self, effect: str, principal: str, right: str, *resources: str) -> list[Rule]:
        """See metamq.Admin.add_rules."""
        rules = admin_users.parsed_rules(effect, principal, right, resources)
        await self._core.call(admin_users.add_rules, rules)
        return list(rules)

    async def remove_rules(self, effect: str, principal: str, right: str, *resources: str) -> list[Rule]:
        """See metamq.Admin.remove_rules."""
        rules = admin_users.parsed_rules(effect, principal, right, resources)
        await self._core.call(admin_users.remove_rules, rules)
        return list(rules)

    async def explain_right(self, principal: str, right: str, resource: str) -> RightDecision:
        """See metamq.Admin.explain_right."""
        return await self._core.call(admin_users.explain, principal, right, resource)

    async def tokens(self) -> list[TokenDescription]:
        """See metamq.Admin.tokens."""
        return await self._core.call(admin_users.all_tokens)

    async def end_tokens(self, principal: str) -> int:
        """See metamq.Admin.end_tokens."""
        return await self._core.call(admin_users.end_tokens, principal)

    async def quotas(self) -> dict[str, Quota]:
        """See metamq.Admin.quotas."""
        return await self._core.call(admin_users.all_quotas)

    async def set_quota(
        self, principal: str, *, write_bytes_s: int = 0, read_bytes_s: int = 0, requests_s: int = 0
    ) -> Quota:
        """See metamq.Admin.set_quota."""
        quota = Quota(write_bytes_s, read_bytes_s, requests_s)
        await self._core.call(admin_users.set_quota, principal, quota)
        return quota

    async def remove_quota(self, principal: str) -> None:
        """See metamq.Admin.remove_quota."""
        await self._core.call(admin_users.remove_quota, principal)

    async def plan_balance(self) -> list[MasterPlace]:
        """See metamq.Admin.plan_balance."""
        return await self._core.call(admin_replicas.plan_balance)

    async def plan_removal(self, broker_id: int, replica: int | None = None) -> RemovalPlan:
        """See metamq.Admin.plan_removal."""
        return await self._core.call(admin_removal.plan_removal, broker_id, replica)

    async def remove_broker(self, broker_id: int, *, accept_loss: bool = False) -> RemovalPlan:
        """See metamq.Admin.remove_broker."""
        return await self._core.call(admin_removal.remove, broker_id, None, accept_loss)

    async def remove_replica(self, broker_id: int, replica: int, *, accept_loss: bool = False) -> RemovalPlan:
        """See metamq.Admin.remove_replica."""
        return await self._core.call(admin_removal.remove, broker_id, replica, accept_loss)

    async def export_cluster(self) -> dict[str, Any]:
        """See metamq.Admin.export_cluster."""
        return await self._core.call(exported)

    async def transactions(self) -> OpenBranches:
        """See metamq.Admin.transactions."""
        return await self._core.call(admin_transactions.open_branches)

    async def commit_branch(self, xid: Xid, broker_id: int) -> None:
        """See metamq.Admin.commit_branch."""
        await self._core.call(admin_transactions.commit_branch, xid, broker_id)

    async def rollback_branch(self, xid: Xid, broker_id: int) -> None:
        """See metamq.Admin.rollback_branch."""
        await self._core.call(admin_transactions.rollback_branch, xid, broker_id)

    async def forget_branch(self, xid: Xid, broker_id: int) -> None:
        """See metamq.Admin.forget_branch."""
        await self._core.call(admin_transactions.forget_branch, xid, broker_id)

    async def close(self) -> None:
        """Disconnects. Further calls do nothing."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
