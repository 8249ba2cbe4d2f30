"""The right that each command needs: one table. A command without an entry is refused, and fails a test.

`check()` runs before each request. Where the right depends on a topic, the request's own processor checks each entry,
by the Access of the connection: one PUT or GET may have allowed and forbidden topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from metamq.security.rights import CLUSTER, DESCRIBE, PROMOTE, RIGHTS
from metamq.wire.commands import Command

if TYPE_CHECKING:
    from metamq.security.rights import Access

Check = Callable[["Access"], None]


def _none(access: Access) -> None:
    """Needs no right: the connection itself answers it."""


def _cluster(right: str) -> Check:
    assert right in RIGHTS[CLUSTER]
    return lambda access: access.check_cluster(right)


def _each_topic(access: Access) -> None:
    """Needs a right on the topic of each entry, which the processor of the command checks."""


def _each_branch(access: Access) -> None:
    """Needs to own the branch, or a right, which metamq.broker.transactions.ownership checks."""


NEEDS: Mapping[int, Check] = {
    Command.HELLO: _none,
    Command.AUTHENTICATE: _none,
    Command.PUT: _each_topic,  # WRITE
    Command.GET: _each_topic,  # READ
    Command.SYNC: lambda access: access.check_is_broker(),
    Command.OFFSETS: _each_topic,  # READ
    Command.STATS: _cluster(DESCRIBE),
    Command.PROMOTE: _cluster(PROMOTE),
    Command.TX: _each_branch,  # and WRITE on each topic
    Command.BRANCHES: _each_branch,  # RECOVER shows all of others
    Command.TOPIC: _each_topic,  # CREATE, ALTER or DELETE
    Command.DELAY: _none,  # never a request
    Command.DELEGATE: _each_topic,  # the right that is delegated
}


def check(command: int, access: Access) -> None:
    """Raises NotAuthorized if the client may not send this command at all."""
    NEEDS[command](access)
