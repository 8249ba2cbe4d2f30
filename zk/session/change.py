"""Changes a node whose content many clients may write, by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from metamq.zk.errors import BadVersion, NodeExists, NoNode

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

T = TypeVar("T")
NEW = -1
"""The version of a node that does not exist yet."""


async def write_version(session: Session, path: str, data: bytes, version: int) -> int | None:
    """Stores the data if the node has this version; NEW makes the node. Returns its new version.

    Returns None if another process was faster. Raises ConnectionLost: then it may be stored.
    """
    try:
        if version == NEW:
            node = await session.create(path, data, makepath=True)
        else:
            node = await session.set(path, data, version)
    except (BadVersion, NodeExists, NoNode):
        return None
    return node.version


async def change_node(
    session: Session,
    path: str,
    read: Callable[[bytes | None], T],
    change: Callable[[T], T],
    write: Callable[[T], bytes],
) -> T:
    """Stores `write(change(read(its data)))`, unless nothing changes; returns the stored value.

    `read` gets None for a node that does not exist. All three may be called several times, if others are faster.

    Raises the errors of the three, and ConnectionLost: then the outcome is unknown.
    """
    while True:
        node = await session.get_or_none(path)
        stored = read(None if node is None else node.data)
        wanted = change(stored)
        if node is not None and wanted == stored:
            return stored
        version = NEW if node is None else node.version
        if await write_version(session, path, write(wanted), version) is not None:
            return wanted
