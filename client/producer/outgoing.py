"""The accepted messages of a producer: batches being filled, and deliveries, which report the outcome of the messages.

A delivery is only a batch and a position in it; it has no future, lock or event per message. A thread that waits for a
delivery creates the batch's event. The loop completes a batch with one call, whatever its number of messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from metamq.client import telemetry
from metamq.client.checks import check_timeout
from metamq.client.model import Receipt, ReceiptRange
from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.security.rights import DELAYED_SUFFIX
from metamq.wire import columns
from metamq.wire.compression import Codec
from metamq.zk.names import partition_name

R = TypeVar("R")
Headers = Mapping[str, bytes]

MESSAGE_OVERHEAD_BYTES = 8
"""Bytes of a message in a batch in addition to its data: its entry in the offsets, and space for a key's entry."""
HEADERS_OVERHEAD_BYTES = 4
"""The size of a message's entry in the column of headers, with or without headers."""
TIMESTAMP_BYTES = 8

SLOW_CALLBACK_S = 0.1

NONE_REFUSED: Mapping[int, OutgoingBatch] = {}

log = logging.getLogger("metamq.client")

_event_lock = threading.Lock()


class CheckedMessage(NamedTuple):
    """A message after its checks."""

    value: bytes
    key: bytes | None = None
    headers: Headers | None = None
    partition: str | None = None
    timestamp_us: int | None = None


class ManyHeaders(NamedTuple):
    """The headers of messages that are sent by one call."""

    first: Headers | None = None
    """Headers of the first message of each batch; with a trace."""
    each: Headers | None = None
    """Headers of each other message."""


NO_HEADERS = ManyHeaders()
AnyMessage = CheckedMessage | bytes
"""A message after its checks; bytes if it has nothing but a value."""


def codec_of(topic: str, codec: Codec) -> Codec:
    """Returns the codec for batches of a topic: none for delayed messages, which a broker reads."""
    return Codec.NONE if topic.endswith(DELAYED_SUFFIX) else codec


def size_of(value: bytes, key: bytes | None, headers: Headers | None) -> int:
    """Returns the bytes that a message counts for."""
    size = len(value) + MESSAGE_OVERHEAD_BYTES
    if key is not None:
        size += len(key)
    if headers:
        size += sum(len(name.encode()) + len(text) + 4 for name, text in headers.items())
    return size


def size_of_all(messages: Sequence[AnyMessage]) -> int:
    """Returns the bytes that the messages count for in the buffer."""
    values = [one for one in messages if isinstance(one, bytes)]
    size = sum(map(len, values)) + MESSAGE_OVERHEAD_BYTES * len(values)
    if len(values) < len(messages):
        size += sum([size_of(*one[:3]) for one in messages if not isinstance(one, bytes)])
    return size


class Busy(NamedTuple):
    """The places for which batches wait to be sent. An open batch for such a place may wait and grow."""

    brokers: Set[int]
    places: Mapping[str, Set[tuple[int, int]]]
    """(broker id, index) by topic."""


IDLE = Busy(frozenset(), {})


class DeliveryOwner(Protocol):
    """The producer from the view of its deliveries."""

    def hurry(self) -> None:
        """Sends without lingering, because a caller waits for a delivery. Thread-safe."""

    def in_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Runs a callback in the producer's loop. Thread-safe. Raises ForkedError in a fork."""

    def is_loop_thread(self) -> bool:
        """Returns True in the thread of the producer's loop, which must not wait for a delivery."""
        ...

    def check_not_inside(self) -> None:
        """Raises ConfigError in code that interrupts a `send` of this thread (a signal handler) and must not wait."""


