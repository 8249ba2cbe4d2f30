"""The asyncio Consumer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from types import TracebackType
from typing import Any, Self, Unpack

from metamq.client.aio_producer import Producer
from metamq.client.consumer_core import ConsumerCore, RebalanceCallback
from metamq.client.consumer_face import ConsumerFace, Position, partitions_of
from metamq.client.consumer_options import ConsumerOptions, ConsumerSettings, DataLoss, Start, consumer_plan
from metamq.client.inbox import Hand
from metamq.client.message_batch import MessageBatch
from metamq.client.model import Message, message_of
from metamq.client.offsets import OffsetStorage
from metamq.client.offsets_database import Connection
from metamq.client.opened_later import OpenedLater
from metamq.client.retrying import RetryPolicy, Rollback, dead_letter_headers, dead_letter_topic
from metamq.client.settings import load, zookeeper_root, zookeeper_servers
from metamq.client.typevars import T
from metamq.errors import ConfigError, TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")


POLL_S = 0.5
"""How often a message that waits for its next attempt looks whether it is still ours."""


class Consumer(OpenedLater, ConsumerFace[T]):
    """Reads topics; see metamq.Consumer for the arguments. For one loop, the one it is opened in.

        async with Consumer(topics=["flights"], group="etl") as consumer:
            async for message in consumer:
                ...

    on_assigned and on_revoked may be coroutine functions; they run in the loop. One task iterates.
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
        self._options = load(ConsumerOptions, "consumer", file=config, arguments=settings)
        self._servers = zookeeper_servers(zookeeper, config)
        self._root = zookeeper_root(root, config)
        self._filter = filter
        self._idle_timeout_s = idle_timeout_s
        self._callbacks = _awaited(on_assigned), _awaited(on_revoked)
        self._hand: Hand | None = None
        self._fields: Iterator[tuple[Any, ...]] | None = None
        self._filled = asyncio.Event()
        self._closed = True

    async def open(self) -> Self:
        """Connects and joins the group; `async with` does it. Raises ConnectError, TopicNotFound, ConfigError."""
        self._open_once()
        on_assigned, on_revoked = self._callbacks
        loop = asyncio.get_running_loop()
        self._core = ConsumerCore(self._plan, self._options, loop, on_assigned=on_assigned, on_revoked=on_revoked)
        self._core.inbox.notify = self._filled.set
        await self._core.open(self._servers, self._root)
        self._closed = False
        return self

    async def __aiter__(self) -> AsyncGenerator[Message[T], None]:
        """Messages, until close(), `idle_timeout_s`, or the loop is left; a new loop goes on where it was left."""
        self._core.check_loop_may_begin()
        while True:
            if self._fields is None:
                self._finish()
                hand = await self._take()
                if hand is None:
                    return
                self._fields = self._iterate(hand)
                self._hand = hand
            for fields in self._fields:
                message: Message[T] = message_of(fields)
                if self._filter is None or self._filter(message):
                    yield message
            self._finish()

    async def batches(self) -> AsyncGenerator[MessageBatch[T], None]:
        """Batches as they are stored, without an object per message; ends as iteration does."""
        if self._filter is not None:
            raise ConfigError("batches() does not filter", hint="Leave `filter=` out, and filter the batch's columns.")
        self._core.check_loop_may_begin()
        while True:
            self._finish()
            hand = await self._take(whole=True)
            if hand is None:
                return
            self._hand = hand
            yield hand.batch

    def _iterate(self, hand: Hand) -> Iterator[tuple[Any, ...]]:
        try:
            return hand.iterate()
        except BaseException:
            self._release(hand, in_hand=False)
            raise

    async def _take(self, *, whole: bool = False) -> Hand | None:
        inbox = self._core.inbox
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                while not inbox.closed:
                    self._filled.clear()
                    with inbox.lock:
                        hand = inbox.take(whole=whole)
                    if hand is not None:
                        return hand
                    await self._filled.wait()
        except TimeoutError:
            pass
        return None

    def _finish(self) -> None:
        hand, self._hand, self._fields = self._hand, None, None
        if hand is not None:
            self._release(hand, in_hand=True)

    def _release(self, hand: Hand, *, in_hand: bool) -> None:
        if self._core.inbox.finish(hand, in_hand=in_hand):
            self._core.refetch(hand.state)
        self._core.consumed()

    async def commit(self, position: Position = None, *, connection: Connection | None = None) -> None:
        """As metamq.Consumer.commit; with `connection` it calls the database in this loop."""
        self._core.check_usable()
        if connection is not None:
            self._commit_in(position, connection)
            return
        refused = await self._core.commits.commit(self._requests(position))
        for error in refused.values():
            raise error

    async def seek(self, partition: tuple[str, str], where: int | Start) -> None:
        """The next message of a TopicPartition is the one at a place; see metamq.Consumer.seek."""
        self._core.check_usable()
        await self._core.seek_to(TopicPartition(*partition), where)

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
        listener: Callable[[Message[T]], Awaitable[object]],
        *,
        concurrency: int = 4,
        max_attempts: int = 5,
        retry_delay_s: float = 0.1,
        dead_letter: bool = True,
    ) -> None:
        """Awaits `listener(message)` for each message; as metamq.Consumer.run, with tasks in place of threads."""
        self._core.check_loop_may_begin()
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}", hint="At least one task has to call the listener.")
        policy = RetryPolicy(max_attempts, retry_delay_s, dead_letter)
        if dead_letter:
            dead_letter_topic(self._plan.group)
        self._finish()
        busy: set[asyncio.Task[None]] = set()
        try:
            while (hand := await self._take_for(busy, concurrency)) is not None:
                task = asyncio.ensure_future(self._handle(hand, listener, policy))
                busy.add(task)
            for task in busy:
                await task
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    async def _take_for(self, busy: set[asyncio.Task[None]], concurrency: int) -> Hand | None:
        """A batch as soon as one of `concurrency` handlers is free; raises what a handler failed with."""
        taking = asyncio.ensure_future(self._take())
        try:
            while True:
                waiting = {*busy, taking} if len(busy) < concurrency else set(busy)
                done, _pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done & busy:
                    busy.discard(task)
                    task.result()
                if taking.done() and len(busy) < concurrency:
                    hand = taking.result()
                    if hand is not None or not busy or self._core.inbox.closed:
                        return hand
                    taking = asyncio.ensure_future(self._take())
        except BaseException:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            if not taking.cancelled() and taking.exception() is None and (hand := taking.result()) is not None:
                self._release(hand, in_hand=False)
            raise

    async def _handle(
        self, hand: Hand, listener: Callable[[Message[T]], Awaitable[object]], policy: RetryPolicy
    ) -> None:
        done = False
        try:
            for fields in hand.iterate():
                message: Message[T] = message_of(fields)
                done = self._filter is not None and not self._filter(message)
                if not done and not await self._deliver(hand, message, listener, policy):
                    return
                done = True
        except BaseException:
            done = False  # also when it was `decode=` or the filter that failed
            raise
        finally:
            self._release(hand, in_hand=done)

    async def _deliver(
        self,
        hand: Hand,
        message: Message[T],
        listener: Callable[[Message[T]], Awaitable[object]],
        policy: RetryPolicy,
    ) -> bool:
        failed = 0
        while True:
            try:
                await listener(message)
                return True
            except Exception as error:
                failed += not isinstance(error, Rollback)
                pause_s = policy.pause_after(error, failed)
                if pause_s is None:
                    if not policy.dead_letter:
                        raise
                    await self._send_dead_letter(hand, message, error, failed)
                    return True
                log.info("%s/%s offset %d failed: %r; again in %g s", *message[:3], error, pause_s)
            while pause_s > 0 and not hand.taken_back:
                await asyncio.sleep(min(pause_s, POLL_S))
                pause_s -= POLL_S
            if hand.taken_back:
                return False

    async def _send_dead_letter(self, hand: Hand, message: Message[T], error: Exception, attempts: int) -> None:
        from metamq.client.aio_admin import Admin

        topic = dead_letter_topic(self._plan.group)
        log.warning("given up after %d attempts, to %s: %r", attempts, topic, message[:3], exc_info=error)
        async with Admin(self._servers, root=self._root) as admin:
            with contextlib.suppress(TopicExists):
                await admin.create_topic(topic, partitions=1, max_message_bytes=MESSAGE_BYTES_MAX)
        headers = dead_letter_headers(message, error, attempts)
        async with Producer[bytes](self._servers, root=self._root) as producer:
            await producer.send(topic, hand.batch.plain_value(message.offset), message.key, headers)

    async def close(self) -> None:
        """Commits what is done, gives the partitions back, disconnects. What is in hand is not done."""
        await self._close(in_hand_done=False)

    async def _close(self, *, in_hand_done: bool) -> None:
        if not self._closed:
            self._closed = True
            await self._core.close(in_hand_done=in_hand_done)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(in_hand_done=kind is None)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
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
