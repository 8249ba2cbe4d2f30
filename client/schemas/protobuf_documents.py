"""Protobuf values as JSON documents, by Protobuf's JSON mapping, but with numbers for all integers."""

from __future__ import annotations

from typing import Any

from metamq.client.schemas.protobuf import file_set, message_indexes
from metamq.client.schemas.value_codec import DocumentCodec
from metamq.errors import ConfigError

_WRAPPERS = ("google.protobuf.Int64Value", "google.protobuf.UInt64Value")
_FREE = ("google.protobuf.Struct", "google.protobuf.Value")
"""Types whose documents have names of their own."""


def protobuf_documents(definition: str) -> DocumentCodec:
    """Returns the codec of a Protobuf schema. Raises ConfigError for a wrong one, and without protobuf."""
    name, files = file_set(definition)
    from google.protobuf import json_format
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    try:
        for file in files.file:
            pool.AddSerializedFile(file.SerializeToString())
        kind: Any = GetMessageClass(pool.FindMessageTypeByName(name))
    except (KeyError, TypeError) as error:
        hint = "Make the file with `protoc --include_imports`, and register it again."
        raise ConfigError(f"the Protobuf schema is wrong: {error}", hint=hint) from None

    def decode(body: bytes) -> Any:
        document = json_format.MessageToDict(
            kind.FromString(body),
            preserving_proto_field_name=True, always_print_fields_with_no_presence=True, descriptor_pool=pool,
        )  # fmt: skip
        return _with_numbers(document, kind.DESCRIPTOR)

    def encode(document: Any) -> bytes:
        if not isinstance(document, dict):
            raise ValueError(f"{document!r:.60} is no object")
        try:
            message = json_format.ParseDict(document, kind(), descriptor_pool=pool)
        except json_format.ParseError as error:
            raise ValueError(str(error)) from None
        encoded: bytes = message.SerializeToString(deterministic=True)
        return encoded

    return DocumentCodec(decode, encode, message_indexes(kind))


def _with_numbers(document: Any, descriptor: Any) -> Any:
    """Returns the document of a message with numbers for 64-bit integers, which Protobuf's mapping writes as text."""
    if descriptor.full_name in _WRAPPERS:
        return int(document)
    if not isinstance(document, dict) or descriptor.full_name in _FREE:
        return document
    for field in descriptor.fields:
        if field.name in document:
            document[field.name] = _field(document[field.name], field)
    return document


def _field(document: Any, field: Any) -> Any:
    if isinstance(document, list):
        return [_field(one, field) for one in document]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = field.message_type.fields_by_name["value"]
        return {name: _field(one, values) for name, one in document.items()}
    if field.message_type is not None:
        return _with_numbers(document, field.message_type)
    return int(document) if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else document
