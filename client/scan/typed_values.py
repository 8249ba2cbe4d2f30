"""The values of a typed topic as one Arrow column of structs.

JSON is read by Arrow's own reader, a batch at a time. It reads one text, in which the values follow each other. So each
value gets its number in the batch, and the numbers are checked: a broken value never moves the others to wrong rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from metamq.client.fetch.arrow import SCHEMA
from metamq.client.schemas.arrow import arrow_schema, fitted
from metamq.client.schemas.compatibility import shape_of
from metamq.client.schemas.frame import SchemaFrame
from metamq.client.schemas.topic import Topic
from metamq.errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from metamq.client.schemas.shapes import Kind, Shape
    from metamq.zk.cluster.schemas import Schema, TopicSchemas

_PLAIN = {
    "boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "string": pa.string(), "enum": pa.string(),
    "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(), "bytes": pa.binary(),
    "text": pa.string(),
}  # fmt: skip
_TIMES = {
    "logicalType: date": pa.date32(),
    "logicalType: timestamp-millis": pa.timestamp("ms", tz="UTC"),
    "logicalType: timestamp-micros": pa.timestamp("us", tz="UTC"),
}
PLACE = ("topic", "partition", "offset", "key")
HINT = "Give `end=` and `start=` around it, or scan the topic's name and decode its values yourself."


class ValueSchema(NamedTuple):
    """The schema by which the values of a topic are read: it can be pickled, for the tasks of Spark."""

    topic: str
    schema: Schema
    versions: dict[int, str]
    """The registered definitions. A value of Avro or Arrow is read by the definition of its writer."""

    def reader(self, kind: Any = None, hint: str = HINT) -> TypedValues:
        """Returns the reader of values. `kind`: an Arrow type with some of the schema's fields; the default is all.
        Raises ConfigError for a schema that has no columns."""
        topic = None
        if self.schema.format == "avro":
            topic = Topic.avro(self.topic, self.schema.definition)
        elif self.schema.format == "arrow":
            topic = Topic.arrow(self.topic, arrow_schema(self.schema.definition))
        if topic is not None:
            topic.learn(self.versions)
        decode = None if topic is None else topic.decode
        return TypedValues(self.topic, self.schema, decode, kind=kind, hint=hint)


def newest_schema(name: str, schemas: TopicSchemas) -> ValueSchema:
    """Returns the newest schema of a topic. Raises ConfigError for a topic without one."""
    if not schemas.versions:
        hint = f"Register one: `metamq topic schema register {name} FILE`."
        raise ConfigError(f"topic {name!r} has no registered schema", hint=hint)
    return ValueSchema(name, schemas.versions[-1], schemas.by_version)


class TypedValues:
    """Makes the typed column of a scan."""

    def __init__(
        self,
        topic: str,
        schema: Schema,
        decode: Callable[[bytes], Any] | None,
        *,
        is_framed: bool | None = None,
        kind: Any = None,
        hint: str = HINT,
    ) -> None:
        """`is_framed`: True if each JSON value has Confluent's framing, None if each may have it. `kind`, `hint`: see
        ValueSchema.reader(). Raises ConfigError for a schema that has no columns."""
        self._decode = decode
        self._is_framed = is_framed
        self._hint = hint
        if schema.format == "protobuf":
            refused = "Scan the topic's name, and decode the column `value` by the class."
            raise ConfigError(f"topic {topic!r} has Protobuf values, which have no Arrow columns here", hint=refused)
        self._has_rows = schema.format == "arrow"
        """True if a message has several rows."""
        of_arrow = pa.struct(list(arrow_schema(schema.definition))) if self._has_rows else None
        self.type: Any = kind or of_arrow or _type_of(shape_of(topic, schema), "")
        """The Arrow type of the column `value`."""
        if not pa.types.is_struct(self.type) or not self.type.num_fields:
            raise ConfigError(f"the schema of topic {topic!r} has no fields", hint="Scan the topic's name.")
        row = pa.schema([pa.field("i", pa.int64()), pa.field("v", self.type)])
        self._parsing = pj.ParseOptions(explicit_schema=row, unexpected_field_behavior="ignore")

    def typed_batches(
        self, batches: Generator[pa.RecordBatch, None, None], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Yields the batches with their values typed. Raises DecodeError."""
        with closing(batches):
            for batch in batches:
                yield self._typed(batch, schema)

    def _typed(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        try:
            values = self._values(batch.column("value"))
        except Exception:
            self._raise_for_first(batch)
            raise
        if self._has_rows:
            messages, values = pc.list_parent_indices(values), values.flatten()
            batch = batch.drop_columns("value").take(messages)
        columns = [values if name == "value" else batch.column(name) for name in schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _values(self, values: pa.Array) -> pa.Array:
        """Returns a struct for each value, or with Arrow a list of structs."""
        if self._decode is not None and self._has_rows:
            found = list(map(self._decode, values.to_pylist()))
            ends = pa.array(accumulate((rows.num_rows for rows in found), initial=0), pa.int32())
            whole = pa.concat_arrays([fitted(rows.to_struct_array(), self.type) for rows in found])
            return pa.ListArray.from_arrays(ends, whole)
        if self._decode is not None:
            return pa.array(list(map(self._decode, values.to_pylist())), type=self.type)
        if self._is_framed is not False:
            values = _without_frames(values, is_needed=bool(self._is_framed))
        count = len(values)
        numbers = pc.cast(pc.cast(pa.arange(0, count), pa.string()), pa.binary())
        parts = pa.scalar(b'{"i":'), numbers, pa.scalar(b',"v":'), values, pa.scalar(b"}\n")
        lines = pc.binary_join_element_wise(*parts, pa.scalar(b""))
        text = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), lines), b"")[0].as_buffer()
        reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
        table = pj.read_json(pa.BufferReader(text), read_options=reading, parse_options=self._parsing)
        if not table.column("i").combine_chunks().equals(pa.arange(0, count)):
            raise ValueError("it is not one JSON value")
        values = table.column("v").combine_chunks()
        values.validate(full=True)  # Arrow's reader takes text that is not UTF-8
        return values

    def _raise_for_first(self, batch: pa.RecordBatch) -> None:
        """Raises DecodeError for the first message whose value is wrong."""
        for row in range(batch.num_rows):
            value = batch.column("value").slice(row, 1)
            try:
                self._values(value)
            except Exception as error:
                topic, partition, offset, key = (batch.column(name)[row].as_py() for name in PLACE)
                wrong = DecodeError(topic, partition, offset, key, value[0].as_py(), error)
                wrong.hint = self._hint
                raise wrong from error


