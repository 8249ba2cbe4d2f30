"""MessageBatch: a stored batch, the item of `consumer.batches()`, decoded column by column on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Generic

from metamq.client.model import Message, message_of
from metamq.client.typevars import T
from metamq.errors import ConfigError, CorruptData, DecodeError, UndecodableBatch
from metamq.wire import columns

if TYPE_CHECKING:
    from metamq.wire.batch import BatchHeader
    from metamq.wire.columns import Columns
    from metamq.zk.partitions import TopicPartition

_NO_HEADERS: Mapping[str, bytes] = {}

SLICE_MESSAGES = 256
"""The number of messages that are decoded and delivered per check of the lease, which costs two or three messages."""
VALUES_AT = 3
"""The index of the values among the columns after the topic."""


def own_part(data: memoryview) -> memoryview:
    """Returns `data`, or a copy if it is less than half of its underlying memory.

    A small part would keep all of that memory, and no limit counts it. The data of one busy partition is nearly all of
    an answer, and is not copied.
    """
    return memoryview(bytes(data)) if 2 * len(data) < memoryview(data.obj).nbytes else data


class MessageBatch(Generic[T]):
    """Messages of one partition with consecutive offsets, from `offset` on. Makes objects of messages only on demand.

    A column is decoded on first use and kept. Iteration yields Messages. Not thread-safe. The use of a column raises
    UndecodableBatch if the batch's producer has encoded it wrongly.
    """

    def __init__(
        self,
        tp: TopicPartition,
        header: BatchHeader,
        data: memoryview,
        first_offset: int,
        decode: Callable[[bytes], T] | None = None,
    ) -> None:
        """`data` is the stored batch. Messages before `first_offset` are left out."""
        self.topic: str = tp.topic
        self.partition: str = tp.partition
        self.offset: int = max(first_offset, header.base_offset)
        self.epoch: int = header.epoch
        self._header = header
        self._data = data
        self._skip = self.offset - header.base_offset
        self._decode = decode
        self._arrived_s = 0.0
        """The monotonic time at which the inbox got it."""
        self.is_rejected: bool = False
        """True if `decode=` has rejected a message of the batch."""

    @property
    def decodes(self) -> bool:
        """True if `decode=` converts the values."""
        return self._decode is not None

    def __len__(self) -> int:
        return self._header.count - self._skip

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self._header.end_offset

    @property
    def offsets(self) -> range:
        """The offsets of the messages."""
        return range(self.offset, self.end_offset)

    @property
    def size_bytes(self) -> int:
        """The bytes of the stored batch."""
        return self._header.size

    @property
    def plain_bytes(self) -> int:
        """The bytes of the decompressed batch."""
        return self._header.plain_size

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turns CorruptData into UndecodableBatch: the checksums were right, so the producer made the error."""
        try:
            yield
        except UndecodableBatch:
            raise
        except CorruptData as error:
            header = self._header
            raise UndecodableBatch(
                self.topic, self.partition, header.base_offset, header.end_offset, error.reason
            ) from error

    @cached_property
    def _columns(self) -> Columns:
        with self._decoding():
            return columns.decode(self._data, self._header)

    @cached_property
    def _plain(self) -> list[Any]:
        with self._decoding():
            plain = self._columns.values.tolist()
        return plain[self._skip :] if self._skip else plain

    @cached_property
    def values(self) -> Sequence[T]:
        """The values, as bytes or as `decode=` returns them. Raises DecodeError for the first value that it rejects."""
        values = self._decoded(self.offset, len(self))
        if len(values) < len(self):
            self._decoded(self.offset + len(values), 1)  # raises
        return values

    def _decoded(self, offset: int, count: int) -> list[T]:
        """Returns the values from an offset on, up to the first that `decode=` rejects. Raises DecodeError if there is
        none."""
        at = offset - self.offset
        plain = self._plain[at : at + count]
        values: list[Any] = []
        cause: Exception = RuntimeError("it raised StopIteration")  # which would end a map() silently
        try:
            values.extend(map(self._decode, plain) if self._decode is not None else plain)
        except Exception as error:
            cause = error  # the error of the first missing value
        if not values:
            self.is_rejected = True
            rejected = self.undecoded(offset)
            raise DecodeError(*rejected[:3], rejected.key, rejected.value, cause) from cause
        return values

    def undecoded(self, offset: int) -> Message[bytes]:
        """Returns one message with its value as it is stored."""
        at = offset - self.offset
        return Message(
            self.topic, self.partition, offset, self.keys[at], self._plain[at], self.headers[at], self.timestamps[at]
        )

    def decoded_message(self, offset: int) -> Message[T]:
        """Returns one message. Raises DecodeError."""
        topic, partition, _, key, _, headers, timestamp = self.undecoded(offset)
        return Message(topic, partition, offset, key, self._decoded(offset, 1)[0], headers, timestamp)

    def plain_value(self, offset: int) -> bytes:
        """Returns one message's value as it is stored."""
        value: bytes = self._plain[offset - self.offset]
        return value

    @cached_property
    def keys(self) -> Sequence[bytes | None]:
        """The keys; None for a message without one."""
        column = self._columns.keys
        if column is None:
            return [None] * len(self)
        with self._decoding():
            return column.tolist_with_nulls()[self._skip :]

    @cached_property
    def timestamps(self) -> Sequence[int]:
        """The timestamps in microseconds since 1970, UTC."""
        column = self._columns.timestamps
        if column is None:
            return [self._header.base_timestamp_us] * len(self)
        return column.tolist()[self._skip :]

    @cached_property
    def headers(self) -> Sequence[Mapping[str, bytes]]:
        """The headers of each message; empty for a message without headers."""
        column = self._columns.headers
        if column is None:
            return [_NO_HEADERS] * len(self)
        with self._decoding():
            return [columns.unpack_headers(packed) for packed in column.tolist()[self._skip :]]

    def distinct_headers(self, name: bytes) -> Iterator[Mapping[str, bytes]]:
        """Iterates over the different headers with this name in them. Raises UndecodableBatch."""
        column = self._columns.headers
        if column is not None:
            with self._decoding():
                packed = dict.fromkeys(column.tolist()[self._skip :])
                yield from [columns.unpack_headers(one) for one in packed if name in one]

    def _after_topic(self, offsets: Iterator[int]) -> tuple[Iterator[Any], ...]:
        """Returns the fields of Message after the topic, one column each, to be zipped at C speed.

        The first iterator in the zip limits it, and any thread may empty that one: then `offsets` does not advance, so
        it always shows how many messages were delivered. With `decode=` the values, at VALUES_AT, are still as stored:
        `_decoded` returns the values of a slice.
        """
        has_keys = self._columns.keys is not None
        has_headers = self._columns.headers is not None
        has_timestamps = self._columns.timestamps is not None
        return (
            repeat(self.partition),
            offsets,
            iter(self.keys) if has_keys else repeat(None),
            iter(self._plain),
            iter(self.headers) if has_headers else repeat(_NO_HEADERS),
            iter(self.timestamps) if has_timestamps else repeat(self._header.base_timestamp_us),
        )

    def undecoded_messages(self) -> Iterator[Message[bytes]]:
        """Iterates over the messages with their values as they are stored. Raises UndecodableBatch, at the call."""
        columns = self._after_topic(iter(self.offsets))
        return map(message_of, zip(repeat(self.topic, len(self)), *columns))  # noqa: B905, some columns are endless

    def __iter__(self) -> Iterator[Message[T]]:
        columns = list(self._after_topic(iter(self.offsets)))
        if self._decode is not None:
            columns[VALUES_AT] = chain.from_iterable(self._decoded_parts())
        return map(message_of, zip(repeat(self.topic, len(self)), *columns))  # noqa: B905, some columns are endless

    def _decoded_parts(self) -> Iterator[list[T]]:
        offset = self.offset
        while offset < self.end_offset:
            part = self._decoded(offset, SLICE_MESSAGES)
            offset += len(part)
            yield part

    def to_arrow(self) -> Any:
        """Returns a pyarrow.RecordBatch with the fields of Message as columns, as metamq.scan() has them.

        Keys and values refer to the received bytes without a copy; `decode=` is not applied. Raises ConfigError without
        pyarrow, and UndecodableBatch.
        """
        try:
            from metamq.client.fetch.arrow import record_batch
        except ImportError:
            raise ConfigError("to_arrow() needs pyarrow", hint="Install it with: pip install pyarrow") from None
        with self._decoding():
            return record_batch(self._columns, self._header, self.topic, self.partition, self._skip)

    def __repr__(self) -> str:
        return f"<MessageBatch {self.topic}/{self.partition} offsets {self.offset} to {self.end_offset - 1}>"
