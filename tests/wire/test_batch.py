"""The batch header: golden bytes, both checksums, and everything a header can lie about."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from metamq.errors import CorruptData, MessageTooLarge
from metamq.wire.batch import (
    BROKER_CRC_AT,
    HEADER_BYTES,
    PRODUCER_AT,
    PRODUCER_CRC_AT,
    check_from_producer,
    check_stored,
    make_batch_id,
    read_header,
    stamp,
    walk,
)
from metamq.wire.columns import decode, encode
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX

SENT_US = 1357034400000000


def stamped(batch: bytearray, base_offset: int = 0) -> bytearray:
    stamp(
        batch,
        0,
        epoch=3,
        base_offset=base_offset,
        batch_id=make_batch_id(3, 1),
        append_time_us=SENT_US + 250_000,
        unflushed_bytes=0,
    )
    return batch


def sample(**columns: Any) -> bytearray:
    return encode([b"UA 1545", b"AA 1141"], base_timestamp_us=SENT_US, producer_id=7, **columns)


def resealed(batch: bytearray, at: int, field: str, value: int) -> bytearray:
    """The batch with one field of the producer part replaced, under a checksum that is right again."""
    from crc32c import crc32c

    struct.pack_into(field, batch, at, value)
    crc = crc32c(bytes(batch[HEADER_BYTES:]), crc32c(bytes(batch[PRODUCER_AT:PRODUCER_CRC_AT])))
    struct.pack_into("<I", batch, PRODUCER_CRC_AT, crc)
    return batch


def test_golden_bytes() -> None:
    assert stamped(sample()).hex() == (
        "78000000" "03000000" "0000000000000000" "0100000000030000" "90f85f3137d20400" "00000000" "cc4015ce"
        "4d51" "00" "00" "02000000" "0700000000000000" "00000000" "20000000"
        "00285c3137d20400" "00285c3137d20400" "20000000" "70a6c9a5"
        "00000000" "07000000" "0e000000" "00000000" "554120313534354141203131343100" "00"
    )  # fmt: skip


def test_every_flipped_bit_is_found() -> None:
    good = bytes(stamped(sample(keys=[b"UA", None], headers=[{"a": b"1"}, None], timestamps_us=[SENT_US, SENT_US])))
    assert check_stored(memoryview(good), 0, len(good))[1] is None
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        _header, problem = check_stored(memoryview(bad), 0, len(bad))
        assert problem is not None, f"bit {bit}"
        if bit < 8 * PRODUCER_AT:
            assert problem == "the broker's checksum does not match"
        with pytest.raises(CorruptData):
            list(walk(memoryview(bad)))


def test_every_flipped_bit_of_the_producers_is_found_by_the_broker() -> None:
    good = bytes(sample(keys=[b"UA", b"AA"]))
    checked = [*range(8 * 4), *range(8 * PRODUCER_AT, 8 * len(good))]  # the size, and all behind the broker's part
    for bit in checked:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptData, MessageTooLarge)):
            check_from_producer(memoryview(bad), 0, len(bad), BATCH_BYTES_MAX)


def test_what_the_broker_writes_changes_nothing_of_the_producers() -> None:
    batch = sample()
    before = bytes(batch[PRODUCER_AT:])
    header = read_header(stamped(batch, base_offset=41))
    assert bytes(batch[PRODUCER_AT:]) == before
    assert (header.epoch, header.base_offset, header.batch_id) == (3, 41, (3 << 40) + 1)
    assert (header.end_offset, header.append_time_us) == (43, SENT_US + 250_000)
    assert check_from_producer(memoryview(batch), 0, len(batch), BATCH_BYTES_MAX) == header
    assert BROKER_CRC_AT + 4 == PRODUCER_AT


@pytest.mark.parametrize(
    ("at", "field", "value", "problem"),
    [
        (40, "<H", 0x1234, "magic is 0x1234, not 0x514d"),
        (42, "<B", 3, "codec 3 is not known to this release"),
        (42, "<B", 255, "codec 255 is not known"),
        (43, "<B", 0x10, "flags 0x10 are not known to this release"),
        (43, "<B", 0x80, "flags 0x80 are not known"),
        (44, "<I", 0, "count 0 is outside 1..1048576"),
        (44, "<I", BATCH_COUNT_MAX + 1, "count 1048577 is outside"),
        (60, "<I", 31, "plain size 31 differs from the body's 32"),
        (60, "<I", 2**24, "plain size 16777216 differs"),
        (80, "<I", 0, "does not fit a body of 0 bytes"),
        (80, "<I", 2**32 - 1, "does not fit a body of 4294967295 bytes"),
    ],
)
def test_what_is_not_known_is_named(at: int, field: str, value: int, problem: str) -> None:
    batch = resealed(sample(), at, field, value)
    with pytest.raises(CorruptData, match=problem):
        check_from_producer(memoryview(batch), 0, len(batch), BATCH_BYTES_MAX)
    found = check_stored(memoryview(stamped(batch)), 0, len(batch))[1]
    assert found is not None
    assert problem in found


@pytest.mark.parametrize(("size", "problem"), [(112, "does not fit"), (128, "does not fit"), (0, "does not fit")])
def test_a_size_that_is_not_the_batchs(size: int, problem: str) -> None:
    batch = sample()
    struct.pack_into("<I", batch, 0, size)
    with pytest.raises(CorruptData, match=problem):
        check_from_producer(memoryview(batch), 0, len(batch), BATCH_BYTES_MAX)


def test_a_batch_in_the_wrong_room() -> None:
    batch = sample()
    view = memoryview(batch + bytes(8))
    with pytest.raises(CorruptData, match="size 120 is not the 128 bytes it came in"):
        check_from_producer(view, 0, len(view), BATCH_BYTES_MAX)
    with pytest.raises(CorruptData, match="size 120 is more than the 112 bytes available"):
        check_from_producer(view, 0, 112, BATCH_BYTES_MAX)
    with pytest.raises(CorruptData, match="87 bytes are less than a header"):
        check_from_producer(view, 0, 87, BATCH_BYTES_MAX)


def test_the_limit_of_a_batch_is_not_damage() -> None:
    batch = sample()
    with pytest.raises(MessageTooLarge, match="batch has 120 bytes, the limit is 100"):
        check_from_producer(memoryview(batch), 0, len(batch), 100)
    compressed = encode([bytes(100_000)], base_timestamp_us=0, codec=Codec.LZ4)
    with pytest.raises(MessageTooLarge, match=r"batch has 100,0\d\d bytes, the limit is 50,000"):
        check_from_producer(memoryview(compressed), 0, len(compressed), 50_000)


def test_a_fetch_cut_at_every_byte() -> None:
    first, second = stamped(sample()), stamped(encode([b"x" * 50], base_timestamp_us=1), base_offset=2)
    data = bytes(first + second)
    for cut in range(len(data) + 1):
        found = [(at, header.base_offset) for at, header in walk(memoryview(data)[:cut])]
        whole = (cut >= len(first)) + (cut >= len(data))
        assert found == [(0, 0), (len(first), 2)][:whole]


def test_damage_in_the_middle_of_a_fetch_says_where() -> None:
    data = bytearray(stamped(sample()) + stamped(sample(), base_offset=2))
    data[-1] ^= 1
    batches = walk(memoryview(data))
    assert next(batches)[0] == 0
    with pytest.raises(CorruptData, match="fetched batch is damaged at byte 120: the producer's checksum") as caught:
        next(batches)
    assert caught.value.position == 120


def test_what_can_be_encoded_is_accepted_up_to_the_limits() -> None:
    largest = encode([bytes(BATCH_BYTES_MAX - HEADER_BYTES - 8)], base_timestamp_us=0)
    assert len(largest) == BATCH_BYTES_MAX
    check_from_producer(memoryview(largest), 0, len(largest), BATCH_BYTES_MAX)
    many = encode([b""] * BATCH_COUNT_MAX, base_timestamp_us=0)
    assert check_from_producer(memoryview(many), 0, len(many), BATCH_BYTES_MAX).count == BATCH_COUNT_MAX
    assert decode(memoryview(many), read_header(many)).count == BATCH_COUNT_MAX


@pytest.mark.parametrize(
    ("values", "columns", "error", "problem"),
    [
        ([bytes(BATCH_BYTES_MAX - HEADER_BYTES)], {}, MessageTooLarge, "batch has 16,777,224 bytes"),
        ([bytes(BATCH_BYTES_MAX)], {"codec": Codec.LZ4}, MessageTooLarge, "batch has 16,777,224 bytes"),
        ([b""], {"keys": [bytes(BATCH_BYTES_MAX + 1)]}, MessageTooLarge, "batch has 16,777,217 bytes"),
        ([random.randbytes(BATCH_BYTES_MAX - 8)], {"codec": Codec.LZ4}, MessageTooLarge, "the limit is 16,777,216"),
        ([b""], {"keys": [b"", b""]}, ValueError, "2 entries for 1 values"),
        ([b""], {"headers": []}, ValueError, "0 entries for 1 values"),
        ([], {}, ValueError, "a batch of 0 messages"),
        ([b""] * (BATCH_COUNT_MAX + 1), {}, ValueError, "a batch of 1048577 messages"),
    ],
    ids=["with its header", "before compression", "a key", "incompressible", "keys", "headers", "none", "many"],
)
def test_what_cannot_be_encoded(values: list[bytes], columns: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        encode(values, base_timestamp_us=0, **columns)
