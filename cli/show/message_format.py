"""Output formats of `metamq consume`: %-letters as in kcat, JSON, or the bare bytes of the value."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from metamq.cli.show.terminal import escaped_bytes, escaped_json
from metamq.client.model import Message


class DecodedMessage(Message[bytes]):
    """A message of a typed topic, for people: `value` is its document as JSON text, or the raw value if it has none."""

    raw: bytes
    """The value as it is stored."""
    document: Any
    problem: str
    """The reason why the value does not decode; empty if it does."""

    @classmethod
    def of(cls, message: Message[bytes], document: Any, problem: str = "") -> DecodedMessage:
        """Returns a message with its document, or with the problem."""
        value = message.value if problem else json_text(document).encode()
        found = cls(*message[:4], value, *message[5:])
        found.raw, found.document, found.problem = message.value, document, problem
        return found


Render = Callable[[Message[bytes]], bytes]

_TOKEN = re.compile(r"%(.(?:\{\w+\})?)|\\(x[0-9a-fA-F]{2}|.)|([^%\\]+)|(.)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def raw_value(message: Message[bytes]) -> bytes:
    """Returns the value as it is stored."""
    return message.raw if isinstance(message, DecodedMessage) else message.value


def json_text(document: Any) -> str:
    """Returns the document on one line, without characters that control a terminal or that UTF-8 lacks."""
    text = escaped_json(json.dumps(document, ensure_ascii=False))
    return text.encode("utf-8", "backslashreplace").decode()  # half of a pair becomes its escape in JSON


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
    "S": lambda message: b"%d" % len(raw_value(message)),
    "T": lambda message: message.time.isoformat().encode(),
    "h": _headers,
    "%": lambda message: b"%",
    "T{us}": lambda message: b"%d" % message.timestamp,
    "T{local}": lambda message: message.time.astimezone().isoformat().encode(),
    "k{hex}": lambda message: (message.key or b"").hex().encode(),
    "k{base64}": lambda message: base64.b64encode(message.key or b""),
    "v{hex}": lambda message: raw_value(message).hex().encode(),
    "v{base64}": lambda message: base64.b64encode(raw_value(message)),
}


def _with_escapes(render: Render) -> Render:
    return lambda message: escaped_bytes(render(message))


_ON_TERMINALS = {**_LETTERS, **{letter: _with_escapes(_LETTERS[letter]) for letter in "tpkvsh"}}
"""The letters with escapes for a producer's bytes: only the format itself may control the terminal."""

LETTERS = (
    "%t topic, %p partition, %o offset, %k key, %v value, %h headers, %K and %S the lengths of key and value (-1: no "
    "key), %T time in UTC, %T{local} local time, %T{us} microseconds since 1970, %k{hex}, %k{base64}, %v{hex} and "
    "%v{base64} encoded bytes, %% a percent sign; \\n, \\t, \\r, \\0, \\\\ and \\xHH as in C"
)


def compile_format(text: str) -> Render:
    """Returns the function that writes a message in this format. Raises ValueError for an unknown letter."""
    pieces: list[Render] = []
    letters = _ON_TERMINALS if sys.stdout.isatty() else _LETTERS
    for letter, escape, plain, dangling in _TOKEN.findall(text):
        if letter and letter not in _LETTERS:
            raise ValueError(f"%{letter} is unknown in a format: {LETTERS}")
        if escape and escape not in _ESCAPES and len(escape) != len("xHH"):
            raise ValueError(f"\\{escape} is unknown in a format: {LETTERS}")
        if dangling:
            raise ValueError(f"the format {text!r} ends in {dangling!r}: {LETTERS}")
        pieces.append(letters[letter] if letter else _constant(plain.encode() if plain else _unescape(escape)))
    return lambda message: b"".join([piece(message) for piece in pieces])


def _constant(text: bytes) -> Render:
    return lambda message: text


def _unescape(escape: str) -> bytes:
    return _ESCAPES[escape] if escape in _ESCAPES else bytes([int(escape[1:], 16)])


def unescaped(text: str) -> bytes:
    """Returns the bytes of a text with escapes as in C, such as a tab for "\\t". Raises ValueError."""
    pieces = re.split(r"\\(x[0-9a-fA-F]{2}|.|$)", text, flags=re.DOTALL)
    for escape in pieces[1::2]:
        if escape not in _ESCAPES and len(escape) != len("xHH"):
            raise ValueError(f"\\{escape} is unknown: write \\n, \\t, \\r, \\0, \\\\ or \\xHH")
    return b"".join(_unescape(piece) if at % 2 else os.fsencode(piece) for at, piece in enumerate(pieces))


def as_json(message: Message[bytes]) -> bytes:
    """Returns one line with the message's document."""
    return json_text(document_of(message)).encode() + b"\n"


def document_of(message: Message[bytes]) -> dict[str, Any]:
    """Returns topic, partition, offset, timestamp_us, key, value, headers.

    A field that is not UTF-8 is null, and is base64-encoded under "key_base64", "value_base64", "headers_base64".
    A decoded message has its document as "decoded", or the reason as "decode_error".
    """
    document: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp_us": message.timestamp,
    }
    _put(document, "key", message.key)
    _put(document, "value", raw_value(message))
    if isinstance(message, DecodedMessage):
        document |= {"decode_error": message.problem} if message.problem else {"decoded": message.document}
    headers: dict[str, Any] = {}
    odd: dict[str, str] = {}
    for name, value in message.headers.items():
        headers[name] = _text(value)
        if headers[name] is None:
            odd[name] = base64.b64encode(value).decode()
    document["headers"] = headers
    if odd:
        document["headers_base64"] = odd
    return document


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
    """Returns only the value; with escapes on a terminal."""
    return escaped_bytes(message.value) if sys.stdout.isatty() else message.value
