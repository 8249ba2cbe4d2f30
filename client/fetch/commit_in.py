"""Offsets in the application's own transaction: when may these messages be counted?

The row holds how far messages are counted. Results for messages up to an offset may be stored with it only if none of
them is counted yet; so it is not enough that the row is still ours, which its generation tells. The outcome of a
database commit may be unknown: the answer was lost, the application handles the message again, and its results are
there already. Then the row holds more than it may, and the new transaction is refused.

    a message       the row may not be past it
    a batch         the row may not be in it or past it
    {tp: offset}    the row has to be below the offset, or hold it since our last commit: nothing new in that partition
    all that is done        likewise
    after seek()    with the last two, nor may it be past the place. With any: if the place lies before what is counted
                    for certain, the application means to count again, and the row may hold anything

Whoever is refused rolls back and goes on with what comes next. If only a part of the messages is counted, what comes
next is the rest of them.

Another task, or thread, may seek while the database is waited for. The results are of messages from before that seek,
so the commit counts as the first of the two: it goes by what held when it was asked for, and changes nothing of where
the seek went.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from metamq.client.fetch.inbox import PartitionState
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.client.offsets.dbapi import Database
from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, Ownership
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.errors import OwnershipLost
from metamq.zk.partitions import TopicPartition

Position = Message[Any] | MessageBatch[Any] | Mapping[TopicPartition, int] | None


def counted_limit(state: PartitionState, position: Position, offset: int) -> float:
    """The highest offset that the row may hold when `offset` is written for `position`."""
    sought, certain = state.sought_offset, state.committed_offset
    if sought is not None and certain is not None and sought < certain:
        return math.inf
    if isinstance(position, Message | MessageBatch):
        return position.offset
    limit = offset if offset == state.assumed_offset else offset - 1
    return limit if sought is None else min(limit, sought)


class OffsetWrite(NamedTuple):
    """One offset that is to be written, and what held when that was asked for."""

    state: PartitionState
    request: CommitRequest
    limit: float
    """The highest offset that the row may hold."""
    guess: CommittedOffset | None
    """What the row holds if the last transaction went well: so that one statement is enough, as a rule."""
    seeks: int

    @property
    def was_sought(self) -> bool:
        """Whether there was a seek meanwhile."""
        return self.state.seeks != self.seeks


def asked(state: PartitionState, request: CommitRequest, position: Position) -> OffsetWrite:
    """To be called before anything is waited for."""
    return OffsetWrite(
        state, request, counted_limit(state, position, request.offset), _guess(state, request), state.seeks
    )


async def commit_in(storage: DatabaseOffsets, database: Database, one: OffsetWrite) -> int | None:
    """Writes one offset; or not, and returns up to where messages are counted already, and these with them.

    Raises OwnershipLost when the row is another owner's.
    """
    state, request, limit, held = one.state, one.request, one.limit, one.guess
    claim = request.claim
    if _counted(held, claim) > limit or not await storage._update_in(database, request.with_known(held)):
        held = await storage._read_in(database, claim)
        if _counted(held, claim) > limit:
            return _counted(held, claim)
        if not await storage._update_in(database, request.with_known(held)):
            raise OwnershipLost(*claim.tp, reason="another transaction of this consumer commits for it")
    state.committed_offset = None if _counted(held, claim) < 0 else _counted(held, claim)
    if not one.was_sought:
        state.assumed_offset, state.sought_offset = request.offset, None
    return None


def _guess(state: PartitionState, request: CommitRequest) -> CommittedOffset | None:
    offset = state.assumed_offset if state.assumed_offset is not None else state.committed_offset
    if offset is None:
        return request.claim.committed
    return CommittedOffset(offset, request.epoch, request.claim.topic_id)


def _counted(held: CommittedOffset | None, claim: Ownership) -> int:
    """How far the present topic's messages are counted; a row may still be of a topic that was deleted."""
    return held.offset if held is not None and held.topic_id == claim.topic_id else -1