@dataclass(eq=False, repr=False, slots=True)
class OutgoingBatch:
    """Messages of one topic, and of one partition once the partition is known, on their way to a broker."""

    topic: str
    broker_id: int = -1
    partition: int = -1
    values: Sequence[bytes] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    timestamps: list[int] | None = None
    headers: list[Headers | None] | None = None
    count: int = 0
    """The number of messages, set when the batch is done. Then the batch drops the messages themselves."""
    size: int = 0
    created_ns: int = field(default_factory=time.monotonic_ns)
    encoded: bytearray | None = None
    attempts: int = 0
    sequence: int = -1
    gapped: bool = False
    unsure: bool = False
    """True if an attempt has no answer: the batch may be stored."""
    refused: Mapping[int, OutgoingBatch] = field(default_factory=lambda: NONE_REFUSED)
    """Messages that were removed after the send, each in a failed batch, by their original index."""
    done: bool = False
    error: MetamqError | None = None
    seen: bool = False
    """True if a caller received the error: flush() does not raise it again."""
    base_offset: int = -1
    timestamp_us: int = field(default_factory=lambda: time.time_ns() // 1000)
    event: threading.Event | None = None
    callbacks: list[Callable[[OutgoingBatch], None]] | None = None

    @property
    def messages(self) -> int:
        """The number of messages until the batch is done, then 0."""
        return len(self.values)

    def encode(self, codec: Codec, producer_id: int, sequence: int) -> bytearray:
        """Encodes the batch for sending, again if the producer id or the sequence changes. CPU time, no I/O."""
        self.sequence = sequence
        self.encoded = columns.encode(
            self.values,
            base_timestamp_us=self.timestamp_us,
            keys=self.keys,
            timestamps_us=self.timestamps,
            headers=self.headers,
            codec=codec_of(self.topic, codec),
            producer_id=producer_id,
            sequence=sequence,
        )
        return self.encoded

    @property
    def name(self) -> str:
        """The topic, with the partition if it is known, for error messages."""
        return f"{self.topic}/{partition_name(self.broker_id, self.partition)}" if self.partition >= 0 else self.topic

    def complete(self, base_offset: int, error: MetamqError | None, *, keep_encoded: bool = False) -> None:
        """Completes the batch as stored or failed. Called once, in the loop.

        `keep_encoded` is True if the batch must still be sent, see metamq.client.producer.partition_queue.
        """
        assert not self.done
        if (reports := telemetry.current) is not None and self.messages:  # a placeholder has none
            reports.sent(self, base_offset, error)
        self.base_offset = base_offset
        self.end(error)
        if not keep_encoded:
            self.encoded = None
        if self.event is not None:  # created before wait() checked `done`, or not needed
            self.event.set()
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:  # a user's error: the other callbacks run, and the producer continues
                log.exception("a delivery's callback failed")

    def end(self, error: MetamqError | None) -> None:
        """Sets the outcome. In a fork's child, no thread waits for it and no loop runs callbacks."""
        self.error = error
        self.count = self.messages
        self.values = ()
        self.keys = self.headers = None
        self.done = True

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until the batch is done. Returns False after `timeout_s` seconds."""
        if self.done:
            return True
        with _event_lock:
            if self.event is None:
                self.event = threading.Event()
        return self.done or self.event.wait(timeout_s)

    def add_callback(self, callback: Callable[[OutgoingBatch], None]) -> None:
        """Calls `callback(batch)` in the loop once the batch is done. Only for the loop, before the batch is done."""
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)

    def timestamp_of(self, index: int) -> int:
        """Returns the timestamp of the message at `index`."""
        return self.timestamps[index] if self.timestamps is not None else self.timestamp_us


class QuickBatch(OutgoingBatch):
    """An open batch that one thread fills without a lock: its values have no keys, headers or timestamps.

    That thread appends a value first, and checks `limit_bytes` afterwards. The thread that closes the batch, under the
    accumulator's lock, sets `limit_bytes` to 0 first, and counts the values afterwards. So in either order a value is
    in the batch, or its thread sees that the batch was closed without it. This needs the GIL.
    """

    __slots__ = ("accepted", "filled_bytes", "limit_bytes", "pending", "thread_id")

    def __init__(self, topic: str, limit_bytes: int) -> None:
        super().__init__(topic)
        self.thread_id = threading.get_ident()
        self.pending: list[bytes] = []
        self.values = self.pending
        self.filled_bytes = 0
        self.limit_bytes = limit_bytes
        """The size in bytes at which the batch is closed; 0 once it is closed."""
        self.accepted = 0
        """The number of pending values that are in the batch; known once it is closed."""

    def close(self) -> None:
        """Fixes `values` and `size`. A value that is appended later is not in the batch."""
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
    """The common base of both kinds of deliveries. `_batches()` returns the batches to wait for; R is the result."""

    __slots__ = ("_producer",)

    def __init__(self, producer: DeliveryOwner) -> None:
        self._producer = producer

    def _batches(self) -> Sequence[OutgoingBatch]:
        raise AssertionError("a delivery waits for batches")

    def _value(self) -> R:
        raise AssertionError("a delivery has a value")

    def done(self) -> bool:
        """Returns True if the outcome is known. Thread-safe."""
        return all(batch.done for batch in self._batches())

    def exception(self, timeout: float | None = None) -> MetamqError | None:
        """Returns the error, or None if all is stored. Blocks like `result`, and raises Timeout. Thread-safe."""
        self._wait(timeout)
        failed = [batch for batch in self._batches() if batch.error is not None]
        for batch in failed:
            batch.seen = True
        return failed[0].error if failed else None

    def _result(self, timeout: float | None) -> R:
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)  # many deliveries share the error
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
        """Returns the batch to wait for. Batches are done nearly in order: when this one is done, the others are done,
        or soon will be."""
        return next((batch for batch in reversed(self._batches()) if not batch.done), None)

    def _check_may_block(self) -> None:
        if self._producer.is_loop_thread():
            raise ConfigError(
                "a wait here would block the event loop that must receive the answer",
                hint="Await the delivery, or use add_done_callback().",
            )
        self._producer.check_not_inside()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Calls `callback(self)` once the outcome is known; immediately if it is known already. Thread-safe.

        The callback runs in the loop that all clients of the process share. It must not block: all of them would wait.
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
        """Returns a concurrent.futures.Future of the result. Cancelling the future does not revoke the message."""
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
    """The result of `send`: reports where the message is stored, or the error. Thread-safe; awaitable in any loop."""

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
        """Moves the delivery to another batch, for example after its topic's partitions are known."""
        self._index = index
        self._batch = batch

    def _become(self, other: Delivery) -> None:
        self._move(other._batch, other._index)

    def result(self, timeout: float | None = None) -> Receipt:
        """Waits until the message is stored, and returns its place. Ctrl-C ends the wait. Thread-safe.

        Raises Timeout after `timeout` seconds (the delivery continues), else the error of the delivery:
        DeliveryTimeout, TopicNotFound, MessageTooLarge, ClosedError, ...
        """
        return self._result(timeout)

    def __repr__(self) -> str:
        (outcome,) = self._batches()
        state = "pending" if not outcome.done else "failed" if outcome.error else "stored"
        return f"<Delivery {state} topic={outcome.topic!r}>"


class ManyDelivery(_Waitable[list[ReceiptRange]]):
    """The result of `send_many`: one object for all its messages. Thread-safe; awaitable in any loop."""

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
        """Waits until the messages are stored. Returns one range of offsets per partition, or more if messages of other
        writers are in between.

        Raises as `Delivery.result`. After an error some of the messages may be stored.
        """
        return self._result(timeout)


def forget_locks() -> None:
    """Replaces the lock in a fork's child: another thread may have held it at the fork."""
    global _event_lock
    _event_lock = threading.Lock()
