"""Packs the column `headers`, an array of structs in each row, into a batch's form: a msgpack map per message. Pure.

It joins columns: before each name and each value comes msgpack's prefix, which depends only on the length. There are
few different lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from metamq.errors import ConfigError


def check_headers(column: pa.Array) -> None:
    """Raises ConfigError for an invalid entry."""
    names, values = _names_and_values(column)
    for what, array in (("key", names), ("value", values)):
        if array.null_count:
            raise ConfigError(
                f"the column 'headers' has {array.null_count:,} entries whose {what!r} is null",
                hint="Leave them out, or give them one: a header is a name and bytes.",
            )


def _names_and_values(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    entries = column.flatten()
    return pc.struct_field(entries, [0]), pc.struct_field(entries, [1])


def packed_headers(column: pa.Array) -> pa.Array | None:
    """Returns a binary array, empty where a row has no headers; None if no row has any.

    If a name comes more than once in a row, all of its entries are there, in their order.
    """
    names, values = _names_and_values(column)
    if not len(names):
        return None
    names, values = names.cast(pa.binary()), values.cast(pa.binary())
    joined = pc.binary_join_element_wise(
        _before(pc.binary_length(names), _before_text), names, _before(pc.binary_length(values), _before_bytes), values,
        b"",
    )  # fmt: skip
    counts = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int32())
    ends = pc.cumulative_sum(counts)
    starts = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    of_rows = pc.binary_join(pa.ListArray.from_arrays(starts, joined), b"")
    return pc.binary_join_element_wise(_before(counts, _before_map), of_rows, b"")


def _before(lengths: pa.Array, write: Callable[[int], bytes]) -> pa.Array:
    encoded = lengths.dictionary_encode()
    return pa.array([write(length) for length in encoded.dictionary.to_pylist()], pa.binary()).take(encoded.indices)


def _before_map(entries: int) -> bytes:
    if not entries:
        return b""
    if entries < 16:
        return bytes([0x80 | entries])
    return _sized(entries, (None, 0xDE, 0xDF))


def _before_text(length: int) -> bytes:
    return bytes([0xA0 | length]) if length < 32 else _sized(length, (0xD9, 0xDA, 0xDB))


def _before_bytes(length: int) -> bytes:
    return _sized(length, (0xC4, 0xC5, 0xC6))


def _sized(length: int, marks: tuple[int | None, int, int]) -> bytes:
    """Returns a mark for lengths of 1, 2 or 4 bytes, and the length."""
    for mark, width in zip(marks, (1, 2, 4), strict=True):
        if mark is not None and length < 1 << 8 * width:
            return bytes([mark]) + length.to_bytes(width, "big")
    raise AssertionError("Arrow's lengths have 31 bits")
