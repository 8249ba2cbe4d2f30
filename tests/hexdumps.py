"""The worked examples in bytes of docs/: hexdump blocks, each with a name."""

from __future__ import annotations

import re

LINE = re.compile(r" *(\d+)  ((?:[0-9a-f]{2} ?)+)(?: +\S.*)?")


def bytes_of(text: str, name: str) -> bytes:
    """The bytes of an example in a document's text; each line must begin where the one before ends."""
    block = re.search(rf"^```hexdump {name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    data = b""
    for line in block[1].splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert int(match[1]) == len(data), line
        data += bytes.fromhex(match[2])
    return data
