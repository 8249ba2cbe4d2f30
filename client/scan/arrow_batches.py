"""Turns fetched batches into Arrow batches, for Spark and scans: columns that refer to the received bytes.

A batch of a thousand messages or more is passed on without a copy. Smaller ones are merged, which copies them: each
Arrow batch costs its reader as much as some hundred rows. Without the column `value` the others are copied, too: a
small column would keep all of the received bytes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metamq.client.fetch.arrow import column
from metamq.errors import CorruptData, UndecodableBatch
from metamq.wire import columns
from metamq.wire.batch import BatchHeader
from metamq.wire.columns import Columns

if TYPE_CHECKING:
    from metamq.client.scan.ranges import OffsetRange

ENOUGH_MESSAGES = 1000
ENOUGH_BYTES = 1024 * 1024
BODY = frozenset({"key", "value", "headers", "timestamp"})
"""The columns for which a batch is decoded, and decompressed."""

CREATE_TIME = 0
"""Spark's type of each timestamp: the producer set it."""

Maker = Callable[[Columns | None, BatchHeader, pa.DataType], pa.Array]
"""Makes a column of a batch with a header; its columns are decoded only if one of BODY is wanted."""


class ArrowBatches:
    """Makes the Arrow batches of one range."""

    def __init__(self, wanted: OffsetRange, schema: pa.Schema) -> None:
        """`schema` has the wanted columns, in Spark's types or a scan's."""
        self._wanted = wanted
        self._offset = wanted.start
        """The offset up to which messages were taken."""
        self._schema = schema
        self._waiting: list[list[pa.Array]] = []
        self._messages = 0
        self._bytes = 0
        self._has_body = not BODY.isdisjoint(schema.names)
        self._is_small = self._has_body and "value" not in schema.names
        known = {"topic": wanted.tp.topic, "partition": wanted.tp.partition, "timestampType": CREATE_TIME}
        makers = _MAKERS | {"key": _keys()} | {name: _constant(value) for name, value in known.items()}
        self._makers = [makers[name] for name in schema.names]

    def of(self, chunks: Iterable[Iterable[tuple[BatchHeader, memoryview]]]) -> Generator[pa.RecordBatch, None, None]:
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
            self._make(header, columns.decode(data, header) if self._has_body else None)
        except CorruptData as error:  # the checksums were right
            raise UndecodableBatch(
                tp.topic, tp.partition, header.base_offset, header.end_offset, error.reason
            ) from error

    def _make(self, header: BatchHeader, decoded: Columns | None) -> None:
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
        if len(waiting) == 1 and not self._is_small:
            arrays = waiting[0]
        else:
            arrays = [pa.concat_arrays(parts) for parts in zip(*waiting, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _constant(value: object) -> Maker:
    """Returns a maker of a column with one value: all batches share one array, and most of them one slice of it."""
    whole: Any = None
    part: pa.Array | None = None

    def make(_decoded: Columns | None, header: BatchHeader, kind: pa.DataType) -> pa.Array:
        nonlocal whole, part
        if part is None or len(part) != header.count:
            if whole is None or len(whole) < header.count:
                whole = pa.repeat(pa.scalar(value, kind), header.count)
            part = whole.slice(0, header.count)
        return part

    return make


def _keys() -> Maker:
    no_keys = _constant(None)

    def make(decoded: Columns | None, header: BatchHeader, kind: pa.DataType) -> pa.Array:
        assert decoded is not None
        return no_keys(decoded, header, kind) if decoded.keys is None else column("key", decoded, header)

    return make


def _plain(name: str) -> Maker:
    def make(decoded: Columns | None, header: BatchHeader, _kind: pa.DataType) -> pa.Array:
        assert decoded is not None
        return column(name, decoded, header)

    return make


def _offsets(_decoded: Columns | None, header: BatchHeader, _kind: pa.DataType) -> pa.Array:
    return pa.arange(header.base_offset, header.end_offset)


def _headers(decoded: Columns | None, header: BatchHeader, kind: Any) -> pa.Array:
    """Makes maps, or lists of structs as in Spark's Kafka source; null for a message without headers."""
    assert decoded is not None
    if decoded.headers is None:
        return pa.nulls(header.count, kind)
    maps = column("headers", decoded, header)
    if pa.types.is_map(kind):
        return maps
    entries = pa.StructArray.from_arrays([maps.keys, maps.items], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(maps.offsets, entries, type=kind, mask=maps.is_null())


_MAKERS: dict[str, Maker] = {
    "value": _plain("value"),
    "offset": _offsets,
    "timestamp": _plain("timestamp"),
    "headers": _headers,
}
