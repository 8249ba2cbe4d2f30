"""What a producer has accepted: batches being filled, and the handles that tell what became of their messages.

A handle is a batch and a place in it, nothing more: no future, lock or event a message. Whoever waits for one makes
the batch's event; the loop completes a batch with one call, whatever its number of messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

from metamq.client.checks import check_timeout
from metamq.client.model import Receipt, ReceiptRange
from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.wire import columns
from metamq.wire.columns import Headers
from metamq.wire.compression import Codec
from metamq.zk.names import partition_name

R = TypeVar("R")

MESSAGE_OVERHEAD_BYTES = 8
"""What a message costs in a batch besides its bytes: its entry in the offsets, and room for a short key's."""

SLOW_CALLBACK_S = 0.1

NONE_REFUSED: Mapping[int, OutgoingBatch] = {}

log = logging.getLogger("metamq.client")

_event_lock = threading.Lock()


class DeliveryOwner(Protocol):
    """The producer, as its deliveries see it."""

    def hurry(self) -> None:
        """Somebody waits for a delivery: do not linger. Any thread."""

    def in_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Runs a callback in the producer's loop, from any thread. Raises ForkedError in a fork."""

    def is_loop_thread(self) -> bool:
        """Whether this is the thread of the producer's loop, which must not wait for a delivery."""

    def check_not_inside(self) -> None:
        """Raises ConfigError in what interrupts a `send` of this thread, as a signal handler, and must not wait."""


class OutgoingBatch:
    """Messages of one topic, and of one partition once it is known, on their way to a broker."""

    __slots__ = (
        "attempts",
        "base_offset",
        "broker_id",
        "callbacks",
        "count",
        "created_ns",
        "done",
        "encoded",
        "error",
        "event",
        "gapped",
        "headers",
        "keys",
        "partition",
        "refused",
        "seen",
        "sequence",
        "size",
        "timestamp_us",
        "timestamps",
        "topic",
        "unsure",
        "values",
    )

    def __init__(self, topic: str) -> None:
        self.topic: str = topic
        self.broker_id: int = -1
        self.partition: int = -1
        self.values: Sequence[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int] | None = None
        self.headers: list[Headers | None] | None = None
        self.count: int = 0
        """Messages; known once done. The messages themselves are let go of then."""
        self.size: int = 0
        self.created_ns: int = time.monotonic_ns()
        self.encoded: bytearray | None = None
        self.attempts: int = 0
        self.sequence: int = -1
        self.gapped: bool = False
        self.unsure: bool = False
        """An attempt at it has no answer: it may be stored."""
        self.refused: Mapping[int, OutgoingBatch] = NONE_REFUSED
        """By their places when they were sent, messages that were taken out again; each in a failed batch."""
        self.done: bool = False
        self.error: MetamqError | None = None
        self.seen: bool = False
        """Somebody was told of the error: flush() need not raise it again."""
        self.base_offset: int = -1
        self.timestamp_us: int = time.time_ns() // 1000
        self.event: threading.Event | None = None
        self.callbacks: list[Callable[[OutgoingBatch], None]] | None = None

    @property
    def messages(self) -> int:
        """How many, until it is done."""
        return len(self.values)

    def encode(self, codec: Codec, producer_id: int, sequence: int) -> bytearray:
        """The bytes to send; made anew when the producer id or the sequence changes. CPU time, no I/O."""
        self.sequence = sequence
        self.encoded = columns.encode(
            self.values,
            base_timestamp_us=self.timestamp_us,
            keys=self.keys,
            timestamps_us=self.timestamps,
            headers=self.headers,
            codec=codec,
            producer_id=producer_id,
            sequence=sequence,
        )
        return self.encoded

    @property
    def name(self) -> str:
        """For errors: topic and partition, where it is known."""
        return f"{self.topic}/{partition_name(self.broker_id, self.partition)}" if self.partition >= 0 else self.topic

    def complete(self, base_offset: int, error: MetamqError | None, *, keep_encoded: bool = False) -> None:
        """The batch is stored, or has failed. Called once, in the loop.

        `keep_encoded`: it is to be sent again all the same, see metamq.client.producer.partition_queue.
        """
        assert not self.done
        self.base_offset = base_offset
        self._end(error)
        if not keep_encoded:
            self.encoded = None
        if self.event is not None:  # made before `done` was looked at, or not needed: see wait()
            self.event.set()
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:  # a user's: the others are called, and the producer goes on
                log.exception("a delivery's callback failed")

    def fail_in_child(self, error: MetamqError) -> None:
        """In a fork's child: nobody waits for the batch here, and no loop calls anybody back."""
        self._end(error)

    def _end(self, error: MetamqError | None) -> None:
        self.error = error
        self.count = self.messages
        self.values = ()
        self.keys = self.headers = None
        self.done = True

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until the batch is done; False after `timeout_s`."""
        if self.done:
            return True
        with _event_lock:
            if self.event is None:
                self.event = threading.Event()
        return self.done or self.event.wait(timeout_s)

    def add_callback(self, callback: Callable[[OutgoingBatch], None]) -> None:
        """Calls `callback(batch)` in the loop once done. Only in the loop, and only before it is done."""
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)

    def timestamp_of(self, index: int) -> int:
        """The message's own timestamp."""
        return self.timestamps[index] if self.timestamps is not None else self.timestamp_us


