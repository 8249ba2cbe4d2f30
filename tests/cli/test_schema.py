"""`metamq topic schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.wrappers_pb2 import StringValue

from tests.cli.conftest import Metamq

TRIP = {"type": "record", "name": "Trip", "fields": [{"name": "number", "type": "int"}]}


@pytest.fixture
def topic(metamq: Metamq, request: pytest.FixtureRequest) -> str:
    name = f"{request.node.name}-topic"
    assert metamq("topic", "create", name, "-p", 1).status == 0
    return name


def test_register_list_show_check(metamq: Metamq, topic: str, tmp_path: Path) -> None:
    file, wrong = tmp_path / "trip.avsc", tmp_path / "wrong.avsc"
    file.write_text(json.dumps(TRIP, indent=4))
    wrong.write_text(json.dumps({**TRIP, "fields": [{"name": "number", "type": "string"}]}))
    assert metamq("topic", "schema", "check", topic, file).talk == f"Topic {topic} accepts the schema.\n"
    assert metamq("topic", "schema", "show", topic).status == 1
    registered = metamq("topic", "schema", "register", topic, file)
    assert registered.talk == f"It is version 1 of the schema of topic {topic}.\n"
    file.write_text(json.dumps(TRIP))
    assert metamq("topic", "schema", "register", topic, file, "-o", "json").json == {"topic": topic, "version": 1}
    assert metamq("topic", "schema", "check", topic, file, "-o", "json").json["compatible"] is True
    for command in ("check", "register"):
        refused = metamq("topic", "schema", command, topic, wrong)
        assert refused.status == 1
        assert "field 'number' is int in version 1 and text in the new schema" in refused.talk.replace("\n", " ")
        assert "Give the field a default or a wider type" in refused.talk
    assert json.loads(metamq("topic", "schema", "show", topic, "--version", 1).data) == TRIP
    shown = metamq("topic", "schema", "show", topic, "-o", "json").json
    assert (shown["version"], shown["format"], json.loads(shown["definition"])) == (1, "avro", TRIP)
    assert "does not have" in metamq("topic", "schema", "show", topic, "--version", 2).talk
    listed = metamq("topic", "schema", "list", topic, "-o", "json").json
    assert (listed["compatibility"], len(listed["versions"])) == ("backward", 1)
    assert "avro" in metamq("topic", "schema", "list", topic).text
    assert metamq("topic", "schema", "register", topic, wrong, "--compatibility", "none").status == 0
    assert metamq("topic", "schema", "list", topic, "-o", "json").json["compatibility"] == "none"


def test_a_json_schema_and_a_protobuf_descriptor(metamq: Metamq, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "wrappers.desc"
    files = FileDescriptorSet()
    StringValue.DESCRIPTOR.file.CopyToProto(files.file.add())
    file.write_bytes(files.SerializeToString())
    missing = metamq("topic", "schema", "register", topic, file, "--message", "google.protobuf.Odd")
    assert "has no type 'google.protobuf.Odd'" in missing.talk
    name = "google.protobuf.StringValue"
    assert metamq("topic", "schema", "register", topic, file, "--message", name).status == 0
    plain = tmp_path / "order.json"
    plain.write_text('{"type": "object", "properties": {"number": {"type": "integer"}}}')
    assert "has messages in protobuf" in metamq("topic", "schema", "check", topic, plain).talk
    plain.write_bytes(b"\xff")
    assert "is not UTF-8" in metamq("topic", "schema", "check", topic, plain).talk
    schema = pa.schema([("number", pa.int64())])
    plain.write_bytes(schema.serialize())
    assert "has messages in protobuf" in metamq("topic", "schema", "check", topic, plain, "--format", "arrow").talk
    plain.write_bytes(b" " * 300_000)
    assert "more than 262,144 bytes" in metamq("topic", "schema", "check", topic, plain).talk
