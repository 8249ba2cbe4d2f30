"""The assignment of a consumer that does not share: it owns every partition of its topics.

For consumers without a group, which commit nothing, and for broadcast consumers, each of which reads every message and
keeps its own offsets. It follows topics that grow, or are deleted or created again, as the group's listener does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from metamq.client.group.assignment import AssignedPartition, AssignmentHandler, Obstacle
from metamq.client.net import outages
from metamq.client.net.missing_topics import MissingTopics
from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, OffsetStorage, Ownership
from metamq.errors import ConnectError, MetamqError, Timeout, TopicNotFound

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

LOOK_AGAIN_S = 0.5


class UnsharedAssignment:
    """Assigns all partitions to `handler`. `storage` is None for a consumer that commits nothing."""

    def __init__(
        self,
        cluster: ClusterClient,
        group: str,
        consumer_id: str,
        topics: Sequence[str],
        storage: OffsetStorage | None,
        handler: AssignmentHandler,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._consumer_id = consumer_id
        self._topics = topics
        self._storage = storage
        self._handler = handler
        self._claims: dict[TopicPartition, Ownership] = {}
        self._missing = MissingTopics(consumer_id, topics)
        self._task: asyncio.Task[None] | None = None
        self._unsettled: Obstacle | None = None

    async def start(self) -> None:
        """Assigns the existing partitions. Raises TopicNotFound, ConnectError."""
        for topic in self._topics:
            await self._cluster.topic(topic)
        await self._look()
        self._task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                await self._look()
                logged, self._unsettled = "", None
            except ConnectError as error:
                log.debug("topics are not followed at present: %s", error)  # the session has logged a warning
            except MetamqError as error:
                if str(error) != logged:
                    log.warning("topics are not followed at present: %s", error)
                logged = str(error)
                since = self._unsettled.since if self._unsettled else time.monotonic()
                self._unsettled = Obstacle(error, since, outages.PATIENCE_S)

    async def _look(self) -> None:
        wanted: dict[TopicPartition, str] = {}
        present = set()
        for topic in self._topics:
            try:
                config = await self._cluster.topic(topic)  # no request unless a watch has fired
            except TopicNotFound:
                continue
            present.add(topic)
            wanted |= dict.fromkeys(config.topic_partitions, config.id)
        self._missing.look(present)
        gone = [tp for tp, claim in self._claims.items() if wanted.get(tp) != claim.topic_id]
        for tp in gone:
            del self._claims[tp]
        self._handler.lost(gone)
        news = [self._claim(tp, topic_id) for tp, topic_id in wanted.items() if tp not in self._claims]
        if news:
            await self._assign(news)

    def _claim(self, tp: TopicPartition, topic_id: str) -> Ownership:
        return Ownership(self._group, tp, topic_id, self._consumer_id, generation=0, version=0, committed=None)

    async def _assign(self, claims: list[Ownership]) -> None:
        if self._storage is not None:
            found = await self._storage.claimed(claims)
            claims = [replace(claim, committed=_committed(found.get(claim.tp))) for claim in claims]
        self._claims |= {claim.tp: claim for claim in claims}
        await self._handler.assigned([AssignedPartition(claim, is_new=self._task is not None) for claim in claims])

    def partition_names(self, topic: str) -> Sequence[str]:
        """See `Assignment.partition_names`."""
        config = self._cluster.configs.get(topic)
        return config.partition_names if config is not None else ()

    def unsettled(self) -> Obstacle | None:
        """See `Assignment.unsettled`."""
        return self._unsettled

    async def confirm(self) -> Obstacle | None:
        """Checks for partitions that did not exist before; see `Assignment.confirm`."""
        requested_at = time.monotonic()
        await self._cluster.session.sync()  # a watch fires before the answer
        for topic in self._topics:
            with contextlib.suppress(TopicNotFound):
                config = await self._cluster.topic(topic)
                for tp in config.topic_partitions:
                    claim = self._claims.get(tp)
                    if claim is None or claim.topic_id != config.id:
                        late = Timeout(f"beginning with {tp}", outages.PATIENCE_S)
                        return Obstacle(late, requested_at, late.timeout_s)
        return None

    async def commit(self, requests: Sequence[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """Commits to the consumer's own storage. Returns the refused commits."""
        if self._storage is None:
            return {}
        outcomes = await self._storage.commit(requests)
        self._claims |= {tp: outcome for tp, outcome in outcomes.items() if isinstance(outcome, Ownership)}
        return {tp: outcome for tp, outcome in outcomes.items() if isinstance(outcome, MetamqError)}

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """Does nothing: no other process reads the progress."""

    def note_progress(self) -> None:
        """Does nothing: no other process reads the progress."""

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Waits for the in-flight messages, and commits them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            finals = await self._handler.revoke(list(self._claims))
            for tp, error in (await self.commit(_requests(self._claims, finals))).items():
                log.error("the last offset of %s is not committed: %s", tp, error)


def _requests(
    claims: Mapping[TopicPartition, Ownership], finals: Mapping[TopicPartition, tuple[int, int] | None]
) -> list[CommitRequest]:
    return [CommitRequest(claims[tp], *final) for tp, final in finals.items() if final is not None]


def _committed(outcome: CommittedOffset | MetamqError | None) -> CommittedOffset | None:
    if isinstance(outcome, MetamqError):
        raise outcome
    return outcome
