"""Turns fetched batches into Arrow batches for Spark: columns that refer to the received bytes.

A batch of a thousand messages or more is passed on without a copy. Smaller ones are merged, which copies them: each
Arrow batch costs Spark as much as some hundred rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from metamq.client.fetch.arrow import column
from metamq.errors import CorruptData, UndecodableBatch
from metamq.spark_consumers.source.columns import CREATE_TIME
from metamq.wire import columns
from metamq.wire.batch import BatchHeader
from metamq.wire.columns import Columns

if TYPE_CHECKING:
    from metamq.spark_consumers.source.ranges import OffsetRange

ENOUGH_MESSAGES = 1000
ENOUGH_BYTES = 1024 * 1024

Maker = Callable[[Columns, BatchHeader, pa.DataType], pa.Array]


class ArrowBatches:
    """Makes the Arrow batches of one range; `schema` is Spark's Arrow schema of the wanted columns."""

    def __init__(self, wanted: OffsetRange, schema: pa.Schema) -> None:
        self._wanted = wanted
        self._offset = wanted.start
        """The offset up to which messages were taken."""
        self._schema = schema
        self._waiting: list[list[pa.Array]] = []
        self._messages = 0
        self._bytes = 0
        constants = {"topic": wanted.tp.topic, "partition": wanted.tp.partition, "timestampType": CREATE_TIME}
        makers = _MAKERS | {"key": _keys()} | {name: _constant(value) for name, value in constants.items()}
        self._makers = [makers[name] for name in schema.names]

    def of(self, chunks: Iterable[Iterable[tuple[BatchHeader, memoryview]]]) -> Iterator[pa.RecordBatch]:
        """Yields the messages of the fetched chunks that are in the range. Raises UndecodableBatch."""
        for chunk in chunks:
            for header, data in chunk:
                self._add(header, data)
                if self._messages >= ENOUGH_MESSAGES or self._bytes >= ENOUGH_BYTES:
                    yield self._taken()
        if self._waiting:
            yield self._taken()

    def _add(self, header: BatchHeader, data: memoryview) -> None:
        tp = self._wanted.tp
        try:
            self._make(header, columns.decode(data, header))
        except CorruptData as error:  # the checksums were right
            raise UndecodableBatch(
                tp.topic, tp.partition, header.base_offset, header.end_offset, error.reason
            ) from error

    def _make(self, header: BatchHeader, decoded: Columns) -> None:
        first = max(self._offset - header.base_offset, 0)
        end = min(self._wanted.end, header.end_offset) - header.base_offset
        self._offset = header.base_offset + end
        arrays = [make(decoded, header, field.type) for make, field in zip(self._makers, self._schema, strict=True)]
        if first > 0 or end < header.count:
            arrays = [array.slice(first, end - first) for array in arrays]
        self._waiting.append(arrays)
        self._messages += end - first
        self._bytes += header.plain_size

    def _taken(self) -> pa.RecordBatch:
        waiting, self._waiting = self._waiting, []
        self._messages = self._bytes = 0
        arrays = waiting[0] if len(waiting) == 1 else [pa.concat_arrays(parts) for parts in zip(*waiting, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _constant(value: object) -> Maker:
    """Returns a maker of a column with one value: all batches share one array, and most of them one slice of it."""
    whole: Any = None
    part: pa.Array | None = None

    def make(decoded: Columns, _header: BatchHeader, kind: pa.DataType) -> pa.Array:
        nonlocal whole, part
        if part is None or len(part) != decoded.count:
            if whole is None or len(whole) < decoded.count:
                whole = pa.repeat(pa.scalar(value, kind), decoded.count)
            part = whole.slice(0, decoded.count)
        return part

    return make


def _keys() -> Maker:
    no_keys, keys = _constant(None), _plain("key")
    return lambda decoded, header, kind: (no_keys if decoded.keys is None else keys)(decoded, header, kind)


def _plain(name: str) -> Maker:
    return lambda decoded, header, _kind: column(name, decoded, header)


def _headers(decoded: Columns, header: BatchHeader, kind: Any) -> pa.Array:
    """Makes lists of structs; null for a message without headers, as in Spark's Kafka source."""
    if decoded.headers is None:
        return pa.nulls(decoded.count, kind)
    maps = column("headers", decoded, header)
    entries = pa.StructArray.from_arrays([maps.keys, maps.items], fields=list(kind.value_type))
    is_empty = pc.equal(maps.offsets[1:], maps.offsets[:-1])
    return pa.ListArray.from_arrays(maps.offsets, entries, type=kind, mask=is_empty)


_MAKERS: dict[str, Maker] = {
    "value": _plain("value"),
    "offset": _plain("offset"),
    "timestamp": _plain("timestamp"),
    "headers": _headers,
}
