"""What others have written does not command the terminal of whoever looks at it.

Names of sessions and clients, values of messages and errors of brokers are other people's bytes. On a terminal a
control character in them could hide a line, rename the window, or type. So where a stream is a terminal they are shown
as escapes: \\x1b, \\u202e. What is piped on stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_C1 = "\x80-\x9f"
_COMMANDS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f{_C1}\u2028\u2029{_BIDI}]")
_JSON_COMMANDS = re.compile(f"[\x7f{_C1}\u2028\u2029{_BIDI}]")


def inert(text: str) -> str:
    """The text with its control characters as escapes, but for the ends of lines and tabs."""
    return _COMMANDS.sub(_escape, text)


def inert_bytes(data: bytes) -> bytes:
    """The same of bytes; what is no UTF-8 is escaped as well."""
    return inert(data.decode("utf-8", "backslashreplace")).encode()


def inert_json(document: str) -> str:
    """A JSON document that means the same, without what json.dumps leaves of control characters in its strings."""
    return _JSON_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def shown(text: str, stream: Any) -> str:
    """As it may be written to a stream: inert where a person looks at it."""
    return inert(text) if stream.isatty() else text


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
