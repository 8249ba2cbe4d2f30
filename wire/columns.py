"""The columns in a batch's body: values, and optionally keys, timestamps and headers.

    values      int32 offsets[count + 1], bytes                     each part padded to 8 bytes
    keys        [validity bitmap,] int32 offsets[count + 1], bytes  with HAS_KEYS, the bitmap with HAS_NULL_KEYS
    timestamps  int64[count], microseconds                          with HAS_TIMESTAMPS; else all have the base one
    headers     int32 offsets[count + 1], bytes                     with HAS_HEADERS; each a msgpack map, empty for none

This is Arrow's layout of a binary array, so `pyarrow` wraps the received bytes without a copy. The fast ways in Python
are one `bytes.join` for encoding, and `BytesIO.read` mapped over the lengths for decoding: half the cost of a
comprehension of slices. Row-wise encodings cost three times as much.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, TypeVar

import msgpack

from metamq.errors import CorruptData, MessageTooLarge
from metamq.wire import batch as layout
from metamq.wire.batch import BatchHeader, padded
from metamq.wire.compression import Codec, compress, decompress
from metamq.wire.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX

Buffer = bytes | bytearray | memoryview
Headers = Mapping[str, bytes]
T = TypeVar("T")
_EMPTY_HEADER = bytes(layout.HEADER_BYTES)
_PADS = tuple(bytes(n) for n in range(layout.ALIGNMENT))


def encode(
    values: Sequence[Buffer],
    *,
    base_timestamp_us: int,
    keys: Sequence[bytes | None] | None = None,
    timestamps_us: Sequence[int] | None = None,
    headers: Sequence[Headers | None] | None = None,
    codec: Codec = Codec.NONE,
    producer_id: int = layout.NO_PRODUCER,
    sequence: int = 0,
) -> bytearray:
    """Encodes a whole batch, ready to send; the broker's part is zero.

    The optional columns have one entry per message. Raises MessageTooLarge if the batch, or its decompressed body, is
    over 16 MiB; ValueError for no messages, for more than a batch may have, and for a column of another length.
    """
    count = len(values)
    if not 0 < count <= BATCH_COUNT_MAX:
        raise ValueError(f"a batch of {count} messages; it must have 1 to {BATCH_COUNT_MAX}")
    for column in (keys, timestamps_us, headers):
        if column is not None and len(column) != count:
            raise ValueError(f"a column has {len(column)} entries for {count} values")
    parts: list[Buffer] = [_EMPTY_HEADER]
    flags = 0
    size = _add_binary(parts, values)
    if keys is not None:
        flags |= layout.HAS_KEYS
        if None in keys:
            flags |= layout.HAS_NULL_KEYS
            size += _add_bitmap(parts, keys)
        size += _add_binary(parts, [key or b"" for key in keys])
    max_timestamp_us = base_timestamp_us
    if timestamps_us is not None:
        flags |= layout.HAS_TIMESTAMPS
        base_timestamp_us, max_timestamp_us = min(timestamps_us), max(timestamps_us)
        parts.append(struct.pack(f"<{count}q", *timestamps_us))
        size += 8 * count
    if headers is not None:
        flags |= layout.HAS_HEADERS
        size += _add_binary(parts, [msgpack.packb(dict(h)) if h else b"" for h in headers])
    return _sealed(
        parts, codec=codec, flags=flags, count=count, producer_id=producer_id, sequence=sequence, plain_size=size,
        base_timestamp_us=base_timestamp_us, max_timestamp_us=max_timestamp_us,
    )  # fmt: skip


def _sealed(parts: list[Buffer], *, codec: Codec, plain_size: int, **fields: int) -> bytearray:
    """The batch of an empty header and the body's parts, of `plain_size` together. Raises MessageTooLarge."""
    if plain_size > BATCH_BYTES_MAX:
        raise MessageTooLarge("batch", plain_size, BATCH_BYTES_MAX)
    body_size = plain_size
    if codec is not Codec.NONE:
        body = compress(codec, b"".join(parts[1:]))
        body_size = len(body)
        parts = [_EMPTY_HEADER, body, _PADS[padded(body_size) - body_size]]
    whole_size = layout.HEADER_BYTES + padded(body_size)
    if whole_size > BATCH_BYTES_MAX:
        raise MessageTooLarge("batch", whole_size, BATCH_BYTES_MAX)
    batch = bytearray().join(parts)
    layout.seal(batch, codec=codec, plain_size=plain_size, body_size=body_size, **fields)
    return batch


