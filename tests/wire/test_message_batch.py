"""What a consumer gets of a batch: lists and Arrow say the same, from any first offset, over the received bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.errors import CorruptData
from metamq.wire import batch as layout
from metamq.wire.batch import make_batch_id, read_header, seal, stamp
from metamq.wire.columns import encode
from metamq.wire.compression import Codec
from metamq.zk.partitions import TopicPartition
from tests.examples import examples

TP = TopicPartition("flights", "0-3")
BASE_OFFSET = 1000
SENT_US = 1357034400000000


def stored(batch: bytearray, base_offset: int = BASE_OFFSET) -> memoryview:
    """A batch as it is fetched: stamped, and in the middle of a larger buffer."""
    stamp(
        batch,
        0,
        epoch=3,
        base_offset=base_offset,
        batch_id=make_batch_id(3, 1),
        append_time_us=0,
        unflushed_bytes=0,
    )
    return memoryview(bytearray(64) + batch)[64:]


def opened(data: memoryview, first_offset: int = 0, decode: Callable[[bytes], Any] | None = None) -> MessageBatch[Any]:
    return MessageBatch(TP, read_header(data), data, first_offset, decode)


def arrow_lists(batch: MessageBatch[Any]) -> dict[str, list[Any]]:
    table = batch.to_arrow()
    table.validate(full=True)
    lists = {name: table.column(name).to_pylist() for name in ("offset", "key", "value", "headers")}
    return {**lists, "timestamp": table.column("timestamp").cast(pa.int64()).to_pylist()}


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """What encode() takes, and an offset to begin at."""
    count = draw(st.integers(1, 20))

    def column(entries: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(entries, min_size=count, max_size=count))

    sent = {
        "values": draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
        "base_timestamp_us": SENT_US,
        "keys": column(st.none() | st.binary(max_size=5)),
        "timestamps_us": column(st.integers(0, 2**52)),
        "headers": column(st.none() | st.dictionaries(st.text(max_size=3), st.binary(max_size=4), max_size=2)),
        "codec": draw(st.sampled_from(list(Codec))),
    }
    return sent, draw(st.integers(0, BASE_OFFSET + count - 1))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(batches())
def test_every_column_from_any_first_offset(case: tuple[dict[str, Any], int]) -> None:
    sent, first_offset = case
    batch = opened(stored(encode(**sent)), first_offset)
    count = len(sent["values"])
    skip = max(first_offset - BASE_OFFSET, 0)
    keys = sent["keys"] or [None] * count
    timestamps = sent["timestamps_us"] or [SENT_US] * count
    headers = [entry or {} for entry in sent["headers"] or [None] * count]

    assert (batch.offset, batch.end_offset, len(batch)) == (BASE_OFFSET + skip, BASE_OFFSET + count, count - skip)
    assert list(batch.offsets) == list(range(batch.offset, batch.end_offset))
    assert list(batch.values) == sent["values"][skip:]
    assert list(batch.keys) == keys[skip:]
    assert list(batch.timestamps) == timestamps[skip:]
    assert list(batch.headers) == headers[skip:]
    assert list(batch) == [
        Message(*TP, BASE_OFFSET + n, keys[n], sent["values"][n], headers[n], timestamps[n]) for n in range(skip, count)
    ]
    lists = arrow_lists(batch)
    assert lists["offset"] == list(batch.offsets)
    assert lists["value"] == list(batch.values)
    assert lists["key"] == list(batch.keys)
    assert lists["timestamp"] == list(batch.timestamps)
    assert lists["headers"] == [list(entry.items()) or None for entry in batch.headers]
    table = batch.to_arrow()
    assert table.schema.names == list(Message._fields)
    assert set(table.column("topic").to_pylist()) == {"flights"}
    assert set(table.column("partition").to_pylist()) == {"0-3"}


def address_of(data: memoryview) -> tuple[int, int]:
    first = int(pa.py_buffer(data).address)
    return first, first + len(data)


@pytest.mark.parametrize("first_offset", [0, BASE_OFFSET + 1])
def test_arrow_wraps_the_received_bytes(first_offset: int) -> None:
    sent = encode(
        [b"UA 1545", b"AA 1141", b""],
        base_timestamp_us=SENT_US,
        keys=[b"UA", None, b"AA"],
        timestamps_us=[SENT_US, SENT_US + 1, SENT_US + 2],
    )
    data = stored(sent)
    low, high = address_of(data)
    table = opened(data, first_offset).to_arrow()
    for name in ("key", "value", "timestamp"):
        for buffer in table.column(name).buffers():
            assert buffer is None or low <= buffer.address < buffer.address + buffer.size <= high, name
    assert table.column("value").buffers()[2].address % 8 == 0
    assert table.column("timestamp").to_pylist()[-1] == datetime(2013, 1, 1, 10, 0, 0, 2, UTC)


def test_arrow_outlives_the_batch() -> None:
    table = opened(stored(encode([bytes([n]) * 1000 for n in range(100)], base_timestamp_us=0))).to_arrow()
    assert [value.as_py()[0] for value in table.column("value")] == list(range(100))


def test_decode_is_for_values_only() -> None:
    data = stored(encode([b"1", b"2", b"3"], base_timestamp_us=0, keys=[b"4", b"5", b"6"]))
    batch = opened(data, BASE_OFFSET + 1, int)
    assert list(batch.values) == [2, 3]
    assert [message.value for message in batch] == [2, 3]
    assert list(batch.keys) == [b"5", b"6"]
    assert arrow_lists(batch)["value"] == [b"2", b"3"]


def hostile(offsets: list[int], data: bytes, *, keys: bool = False) -> memoryview:
    """A batch with right checksums around a column of wrong offsets: the values', or the keys'."""

    def binary(at: list[int], content: bytes) -> bytes:
        packed = struct.pack(f"<{len(at)}i", *at)
        return packed + bytes(-len(packed) % 8) + content + bytes(-len(content) % 8)

    count = len(offsets) - 1
    body = (binary([0] * (count + 1), b"") if keys else b"") + binary(offsets, data)
    batch = bytearray(layout.HEADER_BYTES) + body
    seal(
        batch,
        codec=Codec.NONE,
        flags=layout.HAS_KEYS if keys else 0,
        count=count,
        producer_id=0,
        sequence=0,
        plain_size=len(body),
        base_timestamp_us=0,
        max_timestamp_us=0,
        body_size=len(body),
    )
    return stored(batch)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 3, 8], [0, -3, 5, 8], [0, 9, 9, 8], [0, 2**31 - 1, 2**31 - 1, 8], [0, -(2**31), 8, 8], [0, 4, 4, 16]],
    ids=["descending", "negative", "beyond", "far beyond", "far below", "data missing"],
)
def test_hostile_offsets_are_refused(offsets: list[int], keys: bool) -> None:
    for first_offset in (0, BASE_OFFSET + 2):
        data = hostile(offsets, b"12345678", keys=keys)
        for use in (
            lambda batch: batch.to_arrow(),
            lambda batch: batch.keys if keys else batch.values,
            lambda batch: list(batch),
        ):
            with pytest.raises(CorruptData):
                use(opened(data, first_offset))


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.integers(-3, 20), min_size=3, max_size=9), st.binary(max_size=24), st.booleans())
def test_any_offsets_mean_the_same_to_both(inner: list[int], content: bytes, keys: bool) -> None:
    data = hostile([0, *inner, len(content)], content, keys=keys)
    batch = opened(data)
    try:
        expected = list(batch.keys if keys else batch.values)
    except CorruptData:
        with pytest.raises(CorruptData):
            batch.to_arrow()
        return
    assert arrow_lists(batch)["key" if keys else "value"] == expected