class QuickBatch(OutgoingBatch):
    """An open batch that one thread fills without a lock: its values have neither keys nor headers nor timestamps.

    That thread appends a value, and only then looks at `limit_bytes`. Whoever closes the batch, under the
    accumulator's lock, first puts `limit_bytes` to 0, and only then looks which values are there. So whatever the
    order, a value is in the batch or its thread learns that the batch was closed without it. This needs the GIL.
    """

    __slots__ = ("accepted", "filled_bytes", "limit_bytes", "pending", "thread_id")

    def __init__(self, topic: str, limit_bytes: int) -> None:
        super().__init__(topic)
        self.thread_id = threading.get_ident()
        self.pending: list[bytes] = []
        self.values = self.pending
        self.filled_bytes = 0
        self.limit_bytes = limit_bytes
        """To be closed once it has so many; 0 when it is."""
        self.accepted = 0
        """How many of the pending values are in it; known once closed."""

    def close(self) -> None:
        """From here on `values` and `size` stay as they are; what is appended later is not in it."""
        self.limit_bytes = 0
        self.accepted = len(self.pending)
        self.values = self.pending[: self.accepted]
        self.size = self.filled_bytes


_warned_slow = False


def _warn_slow(callback: Callable[[Any], object], took_s: float) -> None:
    global _warned_slow
    if took_s > SLOW_CALLBACK_S and not _warned_slow:
        _warned_slow = True
        log.warning("a delivery's callback took %.1f s: all clients of the process waited for %r", took_s, callback)


