"""The buffer between `send` and the sender, which takes the batches. Thread-safe; no I/O, no loop.

Theory of operation
-------------------
A message without a key goes into its topic's *floating* batch, which gets its partition only when the sender takes
it: whole batches rotate over the partitions. A message with a key goes into the open batch of its partition.

`send` of only a value runs a million times a second, and a lock would be a third of its cost. So the first thread that
begins a batch this way gets a *quick* batch. It floats too, and this thread alone fills it, without the lock:
QuickBatch explains why no message is lost when the sender takes the batch. Meanwhile the messages of other threads, and
messages with more than a value, go into the floating batch. To keep its messages in order, a thread closes its quick
batch before it uses the floating one, and begins a quick batch only if no floating batch is open.

The loop learns a topic's partitions. Until then messages that need a partition wait, in order, in `unplaced`. Their
deliveries refer to a placeholder batch, and are moved to the real batch later.

The buffer's limit is checked when a batch begins, and once per send_many. So the buffer may exceed its limit by one
batch per partition, and by one send_many. A wait for capacity releases the lock: `send` then starts again.

*Ctrl-C and other interruptions.* CPython runs signal handlers and `__del__` between two bytecodes of a thread, also in
this module: they may raise, and they may send. So an object is complete before it is published: a message is put into a
new batch, then the batch into its slot and `outstanding`, then the sender is woken. A closed batch is in `sealed`
before it leaves its slot. Statements that belong together are plain statements side by side: CPython checks for signals
only at calls, backward jumps and function entries. The lock is re-entrant for a `send` inside of a `send`, or in a
partitioner: the inner message goes to the loop, which accepts it a moment later, see _send_later.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar

from metamq.client.producer.outgoing import (
    IDLE,
    MESSAGE_OVERHEAD_BYTES,
    NO_HEADERS,
    Busy,
    Delivery,
    DeliveryOwner,
    ManyDelivery,
    ManyHeaders,
    OutgoingBatch,
    QuickBatch,
    size_of,
)
from metamq.client.producer.topic_buffer import (
    TopicBuffer,
    add_headers,
    add_message,
    align_columns,
    chunks,
    failed_batch,
    new_batch,
    refuse_large,
    too_large,
)
from metamq.errors import BufferFull, ConfigError, MetamqError, closed_client
from metamq.zk.names import check_topic

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import Headers
    from metamq.client.producer.partitioner import Partitioner
    from metamq.zk.cluster.topics import TopicConfig

Keys = Sequence[bytes | None]
D = TypeVar("D", Delivery, ManyDelivery)
log = logging.getLogger("metamq.client")

QUICK = getattr(sys, "_is_gil_enabled", lambda: True)()
new_object = object.__new__


class Accumulator:
    """The buffers of all topics of one producer. `wake` is called, from any thread, when the sender has work."""

    def __init__(
        self,
        *,
        batch_bytes: int,
        buffer_bytes: int,
        message_bytes_max: int,
        partitioner: Partitioner,
        wake: Callable[[], None],
        wait_s: float | None,
        owner: DeliveryOwner,
    ) -> None:
        self._make_lock()
        self.buffers: dict[str, TopicBuffer] = {}
        self.outstanding: dict[OutgoingBatch, None] = {}
        self.buffered_bytes = 0
        self.closed_by: MetamqError | None = None
        self._fast = dict(self.buffers)  # for the hot path, which checks nothing else; empty once closed
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._message_bytes_max = message_bytes_max
        self._partitioner = partitioner
        self._wake = wake
        self._wait_s = wait_s  # seconds that `send` may wait for capacity: None without limit, 0 not at all
        self._owner = owner

    def _make_lock(self) -> None:
        self.lock = threading.RLock()
        self.capacity = threading.Condition(self.lock)
        self._is_inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # as Condition does
        """Returns True if this thread has the lock already: it interrupts itself inside of this module."""

    # -- accepting ------------------------------------------------------------------------------------------------

    def send(self, topic: str, value: bytes) -> Delivery:
        """Accepts a message with only a value. The hot path.

        A signal handler that sends between `len` and `append` would give two deliveries the same index: both messages
        are stored, but one receipt has the other's offset. After a few runs CPython specializes both calls, and then it
        checks for signals after neither. So only the first runs, and debuggers, are exposed. A check would cost 3 %.
        """
        size = len(value) + MESSAGE_OVERHEAD_BYTES
        buffer = self._fast.get(topic)
        if buffer is not None and size <= buffer.limit_bytes:
            batch = buffer.quick
            if batch is not None and batch.thread_id == get_ident():
                pending = batch.pending
                index = len(pending)
                pending.append(value)
                batch.filled_bytes = filled_bytes = batch.filled_bytes + size
                if filled_bytes < batch.limit_bytes or self._is_in(buffer, batch, index):
                    delivery = new_object(Delivery)  # its __init__ would cost as much as all of the above
                    delivery._producer = self._owner
                    delivery._batch = batch
                    delivery._index = index
                    return delivery
        return self.send_full(topic, value, None, None, None, None)

    def _is_in(self, buffer: TopicBuffer, batch: QuickBatch, index: int) -> bool:
        """Returns True if a value is in a quick batch that is full, or that another thread has closed meanwhile."""
        if self._is_inside():
            if batch.limit_bytes:
                return True  # the next send seals the batch
            del batch.pending[index:]  # this thread is closing the batch: the value may be in it or not
            return False
        with self.lock:
            if buffer.quick is batch:
                self._seal_quick(buffer)
            return index < batch.accepted

    def _send_later(self, topic: str, send: Callable[[], D], handle: Callable[[OutgoingBatch], D]) -> D:
        """Makes the loop call `send`, since this thread is inside of another one. The message may be out of order."""
        self.check_open()
        waiting = OutgoingBatch(topic)
        delivery = handle(waiting)
        self.outstanding[waiting] = None  # for flush()

        def accept() -> None:
            try:
                accepted = send()
            except Exception as error:
                log.error("a message that was sent within a send() for topic %r is not accepted: %s", topic, error)
                end(handle(failed_batch(topic, error)))
            else:
                accepted._notify(end)

        def end(accepted: D) -> None:
            delivery._become(accepted)
            self.finished(waiting)
            waiting.complete(-1, None)

        self._owner.in_loop(accept)
        return delivery

    def send_full(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        partition: str | None,
        timestamp_us: int | None,
        *,
        bounded: bool = True,
    ) -> Delivery:
        """Accepts any message. Raises MessageTooLarge, BufferFull, ConfigError, PartitionNotFound, ClosedError."""
        if self._is_inside():
            send = partial(self.send_full, topic, value, key, headers, partition, timestamp_us, bounded=False)
            return self._send_later(topic, send, lambda batch: Delivery(self._owner, batch, 0))
        size = size_of(value, key, headers)
        waiting_since: float | None = None
        with self.lock:
            while True:
                buffer = self._buffer(topic)
                if size > buffer.limit_bytes:
                    raise too_large(buffer, size)
                unplaced = buffer.config is None and (key is not None or partition is not None)
                if not unplaced:
                    number = buffer.number_of(key, partition, self._partitioner)
                    if number is None and buffer.quick is not None and buffer.quick.thread_id == get_ident():
                        self._seal_quick(buffer)
                    batch = buffer.floating if number is None else buffer.open.get(number)
                    if batch is not None:
                        break
                if self.buffered_bytes < self._buffer_bytes or not bounded:
                    if unplaced:
                        return self._send_unplaced(buffer, value, key, headers, partition, timestamp_us, size)
                    if number is None and headers is None and timestamp_us is None and buffer.quick is None and QUICK:
                        return self._begin_quick(buffer, value, size)
                    break
                waiting_since = self._wait_for_capacity(waiting_since)
            batch, index = self._append(buffer, number, batch, value, key, headers, timestamp_us, size)
        return Delivery(self._owner, batch, index)

    def _begin_quick(self, buffer: TopicBuffer, value: bytes, size: int) -> Delivery:
        batch = QuickBatch(buffer.topic, self._batch_bytes)
        batch.pending.append(value)
        batch.filled_bytes = size
        buffer.quick = batch
        self.outstanding[batch] = None
        if size >= self._batch_bytes:
            self._seal_quick(buffer)
        self._wake()
        return Delivery(self._owner, batch, 0)

    def _append(
        self,
        buffer: TopicBuffer,
        number: int | None,
        batch: OutgoingBatch | None,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        timestamp_us: int | None,
        size: int,
        begun_ns: int | None = None,
    ) -> tuple[OutgoingBatch, int]:
        """Adds a message to an open batch, or to a new one."""
        if batch is not None:
            index = add_message(batch, value, key, headers, timestamp_us, size)
        else:
            batch = new_batch(buffer, None if number is None else buffer.places[number], begun_ns)
            index = add_message(batch, value, key, headers, timestamp_us, size)
            if number is None:
                buffer.floating = batch
            else:
                buffer.open[number] = batch
            self.outstanding[batch] = None
            self._wake()
        if batch.size >= self._batch_bytes:
            self._seal(buffer, number)
        return batch, index

    def _buffer(self, topic: str) -> TopicBuffer:
        self.check_open()
        buffer = self.buffers.get(topic)
        if buffer is None:
            check_topic(topic)
            buffer = TopicBuffer(topic, self._message_bytes_max)
            self.buffers[topic] = self._fast[topic] = buffer
        return buffer

    def _seal(self, buffer: TopicBuffer, number: int | None) -> None:
        """Closes the floating batch, or the open batch of a place, if there is one."""
        batch = buffer.floating if number is None else buffer.open.get(number)
        if batch is None:
            return
        align_columns(batch)
        buffer.sealed += (batch,)
        self.buffered_bytes += batch.size
        if number is None:
            buffer.floating = None
        else:
            del buffer.open[number]

    def _seal_quick(self, buffer: TopicBuffer) -> None:
        """Closes the quick batch, if there is one."""
        batch = buffer.quick
        if batch is not None:
            batch.close()
            buffer.sealed += (batch,)
            self.buffered_bytes += batch.size
            buffer.quick = None

    def _seal_all(self, buffer: TopicBuffer) -> None:
        self._seal_quick(buffer)
        for number in [None, *buffer.open]:
            self._seal(buffer, number)

    def _wait_for_capacity(self, waiting_since: float | None) -> float:
        """Waits for capacity, and releases the lock meanwhile. Returns the start of the caller's wait (time.monotonic).

        Raises `closed_by`, or BufferFull after `_wait_s` seconds; at once in the loop's thread, which frees capacity.
        """
        now = time.monotonic()
        since = now if waiting_since is None else waiting_since
        left_s = None if self._wait_s is None else since + self._wait_s - now
        if (left_s is not None and left_s <= 0) or self._owner.is_loop_thread():
            raise BufferFull(self._buffer_bytes)
        self._wake()
        self.capacity.wait(left_s)
        self.check_open()
        return since

    # -- messages whose topic's partitions are not known yet ---------------------------------------------------------

    def _send_unplaced(
        self,
        buffer: TopicBuffer,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        partition: str | None,
        timestamp_us: int | None,
        size: int,
    ) -> Delivery:
        delivery = Delivery(self._owner, self._placeholder(buffer, size), 0)

        def place(begun_ns: int) -> OutgoingBatch | None:
            try:
                if size > buffer.limit_bytes:
                    raise too_large(buffer, size)
                number = buffer.number_of(key, partition, self._partitioner)
            except Exception as error:
                failed = failed_batch(buffer.topic, error)
                delivery._move(failed, 0)
                return failed
            batch = buffer.open.get(number) if number is not None else None
            delivery._move(*self._append(buffer, number, batch, value, key, headers, timestamp_us, size, begun_ns))
            return None

        buffer.unplaced.append(place)
        return delivery

    def _send_many_unplaced(
        self,
        buffer: TopicBuffer,
        values: Sequence[bytes],
        keys: Keys | None,
        partition: str | None,
        sizes: list[int],
        headers: ManyHeaders,
    ) -> ManyDelivery:
        parts = [self._placeholder(buffer, sum(sizes) + len(sizes) * MESSAGE_OVERHEAD_BYTES)]

        def place(begun_ns: int) -> OutgoingBatch | None:
            try:
                largest = max(sizes) + MESSAGE_OVERHEAD_BYTES
                if largest > buffer.limit_bytes:
                    raise too_large(buffer, largest)
                parts[:] = self._add_placed(buffer, values, keys, partition, sizes, headers, begun_ns)
            except Exception as error:
                failed = failed_batch(buffer.topic, error)
                parts[:] = [failed]
                return failed
            return None

        buffer.unplaced.append(place)
        return ManyDelivery(self._owner, parts)

    def _placeholder(self, buffer: TopicBuffer, size: int) -> OutgoingBatch:
        """Returns the batch that stands for the unplaced messages, after its size is increased by `size`."""
        batch = buffer.placeholder
        if batch is None:
            batch = new_batch(buffer, None)
            buffer.placeholder = batch
            self.outstanding[batch] = None
            self._wake()
        batch.size += size
        self.buffered_bytes += size
        return batch

    # -- many at once -----------------------------------------------------------------------------------------------

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Keys | None,
        partition: str | None = None,
        headers: ManyHeaders = NO_HEADERS,
        *,
        bounded: bool = True,
    ) -> ManyDelivery:
        """Accepts a list of messages as whole batches, all or none."""
        if self._is_inside():
            send = partial(self.send_many, topic, values, keys, partition, headers, bounded=False)
            return self._send_later(topic, send, lambda batch: ManyDelivery(self._owner, [batch]))
        sizes = [*map(len, values)]
        if keys is not None:
            sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
        largest = max(sizes, default=0) + size_of(b"", None, headers.first)
        if each := size_of(b"", None, headers.each) - MESSAGE_OVERHEAD_BYTES:
            sizes = [size + each for size in sizes]
        with self.lock:
            buffer = self._with_capacity(topic, largest, bounded=bounded)
            if not values or (partition is None and (keys is None or all(key is None for key in keys))):
                self._seal_quick(buffer)
                self._seal(buffer, None)
                parts = chunks(buffer, None, values, None, sizes, self._batch_bytes)
                self._add_sealed(buffer, parts, headers)
                return ManyDelivery(self._owner, parts)
            if buffer.config is None:
                return self._send_many_unplaced(buffer, values, keys, partition, sizes, headers)
            return ManyDelivery(self._owner, self._add_placed(buffer, values, keys, partition, sizes, headers))

    def _with_capacity(self, topic: str, largest: int, *, bounded: bool) -> TopicBuffer:
        """Returns a topic's buffer; waits for capacity if `bounded`. Raises MessageTooLarge if `largest` exceeds it."""
        waiting_since: float | None = None
        while True:
            buffer = self._buffer(topic)
            if largest > buffer.limit_bytes:
                raise too_large(buffer, largest)
            if self.buffered_bytes < self._buffer_bytes or not bounded:
                return buffer
            waiting_since = self._wait_for_capacity(waiting_since)

    def _add_placed(
        self,
        buffer: TopicBuffer,
        values: Sequence[bytes],
        keys: Keys | None,
        partition: str | None,
        sizes: list[int],
        headers: ManyHeaders,
        begun_ns: int | None = None,
    ) -> list[OutgoingBatch]:
        """Groups messages by partition and keeps their order. The messages without a place float as one group."""
        groups: dict[int | None, list[int]] = {}
        if partition is not None:
            groups[buffer.number_of(None, partition, self._partitioner)] = [*range(len(values))]
        else:
            for i, key in enumerate(keys or ()):
                groups.setdefault(buffer.number_of(key, None, self._partitioner), []).append(i)
        parts: list[OutgoingBatch] = []
        for number, picked in groups.items():
            if number is None:
                self._seal_quick(buffer)
            self._seal(buffer, number)
            parts += chunks(
                buffer,
                None if number is None else buffer.places[number],
                [values[i] for i in picked],
                None if number is None or keys is None else [keys[i] for i in picked],
                [sizes[i] for i in picked],
                self._batch_bytes,
                begun_ns,
            )
        self._add_sealed(buffer, parts, headers)
        return parts

    def add_batches(self, topic: str, batches: Sequence[OutgoingBatch]) -> None:
        """Accepts finished batches, which come after the earlier messages of their partitions. Raises `closed_by`."""
        with self.lock:
            buffer = self._buffer(topic)
            self._seal_quick(buffer)
            for batch in batches:
                self._seal(buffer, buffer.numbers.get((batch.broker_id, batch.partition)))  # None: any partition
            self._add_sealed(buffer, batches)

    def _add_sealed(self, buffer: TopicBuffer, new: Sequence[OutgoingBatch], headers: ManyHeaders = NO_HEADERS) -> None:
        """Publishes all the batches at once."""
        add_headers(new, headers)
        outstanding = dict.fromkeys(new)
        size = sum(batch.size for batch in new)
        buffer.sealed += new
        self.outstanding |= outstanding
        self.buffered_bytes += size
        self._wake()

    # -- the sender's side --------------------------------------------------------------------------------------------

    def take(self, *, begun_before_ns: int, busy: Busy = IDLE, busy_before_ns: int = 0) -> list[OutgoingBatch]:
        """Takes the batches to send, in order, of topics whose partitions are known.

        These are all sealed batches, and the open batches that began before `begun_before_ns` (monotonic_ns), or, for a
        busy place, before `busy_before_ns`.
        """
        taken: list[OutgoingBatch] = []
        with self.lock:
            for buffer in self.buffers.values():
                if buffer.config is None:
                    continue
                places = busy.places.get(buffer.topic, frozenset())
                is_busy = len(places) >= len(buffer.places) or busy.brokers >= buffer.config.partitions.keys()
                before_ns = busy_before_ns if is_busy else begun_before_ns
                if buffer.quick is not None and buffer.quick.created_ns < before_ns:
                    self._seal_quick(buffer)
                if buffer.floating is not None and buffer.floating.created_ns < before_ns:
                    self._seal(buffer, None)
                for number, batch in list(buffer.open.items()):
                    is_busy = batch.broker_id in busy.brokers or (batch.broker_id, batch.partition) in places
                    if batch.created_ns < (busy_before_ns if is_busy else begun_before_ns):
                        self._seal(buffer, number)
                taken += buffer.sealed
                buffer.sealed.clear()
        return list(dict.fromkeys(taken))  # an interrupted `send` may have added a batch twice

    def unresolved(self) -> list[str]:
        """Returns the topics of messages whose partitions are not known."""
        with self.lock:
            return [buffer.topic for buffer in self.buffers.values() if buffer.config is None]

    def first_open_ns(self) -> int | None:
        """Returns the start of the oldest open batch (monotonic_ns), or None."""
        with self.lock:
            begun = [
                batch.created_ns
                for buffer in self.buffers.values()
                for batch in (buffer.quick, buffer.floating, *buffer.open.values())
                if batch is not None
            ]
        return min(begun, default=None)

    def open_topic(self, config: TopicConfig) -> list[OutgoingBatch]:
        """Places the waiting messages of a topic as resolved() does, if its partitions were not known."""
        with self.lock:
            return self.resolved(config) if self._buffer(config.topic).config is None else []

    def resolved(self, config: TopicConfig) -> list[OutgoingBatch]:
        """Places the waiting messages. Called when the loop has read the topic's configuration, first or changed.

        Returns a failed batch for each message that has no place, for example because its partition does not exist.
        """
        with self.lock:
            buffer = self.buffers.get(config.topic)
            if buffer is None:
                return []
            self._seal_all(buffer)  # their numbers refer to the places of the previous configuration
            is_news = buffer.config is None
            buffer.configure(config, self._message_bytes_max)
            failed = [refused for batch in buffer.sealed for refused in refuse_large(batch, buffer)] if is_news else []
            emptied = [batch for batch in buffer.sealed if not batch.messages]
            for batch in emptied:
                buffer.sealed.remove(batch)
            unplaced, buffer.unplaced = buffer.unplaced, []
            placeholder, buffer.placeholder = buffer.placeholder, None
            begun_ns = placeholder.created_ns if placeholder is not None else time.monotonic_ns()
            failed += [unplaceable for place in unplaced if (unplaceable := place(begun_ns)) is not None]
        if placeholder is not None:
            emptied.append(placeholder)
        for batch in emptied:
            self.finished(batch)
            batch.complete(-1, None)
        return failed

    def forget(self, topic: str) -> list[OutgoingBatch]:
        """Drops a topic's buffer, for example of a missing topic. Returns its batches for the caller to fail."""
        with self.lock:
            buffer = self.buffers.pop(topic, None)
            if buffer is None:
                return []
            self._fast.pop(topic, None)
            self._seal_all(buffer)
            batches = [*buffer.sealed]
            if buffer.placeholder is not None:
                batches.append(buffer.placeholder)
        return batches

    def finished(self, batch: OutgoingBatch) -> None:
        """Frees the capacity of a batch that is done."""
        with self.lock:
            self.outstanding.pop(batch, None)
            self.buffered_bytes -= batch.size
            self.capacity.notify_all()

    def close(self, error: MetamqError | None = None) -> None:
        """Refuses further messages. The sender may still take the accepted ones."""
        with self.lock:
            self.closed_by = error or closed_client("producer")
            self._fast = {}
            for buffer in self.buffers.values():
                self._seal_all(buffer)  # a `send` that reads one of these buffers at this moment finds no open batch
            self.capacity.notify_all()

    def check_not_inside(self) -> None:
        """Raises ConfigError if a wait would never end: this thread has the lock and continues only afterwards."""
        if self._is_inside():
            raise ConfigError(
                "the call waits, and it interrupts a send() of the same thread, as a signal handler does: the wait "
                "would never end",
                hint="Set a flag or raise an exception in the handler, and wait after the send().",
            )

    def check_open(self) -> None:
        """Raises the error that closed the producer."""
        if self.closed_by is not None:
            raise self.closed_by.with_traceback(None)

    def forked(self, error: MetamqError) -> None:
        """Closes the copy in a fork's child: it accepts no messages, and stores none of the accepted ones."""
        self._make_lock()  # another thread may have held it at the fork
        self.closed_by = error
        self._fast = {}
        for batch in self.outstanding:
            if not batch.done:
                batch.end(error)
