"""The messages of one topic between `send` and the sender, and the topic's known configuration.

This module has no lock: the accumulator has one for all topics.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

from metamq.client.producer.outgoing import (
    HEADERS_OVERHEAD_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    TIMESTAMP_BYTES,
    ManyHeaders,
    OutgoingBatch,
    QuickBatch,
    size_of,
)
from metamq.client.producer.partitioner import check_number
from metamq.errors import ConfigError, MessageTooLarge, MetamqError, PartitionNotFound
from metamq.wire.limits import BATCH_COUNT_MAX, MESSAGE_BYTES_MAX
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import Headers
    from metamq.client.producer.partitioner import Partitioner
    from metamq.zk.cluster.topics import TopicConfig


@dataclass(eq=False, repr=False, slots=True)
class TopicBuffer:
    """The messages of one topic that the sender has not taken."""

    topic: str
    limit_bytes: int
    config: TopicConfig | None = None
    places: list[tuple[int, int]] = field(default_factory=list)
    """The (broker id, index) of each configured partition, in numeric order."""
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of each place in `places`."""
    quick: QuickBatch | None = None
    floating: OutgoingBatch | None = None
    open: dict[int, OutgoingBatch] = field(default_factory=dict)
    """The open batches by number of the place."""
    sealed: deque[OutgoingBatch] = field(default_factory=deque)
    unplaced: list[Callable[[int], OutgoingBatch | None]] = field(default_factory=list)
    """Functions that place a message or a send_many, in batches begun at a time. Each may return a failed batch."""
    placeholder: OutgoingBatch | None = None

    def configure(self, config: TopicConfig, message_bytes_max: int) -> None:
        """Sets the topic's partitions and limits, for the first time or after a change."""
        self.config = config
        self.places = [parse_partition(name) for name in config.partition_names]
        self.numbers = {place: number for number, place in enumerate(self.places)}
        self.limit_bytes = min(message_bytes_max, config.max_message_bytes)

    def number_of(self, key: bytes | None, partition: str | None, partitioner: Partitioner) -> int | None:
        """Returns the number of a message's place, or None for any. Raises PartitionNotFound, ConfigError."""
        if partition is not None:
            place = self.numbers.get(parse_partition(partition))
            if place is None:
                names = self.config.partition_names if self.config else []
                raise PartitionNotFound(self.topic, partition, tuple(names))
            return place
        if key is None:
            return None
        number = partitioner(self.topic, key, len(self.places))
        check_number(number, len(self.places))
        return number


def failed_batch(topic: str, error: Exception) -> OutgoingBatch:
    """Returns a batch that stands for a message without a place. `error` is a MetamqError, or a partitioner's error."""
    batch = OutgoingBatch(topic)
    if not isinstance(error, MetamqError):
        wrapped = ConfigError(f"the partitioner failed for a message to topic {topic!r}: {error!r}")
        wrapped.__cause__ = error
        error = wrapped
    batch.complete(-1, error)
    return batch


def new_batch(buffer: TopicBuffer, place: tuple[int, int] | None, begun_ns: int | None = None) -> OutgoingBatch:
    """Returns a batch that is not published yet."""
    batch = OutgoingBatch(buffer.topic)
    if place is not None:
        batch.broker_id, batch.partition = place
    if begun_ns is not None:
        batch.created_ns = begun_ns
    return batch


