"""A consumer of a Topic whose messages name the version of their schema follows the topic's schemas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from metamq.errors import ConnectError, TopicNotFound

if TYPE_CHECKING:
    from metamq.client.consumer.consumer_core import ConsumerCore
    from metamq.client.schemas.topic import Topic
    from metamq.client.settings import ClusterAccess


async def open_with_schemas(core: ConsumerCore, access: ClusterAccess) -> None:
    """Opens the core, and reads the schemas before the first message is decoded. Raises as ConsumerCore.open()."""
    await core.open(access)
    topic = core.plan.typed
    if topic is None or not topic.has_versions:
        return
    changed = asyncio.Event()
    try:
        await _learn(core, topic, changed)
    except BaseException:
        await core.close(last_done=False)
        raise
    core.spawn(_follow(core, topic, changed))


async def _learn(core: ConsumerCore, topic: Topic[Any], changed: asyncio.Event) -> None:
    topic.learn((await core.cluster.topics.get(topic.name, changed.set)).schemas.by_version)


async def _follow(core: ConsumerCore, topic: Topic[Any], changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        try:
            await _learn(core, topic, changed)
        except TopicNotFound:
            pass  # the watch waits for a topic of this name
        except ConnectError:
            await core.cluster.session.connected()
            changed.set()
