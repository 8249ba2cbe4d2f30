"""The asyncio Consumer."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from metamq.client.checks import check_callables, check_seconds, partition_of
from metamq.client.consumer.aio_loop import ConsumerLoop
from metamq.client.consumer.consumer_api import ConsumerApi, Position, faults_of_the_program, partitions_of
from metamq.client.consumer.consumer_core import ConsumerCore, RebalanceCallback
from metamq.client.consumer.key_order import KeyOrderTasks
from metamq.client.consumer.listener import ListenerTasks
from metamq.client.consumer.receivers import PollWait, TaskReceiver
from metamq.client.consumer.retrying import Order, check_run
from metamq.client.consumer.schema_versions import open_with_schemas
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerSettings, DataLoss, Start, consumer_plan
from metamq.client.handling.dead_letters import DeadLetters
from metamq.client.handling.retry_policy import RETRY_DELAY_MAX_S, Errors, RetryPolicy
from metamq.client.model import Message, message_of
from metamq.client.offsets.connections import NOT_GIVEN, AnyConnection, database_of
from metamq.client.one_loop import OneLoop
from metamq.client.opened_later import OpenedLater
from metamq.client.settings import cluster_access, load
from metamq.client.typevars import T
from metamq.errors import DecodeError, ForkedError

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import Wait
    from metamq.client.fetch.inbox import InFlightBatch
    from metamq.client.fetch.message_batch import MessageBatch
    from metamq.client.offsets.offsets import OffsetStorage
    from metamq.client.schemas.topic import Topic
    from metamq.security.config import SecurityConfig
    from metamq.zk.partitions import TopicPartition


class Consumer(OpenedLater, ConsumerApi[T]):
    """Reads topics; see metamq.Consumer for the arguments. Not thread-safe: use it only in the loop that opens it.

        async with Consumer(topics=["flights"], group="etl") as consumer:
            async for message in consumer:
                ...

    on_assigned and on_revoked may be coroutine functions; they run in the loop. One task iterates; a second one gets
    ConfigError.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        topics: Collection[str] | str | Topic[T],
        group: str | None = None,
        start: Start = "earliest",
        decode: Callable[[bytes], T] | None = None,
        filter: Callable[[Message[T]], bool] | None = None,
        auto_commit: bool = True,
        idle_timeout_s: float | None = None,
        on_assigned: Callable[[list[TopicPartition]], object] | None = None,
        on_revoked: Callable[[list[TopicPartition]], object] | None = None,
        on_data_loss: DataLoss = "earliest",
        strategy: str = "range",
        offsets: OffsetStorage | None = None,
        broadcast: bool = False,
        retry_topic: bool = False,
        consumer_id: str | None = None,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        check_callables(decode=decode, filter=filter, on_assigned=on_assigned, on_revoked=on_revoked)
        check_seconds("idle_timeout_s", idle_timeout_s)
        self._plan = consumer_plan(
            topics,
            group,
            consumer_id=consumer_id,
            start=start,
            strategy=strategy,
            auto_commit=auto_commit,
            on_data_loss=on_data_loss,
            broadcast=broadcast,
            offsets=offsets,
            decode=decode,
            retry_topic=retry_topic,
        )
        self._options = load(ConsumerOptions, "consumer", file=config, arguments=settings, others=type(self))
        self._access = cluster_access(zookeeper, root, config, security)
        self._filter = filter
        self._idle_timeout_s = idle_timeout_s
        self._callbacks = _awaited(on_assigned), _awaited(on_revoked)
        self._in_flight: InFlightBatch | None = None
        self._one_loop = OneLoop()
        self._messages: Iterator[Message[T]] = iter(())
        """The rest of the messages in flight."""
        self._closed = True

    async def open(self) -> Self:
        """Connects and joins the group; `async with` calls it. Raises ConnectError, TopicNotFound, ConfigError."""
        self._open_once()
        on_assigned, on_revoked = self._callbacks
        loop = asyncio.get_running_loop()
        self._core = ConsumerCore(self._plan, self._options, loop, on_assigned=on_assigned, on_revoked=on_revoked)
        self._receiver = TaskReceiver(self._core, self._idle_timeout_s)
        await open_with_schemas(self._core, self._access)
        self._closed = False
        return self

    def __aiter__(self) -> ConsumerLoop[Message[T]]:
        """Iterates over messages until close() or `idle_timeout_s`. A new loop continues where the last one ended.

        A cancelled step, as by a time-out, loses no message: the next step of the same loop continues.
        """
        self._core.check_loop_may_begin()
        return ConsumerLoop(self._one_loop, self._receiver.new_wait, self._next_message, lambda: self._messages)

    async def _next_message(self, wait: Wait, check_loop: Callable[[], None]) -> Message[T] | None:
        taken = 0
        while True:
            check_loop()
            for message in self._messages:
                return message
            self._finish()
            if isinstance(wait, PollWait) and wait.ends_after(taken):
                return None
            if taken:
                await asyncio.sleep(0)  # the filter may reject very many
            in_flight = await self._receiver.take(wait=wait)
            taken += 1
            if in_flight is None:
                return None
            self._messages = self._iterate(in_flight)
            self._in_flight = in_flight

    async def poll(self, timeout_s: float | None = None) -> Message[T] | None:
        """Returns the next message, or None if none came within `timeout_s` seconds; see metamq.Consumer.poll."""
        check_seconds("timeout_s", timeout_s)
        self._core.check_loop_may_begin()
        task = asyncio.current_task()
        message = await self._next_message(PollWait(timeout_s), lambda: self._one_loop.has_item(task))
        if message is None:
            self._one_loop.has_none(task)
        return message

    def batches(self, max_messages: int | None = None, within_s: float | None = None) -> ConsumerLoop[MessageBatch[T]]:
        """Iterates over batches as they are stored, without an object per message; see metamq.Consumer.batches."""
        self._check_batches(max_messages, within_s)
        take = partial(self._receiver.take, whole=True, max_messages=max_messages or 0, within_s=within_s or 0.0)
        yielded: InFlightBatch | None = None

        async def next_batch(wait: Wait, check_loop: Callable[[], None]) -> MessageBatch[T] | None:
            nonlocal yielded
            check_loop()
            self._finish(is_handled=self._in_flight is yielded)
            yielded = await take(wait=wait)
            self._in_flight = yielded
            return None if yielded is None else yielded.batch

        return ConsumerLoop(self._one_loop, self._receiver.new_wait, next_batch)

    def _iterate(self, in_flight: InFlightBatch) -> Iterator[Message[T]]:
        try:
            messages: Iterator[Message[T]] = map(message_of, in_flight.iterate())
        except BaseException:
            self._receiver.release(in_flight, last_done=False)
            raise
        return messages if self._filter is None else filter(self._filter, messages)

    def _finish(self, *, is_handled: bool = False) -> None:
        in_flight, self._in_flight, self._messages = self._in_flight, None, iter(())
        if in_flight is not None:
            self._receiver.release(in_flight, last_done=is_handled or not in_flight.is_rejected)

    async def commit(self, position: Position = None, *, connection: AnyConnection | None = NOT_GIVEN) -> None:
        """Commits offsets; see metamq.Consumer.commit.

        connection: a connection of psycopg.AsyncConnection, asyncpg, aiosqlite or SQLAlchemy's asyncio, or a blocking
        connection, which blocks this loop while its database works.
        """
        with faults_of_the_program():
            await self._commit(position, connection)

    async def _commit(self, position: Position, connection: AnyConnection | None) -> None:
        self._core.check_usable()
        self._check_not_none(connection)
        await self._check_given(position)
        if connection is not None and connection is not NOT_GIVEN:
            storage = self._storage_for_commit_in()
            await self._commit_in(storage, position, database_of(connection, storage._paramstyle))
            return
        await self._commit_stored(position)

    async def dead_letter(
        self, message: Message[T] | DecodeError, error: Exception | None = None, *, attempts: int = 1
    ) -> None:
        """Stores a message in the group's dead-letter topic; see metamq.Consumer.dead_letter."""
        await self._send_letter(message, error, attempts)

    async def seek(self, partition: tuple[str, str], where: int | Start) -> None:
        """Sets the next message of a TopicPartition; see metamq.Consumer.seek."""
        self._core.check_usable()
        await self._core.seek_to(partition_of(partition), where)

    def _new_letters(self) -> DeadLetters:
        return DeadLetters(self._access, self._plan.group, self._plan.retry_topic)

    def _seek_now(self, tp: TopicPartition, offset: int) -> None:
        self._core.seek(tp, offset)

    def pause(self, *partitions: tuple[str, str]) -> None:
        """Delivers no messages of these partitions, or of all assigned ones, until resume(). They stay assigned."""
        self._core.check_usable()
        self._core.pause(partitions_of(partitions) or self.assignment)

    def resume(self, *partitions: tuple[str, str]) -> None:
        """Continues with paused partitions, or with all assigned ones."""
        self._core.check_usable()
        self._core.resume(partitions_of(partitions) or self.assignment)

    async def lag(self) -> dict[TopicPartition, int]:
        """Returns the number of stored messages that are not done, per assigned partition. Asks the brokers.

        Raises the first error of a broker, or ConnectError.
        """
        self._core.check_usable()
        return await self._core.lag()

    async def run(
        self,
        listener: Callable[[Message[T]], object],
        *,
        order: Order = "partition",
        concurrency: int = 4,
        max_attempts: int = 5,
        retry_delay_s: float = 0.1,
        retry_delay_max_s: float = RETRY_DELAY_MAX_S,
        jitter: float = 0.0,
        retry_later_s: float | None = None,
        retry_on: Errors = (),
        give_up_on: Errors = (),
        dead_letter: bool = True,
        handler_timeout_s: float | None = None,
    ) -> None:
        """Calls `listener(message)` for each message and awaits the result. Like metamq.Consumer.run, with tasks
        instead of threads.

        The listener may be a plain function that does not block: while it runs, the loop does no other work.

        `handler_timeout_s`: the seconds after which an attempt is cancelled and has failed, with HandlerTimeout. A
        listener ends late if it catches the cancellation, or blocks the loop.
        """
        self._core.check_loop_may_begin()
        order = check_run(order, dead_letter, retry_later_s, self._plan)
        dead_letters = self._new_letters() if dead_letter else None
        policy = RetryPolicy(
            max_attempts,
            retry_delay_s,
            retry_on,
            give_up_on,
            handler_timeout_s,
            retry_delay_max_s=retry_delay_max_s,
            jitter=jitter,
            retry_later_s=retry_later_s,
        )
        kind = {"partition": ListenerTasks, "key": KeyOrderTasks}[order]
        tasks = kind(listener, self._filter, dead_letters, policy, concurrency, self._receiver)
        with self._one_loop.begun(asyncio.current_task) as check_loop:
            check_loop()
            self._finish()
            await tasks.run()

    def stop(self) -> None:
        """Ends the loop, or run(), after the messages that are being processed now; see metamq.Consumer.stop.

        For signals: `asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)`.
        """
        self._core.check_usable()
        self._core.stop()

    async def close(self) -> None:
        """Commits what is done, releases the partitions, disconnects. The current message is not done."""
        await self._close(last_done=False)

    async def _close(self, *, last_done: bool) -> None:
        if not self._closed:
            self._closed = True
            if isinstance(self._core.inbox.error, ForkedError):
                raise self._core.inbox.error
            await self._close_all(last_done=last_done)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(self._core.inbox.error, ForkedError):  # otherwise a child process leaves its parent's block
            await self._close(last_done=kind is None)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not isinstance(self._core.inbox.error, ForkedError):
            warnings.warn(
                "a Consumer was not closed: use `async with` or close()", ResourceWarning, source=self, stacklevel=2
            )


def _awaited(callback: Callable[[list[TopicPartition]], object] | None) -> RebalanceCallback:
    async def call(partitions: list[TopicPartition]) -> None:
        if callback is not None and partitions:
            outcome = callback(partitions)
            if inspect.isawaitable(outcome):
                await outcome

    return call