def add_message(
    batch: OutgoingBatch, value: bytes, key: bytes | None, headers: Headers | None, timestamp_us: int | None, size: int
) -> int:
    """Appends a message of `size` bytes to an open batch. A new column gets default entries for the earlier messages.

    The value is appended last. So an interrupted call leaves no value, and align_columns() removes the rest.
    """
    values: list[bytes] = batch.values  # type: ignore[assignment]
    index = len(values)
    if key is not None or batch.keys is not None:
        if batch.keys is None:
            no_keys: list[bytes | None] = [None] * index
            batch.keys = no_keys
        elif len(batch.keys) > index:
            align_columns(batch)
        batch.keys.append(key)
    if headers or batch.headers is not None:
        if batch.headers is None:
            no_headers: list[Headers | None] = [None] * index
            batch.headers = no_headers
            batch.size += index * HEADERS_OVERHEAD_BYTES
        elif len(batch.headers) > index:
            align_columns(batch)
        batch.headers.append(headers)
        size += HEADERS_OVERHEAD_BYTES
    if timestamp_us is not None or batch.timestamps is not None:
        if batch.timestamps is None:
            batch.timestamps = [batch.timestamp_us] * index
            batch.size += index * TIMESTAMP_BYTES
        elif len(batch.timestamps) > index:
            align_columns(batch)
        batch.timestamps.append(timestamp_us if timestamp_us is not None else time.time_ns() // 1000)
        size += TIMESTAMP_BYTES
    batch.size += size
    values.append(value)
    return index


def add_headers(batches: Sequence[OutgoingBatch], headers: ManyHeaders) -> None:
    """Gives headers to the messages of closed batches. The sizes of the batches have those of `each` already."""
    for batch in batches if headers.first else ():
        batch.headers = [headers.first, *repeat(headers.each, len(batch.values) - 1)]
        batch.size += size_of(b"", None, headers.first) + HEADERS_OVERHEAD_BYTES * len(batch.values)


def align_columns(batch: OutgoingBatch) -> None:
    """Removes the remains of an interrupted add_message(): entries of columns that have no value."""
    count = len(batch.values)
    for column in (batch.keys, batch.headers, batch.timestamps):
        if column is not None and len(column) != count:
            del column[count:]


def too_large(buffer: TopicBuffer, size: int) -> MessageTooLarge:
    """Returns the error for a message that is too large."""
    topic = buffer.topic
    hint = f"Send less at once, or raise the limit: `metamq topic alter {topic} --max-message-bytes 4MiB` at most."
    if size > MESSAGE_BYTES_MAX:
        hint = ""  # MessageTooLarge has a hint of its own: no limit can be raised so far
    elif buffer.config is None or buffer.limit_bytes < buffer.config.max_message_bytes:
        hint = "Send less at once, or raise the producer's `max_message_bytes`, to 4 MiB at most."
    return MessageTooLarge(f"a message for topic {topic!r}", size, buffer.limit_bytes, hint=hint)


def refuse_large(batch: OutgoingBatch, buffer: TopicBuffer) -> list[OutgoingBatch]:
    """Removes the messages over the topic's limit from a closed batch. Returns a failed batch for each.

    For messages that were accepted before the limit was known.
    """
    columns = [batch.keys or repeat(None), batch.headers or repeat(None)]
    sizes = [size_of(*message) for message in zip(batch.values, *columns, strict=False)]
    if max(sizes, default=0) <= buffer.limit_bytes:
        return []
    refused = {
        i: failed_batch(buffer.topic, too_large(buffer, s)) for i, s in enumerate(sizes) if s > buffer.limit_bytes
    }
    keep = [i for i in range(len(sizes)) if i not in refused]
    batch.refused = refused
    batch.values = [batch.values[i] for i in keep]
    batch.keys = batch.keys and [batch.keys[i] for i in keep]
    batch.headers = batch.headers and [batch.headers[i] for i in keep]
    batch.timestamps = batch.timestamps and [batch.timestamps[i] for i in keep]
    return list(refused.values())


def chunk_bounds(sizes: Sequence[int], batch_bytes: int) -> list[tuple[int, int, int]]:
    """Returns (start, end, bytes) of consecutive chunks of at most `batch_bytes` and BATCH_COUNT_MAX messages.

    A larger message is a chunk of its own.
    """
    ends = [0, *accumulate(sizes)]

    def bytes_before(index: int) -> int:
        return ends[index] + index * MESSAGE_OVERHEAD_BYTES

    indexes = range(len(ends))
    bounds = []
    start = 0
    while start < len(sizes):
        limit = bytes_before(start) + batch_bytes
        stop = min(start + BATCH_COUNT_MAX, len(sizes))
        end = bisect_right(indexes, limit, start + 2, stop + 1, key=bytes_before) - 1 if start + 1 < stop else stop
        bounds.append((start, end, bytes_before(end) - bytes_before(start)))
        start = end
    return bounds


def chunks(
    buffer: TopicBuffer,
    place: tuple[int, int] | None,
    values: Sequence[bytes],
    keys: list[bytes | None] | None,
    sizes: list[int],
    batch_bytes: int,
    begun_ns: int | None = None,
) -> list[OutgoingBatch]:
    """Returns sealed batches of at most `batch_bytes` each, or of one message."""
    parts: list[OutgoingBatch] = []
    for start, end, size in chunk_bounds(sizes, batch_bytes):
        batch = new_batch(buffer, place, begun_ns)
        batch.values = values[start:end]
        batch.keys = keys[start:end] if keys is not None else None
        batch.size = size
        parts.append(batch)
    return parts
