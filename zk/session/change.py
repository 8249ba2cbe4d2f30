"""Changes a node whose content many clients may write, by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from metamq.zk.errors import BadVersion, NodeExists, NoNode

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

T = TypeVar("T")


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
        data = write(wanted)
        try:
            if node is None:
                await session.create(path, data, makepath=True)
            else:
                await session.set(path, data, node.version)
        except (BadVersion, NodeExists, NoNode):
            continue
        return wanted
