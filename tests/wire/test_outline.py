"""A broker's look at the columns of a batch: what it takes can be decoded, and what cannot be decoded it refuses."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import CorruptData
from metamq.wire import batch as layout
from metamq.wire.columns import decode, encode
from metamq.wire.compression import Codec
from metamq.wire.outline import columns_problem
from tests.examples import examples

AT = layout.HEADER_BYTES


def sealed(batch: bytearray, **changed: int) -> bytearray:
    """The batch as it is now, with checksums that fit."""
    header = layout.read_header(batch)
    fields = {
        "flags": header.flags, "count": header.count, "plain_size": header.plain_size, "body_size": header.body_size,
        "base_timestamp_us": header.base_timestamp_us, "max_timestamp_us": header.max_timestamp_us,
    } | changed  # fmt: skip
    layout.seal(batch, codec=Codec.NONE, producer_id=0, sequence=0, **fields)
    return batch


def problem_of(batch: bytearray) -> str | None:
    return columns_problem(memoryview(batch), layout.check_from_producer(memoryview(batch), 0, len(batch), 1 << 24))


def is_decodable(batch: bytearray) -> bool:
    """Whether a consumer can read every message."""
    try:
        columns = decode(memoryview(batch), layout.read_header(batch))
        for column in (columns.values, columns.keys, columns.headers):
            if column is not None:
                column.tolist_with_nulls()
    except CorruptData:
        return False
    return True


Rows = st.lists(st.tuples(st.binary(max_size=9), st.none() | st.binary(max_size=9), st.integers(0, 9)), min_size=1)


@pytest.mark.slow
@given(rows=Rows, columns=st.sets(st.sampled_from(["keys", "timestamps_us", "headers"])), change=st.randoms())
@settings(max_examples=examples(400))
def test_what_is_taken_can_be_decoded_and_nothing_else_is(rows: Any, columns: Any, change: random.Random) -> None:
    given_columns = {
        "keys": [key for _value, key, _time in rows],
        "timestamps_us": [time for *_, time in rows],
        "headers": [{"a": value} if value else None for value, *_ in rows],
    }
    wanted = {name: given_columns[name] for name in columns}
    batch = encode([value for value, *_ in rows], base_timestamp_us=5, **wanted)
    assert problem_of(batch) is None
    for _ in range(change.randint(1, 3)):
        at = change.randrange(AT, len(batch) - 3)
        struct.pack_into("<I", batch, at, change.choice([0, 1, 2, 100, 2**31, 2**32 - 1, change.randrange(2**32)]))
    assert (problem_of(sealed(batch)) is None) == is_decodable(batch)


@pytest.mark.parametrize("count", [2, 3, 1 << 14, (1 << 14) + 1, 100_000])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_offset_that_falls_among_many(count: int, where: str) -> None:
    batch = encode([b"abc"] * count, base_timestamp_us=5)
    at = {"first": 1, "middle": count // 2, "last": count - 1}[where]
    assert problem_of(batch) is None
    for wrong, problem in ((3 * count + 1, "not ascending"), (2**32 - 1, "not ascending"), (2**31, "not ascending")):
        changed = bytearray(batch)
        struct.pack_into("<I", changed, AT + 4 * at, wrong)
        assert problem in str(problem_of(sealed(changed)))
        assert not is_decodable(changed)


def test_equal_offsets_are_empty_messages() -> None:
    assert problem_of(encode([b""] * 50_000, base_timestamp_us=5)) is None


def test_a_time_that_no_message_has() -> None:
    batch = encode([b"x"], base_timestamp_us=5)
    assert "one time" in str(problem_of(sealed(batch, max_timestamp_us=2**62)))
