"""The filters of messages: `--key`, `--header`, `--where`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metamq.cli.messages.filters import all_of, parse_condition, parse_header, parse_key
from metamq.client.model import Message

MESSAGE = Message("flights", "0-3", 7, b"UA-17", b"", {"source": b"radar", "odd": b"\xff"}, 0)
VALUE: Any = {"id": 7, "customer": {"name": "Ada", "tags": ["a", "b"]}, "amount": 10.5, "paid": True, "note": None}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (".id == 7", True),
        ("id==7", True),
        (".id == 7.0", True),
        (".id == 8", False),
        ('.id == "7"', False),
        (".id != 8", True),
        (".customer.name == Ada", True),
        ('.customer.name == "Ada"', True),
        (".customer.name != Ada", False),
        (".customer.name ~ d", True),
        (".customer.name ~ x", False),
        (".customer.name < B", True),
        (".customer.name < 7", False),
        (".customer.tags[1] == b", True),
        (".customer.tags[2] == b", False),
        ('.customer.tags == ["a", "b"]', True),
        (".amount > 10", True),
        (".amount >= 10.5", True),
        (".amount <= 10", False),
        (".paid == true", True),
        (".paid == 1", False),
        (".paid > 0", False),
        (".note == null", True),
        (".missing == null", False),
        (".missing != 7", False),
        (".id.deeper == 7", False),
        (".id[0] == 7", False),
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    assert parse_condition(condition)(MESSAGE._replace(value=json.dumps(VALUE).encode())) is holds


def test_a_list_is_a_value_too() -> None:
    assert parse_condition("[0].a == 1")(MESSAGE._replace(value=b'[{"a": 1}]'))


@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_value_that_is_not_json_does_not_match(value: bytes) -> None:
    assert not parse_condition(".id != 7")(MESSAGE._replace(value=value))


@pytest.mark.parametrize(
    "text", ["", ".id", "== 7", ".id ==", ".id = 7", "[x] == 7", ".id > true", ". == 7", ".a..b == 1"]
)
def test_what_is_no_condition_is_explained(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_condition(text)


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("UA*", b"UA-17", True),
        ("ua*", b"UA-17", False),
        ("UA-??", b"UA-17", True),
        ("*17", b"UA-17", True),
        ("UA", b"UA-17", False),
        ("*", None, False),
        ("", b"", True),
        ("\udcff*", b"\xff\n\x00", True),
        ("[éa]lan", "élan".encode(), True),
        ("[é]", b"\xc3", False),
        ("?", "é".encode(), True),
    ],
)
def test_keys(pattern: str, key: bytes | None, matches: bool) -> None:
    assert parse_key(pattern)(MESSAGE._replace(key=key)) is matches


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("source=radar", True), ("source=r*", True), ("source=R*", False), ("source", True), ("other", False)],
)
def test_headers(pattern: str, matches: bool) -> None:
    assert parse_header(pattern)(MESSAGE) is matches


def test_all_filters_must_match() -> None:
    assert all_of(None, (), ()) is None
    both = all_of(parse_key("UA*"), (parse_header("source=radar"),), ())
    assert both is not None
    assert both(MESSAGE)
    assert not both(MESSAGE._replace(headers={}))
