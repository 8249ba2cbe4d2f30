"""The end of groups that no consumer uses: their offsets are removed after a time.

A broker looks at each group at intervals. If the group has no member and no owner, the broker writes the *mark*, a node
of the group. ZooKeeper's times of its creation and its last write say how long the group is unused, so the brokers'
clocks do not count. The mark has the version of the folder of members. Each member that joins or leaves raises that
version, and the mark of an earlier version counts from its next write on.

When the time is over, the nodes below the group are listed with their versions. An offset that was written after the
mark makes the group used: by a consumer of fixed partitions, by a reset, or by a Spark job. Otherwise one transaction
deletes all nodes by their versions. A member that joins meanwhile, or a claim, makes it fail, and nothing is removed.
Only a group with more nodes than a transaction takes is removed in steps, where each step has the same protection.

The node of settled dead letters stays: without it those letters could be sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from metamq.zk.errors import BadVersion, NodeExists, NoNode, NotEmpty
from metamq.zk.nodes import Delete, Stat

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

READS_AT_ONCE = 64
DELETE_BYTES_MAX = 500_000
"""The paths of one transaction; ZooKeeper takes 1 MiB."""


async def look_after(session: Session, group: str, expiry_ms: int) -> tuple[str, int]:
    """Marks a group that is unused, and removes one that was for `expiry_ms`.

    Returns "used", "marked" if this call has made the mark, "unused", or "removed", and the number of removed offsets.
    Raises ConnectionLost.
    """
    paths = session.paths
    members = await session.listing_or_none(paths.members(group))
    if members is not None and members.names:
        return "used", 0
    if await _has_owner(session, group):
        return "used", 0
    seen = str(members.version if members is not None else -1).encode()
    mark = await session.get_or_none(paths.unused(group))
    try:
        if mark is None:
            await session.create(paths.unused(group), seen)
            return "marked", 0
        if mark.data != seen:
            await session.delete(paths.unused(group), mark.version)
            await session.create(paths.unused(group), seen)
            return "marked", 0
        if mark.mtime_ms - mark.ctime_ms < expiry_ms:
            await session.set(paths.unused(group), seen, mark.version)
            return "unused", 0
        return await _remove(session, group, mark)
    except (NoNode, NodeExists, BadVersion, NotEmpty):  # another broker was faster, or the group is used again
        return "unused", 0


async def _has_owner(session: Session, group: str) -> bool:
    paths = session.paths
    for topic in await session.children_or_none(paths.owned_topics(group)) or []:
        if await session.children_or_none(paths.owners(group, topic)):
            return True
    return False


async def _remove(session: Session, group: str, mark: Stat) -> tuple[str, int]:
    paths = session.paths
    nodes = await _nodes(session, paths.group(group), leave=paths.settled_letters(group))
    folder = f"{paths.offset_topics(group)}/"
    offsets = [stat for path, stat in nodes.items() if path.startswith(folder) and "/" in path.removeprefix(folder)]
    if any(stat.mzxid > mark.czxid for stat in offsets):
        await session.delete(paths.unused(group), mark.version)
        return "used", 0
    # The folder of members is in the first transaction: it can be deleted only without members.
    order = sorted(nodes, key=lambda path: (path != paths.members(group), -path.count("/")))
    for some in _parts(order):
        await session.multi([Delete(path, nodes[path].version) for path in some])
    with contextlib.suppress(NotEmpty, NoNode):
        await session.delete(paths.group(group), -1)
    return "removed", len(offsets)


async def _nodes(session: Session, root: str, leave: str) -> dict[str, Stat]:
    """Returns the nodes below `root` with their stats, except `leave`."""
    found: dict[str, Stat] = {}
    waiting = [root]
    while waiting:
        some, waiting = waiting[:READS_AT_ONCE], waiting[READS_AT_ONCE:]
        listed = await asyncio.gather(*(session.children_or_none(path) for path in some))
        paths = [f"{path}/{name}" for path, names in zip(some, listed, strict=True) for name in names or []]
        paths = [path for path in paths if path != leave]
        for at in range(0, len(paths), READS_AT_ONCE):
            part = paths[at : at + READS_AT_ONCE]
            stats = await asyncio.gather(*(session.exists(path) for path in part))
            found |= {path: stat for path, stat in zip(part, stats, strict=True) if stat is not None}
        waiting += [path for path in paths if path in found and found[path].children]
    return found


def _parts(paths: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for path in paths:
        if size + len(path) > DELETE_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(path)
        size += len(path) + 32
    yield part
