"""The queue of one transaction between `send`, which never waits for the network, and the brokers.

`send` puts a message into the queue, in the thread that the transaction belongs to. The producer's loop moves messages
from the queue into batches, and sends full batches. A task does this when the queue has enough for a batch, or when a
topic's configuration is missing. The end of the transaction sends the rest: all messages of a small transaction. The
first error fails the transaction: it refuses later messages, and cannot be committed.

A savepoint is a place in the queue. While there is one, messages behind it stay in the queue, and can be taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.client.model import Receipt, ReceiptRange
from metamq.client.producer.outgoing import Delivery, DeliveryOwner, ManyDelivery, OutgoingBatch, size_of_all
from metamq.errors import BranchMisuse, BufferFull, ConfigError, MetamqError, RolledBack
from metamq.wire.xa import XACode

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import AnyMessage
    from metamq.client.producer.producer_core import ProducerOptions
    from metamq.tx.app.work import GlobalTransaction

TURN_MESSAGES = 500
"""Messages that go into batches in one turn of the loop."""
WAKE_BYTES = 64 * 1024
"""The task starts at this number of bytes in the queue, or at a full batch if that is smaller. Waking the loop for less
costs more than it saves."""
WAIT_HINT = "Read the result after the end of the transaction: it is known only then."


class _Item(NamedTuple):
    """Messages that were sent by one call, at most TURN_MESSAGES."""

    topic: str
    messages: list[AnyMessage]
    bytes: int


class Outbox:
    """The queue of one transaction. Its thread or task calls `add` and `add_many`; the producer's loop the rest."""

    def __init__(
        self, owner: DeliveryOwner, loop: asyncio.AbstractEventLoop, work: GlobalTransaction, options: ProducerOptions
    ) -> None:
        self.failed: MetamqError | None = None
        self.ended = False
        self.closed = False
        """True from the beginning of its prepare: it takes no more messages."""
        self._owner = owner
        self._loop = loop
        self._work = work
        self._limit_bytes = options.buffer_bytes
        self._wake_bytes = min(WAKE_BYTES, options.batch_bytes, options.buffer_bytes // 2)
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._queued = 0
        self._bytes = 0
        self._kept_from: int | None = None
        """Messages that were sent before the first savepoint; None: there is no savepoint."""
        self._added = 0
        self._is_scheduled = False
        """True if the loop was woken for the queue, and has not yet found it empty."""
        self._is_running = False
        self._pump: asyncio.Task[None] | None = None
        self._run_end: asyncio.Future[None] | None = None
        """The future of the running _run(), in any task; made by the task that waits for it."""
        self._given_up = False
        self._placeholders: dict[str, OutgoingBatch] = {}

    @property
    def is_used(self) -> bool:
        """True if a message was sent and not taken back."""
        return self._added > 0

    @property
    def is_full(self) -> bool:
        """True if the queue has more bytes than the producer's buffer may hold."""
        return self._bytes >= self._limit_bytes

    def add(self, topic: str, message: AnyMessage) -> Delivery:
        """Takes a message. Raises the error that failed the transaction; BufferFull."""
        batch = self._put(topic, [message])
        timestamp_us = None if isinstance(message, bytes) else message.timestamp_us
        return _TransactionDelivery(self, self._owner, batch, timestamp_us or -1)

    def add_many(self, topic: str, messages: list[AnyMessage]) -> ManyDelivery:
        """Takes all of the messages, or none. Raises the errors of add()."""
        return _TransactionManyDelivery(self, self._owner, self._put(topic, messages), len(messages))

    def _put(self, topic: str, messages: list[AnyMessage]) -> OutgoingBatch:
        """Queues messages; one call may exceed the limit. Returns a batch that is done when the transaction is."""
        parts = [messages[at : at + TURN_MESSAGES] for at in range(0, len(messages), TURN_MESSAGES)]
        items = [_Item(topic, part, size_of_all(part)) for part in parts]
        with self._lock:  # also against end(), which must find the placeholder of each queued message
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
            call = not self._is_scheduled and (self._bytes >= self._wake_bytes or not self._work.knows(topic))
            self._is_scheduled = self._is_scheduled or call
        if call:
            self._owner.in_loop(self._begin)
        return batch

    def check(self) -> None:
        """Raises the error that failed the transaction."""
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self.ended or self.closed or self._given_up:
            raise BranchMisuse(
                self._work.name, XACode.PROTO, "the transaction takes no more messages: it is prepared, or has ended"
            )

    # -- savepoints ---------------------------------------------------------------------------------------------------

    def savepoint(self) -> int:
        """Keeps later messages in the queue. Returns the argument for take_back()."""
        with self._lock:
            if self._kept_from is None:
                self._kept_from = self._added
            return self._added

    def take_back(self, to: int) -> None:
        """Removes the messages sent since that savepoint."""
        with self._lock:
            while self._added > to:
                item = self._queue.pop()
                self._forget(item)
                self._added -= len(item.messages)
                assert self._added >= to  # a savepoint is between two calls

    def _forget(self, item: _Item) -> None:
        self._queued -= len(item.messages)
        self._bytes -= item.bytes

    # -- in the loop --------------------------------------------------------------------------------------------------

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
        except BaseException:
            # The messages of this turn are neither in the queue nor in `_work`: a commit would miss them.
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
        """Takes messages of one topic from the queue, as many as may go in one turn."""
        with self._lock:
            queue = self._queue
            done = self._added - self._queued
            limit = TURN_MESSAGES if self._kept_from is None else min(TURN_MESSAGES, self._kept_from - done)
            if not queue or limit <= 0:
                self._is_scheduled = False
                return None
            item = queue.popleft()
            self._forget(item)
            topic, taken, _bytes = item
            while queue and queue[0].topic == topic and len(taken) + len(queue[0].messages) <= limit:
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
        """Waits until half of the limit is free, or only messages behind a savepoint are left. Raises the error that
        failed the transaction; BufferFull if the messages behind the savepoint fill the queue."""
        while self._bytes > self._limit_bytes // 2:
            self._begin()
            await self._until_run_ends()
            self.check()
            if self._kept_from is not None:
                if self.is_full:
                    raise BufferFull(self._limit_bytes)
                return

    async def settle(self) -> None:
        """Waits until `_work` has all messages. Raises the error that failed the transaction."""
        with self._lock:
            self._kept_from = None
        while self.failed is None and not self._given_up and (self._queue or self._is_under_way):
            if self._is_under_way:
                await self._until_run_ends()
            else:  # in this task: no other task waits for it
                await self._run()
        if self.failed is not None:
            raise self.failed
        if self._given_up:
            raise BranchMisuse(self._work.name, XACode.PROTO, "the transaction was rolled back meanwhile")

    async def give_up(self) -> None:
        """Stops sending, and drops the queue."""
        self._given_up = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None  # a task that never ran does not do this itself
        with self._lock:
            self._queue.clear()
            self._queued = self._bytes = 0

    def end(self, error: MetamqError | None) -> None:
        """Completes the deliveries: the transaction is committed, or has failed."""
        with self._lock:
            batches = [] if self.ended else list(self._placeholders.values())
            self.ended = True
        for batch in batches:
            batch.complete(-1, error)


def _check_ended(outbox: Outbox) -> None:
    if not outbox.ended:
        raise ConfigError("the delivery waits for the end of its transaction", hint=WAIT_HINT)


class _TransactionDelivery(Delivery):
    """The delivery of a message in a transaction: done at its end. The broker does not report the message's offset."""

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
    """The delivery of many messages; see _TransactionDelivery."""

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
