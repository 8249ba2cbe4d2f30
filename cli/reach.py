"""Looks whether a cluster is there before a command does its work: a wrong address or root is not an empty cluster."""

from __future__ import annotations

import asyncio

from metamq.errors import ConfigError
from metamq.zk.paths import Paths
from metamq.zk.servers import parse_servers
from metamq.zk.session import NoNode, Session

SHOWN_MAX = 10
OWN_NODE = "zookeeper"


def check_cluster(servers: str, root: str) -> None:
    """Raise ConnectError when no ZooKeeper is there, ConfigError when there is nothing at the root."""
    asyncio.run(look_for_cluster(servers, root))


async def look_for_cluster(servers: str, root: str) -> None:
    """See `check_cluster`."""
    Paths(root)
    _hosts, chroot = parse_servers(servers)
    # Without the chroot, which a session makes where it is missing.
    addresses, place = servers.partition("/")[0], chroot + root
    async with await Session.open(addresses, root=place, patient=False) as session:
        if await session.exists(place) is None:
            raise _nothing_there(addresses, place, await _beside(session, place))


async def _beside(session: Session, place: str) -> list[str]:
    """What stands where the first missing part of the path should."""
    while True:
        place = place.rpartition("/")[0]
        try:
            names = await session.children(place or "/")
        except NoNode:
            continue
        return sorted(f"{place}/{name}" for name in names if place or name != OWN_NODE)


def _nothing_there(addresses: str, place: str, beside: list[str]) -> ConfigError:
    problem = f"there is no {place} in ZooKeeper at {addresses}"
    if not beside:
        return ConfigError(f"{problem}: no broker has ever been there", hint="Start the first with `metamq broker`.")
    shown = ", ".join(beside[:SHOWN_MAX]) + (", ..." if len(beside) > SHOWN_MAX else "")
    return ConfigError(
        problem,
        hint=f"Beside it: {shown}. Choose with --root or METAMQ_ROOT, or start the first broker with `metamq broker`.",
    )