def place_and(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of the plain columns that are read for these, one of which is `value`."""
    more = [SCHEMA.field(name) for name in PLACE if name not in schema.names]
    at = schema.get_field_index("value")
    return pa.schema([*schema.set(at, SCHEMA.field("value")), *more])


def _without_frames(values: pa.Array, *, is_needed: bool) -> pa.Array:
    """Returns the values without Confluent's framing; no JSON begins with its zero byte. Raises ValueError."""
    enough = pc.greater_equal(pc.binary_length(values), SchemaFrame.BYTES)
    framed = pc.and_(pc.starts_with(values, pattern=b"\0"), enough)
    if not pc.any(framed).as_py() and not is_needed:
        return values
    if is_needed and not pc.all(framed).as_py():
        raise ValueError(SchemaFrame.PROBLEM)
    return pc.if_else(framed, pc.binary_replace_slice(values, 0, SchemaFrame.BYTES, b""), values)


def _type_of(shape: Shape, path: str) -> Any:
    kinds = [kind for kind in shape if kind.name != "null"]
    if {kind.name for kind in kinds} == {"integer", "number"}:
        return pa.float64()
    if len(kinds) == 1 and (found := _type_of_kind(kinds[0], path)) is not None:
        return found
    problem = f"field {path or '(the whole value)'!r} has no Arrow type: it is {' or '.join(map(str, shape))}"
    raise ConfigError(problem, hint="Scan the topic's name, and decode the column `value` yourself.")


def _type_of_kind(kind: Kind, path: str) -> Any:
    if kind.fields:
        fields = [(name, _type_of(one.shape, f"{path}.{name}" if path else name)) for name, one in kind.fields.items()]
        return pa.struct(fields)
    if kind.name == "array":
        return pa.list_(_type_of(kind.item, f"{path}[]"))
    logical = next((limit for limit in kind.limits if limit.startswith("logicalType: ")), None)
    return _PLAIN.get(kind.name) if logical is None else _TIMES.get(logical)
