"""Arrow: a message is a record batch, without its schema, as in Flight. It names the version of its schema instead."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any

from metamq.client.checks import wrong_type
from metamq.client.schemas.frame import SchemaFrame, parsed_versions
from metamq.client.schemas.shapes import Budget, Field, Kind, Shape
from metamq.client.schemas.value_codec import ValueCodec, library
from metamq.errors import ConfigError


def arrow_codec(topic: str, schema: Any) -> ValueCodec:
    """Returns the codec of the record batches of a pyarrow.Schema. Raises ConfigError."""
    pa = library("pyarrow", "arrow")
    if not isinstance(schema, pa.Schema):
        raise wrong_type("`schema`", "a pyarrow.Schema", schema)
    own = arrow_text(schema)
    arrow_shape(own)
    reader = arrow_schema(own)
    writers: dict[int, Any] = {}
    frame = SchemaFrame(topic, own)

    def learn(versions: Mapping[int, str]) -> None:
        found = parsed_versions(topic, versions, arrow_schema)
        writers.update(found)
        frame.learn({version: versions[version] for version in found})

    def encode(value: Any) -> bytes:
        return frame.head() + memoryview(value.cast(reader).serialize())

    def decode(data: bytes) -> Any:
        writer = writers[frame.version_of(data)]
        body = pa.py_buffer(data[SchemaFrame.BYTES :])  # a copy, so that its arrays are aligned
        if is_compressed(body):
            raise ValueError("its record batch is compressed, and a few bytes could fill the memory")
        rows = pa.ipc.read_record_batch(body, writer)
        rows.validate(full=True)
        return pa.RecordBatch.from_struct_array(fitted(rows.to_struct_array(), pa.struct(list(reader))))

    return ValueCodec("arrow", encode, decode, lambda: own, learn)


def is_compressed(message: Any) -> bool:
    """True if the buffers of an IPC message of a record batch are compressed. pyarrow does not show that.

    The metadata is a flatbuffer: the table Message, whose field 2 is the table RecordBatch, whose field 3 is the
    compression. Raises ValueError.
    """
    metadata = memoryview(message)[8:]
    try:
        (start,) = struct.unpack_from("<I", metadata, 0)
        header = _table_field(metadata, start, 2)
        batch = header + struct.unpack_from("<I", metadata, header)[0]
        return bool(_table_field(metadata, batch, 3))
    except struct.error as error:
        raise ValueError(f"it is not a record batch: {error}") from None


def _table_field(metadata: memoryview, table: int, number: int) -> int:
    """Returns the position of a field in a table of a flatbuffer; 0 if the table does not have it."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    place = 4 + 2 * number
    if place >= struct.unpack_from("<H", metadata, fields)[0]:
        return 0
    offset: int = struct.unpack_from("<H", metadata, fields + place)[0]
    return table + offset if offset else 0


def arrow_text(schema: Any) -> str:
    """Returns the definition of a pyarrow.Schema: the message of Arrow's IPC format, in base64, without metadata."""
    return base64.b64encode(schema.remove_metadata().serialize()).decode()


def arrow_schema(definition: str) -> Any:
    """Returns the pyarrow.Schema of a definition. Raises ConfigError."""
    pa = library("pyarrow", "arrow")
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(definition, validate=True)))
    except (pa.ArrowException, ValueError, OSError) as error:
        hint = "Give pyarrow's schema.serialize() in base64."
        raise ConfigError(f"the Arrow schema is wrong: {error}", hint=hint) from None


def fitted(array: Any, kind: Any) -> Any:
    """Returns an array as its reader's type: other fields are dropped, missing ones are null, numbers become wider.

    Raises ValueError for a null that the type forbids, and Arrow's error for a value that does not fit.
    """
    pa = library("pyarrow", "arrow")
    if array.type == kind:
        return array
    if pa.types.is_struct(kind) and pa.types.is_struct(array.type):
        fields = [_field_of(array, one) for one in kind]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind) and pa.types.is_list(array.type):
        items = fitted(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, items, type=kind, mask=array.is_null())
    return array.cast(kind, safe=not pa.types.is_timestamp(kind))  # Spark has microseconds


def _field_of(array: Any, field: Any) -> Any:
    pa = library("pyarrow", "arrow")
    is_there = array.type.get_field_index(field.name) >= 0
    found = fitted(array.field(field.name), field.type) if is_there else pa.nulls(len(array), field.type)
    if found.null_count and not field.nullable:
        raise ValueError(f"its field {field.name!r} has nulls, and the schema forbids them")
    return found


def arrow_shape(definition: str) -> Shape:
    """Returns the shape of a definition. Raises ConfigError for a wrong one, or one that a batch alone cannot have."""
    schema = arrow_schema(definition)
    if not schema.names:
        raise ConfigError("the Arrow schema has no fields", hint="Add a field.")
    return (Kind("record", _fields(list(schema), "", Budget())),)


def _fields(fields: list[Any], path: str, budget: Budget) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for one in fields:
        place = f"{path}.{one.name}" if path else one.name
        if one.name in found:
            raise ConfigError(f"the Arrow schema has the field {place!r} twice", hint="Rename one of them.")
        found[one.name] = Field(_shape(one, place, budget), not one.nullable, is_certain=True)
    return found


def _shape(field: Any, path: str, budget: Budget) -> Shape:
    budget.take((), "")
    kind = _kind(field.type, path, budget)
    return (kind, Kind("null")) if field.nullable and kind.name != "null" else (kind,)


def _kind(kind: Any, path: str, budget: Budget) -> Kind:
    pa = library("pyarrow", "arrow")
    if pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
        problem = f"field {path!r} of the Arrow schema is {kind}, which a batch alone cannot have"
        raise ConfigError(problem, hint=f"Make it {plain}.")
    if pa.types.is_struct(kind):
        return Kind("struct", _fields(list(kind), path, budget))
    if pa.types.is_list(kind):
        return Kind("list", item=_shape(kind.value_field, f"{path}[]", budget))
    for index in range(kind.num_fields):
        _kind(kind.field(index).type, path, budget)
    return Kind(str(kind))
