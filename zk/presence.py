"""Whether a cluster is there: a wrong address or root is not an empty cluster, and nobody is to make it one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from metamq.errors import ConfigError, MetamqError

if TYPE_CHECKING:
    from metamq.zk.session import Session

log = logging.getLogger("metamq.zk")

SHOWN_MAX = 10
OWN_NODE = "zookeeper"


async def missing_cluster(session: Session) -> ConfigError | None:
    """What is wrong where no broker has ever been; None where one was. Raises ConnectionLost."""
    root = session.paths.root
    if await session.exists(session.paths.broker_ids()) is not None:
        return None
    problem = f"there is no {root} in ZooKeeper at {session.servers}"
    if await session.exists(root) is not None:
        problem = f"there is no broker below {root} in ZooKeeper at {session.servers}"
    beside = await _beside(session, root)
    if not beside:
        return ConfigError(f"{problem}: no broker has ever been there", hint="Start the first with `metamq broker`.")
    shown = ", ".join(beside[:SHOWN_MAX]) + (", ..." if len(beside) > SHOWN_MAX else "")
    return ConfigError(
        problem,
        hint=f"Beside it: {shown}. Choose with --root or METAMQ_ROOT, or start the first broker with `metamq broker`.",
    )


async def warn_without_cluster(session: Session) -> None:
    """Says in the log when no broker has ever been there. Its client waits for one all the same."""
    try:
        problem = await missing_cluster(session)
    except MetamqError as error:
        log.debug("whether there is a cluster is not known: %s", error)
        return
    if problem is not None:
        log.warning("%s", problem)


async def _beside(session: Session, place: str) -> list[str]:
    """What stands where the first missing part of the path should, or beside the last."""
    while place:
        missing, place = place, place.rpartition("/")[0]
        names = await session.children_or_none(place or "/")
        if names is not None:
            found = sorted(f"{place}/{name}" for name in names if place or name != OWN_NODE)
            return [path for path in found if path != missing]
    return []
