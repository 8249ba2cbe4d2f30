"""The hold of an operator on free partitions of a group, while it changes their offsets.

A hold is a claim, as a member makes it: no member owns the partitions meanwhile, and a member that starts waits until
they are free. All writes of the hold are fenced by its generation. If the operator's session ends, the next member's
claim refuses the rest of the writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from metamq.errors import ConfigError, MetamqError
from metamq.zk.groups.ownership import NotYet, Ownership, drop_owner, prepare
from metamq.zk.groups.together import claim_all

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.session import Session


@contextlib.asynccontextmanager
async def held(
    session: Session, group: str, wanted: Sequence[tuple[TopicPartition, str]], consequence: str, *, kept_by: str = ""
) -> AsyncIterator[list[Ownership]]:
    """Claims (partition, topic's id), all or none; the end of the block frees them. `consequence` is for the error.

    Raises ConfigError if a member owns one of them, KeptElsewhere, NotAuthorized, ConnectionLost.
    """
    name = f"operator_{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
    for topic in sorted({tp.topic for tp, _ in wanted}):
        await prepare(session, group, topic)
    try:
        outcomes = await claim_all(session, group, wanted, name, freed=lambda _tp: None, kept_by=kept_by)
        yield [_claimed(group, outcome, consequence) for outcome in outcomes]
    finally:
        await asyncio.gather(*(drop_owner(session, group, tp, name) for tp, _ in wanted))


def _claimed(group: str, outcome: Ownership | NotYet | MetamqError, consequence: str) -> Ownership:
    if isinstance(outcome, MetamqError):
        raise outcome
    if isinstance(outcome, NotYet):
        raise ConfigError(
            f"{outcome.owner} owns {outcome.tp} in group {group!r}, {consequence}",
            hint="Stop it first; `metamq group evict` removes a member that is stuck.",
        )
    return outcome
