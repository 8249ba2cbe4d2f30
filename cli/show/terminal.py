"""Escapes for text from other people: it must not control the terminal.

Names of sessions and clients, values of messages and errors of brokers are other people's bytes. On a terminal a
control character in them could hide a line, rename the window, or type. So a stream that is a terminal shows control
characters as escapes: \\x1b, \\u202e. Output to a pipe or a file is unchanged.
"""

from __future__ import annotations

import re
from typing import Any

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_C1 = "\x80-\x9f"
_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f{_C1}\u2028\u2029{_BIDI}]")
_JSON_CONTROLS = re.compile(f"[\x7f{_C1}\u2028\u2029{_BIDI}]")


def escaped(text: str) -> str:
    """Returns the text with escapes for all control characters except newlines and tabs."""
    return _CONTROLS.sub(_escape, text)


def escaped_bytes(data: bytes) -> bytes:
    """Returns the bytes with escapes for control characters and for bytes that are not UTF-8."""
    return escaped(data.decode("utf-8", "backslashreplace")).encode()


def escaped_json(document: str) -> str:
    """Returns an equal JSON document, with escapes for the control characters that json.dumps leaves in strings."""
    return _JSON_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def shown(text: str, stream: Any) -> str:
    """Returns the text for a stream: with escapes if the stream is a terminal."""
    return escaped(text) if stream.isatty() else text


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
