"""Columns: every combination comes back as it went in, and hostile bodies are refused, never misread."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import CorruptData
from metamq.wire import batch as layout
from metamq.wire.batch import check_from_producer, read_header, seal
from metamq.wire.columns import decode, encode, unpack_headers
from metamq.wire.compression import Codec, compress
from metamq.wire.limits import BATCH_BYTES_MAX
from tests.examples import examples

header_maps = st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=9), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of encode(): all columns or some, with nulls or without."""
    count = draw(st.integers(1, 40))

    def column(entries: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(entries, min_size=count, max_size=count))

    return {
        "values": draw(st.lists(st.binary(max_size=30), min_size=count, max_size=count)),
        "base_timestamp_us": draw(st.integers(-(2**63), 2**63 - 1)),
        "keys": column(draw(st.sampled_from([st.binary(max_size=9), st.none() | st.binary(max_size=9), st.none()]))),
        "timestamps_us": column(st.integers(-(2**63), 2**63 - 1)),
        "headers": column(header_maps),
        "codec": draw(st.sampled_from(list(Codec))),
        "producer_id": draw(st.integers(0, 2**64 - 1)),
        "sequence": draw(st.integers(0, 2**32 - 1)),
    }


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(messages())
def test_round_trip(sent: dict[str, Any]) -> None:
    batch = encode(**sent)
    header = check_from_producer(memoryview(batch), 0, len(batch), BATCH_BYTES_MAX)
    got = decode(memoryview(batch), header)
    keys, timestamps, maps = sent["keys"], sent["timestamps_us"], sent["headers"]
    assert (header.count, header.producer_id, header.sequence) == (
        len(sent["values"]),
        sent["producer_id"],
        sent["sequence"],
    )
    assert header.codec == sent["codec"]
    assert got.values.tolist() == sent["values"]
    assert (got.keys.tolist_with_nulls() if got.keys else None) == keys
    assert (got.timestamps.tolist() if got.timestamps else None) == timestamps
    times = timestamps or [sent["base_timestamp_us"]]
    assert (header.base_timestamp_us, header.max_timestamp_us) == (min(times), max(times))
    found: list[Mapping[str, bytes]] | None = None
    if got.headers is not None:
        found = [unpack_headers(packed) for packed in got.headers.tolist()]
    assert found == (None if maps is None else [entry or {} for entry in maps])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_null_keys_at_the_edges_of_the_bitmap(count: int) -> None:
    for null in {0, count // 2, count - 1}:
        keys = [None if i == null else b"k%d" % i for i in range(count)]
        batch = encode([b""] * count, base_timestamp_us=0, keys=keys)
        got = decode(memoryview(batch), read_header(batch)).keys
        assert got is not None
        assert got.tolist_with_nulls() == keys


def test_a_million_null_keys_take_no_longer_each_than_a_few() -> None:
    """One number of a million bits, shifted for each message, would take half a minute."""
    count = 500_000
    batch = encode([b""] * count, base_timestamp_us=0, keys=[None, b""] * (count // 2))
    keys = decode(memoryview(batch), read_header(batch)).keys
    assert keys is not None
    assert keys.tolist_with_nulls() == [None, b""] * (count // 2)


def sealed(body: bytes, count: int, flags: int = 0, codec: Codec = Codec.NONE, plain_size: int = -1) -> bytearray:
    """A batch of anybody's making, with checksums that are right."""
    batch = bytearray(layout.HEADER_BYTES) + body + bytes(-len(body) % 8)
    size = len(body) if plain_size < 0 else plain_size
    seal(
        batch,
        codec=codec,
        flags=flags,
        count=count,
        producer_id=0,
        sequence=0,
        plain_size=size,
        base_timestamp_us=0,
        max_timestamp_us=0,
        body_size=len(body),
    )
    return batch


def read(batch: bytearray) -> Any:
    header = check_from_producer(memoryview(batch), 0, len(batch), BATCH_BYTES_MAX)
    return decode(memoryview(batch), header)


def binary(offsets: list[int], data: bytes) -> bytes:
    packed = struct.pack(f"<{len(offsets)}i", *offsets)
    return packed + bytes(-len(packed) % 8) + data + bytes(-len(data) % 8)


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 3, 8], [0, -3, 5, 8], [0, 2**31 - 1, 5, 8], [0, 9, 9, 8], [0, -(2**31), 8, 8]],
    ids=["descending", "negative", "far beyond", "beyond", "far below"],
)
def test_offsets_that_are_not_ascending(offsets: list[int]) -> None:
    column = read(sealed(binary(offsets, b"12345678"), 3)).values
    with pytest.raises(CorruptData, match="offsets are not ascending"):
        column.tolist()


@pytest.mark.parametrize(
    ("body", "count", "flags", "problem"),
    [
        (binary([0, 1, 9], b"12345678"), 2, 0, "column of 9 bytes at 16 does not fit 24"),
        (binary([0, 1, -1], b"12345678"), 2, 0, "column of -1 bytes"),
        (binary([1, 2, 8], b"12345678"), 2, 0, "first offset is 1, not 0"),
        (binary([0, 0], b""), 1 << 20, 0, "column of 4194308 bytes at 0 does not fit 8"),
        (binary([0, 0], b""), 1, layout.HAS_KEYS, "column of 8 bytes at 8 does not fit 8"),
        (binary([0, 0], b""), 1, layout.HAS_TIMESTAMPS, "column of 8 bytes at 8"),
        (binary([0, 0], b""), 1, layout.HAS_HEADERS, "column of 8 bytes at 8"),
        (binary([0, 0], b""), 1, layout.HAS_KEYS | layout.HAS_NULL_KEYS, "column of 1 bytes at 8"),
    ],
)
def test_columns_that_do_not_fit_the_body(body: bytes, count: int, flags: int, problem: str) -> None:
    with pytest.raises(CorruptData, match=problem):
        read(sealed(body, count, flags))


@settings(deadline=None, max_examples=examples(300))
@given(
    body=st.binary(max_size=200),
    count=st.integers(1, 12),
    flags=st.integers(0, 15),
    codec=st.sampled_from(list(Codec)),
    squeeze=st.booleans(),
)
def test_any_body_is_read_or_refused(body: bytes, count: int, flags: int, codec: Codec, squeeze: bool) -> None:
    plain_size = len(body)
    if squeeze and codec is not Codec.NONE:
        body = compress(codec, body)
    try:
        columns = read(sealed(body, count, flags, codec, plain_size))
        lists = [columns.values.tolist()]
        if columns.keys is not None:
            lists.append(columns.keys.tolist_with_nulls())
        if columns.timestamps is not None:
            lists.append(columns.timestamps.tolist())
        if columns.headers is not None:
            lists.append([unpack_headers(packed) for packed in columns.headers.tolist()])
    except CorruptData:
        return
    assert {len(entries) for entries in lists} == {count}


@pytest.mark.parametrize(
    "packed",
    [
        msgpack.packb([1, 2]),
        msgpack.packb({"a": 1}),
        msgpack.packb({"a": "text"}),
        msgpack.packb({b"a": b"1"}),
        msgpack.packb({"a": []}),
        msgpack.packb({"a": {"b": b"c"}}),
        msgpack.packb({"a": b"1"}) + b"\xc0",
        msgpack.packb({"a": b"1"})[:-1],
        b"\xdd\x00\x0f\xff\xff" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1\xff\xc4\x00",
        b"\xc1",
    ],
    ids=lambda packed: packed[:6].hex(),
)
def test_headers_that_are_not_a_map_of_str_to_bytes(packed: bytes) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match=r"message headers is damaged: .+"):
            unpack_headers(packed)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()
