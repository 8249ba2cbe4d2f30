"""JSON of znodes: whatever stands there, CorruptData is all that comes out."""

from __future__ import annotations

import ast
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import ConfigError, CorruptData
from metamq.spark_consumers.sink.decisions import Decision, SinkState
from metamq.zk.cluster import registrations, topics
from metamq.zk.cluster.offers import offered_partitions
from metamq.zk.documents import DEPTH_MAX, DOCUMENT_BYTES_MAX, NUMBER_MAX, broker_numbers, number, parse, read_document
from metamq.zk.groups import members, ownership, plans
from metamq.zk.nodes import Node
from metamq.zk.partitions import TopicPartition
from tests.examples import examples

ROOT = Path(__file__).parent.parent.parent

POISON = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "not UTF-8": b"\xff\xfe{}",
    "empty": b"",
    "no JSON": b"{]",
    "a list": b"[1, 2]",
    "null": b"null",
    "a long number": b"1" * 100_000,
    "wrong types": json.dumps(
        {name: [{}] for name in ("format", "id", "partitions", "epoch", "master", "insync", "generation", "topics")}
    ).encode(),
    "not a number": b'{"generation": NaN, "epoch": Infinity}',
    "large": b'{"a": "' + b"x" * 900_000 + b'"}',
}


READERS: dict[str, Callable[[bytes], object]] = {
    "topic": lambda data: topics.from_json("t", data),
    "plan": lambda data: plans.from_bytes("g", data),
    "packed plan": lambda data: plans.from_bytes("g", b"metamq-plan-2\n" + zlib.compress(data)),
    "offset": lambda data: ownership._from_json("g", TopicPartition("t", "0-0"), data),
    "offer": offered_partitions,
    "decision": Decision.from_json,
    "sink": SinkState.from_json,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("poison", POISON)
def test_poison_is_corrupt_data(reader: str, poison: str) -> None:
    with pytest.raises((CorruptData, ConfigError)) as caught:
        READERS[reader](POISON[poison])
    assert len(str(caught.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
FIELDS = [
    "format", "id", "partitions", "flush", "retention_ms", "retention_bytes", "cleanup", "segment_bytes",
    "max_message_bytes", "min_insync", "replication", "inputs", "members", "assignment", "generation", "strategy",
    "topics", "next", "epoch", "topic_id", "consumer", "kept_by", "content", "places", "winners", "query", "floor",
    "runs", "members", "subscriptions", "owners",
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=len(FIELDS)), st.sampled_from(sorted(READERS)))
def test_any_document_is_read_or_refused(document: dict[str, Any], reader: str) -> None:
    if reader == "topic":
        document.setdefault("format", topics.FORMAT)
    try:
        READERS[reader](json.dumps(document).encode())
    except (CorruptData, ConfigError):
        return


def test_depth_and_size_are_bounded_before_anything_is_parsed() -> None:
    whole = b'{"a":' * DEPTH_MAX + b"1" + b"}" * DEPTH_MAX
    assert parse(whole)
    with pytest.raises(ValueError, match="nested deeper than 16"):
        parse(b'{"a":' + b"[" * DEPTH_MAX + b"1" + b"]" * DEPTH_MAX + b"}")
    with pytest.raises(ValueError, match="it has 1,048,577 bytes, the limit is 1,048,576"):
        parse(b" " * (DOCUMENT_BYTES_MAX + 1))
    brackets = json.dumps({"a": "[" * 1000 + '\\"[{' + "}" * 100}).encode()
    assert parse(brackets)["a"].startswith("[["), "brackets in texts are texts"
    with pytest.raises(CorruptData, match=r"the node is damaged: ValueError: True is not a whole number from 0 to"):
        read_document("the node", b'{"a": true}', lambda document: number(document["a"]))
    assert number(NUMBER_MAX) == NUMBER_MAX
    assert broker_numbers(["3", "1", "x", "9" * 5000, "²", "01", "-1"]) == [1, 3]


READS_FILES = {
    "broker/data/data_folder.py",
    "broker/data/folder_report.py",
    "broker/data/restore.py",
    "broker/data/topic_settings.py",
    "broker/workers/worker.py",
    "cli/up_console.py",
    "cli/up_replicas.py",
    "cli/demo/spark.py",
    "cli/demo/worker.py",
    "cli/log_reader.py",
    "cli/messages/filters.py",
    "cli/messages/json_records.py",
    "cli/support/log_files.py",
    "cli/support/machine_parts.py",
    "client/offsets/offsets_file.py",
    "client/schemas/documents.py",
    "spark_consumers/data_source.py",
    "spark_consumers/driver/lag.py",
    "spark_consumers/sink/checkpoint.py",
    "spark_consumers/source/boundaries.py",
    "zk/cluster/cluster_nodes.py",
}
"""Modules that read JSON of files, messages, Spark, or a child's output. An export of a cluster is such a file."""


@pytest.mark.slow
def test_no_other_module_parses_json() -> None:
    found = set()
    for folder in ("broker", "cli", "client", "metamq", "spark_consumers", "tx", "wire", "zk"):
        for path in (ROOT / folder).rglob("*.py"):
            for part in ast.walk(ast.parse(path.read_text())):
                is_load = isinstance(part, ast.Attribute) and part.attr in ("load", "loads", "JSONDecoder")
                if is_load and ast.unparse(part) in ("json.load", "json.loads", "json.JSONDecoder"):
                    found.add(str(path.relative_to(ROOT)))
    assert found - READS_FILES == {"zk/documents.py"}, "what stands in znodes is read by metamq.zk.documents"


def test_an_offset_that_was_set_without_an_epoch_is_read() -> None:
    record = ownership.OffsetRecord(3, "c", ownership.CommittedOffset(7, -1, "t1"))
    assert ownership._from_json("g", TopicPartition("t", "0-0"), ownership._to_json(record)) == record


@pytest.mark.parametrize("poison", POISON)
def test_nodes_of_members_and_replicas(poison: str) -> None:
    there = Node(0, 1, 1, 0, 0, 0, 0, POISON[poison])
    with pytest.raises(CorruptData, match="the node of member 'c' of group 'g' in ZooKeeper"):
        members._from_node("g", "c", there)
    with pytest.raises(CorruptData, match="the slave node of broker 3 in ZooKeeper"):
        registrations.address_of(3, there, "slave")
