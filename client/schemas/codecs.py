"""The codec of a class: pydantic's, Protobuf's or msgspec's."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from metamq.client.checks import wrong_type
from metamq.client.schemas.json_shape import json_shape
from metamq.client.schemas.protobuf import protobuf_codec
from metamq.client.schemas.shapes import mismatches
from metamq.client.schemas.value_codec import ValueCodec, library
from metamq.errors import ConfigError


def codec_of(kind: Any) -> ValueCodec:
    """Returns the codec of a class. Raises ConfigError."""
    if not isinstance(kind, type):
        raise wrong_type("`kind`", "a class", kind)
    if kind in (bytes, str, object):
        problem = f"{kind.__name__} is no type of a typed topic"
        raise ConfigError(problem, hint="Give a class with fields; for bytes, use the topic's name.")
    if hasattr(kind, "__pydantic_validator__"):
        return _pydantic_codec(kind)
    if hasattr(kind, "DESCRIPTOR") and hasattr(kind, "SerializeToString"):
        return protobuf_codec(kind)
    return _msgspec_codec(kind)


def _pydantic_codec(kind: Any) -> ValueCodec:
    adapter = library("pydantic", "pydantic").TypeAdapter(kind)
    _check_that_it_reads_its_own(kind, adapter)
    encode = partial(adapter.serializer.to_json, by_alias=True)  # pydantic-core's own: no Python code for each message
    return ValueCodec("json", encode, adapter.validator.validate_json, lambda: _text(adapter.json_schema()))


def _check_that_it_reads_its_own(kind: Any, adapter: Any) -> None:
    """Raises ConfigError for a model that writes other JSON than it reads, as with different aliases."""
    try:
        written, read = adapter.json_schema(mode="serialization"), adapter.json_schema(mode="validation")
    except Exception:  # pydantic's errors for a part without a schema, as a plain validator; it cannot be registered
        return
    if '"writeOnly": true' in json.dumps(read):
        hint = "Send the secret as str, or leave the field out of the model of messages."
        raise ConfigError(f"{kind.__qualname__} has a secret, which pydantic writes as asterisks", hint=hint)
    try:
        wrong = next(mismatches(json_shape(written), json_shape(read)), None)
    except ConfigError:  # a schema without a shape can still be sent; it cannot be registered
        return
    if wrong is not None:
        problem = (
            f"{kind.__qualname__} cannot read what it writes: field {wrong.path!r} is {wrong.written}, {wrong.reason}"
        )
        raise ConfigError(problem, hint="Give the field one alias for both directions, and the same type.")


def _msgspec_codec(kind: Any) -> ValueCodec:
    msgspec = library("msgspec", "msgspec")
    try:
        decoder, definition = msgspec.json.Decoder(kind), _text(msgspec.json.schema(kind))
    except TypeError as error:
        hint = "Use a dataclass, a msgspec.Struct or a pydantic model with typed fields."
        raise ConfigError(f"{kind.__qualname__} has no encoding: {error}", hint=hint) from None
    return ValueCodec("json", msgspec.json.Encoder().encode, decoder.decode, lambda: definition)


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True)
