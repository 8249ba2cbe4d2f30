"""Batches as Arrow arrays around the received bytes. No other module in this folder imports pyarrow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa

from metamq.errors import CorruptData
from metamq.wire import columns

if TYPE_CHECKING:
    from metamq.wire.batch import BatchHeader
    from metamq.wire.columns import BinaryColumn, Columns

HEADERS_TYPE = pa.map_(pa.string(), pa.binary())
SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", HEADERS_TYPE),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The fields of a Message, in their order. `headers` is null for a message without headers."""


def record_batch(decoded: Columns, header: BatchHeader, topic: str, partition: str, skip: int) -> pa.RecordBatch:
    """Returns the batch without its first `skip` messages. Raises CorruptData if a column's offsets do not ascend."""
    constants = [pa.repeat(name, header.count) for name in (topic, partition)]
    arrays = [*constants, *(make(decoded, header) for make in _COLUMNS.values())]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)[skip:]


def column(name: str, decoded: Columns, header: BatchHeader) -> pa.Array:
    """Returns a column of SCHEMA after `partition`, with all messages of the batch. Raises CorruptData like
    record_batch()."""
    return _COLUMNS[name](decoded, header)


def _offsets(_decoded: Columns, header: BatchHeader) -> pa.Array:
    return pa.arange(header.base_offset, header.end_offset)


def _keys(decoded: Columns, _header: BatchHeader) -> pa.Array:
    return pa.nulls(decoded.count, pa.binary()) if decoded.keys is None else _binary(decoded.keys)


def _values(decoded: Columns, _header: BatchHeader) -> pa.Array:
    return _binary(decoded.values)


def _timestamps(decoded: Columns, header: BatchHeader) -> pa.Array:
    data: memoryview | bytes
    if decoded.timestamps is None:  # repeating bytes is four times as fast as pa.repeat()
        data = header.base_timestamp_us.to_bytes(8, sys.byteorder, signed=True) * decoded.count
    else:
        data = decoded.timestamps
    return pa.Array.from_buffers(SCHEMA.field("timestamp").type, decoded.count, [None, pa.py_buffer(data)])


def _headers_or_nulls(decoded: Columns, _header: BatchHeader) -> pa.Array:
    return pa.nulls(decoded.count, HEADERS_TYPE) if decoded.headers is None else _headers(decoded.headers)


_COLUMNS: dict[str, Callable[[Columns, BatchHeader], pa.Array]] = {
    "offset": _offsets,
    "key": _keys,
    "value": _values,
    "headers": _headers_or_nulls,
    "timestamp": _timestamps,
}


def _binary(column: BinaryColumn) -> pa.Array:
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    array = pa.Array.from_buffers(pa.binary(), column.count, buffers)
    try:
        array.validate(full=True)  # one pass over the offsets, because another library may have written them
    except pa.ArrowInvalid as error:
        raise CorruptData("batch body", str(error)) from error
    return array


def _headers(column: BinaryColumn) -> pa.Array:
    maps = [columns.unpack_header_pairs(packed) for packed in column.tolist()]
    offsets = pa.array(accumulate(map(len, maps), initial=0), pa.int32())
    names = pa.array([name for entries in maps for name, _text in entries], pa.string())
    texts = pa.array([text for entries in maps for _name, text in entries], pa.binary())
    return pa.MapArray.from_arrays(offsets, names, texts, mask=pa.array([not entries for entries in maps], pa.bool_()))
