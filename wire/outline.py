"""Checks that the columns of a batch fit its body. A broker does this before it stores a batch, without decoding it.

A batch with correct checksums may have columns that cannot be decoded. Once it is stored, every consumer fails at it.
So the broker checks an uncompressed body: each column is inside of it, and its offsets begin with 0 and never fall. It
does not check a compressed body: decompression would cost more than everything else that a broker does with a batch.
Consumers check such a body when they decode it (metamq.wire.columns), and report how to skip it.

All checks are O(1) per column, except for the order of its offsets. That check handles thousands of offsets at once, by
arithmetic on integers of thousands of digits. Each offset is a digit of 32 bits whose highest bit is free. Subtracting
each number from the next, digit by digit, clears that bit exactly where the next is smaller. It costs about 6 ns per
message; making a list of offsets costs twenty times as much.
"""

from __future__ import annotations

import struct

from metamq.wire.batch import HAS_HEADERS, HAS_KEYS, HAS_NULL_KEYS, HAS_TIMESTAMPS, HEADER_BYTES, BatchHeader, padded

_INT = struct.Struct("<i")
_GUARD = b"\0\0\0\x80"
_DIGITS_MAX = 14
"""Binary logarithm of the number of offsets per step: few enough for the processor's caches."""
_GUARDS = [int.from_bytes(_GUARD * (1 << power), "little") for power in range(_DIGITS_MAX + 1)]


def columns_problem(batch: memoryview, header: BatchHeader) -> str | None:
    """The problem of an uncompressed batch's columns, or None. `header` was checked."""
    flags, count = header.flags, header.count
    if not flags & HAS_TIMESTAMPS and header.max_timestamp_us != header.base_timestamp_us:
        return "its messages have one timestamp, but its header has two"
    body = batch[HEADER_BYTES : HEADER_BYTES + header.body_size]
    at, problem = _binary(body, 0, count)
    if problem is None and flags & HAS_KEYS:
        if flags & HAS_NULL_KEYS:
            at += padded(-(-count // 8))
        at, problem = _binary(body, at, count)
    if problem is None and flags & HAS_TIMESTAMPS:
        if at + 8 * count > len(body):
            return _outside(at, 8 * count, body)
        at += 8 * count
    if problem is None and flags & HAS_HEADERS:
        at, problem = _binary(body, at, count)
    return problem


def _binary(body: memoryview, start: int, count: int) -> tuple[int, str | None]:
    """(end of the column of byte strings that starts at `start`, its problem or None)."""
    size = 4 * (count + 1)
    if start + size > len(body):
        return start, _outside(start, size, body)
    (first,) = _INT.unpack_from(body, start)
    (last,) = _INT.unpack_from(body, start + size - 4)
    data = start + padded(size)
    if first:
        return start, f"a column's first offset is {first}, not 0"
    if last < 0 or data + last > len(body):
        return start, _outside(data, last, body)
    if count > 1 and not _ascends(body[start : start + size], count):
        return start, "a column's offsets are not ascending"
    return data + padded(last), None


def _ascends(offsets: memoryview, count: int) -> bool:
    for start in range(0, count, 1 << _DIGITS_MAX):
        digits = min(count - start, 1 << _DIGITS_MAX)
        part = offsets[4 * start : 4 * (start + digits + 1)]
        guard = _GUARDS[(digits - 1).bit_length()]
        these, following = int.from_bytes(part[:-4], "little"), int.from_bytes(part[4:], "little")
        if following & guard or (following | guard) - these & guard != guard:
            return False
    return True


def _outside(start: int, size: int, body: memoryview) -> str:
    return f"a column of {size} bytes at {start} does not fit {len(body)}"
