"""The form of a codec, and the import of its library: a Topic imports it when it is made, so metamq needs none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from metamq.errors import ConfigError


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


def library(name: str, extra: str) -> Any:
    """Imports a library. Raises ConfigError, with the pip extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        hint = f"Install it with: pip install 'metamq[{extra}]'"
        raise ConfigError(f"this type of values needs {name}", hint=hint) from None
