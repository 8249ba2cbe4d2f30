"""The messages of one transaction between `send`, which never waits for the network, and their brokers.

`send` puts a message into a queue, from the thread that the transaction belongs to; a task of the producer's loop
takes them on into batches, which go out when they are full. The first that fails fails the transaction: what is sent
after it is refused, and it cannot be committed.

A savepoint is a place in the queue. While there is one, nothing behind it goes out: so it can be taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator
from typing import Any

from metamq.client.model import Receipt, ReceiptRange
from metamq.client.outgoing import Delivery, ManyDelivery, OutgoingBatch, Owner
from metamq.client.topic_buffer import size_of
from metamq.errors import BranchMisuse, BufferFull, ConfigError, MetamqError
from metamq.tx.app.staging import Message
from metamq.tx.app.work import Work
from metamq.wire.xa import XACode

TOGETHER = 500
"""Messages that go into batches in one turn of the loop."""
WAIT_HINT = "Look at it behind the transaction's end: only then is it known."


class Outbox:
    """`add` is for the thread or task of the transaction, the rest for the producer's loop."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop, work: Work, limit_bytes: int) -> None:
        self.failed: MetamqError | None = None
        self.ended = False
        self.closed = False
        """It is prepared, or to be: nothing more is taken."""
        self._owner = owner
        self._loop = loop
        self._work = work
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, Message]] = deque()
        self._bytes = 0
        self._kept_from: int | None = None
        """While there is a savepoint: how many messages were sent before the first one."""
        self._added = 0
        self._pump: asyncio.Task[None] | None = None
        self._placeholders: dict[str, OutgoingBatch] = {}

    @property
    def is_used(self) -> bool:
        """Whether anything was sent, and not taken back."""
        return self._added > 0

    @property
    def is_full(self) -> bool:
        """Whether more waits here than the producer's buffer may hold."""
        return self._bytes >= self._limit_bytes

    def add(self, topic: str, message: Message) -> Delivery:
        """Takes a message. Raises what failed the transaction; BufferFull."""
        self._put(topic, [message])
        return _TransactionDelivery(self, self._owner, self._placeholder(topic), message.timestamp_us or -1)

    def add_many(self, topic: str, messages: list[Message]) -> ManyDelivery:
        """Takes messages: all of them, or none. Raises as add()."""
        self._put(topic, messages)
        return _TransactionManyDelivery(self, self._owner, self._placeholder(topic), len(messages))

    def _put(self, topic: str, messages: list[Message]) -> None:
        """The bound may be exceeded by one call."""
        self.check()
        if self.is_full:
            raise BufferFull(self._limit_bytes)
        with self._lock:
            idle = not self._queue
            self._queue.extend((topic, message) for message in messages)
            self._added += len(messages)
            self._bytes += sum(size_of(message.value, message.key, message.headers) for message in messages)
        if idle or self.is_full:
            self._owner.in_loop(self._begin)

    def check(self) -> None:
        """Raises what failed the transaction."""
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self.ended or self.closed:
            raise BranchMisuse(
                self._work.name, XACode.PROTO, "the transaction takes no more: it is prepared, or has ended"
            )

    def _placeholder(self, topic: str) -> OutgoingBatch:
        if topic not in self._placeholders:
            self._placeholders[topic] = OutgoingBatch(topic)
        return self._placeholders[topic]

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
                _topic, message = self._queue.pop()
                self._added -= 1
                self._bytes -= size_of(message.value, message.key, message.headers)

    # -- the loop's ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._pump is None and not self.ended:
            self._pump = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self.failed is None and (item := self._next()) is not None:
                await self._work.send_many(*item)
        except MetamqError as error:
            self.failed = error
        except Exception as error:
            self.failed = ConfigError(f"the partitioner failed: {error!r}")
            self.failed.__cause__ = error
        finally:
            self._pump = None

    def _next(self) -> tuple[str, list[Message]] | None:
        """Some messages to one topic, as many as may go."""
        with self._lock:
            queue, taken = self._queue, list[Message]()
            done = self._added - len(queue)
            room = TOGETHER if self._kept_from is None else min(TOGETHER, self._kept_from - done)
            if not queue or room <= 0:
                return None
            topic = queue[0][0]
            while queue and len(taken) < room and queue[0][0] == topic:
                message = queue.popleft()[1]
                self._bytes -= size_of(message.value, message.key, message.headers)
                taken.append(message)
            return topic, taken

    async def until_half(self) -> None:
        """Waits until there is room. Raises what failed the transaction; BufferFull when a savepoint keeps all."""
        while self._bytes > self._limit_bytes // 2:
            self._begin()
            if self._pump is not None:
                await asyncio.shield(self._pump)
            self.check()
            if self._kept_from is not None and self.is_full:
                raise BufferFull(self._limit_bytes)

    async def settle(self) -> None:
        """Waits until the Work has all of it. Raises what failed the transaction."""
        with self._lock:
            self._kept_from = None
        while self.failed is None and (self._queue or self._pump is not None):
            self._begin()
            assert self._pump is not None
            await asyncio.shield(self._pump)
        if self.failed is not None:
            raise self.failed

    async def give_up(self) -> None:
        """Stops, and lets go of what waits."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        with self._lock:
            self._queue.clear()
            self._bytes = 0

    def end(self, error: MetamqError | None) -> None:
        """The transaction is committed, or has failed: its deliveries say so."""
        if not self.ended:
            self.ended = True
            for batch in self._placeholders.values():
                batch.complete(-1, error)


def _check_ended(outbox: Outbox) -> None:
    if not outbox.ended:
        raise ConfigError("the delivery waits for the end of its transaction", hint=WAIT_HINT)


class _TransactionDelivery(Delivery):
    """Of a message in a transaction: done when that ends; where it is stored, the broker does not say."""

    __slots__ = ("_outbox", "_timestamp_us")

    def __init__(self, outbox: Outbox, producer: Owner, batch: OutgoingBatch, timestamp_us: int) -> None:
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

    def __init__(self, outbox: Outbox, producer: Owner, batch: OutgoingBatch, count: int) -> None:
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
