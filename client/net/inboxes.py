"""The topics that take delayed messages: made when the first message comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from metamq.errors import Timeout, TopicExists, TopicNotFound
from metamq.security.rights import DELAYED_SUFFIX
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.paths import master_offer

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient

WAIT_S = 10.0
LOOK_AGAIN_S = 0.02
HEADERS_BYTES = 1024
"""Bytes left for the headers that a message has while it waits."""


async def topic_or_inbox(cluster: ClusterClient, topic: str) -> TopicConfig:
    """Returns the topic's configuration. Makes a topic of delayed messages if it is missing. Raises TopicNotFound."""
    try:
        return await cluster.topic(topic)
    except TopicNotFound:
        if not topic.endswith(DELAYED_SUFFIX):
            raise
    made = inbox_of(await cluster.topic(topic.removesuffix(DELAYED_SUFFIX)))
    with contextlib.suppress(TopicExists):  # another client was faster
        await cluster.topics.create(made)
    await _wait_offered(cluster, made)
    return await cluster.topic(topic)


def inbox_of(for_topic: TopicConfig) -> TopicConfig:
    """Returns the configuration of the topic that takes the delayed messages for a topic."""
    return TopicConfig(
        f"{for_topic.topic}{DELAYED_SUFFIX}",
        dict.fromkeys(for_topic.partitions, 1),
        flush=for_topic.flush,
        max_message_bytes=min(for_topic.max_message_bytes, MESSAGE_BYTES_MAX - HEADERS_BYTES),
        min_insync=for_topic.min_insync,
        replication=for_topic.replication,
    )


async def _wait_offered(cluster: ClusterClient, config: TopicConfig) -> None:
    """Waits until every live broker of the topic offers it. Raises Timeout."""
    deadline = time.monotonic() + WAIT_S
    paths = cluster.session.paths
    for broker_id in config.partitions:
        offer = paths.offered_topic("topics-pub", config.topic, master_offer(broker_id))
        while not await cluster.session.exists(offer):
            if broker_id not in await cluster.refresh_brokers():
                break
            if time.monotonic() > deadline:
                raise Timeout(f"the start of topic {config.topic!r} at broker {broker_id}", WAIT_S)
            await asyncio.sleep(LOOK_AGAIN_S)
