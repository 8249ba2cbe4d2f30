"""The driver's view of the cluster: topics, offsets and replicas. Blocking, over the process's background loop.

A streaming query keeps one view while it runs. If a broker cannot be reached, the answers for its partitions are
errors. Without ZooKeeper the view uses its last answers. A query survives both.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections.abc import Collection, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from metamq.client.admin.admin_brokers import Found, ask_offsets, ask_slaves
from metamq.client.background import background
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.delegating import DelegatedToken
from metamq.client.net.first_contact import open_client_session
from metamq.errors import ConnectError, MetamqError, PartitionNotFound, TopicNotFound
from metamq.security.delegation import rights_on
from metamq.security.rights import READ
from metamq.spark_consumers.source.driver_secret import token_seed
from metamq.spark_consumers.source.replicas import ReplicaAddress, replicas_of
from metamq.zk.groups.members import check_empty
from metamq.zk.groups.ownership import CommittedOffset, reset_offset
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.spark_consumers.driver.stream_offsets import Places, StreamPlace
    from metamq.spark_consumers.source.options import Subscription
    from metamq.wire.commands import OffsetsResult

T = TypeVar("T")

SESSION_TIMEOUT_MS = 10_000
PUBLISHED_AT_ONCE = 64

Topics = dict[TopicPartition, str]
"""The partitions of a query, with their topics' ids."""


class ClusterView:
    """An open view. Raises ConnectError, ConfigError if it cannot be opened."""

    def __init__(self, access: ClusterAccess) -> None:
        self._loop = background()
        self._cluster = self._run(self._open(access))
        self._topics: list[str] = []
        """The last list of topics, used while ZooKeeper is unreachable."""
        self._token: DelegatedToken | None = None
        """The token that is renewed until close()."""
        self._keeping: asyncio.Task[None] | None = None

    async def _open(self, access: ClusterAccess) -> ClusterClient:
        return ClusterClient(await open_client_session(access, SESSION_TIMEOUT_MS), with_slaves=True)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects."""
        self._run(self._close())

    async def _close(self) -> None:
        await self._end_token()
        await self._cluster.close()
        await self._cluster.session.close()

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

    def offsets(
        self,
        questions: Mapping[TopicPartition, tuple[str, int]],
        read_to: Mapping[TopicPartition, tuple[int, int]] | None = None,
    ) -> dict[TopicPartition, Found]:
        """Returns the masters' answers for partition -> (topic id, a time in microseconds or EARLIEST, LATEST), or
        errors.

        `read_to`: (offset up to which a partition was read, epoch of the message before). Default: the log's start.
        """
        return self._run(
            ask_offsets(self._cluster, questions, {**dict.fromkeys(questions, (0, -1)), **(read_to or {})})
        )

    def offsets_of_slaves(
        self, questions: Mapping[TopicPartition, tuple[str, int]]
    ) -> dict[TopicPartition, OffsetsResult]:
        """Returns slaves' answers for partitions whose broker has no master now, if there are slaves that answer."""
        return self._run(ask_slaves(self._cluster, questions))

    def replicas(
        self, partitions: Collection[TopicPartition], *, with_slaves: bool
    ) -> dict[TopicPartition, tuple[ReplicaAddress, ...]]:
        """Returns the replicas at which each partition can be read, as known last."""
        return self._run(self._replicas(partitions, with_slaves))

    async def _replicas(
        self, partitions: Collection[TopicPartition], with_slaves: bool
    ) -> dict[TopicPartition, tuple[ReplicaAddress, ...]]:
        masters = await self._cluster.refresh_brokers()
        if with_slaves:
            await asyncio.gather(*map(self._cluster.know_slaves, {tp.topic for tp in partitions}))
        found = {}
        for tp in partitions:
            broker_id, _index = parse_partition(tp.partition)
            slaves = []
            if with_slaves:
                known = self._cluster.slaves.get(broker_id, {})
                slaves = [known[number] for number in self._cluster.slaves_with(broker_id, tp.topic)]
            found[tp] = replicas_of(masters.get(broker_id), slaves)
        return found

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
