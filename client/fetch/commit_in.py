"""Offsets in the application's own transaction: the check that messages are not counted twice.

The row holds the offset up to which messages are counted. Results of messages before an offset may be stored together
with that offset only if none of these messages is counted yet. The row's claim generation shows that this consumer
still owns the row. That is not enough, because the outcome of a database commit may be unknown. If its answer was lost,
the application processes the message again, although its results are stored. Then the row is past its limit, and the
new transaction is refused.

    a message       the row must not be past it
    a batch         the row must not be in it or past it
    {tp: offset}    the row must be below the offset, or hold it since our last commit: nothing new in that partition
    all that is done        the same
    after seek()    in the last two cases the row also must not be past the target of the seek. In all cases: if the
                    target is before what is certainly counted, the application wants to count again, and the row may
                    hold any offset

A refused caller rolls back and continues with the next messages. If only a part of the messages is counted, the next
messages are the others.

Another task, or thread, may seek during the wait for the database. The results are of messages from before that seek,
so the commit counts as the earlier of the two: it applies the state at the time of its call, and keeps the target of
the seek.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, Ownership
from metamq.errors import OwnershipLost
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.fetch.inbox import PartitionState
    from metamq.client.offsets.dbapi import Database
    from metamq.client.offsets.offsets_database import DatabaseOffsets

Position = Message[Any] | MessageBatch[Any] | Mapping[TopicPartition, int] | None


def counted_limit(state: PartitionState, position: Position, offset: int) -> float:
    """Returns the highest offset that the row may hold when `offset` is written for `position`."""
    sought, certain = state.sought_offset, state.committed_offset
    if sought is not None and certain is not None and sought < certain:
        return math.inf
    if isinstance(position, Message | MessageBatch):
        return position.offset
    limit = offset if offset == state.assumed_offset else offset - 1
    return limit if sought is None else min(limit, sought)


class OffsetWrite(NamedTuple):
    """One offset to write, with the state at the time of the call."""

    state: PartitionState
    request: CommitRequest
    limit: float
    """The highest offset that the row may hold."""
    guess: CommittedOffset | None
    """The content of the row if the last transaction succeeded. With a right guess, one statement is enough."""
    seeks: int

    @property
    def was_sought(self) -> bool:
        """True if there was a seek since the call."""
        return self.state.seeks != self.seeks


def offset_write(state: PartitionState, request: CommitRequest, position: Position) -> OffsetWrite:
    """Returns the write for a request. The caller must call it before it waits for anything."""
    return OffsetWrite(
        state, request, counted_limit(state, position, request.offset), _guess(state, request), state.seeks
    )


async def commit_in(storage: DatabaseOffsets, database: Database, one: OffsetWrite) -> int | None:
    """Writes one offset and returns None. If the messages are counted already, returns the counted offset instead.

    Raises OwnershipLost if the row belongs to another owner.
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


async def commit_given_up(storage: DatabaseOffsets, state: PartitionState, request: CommitRequest) -> None:
    """Commits a message without results, in a transaction of its own.

    It writes nothing if a listener has processed a message that the row does not count, or if the row counts this
    message already. Raises OwnershipLost if the row belongs to another owner.
    """
    seeks, handled = state.seeks, state.handled_offset

    async def commit(database: Database) -> bool:
        held = await storage._read_in(database, request.claim)
        counted = _counted(held, request.claim)
        if handled > max(counted, 0) or counted >= request.offset:
            return False
        return await storage._update_in(database, request.with_known(held))

    if await storage._run(commit):
        state.committed_offset = request.offset
        if state.seeks == seeks:
            state.assumed_offset, state.sought_offset = request.offset, None


def _guess(state: PartitionState, request: CommitRequest) -> CommittedOffset | None:
    offset = state.assumed_offset if state.assumed_offset is not None else state.committed_offset
    if offset is None:
        return request.claim.committed
    return CommittedOffset(offset, request.epoch, request.claim.topic_id)


def _counted(held: CommittedOffset | None, claim: Ownership) -> int:
    """Returns the offset up to which the current topic's messages are counted; -1 if the row is of a deleted topic."""
    return held.offset if held is not None and held.topic_id == claim.topic_id else -1
