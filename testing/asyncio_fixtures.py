"""The fixtures that pytest-asyncio runs, one for each scope of loops: a client works in the loop of its test only.

`plugin.py` imports them if pytest-asyncio is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from metamq.testing import aio_clients

if TYPE_CHECKING:
    import metamq
    from metamq.testing.clusters import Cluster

_producer = asynccontextmanager(aio_clients.producer)
_consumer = asynccontextmanager(aio_clients.consumer)


def _of_scope(scope: Any) -> dict[str, Any]:
    """Returns the fixtures for loops of a scope, with functions of their own: pytest-asyncio notes the scope there."""

    async def producer(metamq_cluster: Cluster) -> AsyncIterator[metamq.aio.Producer[Any]]:
        async with _producer(metamq_cluster) as one:
            yield one

    async def consumer(metamq_cluster: Cluster, metamq_topic: str) -> AsyncIterator[metamq.aio.Consumer[Any]]:
        async with _consumer(metamq_cluster, metamq_topic) as one:
            yield one

    made = pytest_asyncio.fixture(loop_scope=scope)
    return {f"_metamq_asyncio_producer_{scope}": made(producer), f"_metamq_asyncio_consumer_{scope}": made(consumer)}


for _scope in ("function", "class", "module", "package", "session"):
    globals().update(_of_scope(_scope))
