"""How `metamq consume` writes a message: a format of %-letters as in kcat, JSON, or the bare bytes of the value."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from metamq.cli.show.terminal import inert_bytes, inert_json
from metamq.client.model import Message

Render = Callable[[Message[bytes]], bytes]

_TOKEN = re.compile(r"%(.)|\\(x[0-9a-fA-F]{2}|.)|([^%\\]+)|(.)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _headers(message: Message[bytes]) -> bytes:
    return b",".join(name.encode() + b"=" + value for name, value in message.headers.items())


_LETTERS: dict[str, Render] = {
    "t": lambda message: message.topic.encode(),
    "p": lambda message: message.partition.encode(),
    "o": lambda message: b"%d" % message.offset,
    "k": lambda message: message.key or b"",
    "K": lambda message: b"%d" % (-1 if message.key is None else len(message.key)),
    "v": lambda message: message.value,
    "s": lambda message: message.value,
    "S": lambda message: b"%d" % len(message.value),
    "T": lambda message: message.time.isoformat().encode(),
    "h": _headers,
    "%": lambda message: b"%",
}


def _shown(render: Render) -> Render:
    return lambda message: inert_bytes(render(message))


_ON_TERMINALS = {**_LETTERS, **{letter: _shown(_LETTERS[letter]) for letter in "tpkvsh"}}
"""What a producer has written does not command the terminal; what the format says does."""

LETTERS = (
    "%t topic, %p partition, %o offset, %k key, %v value, %T time, %h headers, %K and %S the lengths of key and value "
    "(-1: no key), %% a percent sign; \\n, \\t, \\r, \\0, \\\\ and \\xHH as in C"
)


def compile_format(text: str) -> Render:
    """The function that writes a message in this format. Raises ValueError for a letter that means nothing."""
    pieces: list[Render] = []
    letters = _ON_TERMINALS if sys.stdout.isatty() else _LETTERS
    for letter, escape, plain, dangling in _TOKEN.findall(text):
        if letter and letter not in _LETTERS:
            raise ValueError(f"%{letter} means nothing in a format: {LETTERS}")
        if escape and escape not in _ESCAPES and len(escape) != len("xHH"):
            raise ValueError(f"\\{escape} means nothing in a format: {LETTERS}")
        if dangling:
            raise ValueError(f"the format {text!r} ends in {dangling!r}: {LETTERS}")
        pieces.append(letters[letter] if letter else _constant(plain.encode() if plain else _unescape(escape)))
    return lambda message: b"".join([piece(message) for piece in pieces])


def _constant(text: bytes) -> Render:
    return lambda message: text


def _unescape(escape: str) -> bytes:
    return _ESCAPES[escape] if escape in _ESCAPES else bytes([int(escape[1:], 16)])


def as_json(message: Message[bytes]) -> bytes:
    """One line: topic, partition, offset, timestamp_us, key, value, headers.

    What is no UTF-8 is null, and stands base64-encoded under "key_base64", "value_base64", "headers_base64".
    """
    document: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp_us": message.timestamp,
    }
    _put(document, "key", message.key)
    _put(document, "value", message.value)
    headers: dict[str, Any] = {}
    odd: dict[str, str] = {}
    for name, value in message.headers.items():
        headers[name] = _text(value)
        if headers[name] is None:
            odd[name] = base64.b64encode(value).decode()
    document["headers"] = headers
    if odd:
        document["headers_base64"] = odd
    return inert_json(json.dumps(document, ensure_ascii=False)).encode() + b"\n"


def _put(document: dict[str, Any], name: str, value: bytes | None) -> None:
    document[name] = None if value is None else _text(value)
    if value is not None and document[name] is None:
        document[f"{name}_base64"] = base64.b64encode(value).decode()


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def as_raw(message: Message[bytes]) -> bytes:
    """The value, and nothing else; inert on a terminal."""
    return inert_bytes(message.value) if sys.stdout.isatty() else message.value