class ReadyColumn(NamedTuple):
    """A binary column in the layout of the body: Arrow's buffers, each with exactly its own bytes."""

    offsets: Buffer
    """int32, one more than messages; the first is 0."""
    data: Buffer
    validity: Buffer | None = None
    """One bit per message, for keys that may be null."""


class ReadyTimes(NamedTuple):
    """The timestamps of all messages, in microseconds."""

    data: Buffer
    """int64, one per message."""
    lowest: int
    highest: int


class ReadyColumns(NamedTuple):
    """Messages whose columns are ready, for example from Arrow: encoding needs no work per message."""

    messages: int
    values: ReadyColumn
    keys: ReadyColumn | None = None
    headers: ReadyColumn | None = None
    """A msgpack map per entry; empty for no headers."""
    timestamps: ReadyTimes | None = None

    def encode(
        self,
        *,
        base_timestamp_us: int,
        codec: Codec = Codec.NONE,
        producer_id: int = layout.NO_PRODUCER,
        sequence: int = 0,
    ) -> bytearray:
        """Encodes a whole batch, as encode() does from lists. Raises MessageTooLarge, and ValueError like encode()."""
        if not 0 < self.messages <= BATCH_COUNT_MAX:
            raise ValueError(f"a batch of {self.messages} messages; it must have 1 to {BATCH_COUNT_MAX}")
        parts: list[Buffer] = [_EMPTY_HEADER]
        flags = 0
        size = self._add(parts, self.values)
        if self.keys is not None:
            flags |= layout.HAS_KEYS | (layout.HAS_NULL_KEYS if self.keys.validity is not None else 0)
            size += self._add(parts, self.keys)
        max_timestamp_us = base_timestamp_us
        if self.timestamps is not None:
            flags |= layout.HAS_TIMESTAMPS
            data, base_timestamp_us, max_timestamp_us = self.timestamps
            parts.append(data)
            size += 8 * self.messages
        if self.headers is not None:
            flags |= layout.HAS_HEADERS
            size += self._add(parts, self.headers)
        return _sealed(
            parts, codec=codec, flags=flags, count=self.messages, producer_id=producer_id, sequence=sequence,
            plain_size=size, base_timestamp_us=base_timestamp_us, max_timestamp_us=max_timestamp_us,
        )  # fmt: skip

    def _add(self, parts: list[Buffer], column: ReadyColumn) -> int:
        size = 0
        expected = 4 * (self.messages + 1)
        if memoryview(column.offsets).nbytes != expected:
            raise ValueError(f"a column has offsets of {memoryview(column.offsets).nbytes} bytes, not {expected}")
        for part in (column.validity, column.offsets, column.data):
            if part is not None:
                part_size = memoryview(part).nbytes
                parts += [part, _PADS[padded(part_size) - part_size]]
                size += padded(part_size)
        return size


def _add_binary(parts: list[Buffer], column: Sequence[Buffer]) -> int:
    """Appends a binary column's offsets and bytes to `parts`; returns their size."""
    ends = _offsets(column)
    data_size = ends[-1]
    offsets = struct.pack(f"<{len(ends)}i", *ends)
    offsets_size, padded_data_size = padded(len(offsets)), padded(data_size)
    parts.append(offsets)
    parts.append(_PADS[offsets_size - len(offsets)])
    parts.extend(column)
    parts.append(_PADS[padded_data_size - data_size])
    return offsets_size + padded_data_size


def _offsets(column: Sequence[Buffer]) -> list[int]:
    offsets = list(accumulate(map(len, column), initial=0))
    if offsets[-1] > BATCH_BYTES_MAX:
        raise MessageTooLarge("batch", offsets[-1], BATCH_BYTES_MAX)
    return offsets


