"""From rows to batches: each row once, in its partition, in its order, with all that it had."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from metamq.client.producer.batching import Batcher, TargetBatch
from metamq.client.producer.packed_headers import packed_headers
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import ConfigError, MessageTooLarge, PartitionNotFound
from metamq.wire import batch as layout
from metamq.wire import columns
from metamq.wire.columns import unpack_header_pairs, unpack_headers
from metamq.zk.cluster.topics import TopicConfig

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
LENGTHS = [0, 1, 31, 32, 255, 256, 65_535, 65_536]
Message = tuple[bytes, bytes | None, dict[str, bytes]]


def topics(*names: str, **settings: Any) -> dict[str, TopicConfig]:
    return {name: TopicConfig(name, {0: 2, 3: 1}, **settings) for name in names}


def decoded(batch: TargetBatch) -> list[Message]:
    encoded = batch.columns.encode(base_timestamp_us=1)
    view = memoryview(encoded)
    header = layout.check_from_producer(view, 0, len(view), 16 * 1024 * 1024)
    found = columns.decode(view, header)
    keys = [None] * header.count if found.keys is None else found.keys.tolist_with_nulls()
    headers = [b""] * header.count if found.headers is None else found.headers.tolist()
    return list(zip(found.values.tolist(), keys, map(unpack_headers, headers), strict=True))


def gather(
    rows: list[pa.RecordBatch], known: Mapping[str, TopicConfig], topic: str | None = "t", batch_bytes: int = 1 << 20
) -> tuple[dict[tuple[str, tuple[int, int] | None], list[Message]], list[TargetBatch]]:
    batcher = Batcher(topic, lambda name: known[name], batch_bytes)
    made = [one for some in rows for one in batcher.add(some)]
    made += batcher.rest()
    found: dict[tuple[str, tuple[int, int] | None], list[Message]] = {}
    for one in made:
        found.setdefault(tuple(one.target), []).extend(decoded(one))  # type: ignore[arg-type]
    return found, made


@pytest.mark.parametrize("batch_bytes", [300, 5_000, 1 << 20])
def test_each_row_is_once_where_a_producer_would_send_it_and_in_order(batch_bytes: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    known = topics("a", "b")
    names = known["a"].partition_names
    expected: dict[tuple[str, tuple[int, int] | None], list[Message]] = {}
    batches = []
    for _ in range(6):
        rows: list[dict[str, Any]] = []
        for number in range(chance.randrange(1, 60)):
            key = chance.choice([None, b"", b"k%d" % chance.randrange(9)])
            partition = chance.choice([None, None, *names])
            headers = {f"h{n}": chance.randbytes(chance.randrange(4)) for n in range(chance.randrange(3))}
            topic = chance.choice(["a", "b"])
            value = b"%d-" % number + chance.randbytes(chance.randrange(300))
            rows.append(
                {
                    "value": value,
                    "key": key,
                    "headers": [{"key": name, "value": text} for name, text in headers.items()] or None,
                    "topic": topic,
                    "partition": partition,
                }
            )
            places = [(0, 0), (0, 1), (3, 0)]
            place = None
            if partition is not None:
                place = places[names.index(partition)]
            elif key is not None:
                place = places[by_key_hash(topic, key, 3)]
            expected.setdefault((topic, place), []).append((value, key, headers))
        schema = pa.schema(
            {
                "value": pa.binary(),
                "key": pa.binary(),
                "headers": HEADERS,
                "topic": pa.string(),
                "partition": pa.string(),
            }
        )
        whole = pa.RecordBatch.from_pylist([{**rows[0]}, *rows], schema=schema)
        batches.append(whole.slice(1))  # its arrays do not begin at their buffers' start
    found, made = gather(batches, known, None, batch_bytes)
    assert found == expected
    assert all(one.size <= batch_bytes or one.columns.messages == 1 for one in made)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary()])
def test_texts_and_large_arrays_are_bytes_as_well(kind: pa.DataType) -> None:
    values = ["ä", "", "b"] if pa.types.is_large_string(kind) or pa.types.is_string(kind) else ["ä".encode(), b"", b"b"]
    rows = pa.record_batch({"value": pa.array(values, kind), "key": pa.array(values[::-1], kind)})
    found, _made = gather([rows], topics("t"))
    messages = sorted(message for some in found.values() for message in some)
    assert messages == [(b"", b"", {}), (b"b", "ä".encode(), {}), ("ä".encode(), b"b", {})]


def test_rows_for_any_partition_stay_together_and_small_pieces_become_one_batch() -> None:
    rows = [
        pa.record_batch({"value": [b"%d" % (10 * n + i) for i in range(10)], "key": pa.nulls(10, pa.binary())})
        for n in range(5)
    ]
    found, made = gather(rows, topics("t"))
    assert found == {("t", None): [(b"%d" % n, None, {}) for n in range(50)]}
    assert len(made) == 1
    assert made[0].columns.keys is None


def test_headers_are_packed_as_msgpack_does() -> None:
    wanted: list[dict[str, bytes]] = [{"k" * length: b"v" * length} for length in LENGTHS]
    wanted += [{f"{n}": b"%d" % n for n in range(count)} for count in (0, 1, 15, 16, 300)]
    column = pa.array([[{"key": k, "value": v} for k, v in one.items()] for one in wanted] + [None], HEADERS)
    packed = packed_headers(column)
    assert packed is not None
    assert [unpack_headers(one) for one in packed.to_pylist()] == [*wanted, {}]
    sliced = packed_headers(column.slice(2, 4))
    assert sliced is not None
    assert [unpack_headers(one) for one in sliced.to_pylist()] == wanted[2:6]
    assert packed_headers(pa.array([None, []], HEADERS)) is None


@pytest.mark.parametrize(
    ("columns_given", "kind", "said"),
    [
        ({"value": [b"a", None]}, ConfigError, "the column 'value' is null in 1 rows"),
        ({"value": [b"a", b"b"], "partition": ["0-0", "9-9"]}, PartitionNotFound, "9-9"),
        ({"value": [b"a", b"b"], "partition": ["0-0", "x"]}, ConfigError, "'x'"),
        (
            {"value": [b"a", b"x" * 2000]},
            MessageTooLarge,
            r"a row for topic 't'.*2,008.*topic alter t --max-message-bytes",
        ),
        (
            {"value": [b"x" * 4_500_000]},
            MessageTooLarge,
            "4,500,008.* No topic takes a message of more than 4 MiB: split it",
        ),
        (
            {"value": [b"a"], "headers": pa.array([[{"key": None, "value": b""}]], HEADERS)},
            ConfigError,
            "the column 'headers' has 1 entries whose 'key' is null",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named(columns_given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        gather([pa.record_batch(columns_given)], topics("t", max_message_bytes=1024))


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": [b"a", None], "topic": ["t", "u"], "headers": pa.array([None, None], HEADERS)},
        {"value": [b"a", b"b"], "topic": ["t", None], "headers": pa.array([None, None], HEADERS)},
        {
            "value": [b"a", b"b"],
            "topic": ["t", "u"],
            "headers": pa.array([None, [{"key": "k", "value": None}]], HEADERS),
        },
    ],
)
def test_where_a_row_is_wrong_no_row_that_came_with_it_is_taken(wrong: dict[str, Any]) -> None:
    """Each row alone makes a batch here."""
    known = {"t": topics("t")["t"], "u": topics("u")["u"]}
    batcher = Batcher(None, lambda name: known[name], batch_bytes=1)
    with pytest.raises(ConfigError, match="null"):
        next(batcher.add(pa.record_batch(wrong)))
    assert list(batcher.rest()) == []


def test_columns_that_no_message_has_are_left_out() -> None:
    rows = pa.record_batch({"offset": [7, 8], "value": [b"a", b"b"], "timestampType": [0, 0]})
    found, _made = gather([rows], topics("t"))
    assert [value for messages in found.values() for value, _key, _headers in messages] == [b"a", b"b"]


def test_a_header_that_comes_twice_is_kept_twice_in_its_order() -> None:
    pairs = [("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"1")]
    column = pa.array([[{"key": k, "value": v} for k, v in pairs], None], HEADERS)
    packed = packed_headers(column)
    assert packed is not None
    assert packed is not None
    first, second = packed.to_pylist()
    assert (unpack_header_pairs(first), unpack_header_pairs(second)) == (pairs, [])
    assert unpack_headers(first) == {"a": b"1", "b": b"2"}, "where there is one of a name, the last"


def test_a_row_without_a_topic_is_named() -> None:
    rows = pa.record_batch({"value": [b"a", b"b"], "topic": ["t", None]})
    with pytest.raises(ConfigError, match="the column 'topic' is null in 1 rows"):
        gather([rows], topics("t"), None)
