"""How a message is written: formats, JSON, raw."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.cli.show.message_format import as_json, as_raw, compile_format
from metamq.client.model import Message

MESSAGE = Message("flights", "0-3", 7, b"UA", b"v\xff", {"a": b"1", "b": b"2"}, 1_500_000)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"%v\n", b"v\xff\n"),
        ("%s", b"v\xff"),
        (r"%t/%p@%o %k=%v\t%h", b"flights/0-3@7 UA=v\xff\ta=1,b=2"),
        ("%T", b"1970-01-01T00:00:01.500000+00:00"),
        ("%K %S %%", b"2 2 %"),
        (r"\x00\0\\n", b"\0\0\\n"),
        ("ümlaut\n", "ümlaut\n".encode()),
        ("", b""),
    ],
)
def test_formats(template: str, text: bytes) -> None:
    assert compile_format(template)(MESSAGE) == text


def test_no_key() -> None:
    assert compile_format("[%k] %K")(MESSAGE._replace(key=None)) == b"[] -1"


@pytest.mark.parametrize("template", ["%q", "x%", "x\\", r"\q", r"\x1"])
def test_no_formats(template: str) -> None:
    with pytest.raises(ValueError, match="%t topic"):
        compile_format(template)


@given(st.text(alphabet=st.characters(exclude_characters="%\\", exclude_categories=["Cs"])))
def test_plain_text_stands_for_itself(text: str) -> None:
    assert compile_format(text)(MESSAGE) == text.encode()


@given(st.binary(), st.none() | st.binary(), st.dictionaries(st.text(), st.binary(), max_size=3))
def test_json_tells_every_byte(value: bytes, key: bytes | None, headers: dict[str, bytes]) -> None:
    line = as_json(MESSAGE._replace(value=value, key=key, headers=headers))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    found = json.loads(line)

    def read(document: dict[str, str | None], name: str, encoded: str | None) -> bytes | None:
        text = document[name]
        return base64.b64decode(encoded) if encoded is not None else None if text is None else text.encode()

    assert read(found, "value", found.get("value_base64")) == value
    assert read(found, "key", found.get("key_base64")) == key
    odd = found.get("headers_base64", {})
    assert {name: read(found["headers"], name, odd.get(name)) for name in found["headers"]} == headers
    assert (found["topic"], found["partition"], found["offset"], found["timestamp_us"]) == (
        "flights",
        "0-3",
        7,
        1_500_000,
    )


def test_raw_is_the_value() -> None:
    assert as_raw(MESSAGE) == b"v\xff"