class _Waitable(Generic[R]):
    """What the two kinds of deliveries share; `_batches()` says what they wait for, R is their result."""

    __slots__ = ("_producer",)

    def __init__(self, producer: DeliveryOwner) -> None:
        self._producer = producer

    def _batches(self) -> Sequence[OutgoingBatch]:
        raise AssertionError("a delivery waits for batches")

    def _value(self) -> R:
        raise AssertionError("a delivery has a value")

    def done(self) -> bool:
        """Whether the outcome is known."""
        return all(batch.done for batch in self._batches())

    def exception(self, timeout: float | None = None) -> MetamqError | None:
        """The error, or None when all is stored. Blocks as `result` does."""
        self._wait(timeout)
        failed = [batch for batch in self._batches() if batch.error is not None]
        for batch in failed:
            batch.seen = True
        return failed[0].error if failed else None

    def _result(self, timeout: float | None) -> R:
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)  # many deliveries share it
        return self._value()

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            check_timeout("timeout", timeout)
        if self.done():
            return
        if timeout != 0:
            self._check_may_block()
        self._producer.hurry()
        deadline = None if timeout is None else time.monotonic() + timeout
        while (batch := self._last_pending()) is not None:
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or not batch.wait(left):
                raise Timeout(f"the delivery to {batch.name}", timeout or 0)

    def _last_pending(self) -> OutgoingBatch | None:
        """The one to wait for: batches are done about in their order, so once this one is, all are, or soon."""
        return next((batch for batch in reversed(self._batches()) if not batch.done), None)

    def _check_may_block(self) -> None:
        if self._producer.is_loop_thread():
            raise ConfigError(
                "waiting here would block the event loop that is to bring the answer",
                hint="Await the delivery, or use add_done_callback().",
            )
        self._producer.check_not_inside()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Calls `callback(self)` once the outcome is known; at once when it is.

        It runs in the loop that all clients of the process share, and must not block: they all would stand still.
        """
        self._producer.in_loop(self._notify, callback)

    def _notify(self, callback: Callable[[Self], object]) -> None:
        pending = self._last_pending()
        if pending is None:
            began_s = time.monotonic()
            callback(self)
            _warn_slow(callback, time.monotonic() - began_s)
        else:
            self._producer.hurry()
            pending.add_callback(lambda _batch: self._notify(callback))

    def as_future(self) -> Future[R]:
        """A concurrent.futures.Future of the result; cancelling it does not take the message back."""
        future: Future[R] = Future()

        def settle(_delivery: Any) -> None:
            if future.set_running_or_notify_cancel():
                error = self.exception(0)
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(self._value())

        self.add_done_callback(settle)
        return future

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self.as_future()).__await__()


class Delivery(_Waitable[Receipt]):
    """What `send` returns: tells where the message was stored, or why not. Thread-safe; awaitable in any loop."""

    __slots__ = ("_batch", "_index")

    def __init__(self, producer: DeliveryOwner, batch: OutgoingBatch, index: int) -> None:
        self._producer = producer
        self._batch = batch
        self._index = index

    def _batches(self) -> Sequence[OutgoingBatch]:
        batch = self._batch
        return (batch.refused.get(self._index, batch),)

    def _value(self) -> Receipt:
        batch = self._batch
        index = self._index - sum(place < self._index for place in batch.refused)
        name = partition_name(batch.broker_id, batch.partition)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        return Receipt(batch.topic, name, offset, batch.timestamp_of(index))

    def _move(self, batch: OutgoingBatch, index: int) -> None:
        """The message went to another batch, as happens when its topic's partitions become known."""
        self._index = index
        self._batch = batch

    def _become(self, other: Delivery) -> None:
        self._move(other._batch, other._index)

    def result(self, timeout: float | None = None) -> Receipt:
        """Where the message is stored. Blocks until it is; Ctrl-C ends the wait.

        Raises Timeout after `timeout` seconds (the delivery goes on), else what the delivery failed with:
        DeliveryTimeout, TopicNotFound, MessageTooLarge, ClosedError, ...
        """
        return self._result(timeout)

    def __repr__(self) -> str:
        (outcome,) = self._batches()
        state = "pending" if not outcome.done else "failed" if outcome.error else "stored"
        return f"<Delivery {state} topic={outcome.topic!r}>"


class ManyDelivery(_Waitable[list[ReceiptRange]]):
    """What `send_many` returns: one handle for all of its messages."""

    __slots__ = ("_parts",)

    def __init__(self, producer: DeliveryOwner, parts: list[OutgoingBatch]) -> None:
        self._producer = producer
        self._parts = parts

    def _batches(self) -> Sequence[OutgoingBatch]:
        return [batch for part in self._parts for batch in (part, *part.refused.values())]

    def _become(self, other: ManyDelivery) -> None:
        self._parts[:] = other._parts

    def _value(self) -> list[ReceiptRange]:
        ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for batch in self._parts:
            runs = ranges.setdefault((batch.broker_id, batch.partition), [])
            count = batch.count
            if runs and runs[-1][0] + runs[-1][1] == batch.base_offset:
                runs[-1] = runs[-1][0], runs[-1][1] + count
            else:
                runs.append((batch.base_offset, count))
        return [
            ReceiptRange(self._parts[0].topic, partition_name(*place), offset, count)
            for place, runs in sorted(ranges.items())
            for offset, count in runs
        ]

    def result(self, timeout: float | None = None) -> list[ReceiptRange]:
        """Where the messages are stored: a range of offsets a partition, more where others wrote in between.

        Raises as `Delivery.result`; with an error some of the messages may be stored.
        """
        return self._result(timeout)


def forget_locks() -> None:
    """In a fork's child: another thread may have held the lock at the fork."""
    global _event_lock
    _event_lock = threading.Lock()
