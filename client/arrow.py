"""Batches as Arrow, wrapped around the received bytes. The only file that imports pyarrow."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pyarrow as pa

from metamq.errors import CorruptData
from metamq.wire import columns
from metamq.wire.batch import BatchHeader
from metamq.wire.columns import BinaryColumn, Columns

HEADERS_TYPE = pa.map_(pa.string(), pa.binary())
SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("headers", HEADERS_TYPE),
    ]
)


def record_batch(decoded: Columns, header: BatchHeader, topic: str, partition: str, skip: int) -> pa.RecordBatch:
    """The batch without its first `skip` messages. Raises CorruptData when a column's offsets are not ascending."""
    count = decoded.count
    if decoded.timestamps is None:
        timestamps = pa.repeat(pa.scalar(header.base_timestamp_us, pa.timestamp("us", tz="UTC")), count)
    else:
        timestamps = pa.Array.from_buffers(
            pa.timestamp("us", tz="UTC"), count, [None, pa.py_buffer(decoded.timestamps)]
        )
    arrays = [
        pa.arange(header.base_offset, header.end_offset),
        pa.nulls(count, pa.binary()) if decoded.keys is None else _binary(decoded.keys),
        _binary(decoded.values),
        timestamps,
        pa.nulls(count, HEADERS_TYPE) if decoded.headers is None else _headers(decoded.headers),
    ]
    schema = SCHEMA.with_metadata({"topic": topic, "partition": partition})
    return pa.RecordBatch.from_arrays(arrays, schema=schema)[skip:]


def _binary(column: BinaryColumn) -> pa.Array:
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    array = pa.Array.from_buffers(pa.binary(), column.count, buffers)
    try:
        array.validate(full=True)  # one pass over the offsets, since others than this library may have written them
    except pa.ArrowInvalid as error:
        raise CorruptData("batch body", str(error)) from error
    return array


def _headers(column: BinaryColumn) -> pa.Array:
    maps: list[dict[str, Any]] = [columns.unpack_headers(packed) for packed in column.tolist()]
    offsets = pa.array(accumulate(map(len, maps), initial=0), pa.int32())
    names = pa.array([name for entry in maps for name in entry], pa.string())
    texts = pa.array([text for entry in maps for text in entry.values()], pa.binary())
    return pa.MapArray.from_arrays(offsets, names, texts)
