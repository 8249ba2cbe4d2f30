"""Looks whether a cluster is there before a command does its work: a wrong address or root is not an empty cluster."""

from __future__ import annotations

import asyncio

from metamq.client.net.first_contact import open_session
from metamq.zk.session.presence import missing_cluster


def check_cluster(servers: str, root: str) -> None:
    """Raise ConnectError when no ZooKeeper is there, ConfigError when no broker was ever at the root."""
    asyncio.run(look_for_cluster(servers, root))


async def look_for_cluster(servers: str, root: str) -> None:
    """See `check_cluster`."""
    async with await open_session(servers, root=root, patient=False) as session:
        problem = await missing_cluster(session)
        if problem is not None:
            raise problem
