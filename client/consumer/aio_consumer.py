"""The asyncio Consumer."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from types import TracebackType
from typing import Any, Self, Unpack

from metamq.client.checks import check_callables, check_seconds, check_whole, partition_of
from metamq.client.consumer.aio_listener import DeadLetters, ListenerTasks
from metamq.client.consumer.consumer_core import ConsumerCore, RebalanceCallback
from metamq.client.consumer.consumer_face import ConsumerFace, Position, partitions_of
from metamq.client.consumer.hands import TaskHands
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerSettings, DataLoss, Start, consumer_plan
from metamq.client.fetch.inbox import Hand
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message, message_of
from metamq.client.net.retrying import RetryPolicy
from metamq.client.offsets.dbapi import NOT_GIVEN, AnyConnection, database_of
from metamq.client.offsets.offsets import OffsetStorage
from metamq.client.one_loop import OneLoop
from metamq.client.opened_later import OpenedLater
from metamq.client.settings import load, zookeeper_root, zookeeper_servers
from metamq.client.typevars import T
from metamq.errors import ConfigError, ForkedError
from metamq.zk.partitions import TopicPartition


class Consumer(OpenedLater, ConsumerFace[T]):
    """Reads topics; see metamq.Consumer for the arguments. For one loop, the one it is opened in.

        async with Consumer(topics=["flights"], group="etl") as consumer:
            async for message in consumer:
                ...

    on_assigned and on_revoked may be coroutine functions; they run in the loop. One task iterates, and
    a second one gets ConfigError.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        topics: Collection[str] | str,
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
        consumer_id: str | None = None,
        config: str | None = None,
        root: str | None = None,
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
        )
        self._options = load(ConsumerOptions, "consumer", file=config, arguments=settings, others=type(self))
        self._servers = zookeeper_servers(zookeeper, config)
        self._root = zookeeper_root(root, config)
        self._filter = filter
        self._idle_timeout_s = idle_timeout_s
        self._callbacks = _awaited(on_assigned), _awaited(on_revoked)
        self._hand: Hand | None = None
        self._one_loop = OneLoop()
        self._fields: Iterator[tuple[Any, ...]] | None = None
        self._closed = True

    async def open(self) -> Self:
        """Connects and joins the group; `async with` does it. Raises ConnectError, TopicNotFound, ConfigError."""
        self._open_once()
        on_assigned, on_revoked = self._callbacks
        loop = asyncio.get_running_loop()
        self._core = ConsumerCore(self._plan, self._options, loop, on_assigned=on_assigned, on_revoked=on_revoked)
        self._hands = TaskHands(self._core, self._idle_timeout_s)
        await self._core.open(self._servers, self._root)
        self._closed = False
        return self

    async def __aiter__(self) -> AsyncGenerator[Message[T], None]:
        """Messages, until close(), `idle_timeout_s`, or the loop is left; a new loop goes on where it was left."""
        self._core.check_loop_may_begin()
        with self._one_loop.begun(asyncio.current_task) as goes_on:
            while True:
                goes_on()
                if self._fields is None:
                    self._finish()
                    hand = await self._hands.take()
                    if hand is None:
                        return
                    self._fields = self._iterate(hand)
                    self._hand = hand
                for fields in self._fields:
                    message: Message[T] = message_of(fields)
                    if self._filter is None or self._filter(message):
                        yield message
                self._finish()

    async def batches(self, max_messages: int | None = None) -> AsyncGenerator[MessageBatch[T], None]:
        """Batches as they are stored, without an object per message; see metamq.Consumer.batches."""
        if max_messages is not None:
            check_whole("max_messages", max_messages, 1)
        if self._filter is not None:
            raise ConfigError("batches() does not filter", hint="Leave `filter=` out, and filter the batch's columns.")
        self._core.check_loop_may_begin()
        with self._one_loop.begun(asyncio.current_task) as goes_on:
            goes_on()
            self._finish()
            while True:
                hand = await self._hands.take(whole=True, max_messages=max_messages or 0)
                if hand is None:
                    return
                self._hand = hand
                yield hand.batch
                goes_on()
                self._finish(is_handled=True)

    def _iterate(self, hand: Hand) -> Iterator[tuple[Any, ...]]:
        try:
            return hand.iterate()
        except BaseException:
            self._hands.release(hand, in_hand=False)
            raise

    def _finish(self, *, is_handled: bool = False) -> None:
        hand, self._hand, self._fields = self._hand, None, None
        if hand is not None:
            self._hands.release(hand, in_hand=is_handled or not hand.is_rejected)

    async def commit(self, position: Position = None, *, connection: AnyConnection | None = NOT_GIVEN) -> None:
        """As metamq.Consumer.commit.

        connection: of psycopg.AsyncConnection, asyncpg or aiosqlite; or a blocking one, whose database this loop waits
        for.
        """
        self._core.check_usable()
        self._check_not_none(connection)
        await self._check_given(position)
        if connection is not None and connection is not NOT_GIVEN:
            storage = self._storage_for_commit_in()
            await self._commit_in(storage, position, database_of(connection, storage._paramstyle))
            return
        refused = await self._core.commits.commit(self._requests(position))
        for error in refused.values():
            raise error

    async def seek(self, partition: tuple[str, str], where: int | Start) -> None:
        """The next message of a TopicPartition is the one at a place; see metamq.Consumer.seek."""
        self._core.check_usable()
        await self._core.seek_to(partition_of(partition), where)

    def _seek_now(self, tp: TopicPartition, offset: int) -> None:
        self._core.seek(tp, offset)

    def pause(self, *partitions: tuple[str, str]) -> None:
        """Hands out nothing of these partitions, or of all assigned ones, until resume(); they stay assigned."""
        self._core.check_usable()
        self._core.pause(partitions_of(partitions) or self.assignment)

    def resume(self, *partitions: tuple[str, str]) -> None:
        """Goes on with paused partitions."""
        self._core.check_usable()
        self._core.resume(partitions_of(partitions) or self.assignment)

    async def lag(self) -> dict[TopicPartition, int]:
        """Messages that are stored and not done, per assigned partition, as the brokers know now."""
        self._core.check_usable()
        return await self._core.lag()

    async def run(
        self,
        listener: Callable[[Message[T]], object],
        *,
        concurrency: int = 4,
        max_attempts: int = 5,
        retry_delay_s: float = 0.1,
        dead_letter: bool = True,
    ) -> None:
        """Awaits `listener(message)` for each message; as metamq.Consumer.run, with tasks in place of threads.

        A plain function will do where it does not block: it is called in the loop, which does nothing else meanwhile.
        """
        self._core.check_loop_may_begin()
        dead_letters = DeadLetters(self._servers, self._root, self._plan.group) if dead_letter else None
        policy = RetryPolicy(max_attempts, retry_delay_s)
        tasks = ListenerTasks(self._hands, listener, self._filter, dead_letters, policy, concurrency)
        with self._one_loop.begun(asyncio.current_task) as goes_on:
            goes_on()
            self._finish()
            await tasks.run()

    async def close(self) -> None:
        """Commits what is done, gives the partitions back, disconnects. What is in hand is not done."""
        await self._close(in_hand_done=False)

    async def _close(self, *, in_hand_done: bool) -> None:
        if not self._closed:
            self._closed = True
            if isinstance(self._core.inbox.error, ForkedError):
                raise self._core.inbox.error
            await self._core.close(in_hand_done=in_hand_done)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(self._core.inbox.error, ForkedError):  # else a child leaves its parent's block
            await self._close(in_hand_done=kind is None)

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
