"""The common base of the blocking and the asyncio Consumer: argument checks, and the methods that do not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic

from metamq.client.checks import check_seconds, check_whole, partition_of, wrong_type
from metamq.client.fetch.commit_in import Position, commit_in, offset_write
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.client.typevars import T
from metamq.errors import ConfigError, DecodeError, OwnershipLost
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.consumer.consumer_core import ConsumerCore
    from metamq.client.consumer.health import ConsumerHealth
    from metamq.client.handling.dead_letters import DeadLetters
    from metamq.client.offsets.dbapi import Database
    from metamq.client.offsets.offsets import CommitRequest
    from metamq.client.settings import ClusterAccess

__all__ = ["ConsumerApi", "Position", "faults_of_the_program", "offsets_of", "partitions_of"]


@contextmanager
def faults_of_the_program() -> Iterator[None]:
    """Marks a ConfigError of commit() and dead_letter(): in a listener it ends run(), as each message would fail."""
    try:
        yield
    except ConfigError as error:
        error.ends_run = True
        raise


def offsets_of(position: Position) -> dict[TopicPartition, int] | None:
    """Returns the offsets that commit(position) commits, or None for all that is done."""
    if position is None:
        return None
    if isinstance(position, Message):
        return {TopicPartition(position.topic, position.partition): position.offset + 1}
    if isinstance(position, MessageBatch):
        return {TopicPartition(position.topic, position.partition): position.end_offset}
    if not isinstance(position, Mapping):
        raise wrong_type("`position`", "a message, a batch or {TopicPartition: offset}", position)
    return {partition_of(tp): offset for tp, offset in position.items()}


class ConsumerApi(Generic[T]):
    """The methods of a Consumer that do not wait."""

    _core: ConsumerCore
    _access: ClusterAccess
    _filter: Callable[[Message[T]], bool] | None
    _letters: DeadLetters | None = None

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions that this consumer has now. Thread-safe. Raises ClosedError after close()."""
        self._core.check_usable()
        return self._core.assignment()

    def health(self) -> ConsumerHealth:
        """Returns the state per partition: positions, lag, last errors. Makes no request. Thread-safe.

        May also be called after close().
        """
        return self._core.health()

    @property
    def stopped(self) -> bool:
        """True after stop() or close(): loops end, and poll() returns None at once. Thread-safe."""
        return self._core.inbox.stopped

    def _check_batches(self, max_messages: int | None, within_s: float | None) -> None:
        """Checks the arguments of batches(). Raises ConfigError also for a consumer with a filter."""
        if max_messages is not None:
            check_whole("max_messages", max_messages, 1)
        check_seconds("within_s", within_s)
        if within_s is not None and max_messages is None:
            raise ConfigError("batches(within_s=...) needs the size of a full batch", hint="Give max_messages=, too.")
        if self._filter is not None:
            raise ConfigError("batches() does not filter", hint="Leave `filter=` out, and filter the batch's columns.")
        self._core.check_loop_may_begin()

    def _requests(self, position: Position) -> list[CommitRequest]:
        delivered = isinstance(position, Message | MessageBatch)
        return self._core.commits.requests(offsets_of(position), delivered=delivered)

    async def _commit_stored(self, position: Position) -> None:
        """Commits in the storage of the group."""
        refused = await self._core.commits.commit(lambda: self._requests(position))
        for error in refused.values():
            raise error

    async def _check_given(self, position: Position) -> None:
        """Raises OffsetOutOfRange for an offset beyond the partition's end: no message before it can be done."""
        if isinstance(position, Mapping):
            given = {request.claim.tp: request.offset for request in self._requests(position)}
            await self._core.check_not_beyond_end(given, "Give the offset after the last message that is done.")

    def _storage_for_commit_in(self) -> DatabaseOffsets:
        """Returns the storage. Raises ConfigError if offsets cannot be committed on a connection."""
        storage = self._core.plan.offsets
        if not isinstance(storage, DatabaseOffsets):
            raise ConfigError(
                "commit(connection=...) needs offsets in a database",
                hint="Give Consumer(offsets=DatabaseOffsets(...), auto_commit=False), or --offsets and "
                "--no-auto-commit to `metamq worker`.",
            )
        if self._core.plan.auto_commit:
            raise ConfigError(
                "commit(connection=...) does not work with auto_commit, which may commit the same messages first",
                hint="Give Consumer(auto_commit=False), or --no-auto-commit to `metamq worker`.",
            )
        return storage

    def _check_not_none(self, connection: object) -> None:
        """Raises ConfigError if the connection is None although offsets are in a database."""
        if connection is None and isinstance(self._core.plan.offsets, DatabaseOffsets):
            raise ConfigError(
                "commit(connection=None) gives no connection: the offsets would be stored without the results",
                hint="Give the connection that the results are stored with, or leave `connection` out.",
            )

    async def _commit_in(self, storage: DatabaseOffsets, position: Position, database: Database) -> None:
        """Writes offsets into the application's own transaction. Waits only for the database."""
        states, everything = self._core.inbox.states, []
        for request in self._requests(position):
            if (state := states.get(request.claim.tp)) is None:
                raise OwnershipLost(*request.claim.tp, reason="it is not assigned to this consumer")
            if state.in_flight is not None and state.in_flight.first_unfinished is not None:
                raise ConfigError(
                    "commit(connection=...) does not work in run(order='key'): the results of a message that is being "
                    "processed would be stored without its offset",
                    hint="Use run(order='partition'), a loop or batches(). `metamq worker` has --order partition.",
                )
            everything.append(offset_write(state, request, position))
        await database.check_in_transaction()  # may wait: after the state at the time of the call was read
        for one in everything:
            counted = await commit_in(storage, database, one)
            if counted is not None:
                tp, offset = one.request.claim.tp, one.request.offset
                if one.was_sought or states.get(tp) is not one.state:
                    pass  # a seek or another owner has set the next offset
                elif counted < offset:
                    self._seek_now(tp, counted)
                else:
                    one.state.sought_offset = offset  # the next commit begins there
                raise OwnershipLost(*tp, reason=f"its messages are counted up to offset {counted} already")

    async def _send_letter(self, given: Message[T] | DecodeError, error: Exception | None, attempts: int) -> None:
        """Stores a message in the dead-letter topic; see Consumer.dead_letter."""
        with faults_of_the_program():
            await self._give_up(given, error, attempts)

    async def _give_up(self, given: Message[T] | DecodeError, error: Exception | None, attempts: int) -> None:
        self._core.check_usable()
        check_whole("attempts", attempts, 1)
        if not isinstance(given, Message | DecodeError):
            raise wrong_type("`message`", "a message, or the DecodeError of one", given)
        error = given if error is None and isinstance(given, DecodeError) else error
        if not isinstance(error, Exception):
            raise wrong_type("`error`", "the exception that the message failed with", error)
        self._letters = self._letters or self._new_letters()
        message = self._stored(given)
        await self._letters.send(message, message.value, error, attempts)
        self._core.handlers.given_up(given.topic)
        with self._core.inbox.lock:
            state = self._core.inbox.states.get(TopicPartition(given.topic, given.partition))
            if state is not None and state.in_flight is not None and state.in_flight.rejected is given:
                state.in_flight.rejected = None  # the next loop continues after the message

    def _stored(self, given: Message[T] | DecodeError) -> Message[Any]:
        """Returns a delivered message with its value as it is stored. Raises OwnershipLost, ConfigError."""
        tp = TopicPartition(given.topic, given.partition)
        with self._core.inbox.lock:
            state = self._core.inbox.states.get(tp)
            in_flight = None if state is None else state.in_flight
            if in_flight is not None and in_flight.first_unfinished is not None:
                raise ConfigError(
                    "dead_letter() does not work in run(order='key'): run() decides when the message is done",
                    hint="Raise metamq.GiveUp in the listener.",
                )
            if in_flight is not None and given.offset in in_flight.batch.offsets:
                return in_flight.batch.undecoded(given.offset)
            if state is None or not state.has_delivered(given.offset + 1):
                raise OwnershipLost(*tp, reason=f"another owner came after the delivery of offset {given.offset}")
        if isinstance(given, DecodeError) or self._core.plan.decode is not None:
            raise ConfigError(
                f"the stored message of {tp} at offset {given.offset} is not here any more",
                hint="Call dead_letter() before you ask for the next message or batch.",
            )
        return given

    async def _close_all(self, *, last_done: bool) -> None:
        try:
            await self._core.close(last_done=last_done)
        finally:
            if self._letters is not None:
                await self._letters.close()

    def _new_letters(self) -> DeadLetters:
        raise NotImplementedError

    def _seek_now(self, tp: TopicPartition, offset: int) -> None:
        """Seeks. In the blocking consumer, waits for the seek."""
        raise NotImplementedError


def partitions_of(partitions: Iterable[tuple[str, str]] | tuple[str, str]) -> list[TopicPartition]:
    """Returns the TopicPartitions of the arguments of pause() and resume(): one, or several."""
    if isinstance(partitions, tuple) and len(partitions) == 2 and isinstance(partitions[0], str):
        return [partition_of(partitions)]
    return [partition_of(tp) for tp in partitions]
