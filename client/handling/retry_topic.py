"""The retry topic of a group, which its consumers create."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from metamq.client.admin.admin_core import WAIT_S
from metamq.client.admin.admin_model import TopicSettings
from metamq.client.admin.admin_topics import create_topic
from metamq.errors import TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient

PARTITIONS = 4


async def create_retry_topic(cluster: ClusterClient, topic: str | None) -> None:
    """Creates the topic unless it is there, or None. Raises as create_topic()."""
    if topic is None or topic in await cluster.topics.names():
        return
    settings = TopicSettings(max_message_bytes=MESSAGE_BYTES_MAX)
    with contextlib.suppress(TopicExists):
        await create_topic(cluster, topic, PARTITIONS, None, False, WAIT_S, settings)
