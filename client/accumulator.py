"""Where `send` puts messages, and where the sender takes batches from. Thread-safe; no I/O, no loop.

Theory of operation
-------------------
`send` runs a million times a second, so it does one dictionary look-up, one append and one addition under one lock.
A message without a key goes into its topic's *floating* batch, which gets its partition only when the sender takes
it: whole batches rotate over the partitions. A message with a key goes into the open batch of its partition.

A topic's partitions are learned by the loop. Until then its messages wait, in order, in `unplaced`; their deliveries
point at a placeholder batch and are moved when the partitions are known.

The buffer's bound is checked when a batch is begun, not for every message: it may be exceeded by one batch a topic.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from metamq.client.outgoing import MESSAGE_OVERHEAD_BYTES, Delivery, ManyDelivery, OutgoingBatch
from metamq.client.partitioner import Partitioner
from metamq.errors import BufferFull, ClosedError, ConfigError, MessageTooLarge, MetamqError, PartitionNotFound
from metamq.wire.limits import BATCH_COUNT_MAX
from metamq.zk.names import check_topic, parse_partition
from metamq.zk.topics import TopicConfig

Headers = Mapping[str, bytes]


class TopicBuffer:
    """The messages of one topic that no sender has taken."""

    __slots__ = ("config", "floating", "limit_bytes", "open", "places", "sealed", "topic", "unplaced", "unplaced_batch")

    def __init__(self, topic: str, limit_bytes: int) -> None:
        self.topic = topic
        self.limit_bytes = limit_bytes
        self.config: TopicConfig | None = None
        self.places: list[tuple[int, int]] = []
        """(broker id, index) of each configured partition, in numeric order."""
        self.floating: OutgoingBatch | None = None
        self.open: dict[int, OutgoingBatch] = {}
        """Open batches by number of the place."""
        self.sealed: deque[OutgoingBatch] = deque()
        self.unplaced: list[Callable[[], None]] = []
        self.unplaced_batch: OutgoingBatch | None = None


class Accumulator:
    """All topics' buffers of one producer. `wake` is called, from any thread, when the sender has something to do."""

    def __init__(
        self,
        *,
        batch_bytes: int,
        buffer_bytes: int,
        message_bytes_max: int,
        partitioner: Partitioner,
        wake: Callable[[], None],
        wait_s: float | None,
        owner: Any,
    ) -> None:
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.buffers: dict[str, TopicBuffer] = {}
        self.outstanding: dict[OutgoingBatch, None] = {}
        self.buffered_bytes = 0
        self.closed_by: MetamqError | None = None
        self._fast = dict(self.buffers)
        """The same buffers for the hot path, which looks at nothing else; empty once closed."""
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._message_bytes_max = message_bytes_max
        self._partitioner = partitioner
        self._wake = wake
        self._wait_s = wait_s
        """How long `send` may block for room: None for ever, 0 not at all."""
        self._owner = owner

    def send(self, topic: str, value: bytes) -> Delivery:
        """Accepts a message that has nothing but a value. The hot path."""
        size = len(value) + MESSAGE_OVERHEAD_BYTES
        buffer = self._fast.get(topic)
        if buffer is None or size > buffer.limit_bytes:
            return self.send_full(topic, value, None, None, None, None)
        with self.lock:
            batch = buffer.floating
            if batch is not None and batch.headers is None and batch.timestamps is None:
                values: list[bytes] = batch.values  # type: ignore[assignment]
                index = len(values)
                values.append(value)
                batch.size += size
                if batch.size >= self._batch_bytes:
                    self._seal(buffer, None)
                return Delivery(self._owner, batch, index)
        return self.send_full(topic, value, None, None, None, None)

    def send_full(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        partition: str | None,
        timestamp_us: int | None,
    ) -> Delivery:
        """Accepts any message. Raises MessageTooLarge, BufferFull, ConfigError, PartitionNotFound, ClosedError."""
        size = len(value) + MESSAGE_OVERHEAD_BYTES
        if key is not None:
            size += len(key)
        if headers:
            size += sum(len(name) + len(text) + 4 for name, text in headers.items())
        with self.lock:
            buffer = self._buffer(topic)
            if size > buffer.limit_bytes:
                raise MessageTooLarge(f"the message for topic {topic!r}", size, buffer.limit_bytes)
            if buffer.config is None and (key is not None or partition is not None):
                return self._send_unplaced(buffer, value, key, headers, partition, timestamp_us, size)
            number = self._number(buffer, key, partition)
            batch = self._batch_for(buffer, number)
            index = _add(batch, value, key, headers, timestamp_us)
            batch.size += size
            if batch.size >= self._batch_bytes:
                self._seal(buffer, number)
        return Delivery(self._owner, batch, index)

    def _number(self, buffer: TopicBuffer, key: bytes | None, partition: str | None) -> int | None:
        """The place that a message has to go to, None for any."""
        if partition is not None:
            place = parse_partition(partition)
            if place not in buffer.places:
                names = buffer.config.partition_names if buffer.config else []
                raise PartitionNotFound(buffer.topic, partition, tuple(names))
            return buffer.places.index(place)
        if key is None:
            return None
        number = self._partitioner(buffer.topic, key, len(buffer.places))
        if not 0 <= number < len(buffer.places):
            raise ConfigError(f"the partitioner gave {number} for a topic of {len(buffer.places)} partitions")
        return number

    def _buffer(self, topic: str) -> TopicBuffer:
        if self.closed_by is not None:
            raise self.closed_by
        buffer = self.buffers.get(topic)
        if buffer is None:
            check_topic(topic)
            buffer = TopicBuffer(topic, self._message_bytes_max)
            self.buffers[topic] = self._fast[topic] = buffer
        return buffer

    def _batch_for(self, buffer: TopicBuffer, number: int | None) -> OutgoingBatch:
        batch = buffer.floating if number is None else buffer.open.get(number)
        if batch is None:
            self._wait_for_room()
            batch = buffer.floating if number is None else buffer.open.get(number)
        if batch is None:
            batch = self._begin(buffer)
            if number is None:
                buffer.floating = batch
            else:
                batch.broker_id, batch.partition = buffer.places[number]
                buffer.open[number] = batch
        return batch

    def _begin(self, buffer: TopicBuffer) -> OutgoingBatch:
        batch = OutgoingBatch(buffer.topic)
        self.outstanding[batch] = None
        self._wake()
        return batch

    def _seal(self, buffer: TopicBuffer, number: int | None) -> None:
        """Closes the floating batch, or the open one of a place, if there is one."""
        if number is None:
            batch, buffer.floating = buffer.floating, None
        else:
            batch = buffer.open.pop(number, None)
        if batch is not None:
            self.buffered_bytes += batch.size
            buffer.sealed.append(batch)

    def take(self, *, open_before_ns: int) -> list[OutgoingBatch]:
        """The batches to send, in order, of topics whose partitions are known.

        All that are sealed, and the open ones that were begun before `open_before_ns` (time_ns; 0: none of them).
        """
        taken: list[OutgoingBatch] = []
        with self.lock:
            for buffer in self.buffers.values():
                if buffer.config is None:
                    continue
                if buffer.floating is not None and buffer.floating.created_ns < open_before_ns:
                    self._seal(buffer, None)
                for number in [n for n, batch in buffer.open.items() if batch.created_ns < open_before_ns]:
                    self._seal(buffer, number)
                taken += buffer.sealed
                buffer.sealed.clear()
        return taken

    def unresolved(self) -> list[str]:
        """Topics with messages whose partitions are not known."""
        with self.lock:
            return [buffer.topic for buffer in self.buffers.values() if buffer.config is None]

    def first_open_ns(self) -> int | None:
        """When the oldest open batch was begun (time_ns), None without one."""
        with self.lock:
            begun = [batch.created_ns for buffer in self.buffers.values() for batch in buffer.open.values()]
            begun += [b.floating.created_ns for b in self.buffers.values() if b.floating is not None]
        return min(begun, default=None)

    def _wait_for_room(self) -> None:
        """Under the lock, which waiting releases."""
        if self.buffered_bytes < self._buffer_bytes:
            return
        self._wake()
        deadline = None if self._wait_s is None else time.monotonic() + self._wait_s
        while self.buffered_bytes >= self._buffer_bytes and self.closed_by is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise BufferFull(self._buffer_bytes)
            self.room.wait(left)
        if self.closed_by is not None:
            raise self.closed_by

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
        self._wait_for_room()
        placeholder = self._placeholder(buffer)
        delivery = Delivery(self._owner, placeholder, 0)
        self.buffered_bytes += size

        def place() -> None:
            self.buffered_bytes -= size
            number = self._number(buffer, key, partition)
            batch = buffer.open.get(number) if number is not None else None
            if batch is None:
                assert number is not None
                batch = self._begin(buffer)
                batch.broker_id, batch.partition = buffer.places[number]
                buffer.open[number] = batch
            delivery.moved(batch, _add(batch, value, key, headers, timestamp_us))
            batch.size += size
            if batch.size >= self._batch_bytes:
                self._seal(buffer, number)

        def place_or_fail() -> None:
            try:
                place()
            except MetamqError as error:  # such as a partition that the topic turns out not to have
                failed = OutgoingBatch(buffer.topic)
                failed.complete(-1, error)
                delivery.moved(failed, 0)

        buffer.unplaced.append(place_or_fail)
        return delivery

    def _placeholder(self, buffer: TopicBuffer) -> OutgoingBatch:
        if buffer.unplaced_batch is None:
            buffer.unplaced_batch = self._begin(buffer)
        return buffer.unplaced_batch

    def send_many(self, topic: str, values: Sequence[bytes], keys: Sequence[bytes | None] | None) -> ManyDelivery:
        """Accepts a list of messages as whole batches: no work a message but what C does."""
        with self.lock:
            buffer = self._buffer(topic)
            sizes = [*map(len, values)]
            if keys is not None:
                sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
            largest = max(sizes, default=0) + MESSAGE_OVERHEAD_BYTES
            if largest > buffer.limit_bytes:
                raise MessageTooLarge(f"a message for topic {topic!r}", largest, buffer.limit_bytes)
            if keys is None or all(key is None for key in keys):
                self._seal(buffer, None)
                return ManyDelivery(self._owner, self._add_chunks(buffer, None, values, None, sizes))
            parts: list[OutgoingBatch] = []
            delivery = ManyDelivery(self._owner, parts)
            if buffer.config is not None:
                parts += self._add_keyed(buffer, values, keys, sizes)
            else:
                parts.append(self._placeholder(buffer))

                def place() -> None:
                    parts[:] = self._add_keyed(buffer, values, keys, sizes)

                buffer.unplaced.append(place)
            return delivery

    def _add_keyed(
        self, buffer: TopicBuffer, values: Sequence[bytes], keys: Sequence[bytes | None], sizes: list[int]
    ) -> list[OutgoingBatch]:
        """Groups messages by partition, in their order; the keyless ones go to the first group's place."""
        groups: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            number = self._number(buffer, key, None) if key is not None else -1
            groups.setdefault(number, []).append(i)  # type: ignore[arg-type]
        parts: list[OutgoingBatch] = []
        for number, picked in groups.items():
            self._seal(buffer, number if number >= 0 else None)
            parts += self._add_chunks(
                buffer,
                buffer.places[number] if number >= 0 else None,
                [values[i] for i in picked],
                [keys[i] for i in picked],
                [sizes[i] for i in picked],
            )
        return parts

    def _add_chunks(
        self,
        buffer: TopicBuffer,
        place: tuple[int, int] | None,
        values: Sequence[bytes],
        keys: list[bytes | None] | None,
        sizes: list[int],
    ) -> list[OutgoingBatch]:
        """Sealed batches of at most `batch_bytes` each, or of one message."""
        parts: list[OutgoingBatch] = []
        for start, end, size in chunk_bounds(sizes, self._batch_bytes):
            self._wait_for_room()
            batch = self._begin(buffer)
            if place is not None:
                batch.broker_id, batch.partition = place
            batch.values = values[start:end]
            batch.keys = keys[start:end] if keys is not None else None
            batch.size = size
            self.buffered_bytes += size
            buffer.sealed.append(batch)
            parts.append(batch)
        return parts

    def resolved(self, config: TopicConfig) -> None:
        """The loop learned, or learned anew, the topic's configuration: places what waited for it."""
        with self.lock:
            buffer = self.buffers[config.topic]
            buffer.config = config
            buffer.places = [parse_partition(name) for name in config.partition_names]
            buffer.limit_bytes = min(self._message_bytes_max, config.max_message_bytes)
            unplaced, buffer.unplaced = buffer.unplaced, []
            placeholder, buffer.unplaced_batch = buffer.unplaced_batch, None
            for place in unplaced:
                place()
            if placeholder is not None:
                self.outstanding.pop(placeholder, None)
        if placeholder is not None:
            placeholder.complete(-1, None)

    def forget(self, topic: str) -> list[OutgoingBatch]:
        """Drops a topic's buffer, as when it does not exist; returns its batches, for the caller to fail."""
        with self.lock:
            buffer = self.buffers.pop(topic)
            self._fast.pop(topic, None)
            for number in [None, *buffer.open]:
                self._seal(buffer, number)
            batches = [*buffer.sealed]
            if buffer.unplaced_batch is not None:
                batches.append(buffer.unplaced_batch)
        return batches

    def finished(self, batch: OutgoingBatch) -> None:
        """A batch is done: its room is free."""
        with self.lock:
            self.outstanding.pop(batch, None)
            self.buffered_bytes -= batch.size
            self.room.notify_all()

    def close(self, error: MetamqError | None = None) -> None:
        """Refuses further messages."""
        with self.lock:
            self.closed_by = error or ClosedError("producer")
            self._fast = {}
            self.room.notify_all()


