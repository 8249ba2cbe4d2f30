"""Checks if there is a cluster: a wrong address or root is not an empty cluster, and must not become one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from metamq.errors import ConfigError, MetamqError

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.zk")

SHOWN_MAX = 10
OWN_NODE = "zookeeper"


async def missing_cluster(session: Session) -> ConfigError | None:
    """The problem if no broker has ever been registered; None if one was. Raises ConnectionLost."""
    if await session.exists(session.paths.broker_ids()) is not None:
        return None
    if session.chroot and await session.exists("/") is None:
        problem = f"there is no {session.chroot} in ZooKeeper at {session.servers.partition('/')[0]}"
        beside = await _beside(session.names_at, session.chroot)
        choose = "It is the end of the ZooKeeper address: correct it"
    else:
        root = session.paths.root
        what = root if await session.exists(root) is None else f"broker below {root}"
        problem = f"there is no {what} in ZooKeeper at {session.servers}"
        beside = await _beside(session.children_or_none, root)
        choose = "Choose with --root or METAMQ_ROOT"
    if not beside:
        hint = "Start the first with `metamq broker`. If ZooKeeper was lost, see `metamq cluster restore`."
        return ConfigError(f"{problem}: no broker has ever been there", hint=hint)
    shown = ", ".join(beside[:SHOWN_MAX]) + (", ..." if len(beside) > SHOWN_MAX else "")
    return ConfigError(problem, hint=f"Beside it: {shown}. {choose}, or start the first broker with `metamq broker`.")


async def warn_without_cluster(session: Session) -> None:
    """Logs a warning if no broker has ever been registered. The client waits for a broker anyway."""
    try:
        problem = await missing_cluster(session)
    except MetamqError as error:
        log.debug("it is unknown if there is a cluster: %s", error)
        return
    if problem is not None:
        log.warning("%s", problem)


async def _beside(children_of: Callable[[str], Awaitable[list[str] | None]], place: str) -> list[str]:
    """The nodes at the place of the first missing part of the path, or next to the last part."""
    while place:
        missing, place = place, place.rpartition("/")[0]
        names = await children_of(place or "/")
        if names is not None:
            found = sorted(f"{place}/{name}" for name in names if place or name != OWN_NODE)
            return [path for path in found if path != missing]
    return []
