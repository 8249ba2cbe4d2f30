"""All lists of security in ZooKeeper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metamq.errors import CorruptData, NotAuthorized
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.security.quotas import QUOTAS
from metamq.zk.security.rights import RULES
from metamq.zk.security.users import USERS

if TYPE_CHECKING:
    from metamq.zk.security.shared_node import SharedNode
    from metamq.zk.session.session import Session

LISTS: tuple[SharedNode[Any], ...] = (USERS, RULES, QUOTAS, DELEGATIONS)


async def damaged_lists(session: Session) -> list[CorruptData]:
    """Returns the error of each list that cannot be read; none for a client that may not read them. Raises
    ConnectionLost."""
    found = []
    for one in LISTS:
        try:
            await one.read(session)
        except CorruptData as error:
            found.append(error)
        except NotAuthorized:
            return []
    return found
