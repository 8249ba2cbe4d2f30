"""Work on the nodes of a cluster in ZooKeeper, in a session of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from metamq import SecurityConfig
from metamq.security.tls import client_security
from metamq.testing import Cluster
from metamq.zk.session.session import Session
from tests.parts import SLOW_S


def run(running: Cluster, security: SecurityConfig, work: Callable[[Session], Awaitable[object]]) -> None:
    async def opened() -> None:
        async with await Session.open(running.zookeeper, security=client_security(security)) as session:
            await work(session)

    asyncio.run(asyncio.wait_for(opened(), SLOW_S))


async def tree(session: Session, path: str) -> list[str]:
    """The node, and all below it."""
    names = await session.children_or_none(path) or []
    return [path, *[one for name in sorted(names) for one in await tree(session, f"{path}/{name}")]]
