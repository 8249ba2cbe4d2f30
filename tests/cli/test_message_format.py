"""How a message is written: formats, JSON, raw."""

from __future__ import annotations

import base64
import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.cli.messages.json_records import parse_record
from metamq.cli.show.message_format import as_json, as_raw, compile_format, unescaped
from metamq.client.model import Message, time_of
from metamq.errors import ConfigError

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
        ("%k{hex} %v{hex} %k{base64} %v{base64} {%k}", b"5541 76ff VUE= dv8= {UA}"),
        ("%T{us}", b"1500000"),
        ("ümlaut\n", "ümlaut\n".encode()),
        ("", b""),
    ],
)
def test_formats(template: str, text: bytes) -> None:
    assert compile_format(template)(MESSAGE) == text


def test_no_key() -> None:
    assert compile_format("[%k] %K")(MESSAGE._replace(key=None)) == b"[] -1"


def test_a_printed_local_time_is_a_time_with_its_zone() -> None:
    printed = compile_format("%T{local}")(MESSAGE).decode()
    assert datetime.fromisoformat(printed) == MESSAGE.time
    assert datetime.fromisoformat(printed).tzinfo is not None


@pytest.mark.parametrize("template", ["%q", "x%", "x\\", r"\q", r"\x1", "%v{rot13}", "%o{hex}"])
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


@given(st.binary(), st.none() | st.binary(), st.dictionaries(st.text(), st.binary()), st.integers(0, 1 << 57))
def test_a_printed_message_is_read_back(
    value: bytes, key: bytes | None, headers: dict[str, bytes], timestamp: int
) -> None:
    found = parse_record(1, as_json(MESSAGE._replace(value=value, key=key, headers=headers, timestamp=timestamp)))
    assert found == (value, key, headers or None, "0-3", time_of(timestamp))
    assert list(found.headers or ()) == list(headers)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 7 is not JSON: Expecting property name"),
        (b"[]", "line 7: a record is an object, not []"),
        (b'{"valeu": "x"}', "line 7: unknown field 'valeu' (Did you mean 'value'?)"),
        (b'{"key": "x"}', "line 7: the record has no value"),
        (b'{"value": null}', "line 7: the record has no value"),
        (b'{"value": {"a": 1}}', "line 7: `value` is a text, not {'a': 1}"),
        (b'{"value": "", "value_base64": ""}', "line 7: `value` and `value_base64` are both given"),
        (b'{"value_base64": "?"}', "line 7: `value_base64` is not base64"),
        (b'{"value": "", "value": ""}', "line 7: 'value' is given twice"),
        (b'{"value": "", "headers": {"a": null}}', "line 7: the header 'a' has no value"),
        (b'{"value": "", "headers": ["a"]}', "line 7: `headers` is an object, not ['a']"),
        (b'{"value": "", "partition": 3}', 'line 7: `partition` is a name such as "0-3", not 3'),
        (b'{"value": "", "partition": "3"}', "line 7: partition '3' is not a broker id"),
        (b'{"value": "", "timestamp_us": 1.5}', "line 7: `timestamp_us` is a whole number"),
        (b'{"value": "", "timestamp_us": -1}', "line 7: `timestamp` 1969-12-31"),
        (b'{"value": "", "timestamp_us": 1e999}', "line 7: `timestamp_us` is a whole number"),
        (b'{"value": "", "timestamp_us": 999999999999999999999}', "line 7: "),
        (b"\xff", "line 7: "),
        (b"[" * 100_000, "line 7"),
    ],
)
def test_what_is_no_record_is_named(line: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_record(7, line)
    assert f"{raised.value.problem} ({raised.value.hint})".startswith(words)
    assert raised.value.hint


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_a_text_without_backslashes_stands_for_itself(text: str) -> None:
    assert unescaped(text.replace("\\", "")) == text.replace("\\", "").encode()


def test_escapes() -> None:
    assert unescaped(r"a\t\0\x1e\\") == b"a\t\0\x1e\\"
    for wrong in ("\\", r"\q", r"\x1"):
        with pytest.raises(ValueError, match="is unknown"):
            unescaped(wrong)


def test_raw_is_the_value() -> None:
    assert as_raw(MESSAGE) == b"v\xff"
