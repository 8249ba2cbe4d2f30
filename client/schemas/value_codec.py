"""The form of a codec, and of a document. Imports a codec's library: a Topic does so when it is made, so metamq needs
none."""

from __future__ import annotations

import base64
import importlib
import math
from collections.abc import Callable
from datetime import date, time, timedelta
from typing import Any, NamedTuple

from metamq.errors import ConfigError

_INFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class ValueCodec(NamedTuple):
    """The encoding of one type. `encode` and `decode` are called for each message."""

    format: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    definition: Callable[[], str]
    learn: Callable[[dict[int, str]], None] | None = None
    """Takes the registered definitions by version, if the messages name their version."""
    indexes: bytes = b""
    """The bytes after the version in a framed message: the message type of Protobuf."""


class DocumentCodec(NamedTuple):
    """The encoding of values without their framing, from and to JSON documents."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    indexes: bytes = b""
    """As in ValueCodec."""


def wrong_field(path: str, problem: str) -> ValueError:
    """Returns the error for a part of a document that does not fit the schema."""
    return ValueError(f"field {path or '(the whole value)'!r}: {problem}")


def library(name: str, extra: str) -> Any:
    """Imports a library. Raises ConfigError, with the pip extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        hint = f"Install it with: pip install 'metamq[{extra}]'"
        raise ConfigError(f"this type of values needs {name}", hint=hint) from None


def plain(value: Any) -> Any:
    """Returns a decoded value with the types of JSON only."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _INFINITE[str(value)]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, date | time) else str(value)
