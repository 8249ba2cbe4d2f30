"""What the blocking and the asyncio Consumer have in common: arguments in, and what may be asked from any thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic

from metamq.client.consumer_core import ConsumerCore
from metamq.client.health import ConsumerHealth
from metamq.client.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.client.offsets import CommitRequest
from metamq.client.offsets_database import Connection, DatabaseOffsets
from metamq.client.typevars import T
from metamq.errors import ConfigError, OwnershipLost
from metamq.zk.ownership import Committed
from metamq.zk.partitions import TopicPartition

Position = Message[Any] | MessageBatch[Any] | Mapping[TopicPartition, int] | None


def offsets_of(position: Position) -> dict[TopicPartition, int] | None:
    """What commit(position) commits: the offset after a message or batch; None for all that is done."""
    if position is None:
        return None
    if isinstance(position, Message):
        return {TopicPartition(position.topic, position.partition): position.offset + 1}
    if isinstance(position, MessageBatch):
        return {TopicPartition(position.topic, position.partition): position.end_offset}
    return {TopicPartition(*tp): offset for tp, offset in position.items()}


class ConsumerFace(Generic[T]):
    """The parts of a Consumer that wait for nothing."""

    _core: ConsumerCore

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions that this consumer has now."""
        return self._core.assignment()

    def health(self) -> ConsumerHealth:
        """How consumption goes, partition by partition: positions, lag, last errors. Asks nobody; any thread."""
        return self._core.health()

    def _commit_in(self, position: Position, connection: Connection) -> None:
        """Writes offsets into the application's own transaction, in this thread."""
        storage = self._core.plan.offsets
        if not isinstance(storage, DatabaseOffsets):
            raise ConfigError(
                "commit(connection=...) needs offsets in a database",
                hint="Give Consumer(offsets=DatabaseOffsets(...)).",
            )
        for request in self._core.commit_requests(offsets_of(position)):
            self._commit_one_in(storage, connection, request)

    def _commit_one_in(self, storage: DatabaseOffsets, connection: Connection, request: CommitRequest) -> None:
        """The row holds what the last transaction wrote or, if that was rolled back, what the one before did."""
        state = self._core.inbox.states.get(request.claim.tp)
        if state is None:
            raise OwnershipLost(*request.claim.tp, reason="it is not assigned to this consumer")
        stored = request.claim.committed
        known: list[int | None] = [state.assumed_offset] if state.assumed_offset is not None else []
        known += [state.committed_offset, stored.offset if stored else None]
        for number, offset in enumerate(dict.fromkeys(known)):
            committed = None if offset is None else Committed(offset, request.epoch, request.claim.topic_id)
            try:
                storage.commit_in(connection, [request.with_known(committed)])
            except OwnershipLost:
                if number + 1 == len(dict.fromkeys(known)):
                    raise
                continue
            state.committed_offset = offset
            state.assumed_offset = request.offset
            return


def partitions_of(partitions: Iterable[tuple[str, str]] | tuple[str, str]) -> list[TopicPartition]:
    """TopicPartitions of what pause() and resume() were given: one, or several."""
    if isinstance(partitions, tuple) and len(partitions) == 2 and isinstance(partitions[0], str):
        return [TopicPartition(*partitions)]
    return [TopicPartition(*tp) for tp in partitions]
