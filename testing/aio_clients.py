"""Asyncio clients for the life of a test: the bodies of fixtures, for any plugin that runs async fixtures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import metamq
    from metamq.testing.clusters import Cluster

IDLE_TIMEOUT_S = 0.2
"""The time after which the loop of a fixture's consumer asks if it has read all messages, and ends."""


async def producer(metamq_cluster: Cluster) -> AsyncIterator[metamq.aio.Producer[Any]]:
    """A producer, open in the loop that runs this fixture."""
    async with metamq_cluster.aio_producer() as producer:
        yield producer
        metamq_cluster.repair()


async def consumer(metamq_cluster: Cluster, metamq_topic: str) -> AsyncIterator[metamq.aio.Consumer[Any]]:
    """A consumer of the test's topic, open in the loop that runs this fixture."""
    async with metamq_cluster.aio_consumer(topics=metamq_topic, idle_timeout_s=IDLE_TIMEOUT_S) as consumer:
        yield consumer
        metamq_cluster.repair()
