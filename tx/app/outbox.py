"""The messages of one transaction between `send`, which never waits for the network, and their brokers.

`send` puts a message into a queue, from the thread that the transaction belongs to. The producer's loop takes them on
into batches, which go out when they are full: in a task once there is enough for one, or a topic to ask for; what is
left, which is all of a small transaction, at its end. The first that fails fails the transaction: what is sent after it
is refused, and it cannot be committed.

A savepoint is a place in the queue. While there is one, nothing behind it goes out: so it can be taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

from metamq.client.model import Receipt, ReceiptRange
from metamq.client.producer.outgoing import Delivery, DeliveryOwner, ManyDelivery, OutgoingBatch
from metamq.client.producer.producer_core import ProducerOptions
from metamq.errors import BranchMisuse, BufferFull, ConfigError, MetamqError, RolledBack
from metamq.tx.app.staging import AnyMessage, size_of_all
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.xa import XACode

TOGETHER = 500
"""Messages that go into batches in one turn of the loop."""
ENOUGH_BYTES = 64 * 1024
"""When so much waits, or a batch's worth, it is taken on: to wake the loop for less costs more than it brings."""
WAIT_HINT = "Look at it behind the transaction's end: only then is it known."


class _Item(NamedTuple):
    """Messages that were sent by one call, TOGETHER at most."""

    topic: str
    messages: list[AnyMessage]
    bytes: int


