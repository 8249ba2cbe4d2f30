"""The rows of a table as messages, for `send_table()`. Any object with `__arrow_c_stream__` is a table.

Its columns have the names and the meaning of those of metamq.scan(). Libraries have several types for one kind of
column (`large_string`, views, dictionaries): Arrow casts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from metamq.client.checks import wrong_type
from metamq.client.model import TIMESTAMP_US_MAX
from metamq.client.producer.batching import Batcher, ColumnarBatch
from metamq.client.producer.outgoing import CheckedMessage
from metamq.client.producer.packed_headers import check_headers
from metamq.client.producer.partitioner import partitioner_named
from metamq.client.schemas.topic import Topic
from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import AnyMessage
    from metamq.client.producer.producer_core import ProducerOptions
    from metamq.zk.cluster.topics import TopicConfig

PIECE_BYTES = 8 * 1024 * 1024
"""About the bytes of the rows that are taken at a time. The producer's buffer is checked for each piece."""
PACKED_BYTES = 256 * 1024
"""The size of a message of Arrow rows: batching gains no more, and a reader holds a whole message."""
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME = pa.timestamp("us", tz="UTC")
TYPES = {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS, "timestamp": TIME, "partition": pa.string()}
"""The columns of a message, with the types to which they are cast."""
IGNORED = ("topic", "offset")
"""Columns of a scan that a message gets again when it is sent."""
KINDS = {
    "key": "bytes or text",
    "value": "bytes or text",
    "headers": "a map of text to bytes",
    "timestamp": "a timestamp with a time zone",
    "partition": "text",
}


def batches_of(
    rows: Iterable[pa.RecordBatch], config: TopicConfig, options: ProducerOptions
) -> Iterator[list[ColumnarBatch]]:
    """Yields the batches of each piece of a table. Raises PartitionNotFound, MessageTooLarge, ConfigError."""
    batcher = Batcher(
        config.topic,
        lambda _topic: config,
        options.batch_bytes,
        columns=tuple(TYPES),
        partitioner=partitioner_named(options.partitioner),
        message_bytes_max=options.max_message_bytes,
    )
    for piece in rows:
        yield [batch.outgoing() for batch in batcher.add(piece)]
    yield [batch.outgoing() for batch in batcher.rest()]


def messages_in(rows: Iterable[pa.RecordBatch]) -> list[AnyMessage]:
    """Returns the messages of a table, for a transaction."""
    found: list[AnyMessage] = []
    for piece in rows:
        columns = {name: piece.column(name).to_pylist() for name in piece.schema.names}
        empty = [None] * piece.num_rows
        headers = [
            entries and {one["key"]: one["value"] for one in entries} for entries in columns.get("headers", empty)
        ]
        columns |= {"headers": headers}
        order = [columns.get(name, empty) for name in ("value", "key", "headers", "partition", "timestamp")]
        found += map(CheckedMessage, *order)
    return found


def rows_of(topic: str | Topic[Any], table: Any) -> tuple[str, Iterator[pa.RecordBatch]]:
    """Returns the topic's name, and the messages some at a time, with columns of TYPES; `timestamp` as int64. Raises
    ConfigError, WrongType."""
    if not hasattr(table, "__arrow_c_stream__"):
        raise wrong_type(
            "`table`", "a table of Arrow, Polars, pandas or DuckDB (an object with __arrow_c_stream__)", table
        )
    reader = pa.RecordBatchReader.from_stream(table)
    pieces = (piece for rows in reader for piece in _pieces(rows))
    if isinstance(topic, Topic):
        if topic.schema.format != "arrow":
            hint = "Encode them in the table's column 'value', and give the topic's name."
            raise ConfigError(f"send_table() does not encode the values of {topic!r}", hint=hint)
        return topic.name, (_packed(topic, piece) for piece in pieces)
    _check_columns(reader.schema)
    return topic, map(_cast, pieces)


def _packed(topic: Topic[Any], rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(_encoded(topic, rows), pa.binary())], names=["value"])


def _encoded(topic: Topic[Any], rows: pa.RecordBatch) -> list[bytes]:
    """Returns the rows in messages of at most PACKED_BYTES, or of one row."""
    data = topic.encode(rows)
    if len(data) <= PACKED_BYTES or rows.num_rows <= 1:
        return [data]
    half = rows.num_rows // 2
    return _encoded(topic, rows.slice(0, half)) + _encoded(topic, rows.slice(half))


def _check_columns(schema: pa.Schema) -> None:
    known = [*TYPES, *IGNORED]
    for name in schema.names:
        if name not in known:
            hint = f"A message has {', '.join(TYPES)}. Pack other columns into the value, or leave them out."
            raise ConfigError(f"the table has a column {name!r}", hint=hint)
        if schema.names.count(name) > 1:
            raise ConfigError(f"the table has the column {name!r} twice", hint="Name each once.")
    if "value" not in schema.names:
        raise ConfigError("the table has no column 'value'", hint="Give the column to send this name.")
    for name in TYPES:
        if name in schema.names and not _FITS[name](_plain(schema.field(name).type)):
            problem = f"the table's column {name!r} is of type {schema.field(name).type}"
            raise ConfigError(problem, hint=f"It has to be {KINDS[name]}.")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_bytes(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_null)
    return _is_text(kind) or any(check(kind) for check in checks)


def _is_headers(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return _is_text(kind.key_type) and _is_bytes(kind.item_type)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return bool(kind == pa.null())
    entry = kind.value_type
    is_named = pa.types.is_struct(entry) and [one.name for one in entry] == ["key", "value"]
    return bool(is_named) and _is_text(entry[0].type) and _is_bytes(entry[1].type)


_FITS: dict[str, Callable[[pa.DataType], bool]] = {
    "key": _is_bytes,
    "value": _is_bytes,
    "headers": _is_headers,
    "timestamp": lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,
    "partition": lambda kind: _is_text(kind) or pa.types.is_null(kind),
}


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    size = rows.nbytes
    for column in rows.columns:  # a dictionary has each of its entries once, and a message has a copy
        if pa.types.is_dictionary(column.type) and _is_bytes(column.type.value_type) and len(column.dictionary):
            size += rows.num_rows * (pc.max(pc.binary_length(column.dictionary.cast(pa.binary()))).as_py() or 0)
    count = max(rows.num_rows * PIECE_BYTES // max(size, 1), 1)
    for first in range(0, rows.num_rows, count):
        yield rows.slice(first, count)


def _column(column: pa.Array, name: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return _column(column.dictionary, name).take(column.indices)
    is_finer = pa.types.is_timestamp(column.type) and column.type.unit == "ns"
    try:
        return column.cast(TYPES[name], safe=not is_finer)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"the table's column {name!r} has a wrong value: {error}") from error


def _cast(rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = {name: _column(rows.column(name), name) for name in TYPES if name in rows.schema.names}
    if columns["value"].null_count:
        raise ConfigError("the table's column 'value' has nulls", hint="A message has a value: leave these rows out.")
    if "headers" in columns:
        check_headers(columns["headers"])
    if "timestamp" in columns:
        times = columns["timestamp"].cast(pa.int64()).fill_null(time.time_ns() // 1000)
        if not 0 <= pc.min(times).as_py() <= pc.max(times).as_py() <= TIMESTAMP_US_MAX:
            raise ConfigError("the table's column 'timestamp' has a time before 1970 or after the year 9999")
        columns["timestamp"] = times
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
