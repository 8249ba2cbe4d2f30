"""The implementation of Admin: one ZooKeeper session, connections to brokers, and the operations on them.

The blocking and the asyncio Admin are thin APIs over this core; so both have every feature.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from metamq.client.admin import (
    admin_brokers,
    admin_groups,
    admin_removal,
    admin_replicas,
    admin_topics,
    admin_transactions,
)
from metamq.client.forks import register_for_forks
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.errors import ClosedError, ForkedError, MetamqError, closed_client
from metamq.zk.cluster.cluster_nodes import export_cluster

if TYPE_CHECKING:
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
    from metamq.wire.xa import Xid
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.partitions import TopicPartition


class AdminCore:
    """The core of one Admin, for the loop that opens it. metamq.Admin documents the methods and their errors."""

    def __init__(self) -> None:
        self.closed_by: MetamqError | None = ClosedError(
            "admin", "it was never opened", hint="Use `async with Admin()`."
        )
        self._open_cluster: ClusterClient | None = None
        register_for_forks(self)

    async def open(self, servers: str, root: str) -> None:
        """Connects to ZooKeeper. Raises ConnectError."""
        session = await open_client_session(servers, root)
        self._open_cluster = ClusterClient(session)
        self.closed_by = None

    async def close(self) -> None:
        """Disconnects. May be repeated. Does nothing in a fork's child."""
        if isinstance(self.closed_by, ForkedError):
            return
        cluster, self._open_cluster = self._open_cluster, None
        if cluster is not None:
            self.closed_by = closed_client("admin")
            await cluster.close()
            await cluster.session.close()

    def forked(self) -> None:
        """Closes the copy in a fork's child: it cannot be used any more."""
        self.closed_by = ForkedError("admin")

    async def _cluster(self) -> ClusterClient:
        """Returns the cluster, once its session is connected. Raises ClosedError, ConnectError."""
        if self._open_cluster is None or self.closed_by is not None:
            raise self.closed_by or closed_client("admin")
        await admin_topics.until_connected(self._open_cluster.session)
        return self._open_cluster

    async def create_topic(
        self,
        topic: str,
        partitions: int,
        brokers: Collection[int] | None,
        exist_ok: bool,
        timeout_s: float,
        settings: TopicSettings,
    ) -> TopicConfig:
        cluster = await self._cluster()
        return await admin_topics.create_topic(cluster, topic, partitions, brokers, exist_ok, timeout_s, settings)

    async def alter(
        self,
        topic: str,
        partitions: int | None,
        brokers: Collection[int] | None,
        timeout_s: float,
        settings: TopicSettings,
    ) -> TopicConfig:
        return await admin_topics.alter_topic(await self._cluster(), topic, partitions, brokers, timeout_s, settings)

    async def delete(self, topic: str, timeout_s: float) -> TopicConfig | None:
        return await admin_topics.delete_topic(await self._cluster(), topic, timeout_s)

    async def topics(self) -> dict[str, TopicConfig]:
        return await admin_topics.all_topics(await self._cluster())

    async def describe_topic(self, topic: str) -> TopicDescription:
        return await admin_topics.describe_topic(await self._cluster(), topic)

    async def groups(self) -> dict[str, GroupSummary]:
        return await admin_groups.all_groups(await self._cluster())

    async def describe_group(self, group: str) -> GroupDescription:
        return await admin_groups.describe_group(await self._cluster(), group)

    async def explain_group(self, group: str) -> GroupExplanation:
        return await admin_groups.explain_group(await self._cluster(), group)

    async def reset_offsets(self, group: str, topic: str, to: ResetTo, dry_run: bool) -> tuple[OffsetReset, ...]:
        return await admin_groups.reset_offsets(await self._cluster(), group, topic, to, dry_run=dry_run)

    async def evict(self, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
        return await admin_groups.evict(await self._cluster(), group, consumer_id)

    async def delete_group(self, group: str) -> None:
        await admin_groups.delete_group(await self._cluster(), group)

    async def brokers(self) -> dict[int, BrokerDescription]:
        return await admin_brokers.describe_brokers((await self._cluster()).session)

    async def statistics(self, broker_id: int) -> BrokerStatistics:
        return await admin_brokers.broker_statistics(await self._cluster(), broker_id)

    async def replicas(self) -> dict[int, BrokerReplicas]:
        return await admin_replicas.describe_replicas(await self._cluster())

    async def plan_promotion(self, broker_id: int, replica: int) -> PromotionPlan:
        return await admin_replicas.plan_promotion(await self._cluster(), broker_id, replica)

    async def promote(self, broker_id: int, replica: int, accept_loss: bool) -> int:
        return await admin_replicas.promote(await self._cluster(), broker_id, replica, accept_loss)

    async def plan_removal(self, broker_id: int, replica: int | None) -> RemovalPlan:
        return await admin_removal.plan_removal(await self._cluster(), broker_id, replica)

    async def remove(self, broker_id: int, replica: int | None, accept_loss: bool) -> RemovalPlan:
        return await admin_removal.remove(await self._cluster(), broker_id, replica, accept_loss)

    async def export_cluster(self) -> dict[str, Any]:
        return (await export_cluster((await self._cluster()).session)).to_json()

    async def transactions(self) -> OpenBranches:
        return await admin_transactions.open_branches(await self._cluster())

    async def commit_branch(self, xid: Xid, broker_id: int) -> None:
        await admin_transactions.commit_branch(await self._cluster(), xid, broker_id)

    async def rollback_branch(self, xid: Xid, broker_id: int) -> None:
        await admin_transactions.rollback_branch(await self._cluster(), xid, broker_id)

    async def forget_branch(self, xid: Xid, broker_id: int) -> None:
        await admin_transactions.forget_branch(await self._cluster(), xid, broker_id)