def _add(
    batch: OutgoingBatch, value: bytes, key: bytes | None, headers: Headers | None, timestamp_us: int | None
) -> int:
    """Appends a message to an open batch; columns that it is the first to have are filled up before it."""
    values: list[bytes] = batch.values  # type: ignore[assignment]
    index = len(values)
    values.append(value)
    if key is not None or batch.keys is not None:
        if batch.keys is None:
            batch.keys = [None] * index
        batch.keys.append(key)
    if headers or batch.headers is not None:
        if batch.headers is None:
            batch.headers = [None] * index
        batch.headers.append(headers)
    if timestamp_us is not None or batch.timestamps is not None:
        if batch.timestamps is None:
            batch.timestamps = [batch.timestamp_us] * index
        batch.timestamps.append(timestamp_us if timestamp_us is not None else time.time_ns() // 1000)
    return index


def chunk_bounds(sizes: Sequence[int], batch_bytes: int) -> list[tuple[int, int, int]]:
    """(start, end, bytes) of consecutive chunks of at most `batch_bytes` and BATCH_COUNT_MAX messages.

    A message larger than that is a chunk of its own.
    """
    ends = list(accumulate(sizes))
    bounds = []
    start = 0
    before = 0
    while start < len(ends):
        # A message costs MESSAGE_OVERHEAD_BYTES besides its own; counted on average to stay out of Python loops.
        end = bisect_right(ends, before + batch_bytes, start)
        end = min(max(end, start + 1), start + BATCH_COUNT_MAX)
        size = ends[end - 1] - before + (end - start) * MESSAGE_OVERHEAD_BYTES
        bounds.append((start, end, size))
        before = ends[end - 1]
        start = end
    return bounds
