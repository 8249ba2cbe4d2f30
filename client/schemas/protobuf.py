"""Protobuf: classes that protoc made. Messages name their fields by number, so a reader needs no version."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from metamq.client.schemas.frame import index_list
from metamq.client.schemas.shapes import Budget, Field, Kind, Shape
from metamq.client.schemas.value_codec import ValueCodec, library
from metamq.errors import ConfigError

_TYPES = "double float int64 uint64 int32 fixed64 fixed32 bool text group message bytes uint32 enum sfixed32 sfixed64"
_NAMES = dict(enumerate([*_TYPES.split(), "sint32", "sint64"], 1))
_NAMES |= {1: "64-bit float", 2: "32-bit float"}  # unlike Avro's, the second is not read as the first
_MESSAGE, _ENUM, _REPEATED, _REQUIRED = 11, 14, 3, 2


def protobuf_codec(kind: Any) -> ValueCodec:
    """Returns the codec of a class that protoc made."""
    library("google.protobuf", "protobuf")

    def encode(value: Any) -> bytes:
        return value.SerializeToString()  # type: ignore[no-any-return]

    return ValueCodec("protobuf", encode, kind.FromString, lambda: _definition(kind), None, message_indexes(kind))


def message_indexes(kind: Any) -> bytes:
    """Returns the framing's list for a message type: its index in the file, then those in the types around it."""
    one, found = kind.DESCRIPTOR, list[int]()
    while one is not None:
        around = one.containing_type
        beside = around.nested_types if around is not None else list(one.file.message_types_by_name.values())
        found.append([other.full_name for other in beside].index(one.full_name))
        one = around
    return index_list(found[::-1])


def _definition(kind: Any) -> str:
    """The full name of the message type, a space, and its file with all imports as a FileDescriptorSet, in base64."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    files = FileDescriptorSet()
    done: set[str] = set()

    def add(file: Any) -> None:
        if file.name not in done:
            done.add(file.name)
            for imported in file.dependencies:
                add(imported)
            file.CopyToProto(files.file.add())

    add(kind.DESCRIPTOR.file)
    return f"{kind.DESCRIPTOR.full_name} {base64.b64encode(files.SerializeToString(deterministic=True)).decode()}"


def file_set(definition: str) -> tuple[str, Any]:
    """Returns the full name of the message type and the FileDescriptorSet of a definition. Raises ConfigError."""
    library("google.protobuf", "protobuf")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    name, _, encoded = definition.partition(" ")
    try:
        return name, FileDescriptorSet.FromString(base64.b64decode(encoded, validate=True))
    except (DecodeError, binascii.Error, ValueError) as error:
        hint = "Give the name of a message type, a space, and a FileDescriptorSet in base64."
        raise ConfigError(f"the Protobuf schema is wrong: {error}", hint=hint) from None


def protobuf_shape(definition: str) -> Shape:
    """Returns the shape of a definition. Its fields have numbers. Raises ConfigError for a wrong or recursive one."""
    name, files = file_set(definition)
    types: dict[str, Any] = {}
    for file in files.file:
        package = f".{file.package}" if file.package else ""
        _collect(package, file.message_type, file.enum_type, types)
    reader = _ProtobufReader(types)
    return (reader.record(f".{name}", ()),)


def _collect(scope: str, messages: Any, enums: Any, types: dict[str, Any]) -> None:
    for enum in enums:
        types[f"{scope}.{enum.name}"] = enum
    for message in messages:
        types[f"{scope}.{message.name}"] = message
        _collect(f"{scope}.{message.name}", message.nested_type, message.enum_type, types)


class _ProtobufReader:
    def __init__(self, types: dict[str, Any]) -> None:
        self._types = types
        self._budget = Budget()

    def record(self, name: str, names: tuple[str, ...]) -> Kind:
        names = self._budget.take(names, name.removeprefix("."))
        if name not in self._types:
            raise ConfigError(f"the Protobuf schema has no type {name[1:]!r}", hint="Add the file that has it.")
        fields = {}
        for one in self._types[name].field:
            kind = self._kind(one, names)
            if one.label == _REPEATED:
                kind = Kind("repeated", item=(kind,))
            is_needed = one.label == _REQUIRED
            fields[str(one.number)] = Field((kind,), is_needed, is_needed, f"{one.name} = {one.number}")
        return Kind("message", fields)

    def _kind(self, one: Any, names: tuple[str, ...]) -> Kind:
        if one.type == _MESSAGE:
            return self.record(one.type_name, names)
        if one.type == _ENUM:
            self._budget.take(names, "")
            return Kind("enum number")  # an unknown number is kept
        return Kind(_NAMES[one.type])