class Outbox:
    """`add` is for the thread or task of the transaction, the rest for the producer's loop."""

    def __init__(
        self, owner: DeliveryOwner, loop: asyncio.AbstractEventLoop, work: GlobalTransaction, options: ProducerOptions
    ) -> None:
        self.failed: MetamqError | None = None
        self.ended = False
        self.closed = False
        """It is prepared, or to be: nothing more is taken."""
        self._owner = owner
        self._loop = loop
        self._work = work
        self._limit_bytes = options.buffer_bytes
        self._enough_bytes = min(ENOUGH_BYTES, options.batch_bytes, options.buffer_bytes // 2)
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._queued = 0
        self._bytes = 0
        self._kept_from: int | None = None
        """While there is a savepoint: how many messages were sent before the first one."""
        self._added = 0
        self._is_called = False
        """The loop was told to take on what is here, and has not come to its end yet."""
        self._is_running = False
        self._pump: asyncio.Task[None] | None = None
        self._run_end: asyncio.Future[None] | None = None
        """Of the _run() that is under way, in whatever task; made by who waits for it."""
        self._given_up = False
        self._placeholders: dict[str, OutgoingBatch] = {}

    @property
    def is_used(self) -> bool:
        """Whether anything was sent, and not taken back."""
        return self._added > 0

    @property
    def is_full(self) -> bool:
        """Whether more waits here than the producer's buffer may hold."""
        return self._bytes >= self._limit_bytes

    def add(self, topic: str, message: AnyMessage) -> Delivery:
        """Takes a message. Raises what failed the transaction; BufferFull."""
        batch = self._put(topic, [message])
        timestamp_us = None if isinstance(message, bytes) else message.timestamp_us
        return _TransactionDelivery(self, self._owner, batch, timestamp_us or -1)

    def add_many(self, topic: str, messages: list[AnyMessage]) -> ManyDelivery:
        """Takes messages: all of them, or none. Raises as add()."""
        return _TransactionManyDelivery(self, self._owner, self._put(topic, messages), len(messages))

    def _put(self, topic: str, messages: list[AnyMessage]) -> OutgoingBatch:
        """The bound may be exceeded by one call. Returns what is done when the transaction is."""
        parts = [messages[at : at + TOGETHER] for at in range(0, len(messages), TOGETHER)]
        items = [_Item(topic, part, size_of_all(part)) for part in parts]
        with self._lock:  # also against end(), which is to find the placeholder of what was taken
            self.check()
            if self.is_full:
                raise BufferFull(self._limit_bytes)
            batch = self._placeholders.get(topic)
            if batch is None:
                batch = self._placeholders[topic] = OutgoingBatch(topic)
            for item in items:
                self._queue.append(item)
                self._bytes += item.bytes
            self._queued += len(messages)
            self._added += len(messages)
            call = not self._is_called and (self._bytes >= self._enough_bytes or not self._work.knows(topic))
            self._is_called = self._is_called or call
        if call:
            self._owner.in_loop(self._begin)
        return batch

    def check(self) -> None:
        """Raises what failed the transaction."""
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self.ended or self.closed or self._given_up:
            raise BranchMisuse(
                self._work.name, XACode.PROTO, "the transaction takes no more: it is prepared, or has ended"
            )

    # -- savepoints ---------------------------------------------------------------------------------------------------

    def savepoint(self) -> int:
        """From here on messages wait. Returns what take_back() takes."""
        with self._lock:
            if self._kept_from is None:
                self._kept_from = self._added
            return self._added

    def take_back(self, to: int) -> None:
        """What was sent since that savepoint is not sent."""
        with self._lock:
            while self._added > to:
                item = self._queue.pop()
                self._forget(item)
                self._added -= len(item.messages)
                assert self._added >= to  # a savepoint is between two calls

    def _forget(self, item: _Item) -> None:
        self._queued -= len(item.messages)
        self._bytes -= item.bytes

    # -- the loop's ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_under_way and not self.ended and not self._given_up:
            self._pump = self._loop.create_task(self._run_alone())

    async def _run_alone(self) -> None:
        try:
            await self._run()
        finally:
            self._pump = None

    async def _run(self) -> None:
        assert not self._is_running
        self._is_running = True
        try:
            while self.failed is None and (item := self._next()) is not None:
                await self._work.send_many(*item)
        except MetamqError as error:
            self.failed = error
        except Exception as error:
            self.failed = ConfigError(f"the partitioner failed: {error!r}")
            self.failed.__cause__ = error
        except (
            BaseException
        ):  # what was on its way is neither here nor in the Work: without it nothing may be committed
            if not self._given_up:
                reason = "it was interrupted while its messages were sent, and can only be rolled back"
                self.failed = RolledBack(self._work.name, XACode.RBROLLBACK, reason)
            raise
        finally:
            self._is_running = False
            if self._run_end is not None:
                self._run_end.set_result(None)
                self._run_end = None

    def _next(self) -> tuple[str, list[AnyMessage]] | None:
        """Some messages to one topic, as many as may go."""
        with self._lock:
            queue = self._queue
            done = self._added - self._queued
            room = TOGETHER if self._kept_from is None else min(TOGETHER, self._kept_from - done)
            if not queue or room <= 0:
                self._is_called = False
                return None
            item = queue.popleft()
            self._forget(item)
            topic, taken, _bytes = item
            while queue and queue[0].topic == topic and len(taken) + len(queue[0].messages) <= room:
                item = queue.popleft()
                self._forget(item)
                taken += item.messages
            return topic, taken

    @property
    def _is_under_way(self) -> bool:
        return self._is_running or self._pump is not None

    async def _until_run_ends(self) -> None:
        if self._pump is not None:
            await asyncio.wait([self._pump])
        elif self._is_running:  # in a task of a settle()
            if self._run_end is None:
                self._run_end = self._loop.create_future()
            await asyncio.wait([self._run_end])

    async def until_half(self) -> None:
        """Waits until half of the bound is free, or all that a savepoint does not keep has gone. Raises what failed the
        transaction; BufferFull when what it keeps leaves no room."""
        while self._bytes > self._limit_bytes // 2:
            self._begin()
            await self._until_run_ends()
            self.check()
            if self._kept_from is not None:
                if self.is_full:
                    raise BufferFull(self._limit_bytes)
                return

    async def settle(self) -> None:
        """Waits until the Work has all of it. Raises what failed the transaction."""
        with self._lock:
            self._kept_from = None
        while self.failed is None and not self._given_up and (self._queue or self._is_under_way):
            if self._is_under_way:
                await self._until_run_ends()
            else:  # without a task: nobody else waits for it
                await self._run()
        if self.failed is not None:
            raise self.failed
        if self._given_up:
            raise BranchMisuse(self._work.name, XACode.PROTO, "the transaction was rolled back meanwhile")

    async def give_up(self) -> None:
        """Stops, and lets go of what waits."""
        self._given_up = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None  # one that never ran does not say so itself
        with self._lock:
            self._queue.clear()
            self._queued = self._bytes = 0

    def end(self, error: MetamqError | None) -> None:
        """The transaction is committed, or has failed: its deliveries say so."""
        with self._lock:
            batches = [] if self.ended else list(self._placeholders.values())
            self.ended = True
        for batch in batches:
            batch.complete(-1, error)


def _check_ended(outbox: Outbox) -> None:
    if not outbox.ended:
        raise ConfigError("the delivery waits for the end of its transaction", hint=WAIT_HINT)


class _TransactionDelivery(Delivery):
    """Of a message in a transaction: done when that ends; where it is stored, the broker does not say."""

    __slots__ = ("_outbox", "_timestamp_us")

    def __init__(self, outbox: Outbox, producer: DeliveryOwner, batch: OutgoingBatch, timestamp_us: int) -> None:
        super().__init__(producer, batch, 0)
        self._outbox = outbox
        self._timestamp_us = timestamp_us

    def _value(self) -> Receipt:
        us = self._timestamp_us
        return Receipt(self._batch.topic, "", -1, us if us >= 0 else self._batch.timestamp_us)

    def _check_may_block(self) -> None:
        _check_ended(self._outbox)

    def __await__(self) -> Generator[Any, None, Receipt]:
        _check_ended(self._outbox)
        return super().__await__()


class _TransactionManyDelivery(ManyDelivery):
    """As _TransactionDelivery, of many."""

    __slots__ = ("_count", "_outbox")

    def __init__(self, outbox: Outbox, producer: DeliveryOwner, batch: OutgoingBatch, count: int) -> None:
        super().__init__(producer, [batch])
        self._outbox = outbox
        self._count = count

    def _value(self) -> list[ReceiptRange]:
        return [ReceiptRange(self._parts[0].topic, "", -1, self._count)] if self._count else []

    def _check_may_block(self) -> None:
        _check_ended(self._outbox)

    def __await__(self) -> Generator[Any, None, list[ReceiptRange]]:
        _check_ended(self._outbox)
        return super().__await__()
