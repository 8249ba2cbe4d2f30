"""The driver's view of the cluster: a reader's, with the topics of a query, tokens for tasks, and published progress.

A streaming query keeps one view while it runs. It survives without ZooKeeper, or without a broker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from metamq.client.net.delegating import DelegatedToken
from metamq.client.scan.cluster_view import ClusterView, Topics
from metamq.errors import ConnectError, MetamqError, PartitionNotFound, TopicNotFound
from metamq.security.delegation import rights_on
from metamq.security.rights import READ
from metamq.spark_consumers.source.driver_secret import token_seed
from metamq.zk.groups.members import check_empty
from metamq.zk.groups.ownership import CommittedOffset, reset_offset

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.spark_consumers.driver.stream_offsets import Places, StreamPlace
    from metamq.spark_consumers.source.options import Subscription
    from metamq.zk.partitions import TopicPartition

PUBLISHED_AT_ONCE = 64


class QueryView(ClusterView):
    """An open view. Raises ConnectError, ConfigError if it cannot be opened."""

    def __init__(self, access: ClusterAccess) -> None:
        super().__init__(access)
        self._topics: list[str] = []
        """The last list of topics, used while ZooKeeper is unreachable."""
        self._token: DelegatedToken | None = None
        """The token that is renewed until close()."""
        self._keeping: asyncio.Task[None] | None = None

    async def _close(self) -> None:
        await self._end_token()
        await super()._close()

    def delegated(
        self, access: ClusterAccess, topics: Collection[str], lifetime_s: float, *, keep: bool
    ) -> ClusterAccess:
        """Returns the security settings of tasks that read these topics, with a token.

        With `keep`, this view has its own token, renews it, and ends it in close(). Otherwise all queries of this
        user's drivers with the same rights share a token, which expires. Raises ConnectError, NotAuthorized,
        ConfigError.
        """
        return self._run(self._delegated(access, topics, lifetime_s, keep))

    async def _delegated(
        self, access: ClusterAccess, topics: Collection[str], lifetime_s: float, keep: bool
    ) -> ClusterAccess:
        rights = rights_on(READ, topics)
        if not keep:
            seed = token_seed(access.security, rights)
            shared = DelegatedToken.new(self._cluster, access.security, rights, lifetime_s, seed)
            await shared.renew()
            return access._replace(security=shared.config)
        if self._token is None or not rights <= self._token.rights:
            token = DelegatedToken.new(self._cluster, access.security, rights, lifetime_s)
            await token.renew()
            await self._end_token()
            self._token, self._keeping = token, asyncio.ensure_future(token.keep())
        return access._replace(security=self._token.config)

    async def _end_token(self) -> None:
        if self._token is not None:
            if self._keeping is not None:
                self._keeping.cancel()
                await asyncio.wait([self._keeping])  # a renewal in progress could make the token again
            with contextlib.suppress(MetamqError):
                await self._token.end()
            self._token = None

    def partitions(self, subscription: Subscription, *, missing_ok: bool = False) -> Topics:
        """Returns the subscribed partitions. Raises TopicNotFound, PartitionNotFound unless `missing_ok`."""
        return self._run(self._partitions(subscription, missing_ok))

    async def _partitions(self, subscription: Subscription, missing_ok: bool) -> Topics:
        names: Collection[str] = subscription.topics or dict.fromkeys(tp.topic for tp in subscription.partitions)
        if subscription.pattern is not None:
            names = await self._matching(re.compile(subscription.pattern))
        found: Topics = {}
        for name in names:
            try:
                config = await self._cluster.topic(name)
            except TopicNotFound:
                if missing_ok or subscription.pattern is not None:  # deleted since the names were listed
                    continue
                raise
            found |= dict.fromkeys(config.topic_partitions, config.id)
        if not subscription.partitions:
            return found
        for tp in subscription.partitions:
            if tp not in found and not missing_ok:
                known = tuple(one.partition for one in found if one.topic == tp.topic)
                raise PartitionNotFound(tp.topic, tp.partition, known)
        return {tp: found[tp] for tp in subscription.partitions if tp in found}

    async def _matching(self, pattern: re.Pattern[str]) -> list[str]:
        try:
            self._topics = sorted(filter(pattern.fullmatch, await self._cluster.topics.names()))
        except ConnectError:
            if not self._topics:
                raise
        return self._topics

    def check_group(self, group: str) -> None:
        """Raises ConfigError if the group has consumers, which set its offsets themselves."""
        self._run(check_empty(self._cluster.session, group, "a query cannot publish its progress there"))

    def publish_soon(self, group: str, places: Places) -> concurrent.futures.Future[None]:
        """Starts to set the group's offsets. The result may be ConnectError; ConfigError if the group has members."""
        return asyncio.run_coroutine_threadsafe(self._publish(group, places), self._loop.loop)

    async def _publish(self, group: str, places: Places) -> None:
        session = self._cluster.session
        await check_empty(session, group, "a query cannot publish its progress there")
        limit = asyncio.Semaphore(PUBLISHED_AT_ONCE)

        async def publish_one(tp: TopicPartition, place: StreamPlace) -> None:
            async with limit:
                await reset_offset(session, group, tp, CommittedOffset(place.offset, place.epoch, place.topic_id))

        found = await asyncio.gather(*(publish_one(*item) for item in places.items()), return_exceptions=True)
        for error in filter(None, found):
            raise error
