"""`consume --decode schema`, `topic tail --decode schema`, `produce --encode schema`: typed values as JSON."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from metamq import Topic
from tests.cli.conftest import Metamq
from tests.client.test_documents import DOCUMENT, ORDER, TRIP


@pytest.fixture
def trips(metamq: Metamq, topic: str, tmp_path: Path) -> str:
    file = tmp_path / "trip.avsc"
    file.write_text(json.dumps(TRIP))
    assert metamq("topic", "schema", "register", topic, file).status == 0
    return topic


def documents(metamq: Metamq, topic: str, *options: object) -> list[Any]:
    lines = metamq("consume", topic, "-e", "-o", "json", "--decode", "schema", *options).text.splitlines()
    return [json.loads(line) for line in lines]


def test_avro_comes_back_as_it_was_given(metamq: Metamq, trips: str) -> None:
    sent = metamq("produce", trips, "-K", "|", "--encode", "schema", stdin=b"k|" + json.dumps(DOCUMENT).encode())
    assert sent.status == 0, sent.talk
    (found,) = documents(metamq, trips)
    assert (found["key"], found["decoded"]) == ("k", DOCUMENT)
    raw = base64.b64decode(found["value_base64"])
    assert raw[:5] == b"\0\0\0\0\1"
    own = Topic.avro(trips, json.dumps(TRIP))
    own.learn({1: json.dumps(TRIP)})
    assert own.decode(raw)["stops"] == [None, "Bergen", {"at": 7}]


def test_the_output_replays_byte_for_byte_and_encodes_again(metamq: Metamq, trips: str) -> None:
    metamq("produce", trips, "--encode", "schema", json.dumps(DOCUMENT))
    metamq("produce", trips, "no avro")
    output = metamq("consume", trips, "-e", "-o", "json", "--decode", "schema").data
    assert metamq("produce", trips, "--json", stdin=output).status == 0
    first, odd = output.splitlines()
    assert "decoded" not in json.loads(odd)
    assert json.loads(odd)["decode_error"] == "it does not begin with a zero byte and the id of a schema"
    again = metamq("produce", trips, "--json", "--encode", "schema", stdin=first)
    assert again.status == 0, again.talk
    values = [one.get("value_base64", one["value"]) for one in documents(metamq, trips)]
    assert values == [values[0], "no avro", values[0], "no avro", values[0]]
    refused = metamq("produce", trips, "--json", "--encode", "schema", stdin=odd)
    assert (refused.status, "line 1: the record has no `decoded`" in refused.talk) == (1, True)


def test_filters_see_the_decoded_value(metamq: Metamq, trips: str) -> None:
    lines = [json.dumps({**DOCUMENT, "number": number, "place": "Oslo"}) for number in range(4)]
    assert metamq("produce", trips, "--encode", "schema", stdin="\n\n".join(lines).encode()).status == 0
    metamq("produce", trips, "odd\x1b")
    options = ["--where", ".number >= 2", "--count", 2, "--width", 999]
    lines = metamq("topic", "tail", trips, "--decode", "schema", *options).text.splitlines()
    assert [json.loads(line.split(" ", 4)[4])["number"] for line in lines] == [2, 3]
    found = metamq("consume", trips, "-e", "--decode", "schema", "--where", ".place == Oslo", "--format", r"%o %S\n")
    assert found.text.split("\n")[:2] == ["0 54", "1 54"]
    assert metamq("consume", trips, "-e", "--where", ".place == Oslo").text == ""


def test_what_does_not_decode_is_shown_with_the_reason(metamq: Metamq, trips: str) -> None:
    metamq("produce", trips, "odd\x1b")
    metamq("produce", trips, "--encode", "schema", json.dumps(DOCUMENT))
    why = "it does not begin with a zero byte and the id of a schema"
    shown = metamq("consume", trips, "-e", "--decode", "schema")
    odd, decoded = shown.data.splitlines()
    assert (shown.status, odd, json.loads(decoded)) == (0, b"odd\x1b", DOCUMENT)
    assert "Oslo\\u202e" in decoded.decode()
    assert shown.talk == f"{trips} 0-0@0 is not decoded: {why}\n"
    line, _ = metamq("topic", "tail", trips, "--decode", "schema", "--count", 2).text.splitlines()
    assert line.endswith(rf"0-0@0 - odd\x1b (not decoded: {why})")


@pytest.mark.slow
def test_a_schema_that_is_registered_later(process: Any, metamq: Metamq, trips: str, tmp_path: Path) -> None:
    metamq("produce", trips, "--encode", "schema", json.dumps(DOCUMENT))
    child = process("topic", "tail", trips, "-o", "json", "--decode", "schema", "--count", 2)
    assert json.loads(child.stdout.readline())["decoded"] == DOCUMENT
    newer = {**TRIP, "fields": [*TRIP["fields"], {"name": "note", "type": "string", "default": "-"}]}
    (tmp_path / "newer.avsc").write_text(json.dumps(newer))
    metamq("topic", "schema", "register", trips, tmp_path / "newer.avsc")
    metamq("produce", trips, "--encode", "schema", json.dumps(DOCUMENT))
    assert json.loads(child.stdout.readline())["decoded"] == {**DOCUMENT, "note": "-"}
    assert child.wait(60) == 0
    metamq("produce", trips, "--encode", "schema", "--schema-version", 1, json.dumps(DOCUMENT))
    assert [one["decoded"].get("note") for one in documents(metamq, trips)] == [None, "-", None]


def test_a_wrong_line_ends_the_command_after_those_before(metamq: Metamq, topic: str, tmp_path: Path) -> None:
    assert "has no registered schema" in metamq("consume", topic, "-e", "--decode", "schema").talk
    assert "has no registered schema" in metamq("produce", topic, "--encode", "schema", "{}").talk
    (tmp_path / "order.json").write_text(json.dumps(ORDER))
    metamq("topic", "schema", "register", topic, tmp_path / "order.json")
    lines = b'{"number": 1.0}\n\n{"number": 2}\n{"number": "x"}\n{"number": 4}\n'
    sent = metamq("produce", topic, "--encode", "schema", "--framing", "confluent", "--key", "k", stdin=lines)
    assert sent.status == 1
    assert "2 messages of the input stored, then:" in sent.talk
    assert "line 4: field 'number': 'x' is not of type 'integer'" in sent.talk
    shown = metamq("consume", topic, "-e", "--format", r"%k %v{hex} %v\n", "--decode", "schema").text.splitlines()
    texts = '{"number": 1.0}', '{"number": 2}'
    assert shown == [f"k 0000000001{text.encode().hex()} {text}" for text in texts]
    assert "line 1 is not JSON" in metamq("produce", topic, "--encode", "schema", "{").talk


def test_options_that_do_not_fit(metamq: Metamq, topic: str) -> None:
    assert metamq("consume", topic, "--decode", "schema", "-o", "raw").status == 2
    assert metamq("produce", topic, "--framing", "confluent", "x").status == 2


def test_one_of_the_topics_has_no_schema(metamq: Metamq, trips: str) -> None:
    plain = f"{trips}-plain"
    metamq("topic", "create", plain, "-p", 1)
    metamq("produce", plain, "text")
    metamq("produce", trips, "--encode", "schema", json.dumps(DOCUMENT))
    found = {one["topic"]: one for one in documents(metamq, f"{trips}*")}
    assert found[trips]["decoded"] == DOCUMENT
    assert found[plain]["value"] == "text"
    assert found[plain]["decode_error"] == f"topic {plain!r} has no registered schema"
