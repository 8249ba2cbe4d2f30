"""Checks that a cluster exists before a command works on it: a wrong address or root must not look empty."""

from __future__ import annotations

import asyncio

from metamq.client.net.first_contact import open_session
from metamq.zk.session.presence import missing_cluster


def check_cluster(servers: str, root: str) -> None:
    """Raises ConnectError if ZooKeeper does not answer, ConfigError if no broker was ever started at the root."""
    asyncio.run(look_for_cluster(servers, root))


async def look_for_cluster(servers: str, root: str) -> None:
    """Raises the errors of `check_cluster`; for use in an event loop."""
    async with await open_session(servers, root=root, patient=False) as session:
        problem = await missing_cluster(session)
        if problem is not None:
            raise problem
