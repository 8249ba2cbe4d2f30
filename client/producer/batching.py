"""Turns Arrow batches of rows into the columns of batches for partitions: by Arrow's kernels, without a loop over rows.

For Spark's sink and for send_table(). Rows with a key have the same partition as messages of `send` with that key. Rows
for any partition stay together, in the pieces in which they came. The pieces for a partition are collected until they
make a batch: a small batch costs the broker and the readers as much as a large one. Pure: no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from metamq.client.producer.outgoing import (
    HEADERS_OVERHEAD_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    TIMESTAMP_BYTES,
    OutgoingBatch,
)
from metamq.client.producer.packed_headers import check_headers, packed_headers
from metamq.client.producer.partitioner import Partitioner, by_key_hash, check_number
from metamq.errors import ConfigError, MessageTooLarge, MetamqError, PartitionNotFound
from metamq.wire.columns import ReadyColumn, ReadyColumns, ReadyTimes
from metamq.wire.limits import BATCH_COUNT_MAX, BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.wire.compression import Codec

Topics = Callable[[str], TopicConfig]

COLUMNS = ("value", "key", "headers", "topic", "partition")
"""The columns of a row of Spark that count; a query may have others."""
OPEN_BYTES_MAX = 32 * 1024 * 1024
"""The most bytes of all waiting pieces. Without this limit, each of thousands of partitions could keep a megabyte."""


class Target(NamedTuple):
    """The destination of messages. `place`: (broker id, index) of the partition; None: any."""

    topic: str
    place: tuple[int, int] | None


class TargetBatch(NamedTuple):
    """Messages for one target, as many as make a batch."""

    target: Target
    columns: ReadyColumns
    size: int

    def outgoing(self) -> ColumnarBatch:
        """Returns the batch for a sender."""
        return ColumnarBatch(self.target.topic, self.columns, self.size, self.target.place)


NO_COLUMNS = ReadyColumns(0, ReadyColumn(bytes(4), b""))


class ColumnarBatch(OutgoingBatch):
    """Messages in finished columns. `place`: (broker id, index) of their partition; None: any."""

    __slots__ = ("columns",)

    def __init__(self, topic: str, columns: ReadyColumns, size: int, place: tuple[int, int] | None) -> None:
        super().__init__(topic)
        self.columns = columns
        self.size = size
        if place is not None:
            self.broker_id, self.partition = place

    @property
    def messages(self) -> int:
        """The number of messages."""
        return self.columns.messages

    def end(self, error: MetamqError | None) -> None:
        """Sets the outcome, and drops the columns."""
        super().end(error)
        self.columns = NO_COLUMNS

    def encode(self, codec: Codec, producer_id: int, sequence: int) -> bytearray:
        """Encodes the batch; see OutgoingBatch.encode."""
        self.sequence = sequence
        self.encoded = self.columns.encode(
            base_timestamp_us=self.timestamp_us, codec=codec, producer_id=producer_id, sequence=sequence
        )
        return self.encoded


class _Piece(NamedTuple):
    """Some rows for one target, as binary arrays, and times in microseconds."""

    values: pa.Array
    keys: pa.Array | None
    headers: pa.Array | None
    times: pa.Array | None
    size: int


class Batcher:
    """The batcher of one task, or one table.

    `topic`: of all rows; None: use the column. `topics` gives a topic's configuration. `columns`: those that count;
    the column `timestamp`, if it does, has int64 microseconds without nulls.
    """

    def __init__(
        self,
        topic: str | None,
        topics: Topics,
        batch_bytes: int = BATCH_TARGET_BYTES,
        *,
        columns: Collection[str] = COLUMNS,
        partitioner: Partitioner = by_key_hash,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self._topic = topic
        self._topics = topics
        self._batch_bytes = batch_bytes
        self._columns = columns
        self._partitioner = partitioner
        self._message_bytes_max = message_bytes_max
        self._open: dict[Target, list[_Piece]] = {}
        self._sizes: dict[Target, int] = {}
        self._places: dict[str, tuple[TopicConfig, list[tuple[int, int]]]] = {}

    def add(self, rows: pa.RecordBatch) -> Iterator[TargetBatch]:
        """Takes rows; yields full batches. Raises TopicNotFound, PartitionNotFound, MessageTooLarge. Raises ConfigError
        for a null, before it has taken any of these rows."""
        if not rows.num_rows:
            return
        rows = rows.select([name for name in rows.schema.names if name in self._columns])
        self._check_rows(rows)
        for topic, some in self._by_topic(rows):
            for place, group in self._by_place(topic, some):
                target = Target(topic, place)
                piece = self._piece(group)
                self._open.setdefault(target, []).append(piece)
                self._sizes[target] = self._sizes.get(target, 0) + piece.size
                if self._sizes[target] >= self._batch_bytes:
                    yield from self._taken(target)
        if sum(self._sizes.values()) > OPEN_BYTES_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[TargetBatch]:
        """Yields the remaining messages."""
        for target in list(self._open):
            yield from self._taken(target)

    def _check_rows(self, rows: pa.RecordBatch) -> None:
        values = rows.column("value")
        if values.null_count:
            raise ConfigError(
                f"the column 'value' is null in {values.null_count:,} rows",
                hint="A message has a value: leave these rows out, or mark them by a header and coalesce(value, ''). "
                "With delivery=at_least_once, other rows may be stored already.",
            )
        if self._topic is None and (nulls := rows.column("topic").null_count):
            raise ConfigError(
                f"the column 'topic' is null in {nulls:,} rows",
                hint="Give each row a topic, or all of them one by the option 'topic'.",
            )
        if "headers" in rows.schema.names:
            check_headers(rows.column("headers"))

    # -- the targets of rows ------------------------------------------------------------------------------------------

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, rows
            return
        column = rows.column("topic")
        encoded = column.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if len(names) == 1:
            yield names[0], rows
            return
        for number, some in _grouped(rows, encoded.indices):
            yield names[number], some

    def _by_place(self, topic: str, rows: pa.RecordBatch) -> Iterator[tuple[tuple[int, int] | None, pa.RecordBatch]]:
        places = self._places_of(topic)
        numbers = self._numbers(topic, rows, places)
        if numbers is None or numbers.null_count == len(numbers):
            yield None, rows
            return
        for number, some in _grouped(rows, numbers):
            yield None if number is None else places[number], some

    def _places_of(self, topic: str) -> list[tuple[int, int]]:
        config = self._topics(topic)
        known = self._places.get(topic)
        if known is None or known[0] is not config:
            known = self._places[topic] = config, [parse_partition(name) for name in config.partition_names]
        return known[1]

    def _places_of_keys(self, topic: str, keys: pa.Array, count: int) -> list[int]:
        found = [self._partitioner(topic, key, count) for key in keys.to_pylist()]
        for number in set(found):
            check_number(number, count)
        return found

    def _numbers(self, topic: str, rows: pa.RecordBatch, places: list[tuple[int, int]]) -> pa.Array | None:
        """Returns the index of each row's partition in the topic; null, or None for all rows: any partition."""
        by_key = None
        if "key" in rows.schema.names:
            encoded = _binary(rows.column("key")).dictionary_encode()
            by_key = pa.array(self._places_of_keys(topic, encoded.dictionary, len(places)), pa.int32())
            by_key = by_key.take(encoded.indices)
        if "partition" not in rows.schema.names or rows.column("partition").null_count == rows.num_rows:
            return by_key
        encoded = rows.column("partition").dictionary_encode()
        known = {place: number for number, place in enumerate(places)}
        numbers = []
        for name in encoded.dictionary.to_pylist():
            try:
                numbers.append(known[parse_partition(name)])
            except KeyError:
                raise PartitionNotFound(topic, name, tuple(f"{broker}-{index}" for broker, index in places)) from None
        named = pa.array(numbers, pa.int32()).take(encoded.indices)
        return named if by_key is None else pc.coalesce(named, by_key)

    # -- the batches --------------------------------------------------------------------------------------------------

    def _piece(self, rows: pa.RecordBatch) -> _Piece:
        values = _binary(rows.column("value"))
        keys = _binary(rows.column("key")) if "key" in rows.schema.names else None
        if keys is not None and keys.null_count == len(keys):
            keys = None
        headers = packed_headers(rows.column("headers")) if "headers" in rows.schema.names else None
        size = len(values) * MESSAGE_OVERHEAD_BYTES + _bytes_of(values) + _bytes_of(keys)
        if headers is not None:
            size += _bytes_of(headers) + len(values) * HEADERS_OVERHEAD_BYTES
        times = rows.column("timestamp") if "timestamp" in rows.schema.names else None
        if times is not None:
            size += len(values) * TIMESTAMP_BYTES
        return _Piece(values, keys, headers, times, size)

    def _taken(self, target: Target) -> Iterator[TargetBatch]:
        pieces, size = self._open.pop(target), self._sizes.pop(target)
        values = _joined([piece.values for piece in pieces])
        keys = headers = None
        if any(piece.keys is not None for piece in pieces):
            keys = _joined([_or_nulls(piece.keys, len(piece.values)) for piece in pieces])
        if any(piece.headers is not None for piece in pieces):
            headers = _joined([_or_empty(piece.headers, len(piece.values)) for piece in pieces])
        times = None if pieces[0].times is None else _joined([piece.times for piece in pieces])
        config = self._topics(target.topic)
        limit = min(config.max_message_bytes, self._message_bytes_max)
        if size <= self._batch_bytes and len(values) <= BATCH_COUNT_MAX and size <= limit:
            yield TargetBatch(target, _ready(values, keys, headers, times), size)
            return
        parts = -(-size // self._batch_bytes)  # of about equal size: the last one must not be small
        for first, end, part_size in _chunks([values, keys, headers], times is not None, -(-size // parts)):
            if end - first == 1 or part_size > limit:
                self._check_sizes(config, limit, [values, keys, headers], first, end)
            columns = [None if one is None else one.slice(first, end - first) for one in (values, keys, headers, times)]
            yield TargetBatch(target, _ready(*columns), part_size)

    def _check_sizes(self, config: TopicConfig, limit: int, columns: list[Any], first: int, end: int) -> None:
        sizes = pc.binary_length(columns[0].slice(first, end - first))
        for one in columns[1:]:
            if one is not None:
                sizes = pc.add(sizes, pc.fill_null(pc.binary_length(one.slice(first, end - first)), 0))
        largest = pc.max(sizes).as_py() + MESSAGE_OVERHEAD_BYTES
        if largest > limit:
            command = f"`metamq topic alter {config.topic} --max-message-bytes 4MiB` at most"
            hint = "" if largest > MESSAGE_BYTES_MAX else f"Write less. Raise the limit: {command}."
            if limit < config.max_message_bytes:
                hint = "Write less, or raise the producer's `max_message_bytes`, to 4 MiB at most."
            raise MessageTooLarge(f"a row for topic {config.topic!r}", largest, limit, hint=hint)


def _grouped(rows: pa.RecordBatch, numbers: pa.Array) -> Iterator[tuple[int | None, pa.RecordBatch]]:
    """Yields the rows of each number, in their order."""
    order = pc.array_sort_indices(numbers)  # stable
    ends = pc.run_end_encode(numbers.take(order))
    is_sorted = ends.values.null_count == 0 and len(ends.values) == 1
    ordered = rows if is_sorted else rows.take(order)
    first = 0
    for number, end in zip(ends.values.to_pylist(), ends.run_ends.to_pylist(), strict=True):
        yield number, ordered.slice(first, end - first)
        first = end


def _binary(array: pa.Array) -> pa.Array:
    """Returns the same bytes as Arrow's binary, for any kind of text or bytes."""
    return array if array.type == pa.binary() else array.cast(pa.binary())


def _bytes_of(array: pa.Array | None) -> int:
    if array is None:
        return 0
    offsets = _offsets_of(array)
    return offsets[-1] - offsets[0]


def _offsets_of(array: pa.Array) -> memoryview:
    """Returns int32 offsets, one more than the array has entries. The array has at least one entry."""
    offsets = memoryview(array.buffers()[1]).cast("i")
    return offsets[array.offset : array.offset + len(array) + 1]


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _or_nulls(keys: pa.Array | None, rows: int) -> pa.Array:
    return pa.nulls(rows, pa.binary()) if keys is None else keys


def _or_empty(headers: pa.Array | None, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(b"", pa.binary()), rows) if headers is None else headers


def _chunks(columns: list[pa.Array | None], has_times: bool, batch_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, bytes) of consecutive chunks of at most `batch_bytes`, or of one message."""
    offsets = [_offsets_of(one) for one in columns if one is not None]
    overhead = MESSAGE_OVERHEAD_BYTES + (HEADERS_OVERHEAD_BYTES if columns[2] is not None else 0)
    overhead += TIMESTAMP_BYTES if has_times else 0
    rows = len(offsets[0]) - 1

    def bytes_before(row: int) -> int:
        return sum(one[row] for one in offsets) + row * overhead

    first = 0
    while first < rows:
        limit = bytes_before(first) + batch_bytes
        stop = min(first + BATCH_COUNT_MAX, rows)
        end = max(bisect_right(range(rows + 1), limit, first + 1, stop + 1, key=bytes_before) - 1, first + 1)
        yield first, end, bytes_before(end) - bytes_before(first)
        first = end


def _ready(values: pa.Array, keys: pa.Array | None, headers: pa.Array | None, times: pa.Array | None) -> ReadyColumns:
    return ReadyColumns(
        len(values),
        _column(values),
        None if keys is None else _column(keys),
        None if headers is None else _column(headers),
        None if times is None else _times(times),
    )


def _times(array: pa.Array) -> ReadyTimes:
    ends = pc.min_max(array)
    used = array.buffers()[1].slice(8 * array.offset, 8 * len(array))
    return ReadyTimes(used, ends["min"].as_py(), ends["max"].as_py())


def _column(array: pa.Array) -> ReadyColumn:
    """Returns the used part of the array's own buffers; offsets that do not begin at 0 are copied."""
    _validity, offsets, data = array.buffers()
    count = len(array)
    ends = _offsets_of(array)
    first, last = ends[0], ends[-1]
    used = offsets.slice(4 * array.offset, 4 * (count + 1))
    if first:
        used = pc.subtract(pa.Array.from_buffers(pa.int32(), count + 1, [None, used]), pa.scalar(first, pa.int32()))
        used = used.buffers()[1].slice(0, 4 * (count + 1))
    body = b"" if data is None else data.slice(first, last - first)
    bits = None
    if array.null_count:
        bits = pc.is_valid(array).buffers()[1].slice(0, -(-count // 8))
    return ReadyColumn(used, body, bits)
