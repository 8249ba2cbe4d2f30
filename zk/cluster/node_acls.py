"""Finds the nodes whose access lists are not those of metamq.zk.session.acls, and corrects them.

Nodes that were made before security was on, or without TLS to ZooKeeper, may be changed by each client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.errors import NotAuthorized
from metamq.zk.errors import NoNode
from metamq.zk.session.acls import acl_of, differs, is_open, owned_by

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

AT_ONCE = 200
"""Nodes that are looked at in one step."""


async def wrong_nodes(session: Session, *, enough: int | None = None) -> list[str]:
    """Returns the paths of such nodes, parents first; with `enough` it may stop after that number.

    Groups and sinks of Spark are their clients': it does not look below their folders. Raises ConnectionLost.
    """
    paths = session.paths
    found: list[str] = []
    waiting = [paths.root]
    while waiting and (enough is None or len(found) < enough):
        some, waiting = waiting[-AT_ONCE:], waiting[:-AT_ONCE]
        for path, is_wrong, children in await asyncio.gather(*(_look_at(session, path) for path in some)):
            if is_wrong:
                found.append(path)
            if path not in (paths.groups(), paths.sinks()):
                waiting += [f"{path}/{child}" for child in children]
    return sorted(found)


async def _look_at(session: Session, path: str) -> tuple[str, bool, list[str]]:
    """Returns the path, if its list is wrong, and its children. A node that cannot be read, except of users and rules,
    belongs to another client: that is wrong, too."""
    try:
        found, children = await asyncio.gather(session.acl(path), session.children(path))
    except NoNode:
        return path, False, []
    except NotAuthorized:
        return path, not f"{path}/".startswith(f"{session.paths.security()}/"), []
    return path, differs(found, acl_of(session.paths, path)), children


async def correct_nodes(session: Session, paths: list[str], progress: Callable[[int], None]) -> list[str]:
    """Gives the nodes their lists, and returns those that belong to another client, which did not allow it. `progress`
    gets the number of nodes of each step. May be repeated after an error. Raises ConnectionLost."""
    refused: list[str] = []
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        done = await asyncio.gather(*(_is_corrected(session, path) for path in some))
        refused += [path for path, is_done in zip(some, done, strict=True) if not is_done]
        progress(len(some))
    return refused


async def _is_corrected(session: Session, path: str) -> bool:
    try:
        await session.set_acl(path, acl_of(session.paths, path))
    except NoNode:
        pass
    except NotAuthorized:
        return False
    return True


async def give_group(session: Session, group: str, principal: str, digest: str) -> list[str]:
    """Gives a group to a principal; ANY_PRINCIPAL: to all clients. Raises NotAuthorized, ConnectionLost.

    Returns the nodes in it that belong to another client, which did not allow it.
    """
    wanted, root = owned_by(principal, digest), session.paths.group(group)
    refused: list[str] = []
    waiting = [root]
    while waiting:
        path = waiting.pop()
        try:
            await session.set_acl(path, wanted)
        except NoNode:
            continue
        except NotAuthorized:
            if path == root:
                raise
            refused.append(path)
            continue
        # After the change of the list: other clients can add no node here now.
        waiting += [f"{path}/{name}" for name in await session.children_or_none(path) or []]
    return sorted(refused)


async def open_groups(session: Session) -> list[str]:
    """Returns the groups that each client may change. Raises ConnectionLost."""
    names = sorted(await session.children_or_none(session.paths.groups()) or [])
    found = []
    for name in names:
        with contextlib.suppress(NoNode, NotAuthorized):
            if is_open(await session.acl(session.paths.group(name))):
                found.append(name)
    return found


async def brokers_without_certificate(session: Session) -> list[str]:
    """Returns the registrations of running brokers that ZooKeeper does not know by a certificate. They would lose the
    right to change their own nodes."""
    folders = await session.children_or_none(session.paths.broker_ids()) or []
    found = []
    for folder in sorted(folders):
        path = f"{session.paths.broker_ids()}/{folder}"
        for name in sorted(await session.children_or_none(path) or []):
            node = await session.get_or_none(f"{path}/{name}")
            if node is not None and node.ephemeral_owner and (await _look_at(session, f"{path}/{name}"))[1]:
                found.append(f"{path}/{name}")
    return found