def _add_bitmap(parts: list[Buffer], keys: Sequence[bytes | None]) -> int:
    size = padded(-(-len(keys) // 8))
    bits = "".join(["0" if key is None else "1" for key in reversed(keys)])
    parts.append(int(bits, 2).to_bytes(size, "little"))
    return size


@dataclass(eq=False, repr=False, slots=True)
class BinaryColumn:
    """A binary column in a body: Arrow's three buffers, as views."""

    count: int
    offsets: memoryview
    """int32, count + 1 entries."""
    data: memoryview
    validity: memoryview | None

    def tolist(self) -> list[bytes]:
        """All entries as bytes; null entries are empty. Raises CorruptData if the offsets are not ascending."""
        data = bytes(self.data)
        offsets = self.offsets.tolist()
        if offsets != sorted(offsets):  # the first is 0 and the last is where the data ends: see _Reader
            raise CorruptData("batch body", "a column's offsets are not ascending")
        lengths = map(sub, offsets[1:], offsets)
        return [*map(BytesIO(data).read, lengths)]

    def tolist_with_nulls(self) -> list[bytes | None]:
        """All entries as bytes; null entries are None. Raises CorruptData like tolist()."""
        entries = self.tolist()
        if self.validity is None:
            return list(entries)
        bits = f"{int.from_bytes(self.validity, 'little'):0{self.count}b}"  # the last message's bit comes first
        return [entry if bit == "1" else None for entry, bit in zip(entries, reversed(bits), strict=False)]


class Columns:
    """The decoded columns of one batch. They are views into the received bytes: data is copied only on request."""

    __slots__ = ("count", "headers", "keys", "timestamps", "values")

    def __init__(
        self,
        values: BinaryColumn,
        keys: BinaryColumn | None,
        timestamps: memoryview | None,
        headers: BinaryColumn | None,
    ) -> None:
        self.count = values.count
        self.values = values
        self.keys = keys
        self.timestamps = timestamps
        """int64 microseconds, or None if all messages have the batch's base timestamp."""
        self.headers = headers


def decode(batch: memoryview, header: BatchHeader) -> Columns:
    """The columns of a batch with verified checksums.

    Raises CorruptData if the columns do not fit the body: then another library made it.
    """
    body = batch[layout.HEADER_BYTES : layout.HEADER_BYTES + header.body_size]
    if header.codec != Codec.NONE:
        body = memoryview(decompress(header.codec, body, header.plain_size))
    reader = _Reader(body, header.count)
    values = reader.binary(with_validity=False)
    keys = reader.binary(bool(header.flags & layout.HAS_NULL_KEYS)) if header.flags & layout.HAS_KEYS else None
    timestamps = None
    if header.flags & layout.HAS_TIMESTAMPS:
        timestamps = reader.take(8 * header.count).cast("q")
    headers = reader.binary(with_validity=False) if header.flags & layout.HAS_HEADERS else None
    return Columns(values, keys, timestamps, headers)


class _Reader:
    def __init__(self, body: memoryview, count: int) -> None:
        self._body = body
        self._count = count
        self._at = 0

    def take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + padded(size)
        if size < 0 or start + size > len(self._body):
            raise CorruptData("batch body", f"a column of {size} bytes at {start} does not fit {len(self._body)}")
        return self._body[start : start + size]

    def binary(self, with_validity: bool) -> BinaryColumn:
        validity = self.take(-(-self._count // 8)) if with_validity else None
        offsets = self.take(4 * (self._count + 1)).cast("i")
        if offsets[0] != 0:
            raise CorruptData("batch body", f"a column's first offset is {offsets[0]}, not 0")
        return BinaryColumn(self._count, offsets, self.take(offsets[-1]), validity)


class _Pairs(list[tuple[Any, Any]]):
    """A map's entries."""


def unpack_headers(packed: bytes) -> dict[str, bytes]:
    """The headers of one message. A repeated name gets its last value. Raises CorruptData unless they are a map of str
    to bytes."""
    if not packed:
        return {}
    headers = _unpacked(packed, dict)
    _check_headers(headers.items())
    return headers


def unpack_header_pairs(packed: bytes) -> list[tuple[str, bytes]]:
    """All headers of one message, in order. Raises CorruptData like unpack_headers()."""
    if not packed:
        return []
    pairs = _unpacked(packed, _Pairs)
    _check_headers(pairs)
    return list(pairs)


def _unpacked(packed: bytes, kind: type[T]) -> T:
    hook = None if kind is dict else kind
    try:
        headers: Any = msgpack.unpackb(packed, max_array_len=0, object_pairs_hook=hook)  # arrays announce too much
    except Exception as error:  # msgpack has no common base class for what it raises
        raise CorruptData("message headers", str(error) or type(error).__name__) from error
    if not isinstance(headers, kind):
        raise CorruptData("message headers", f"they are a {type(headers).__name__}, not a map")
    return headers


def _check_headers(entries: Iterable[tuple[Any, Any]]) -> None:
    for name, text in entries:
        if type(name) is not str or type(text) is not bytes:
            raise CorruptData("message headers", f"{reprlib.repr(name)} is {reprlib.repr(text)}, not a str and bytes")
