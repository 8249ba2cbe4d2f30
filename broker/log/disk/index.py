"""A segment's sparse index: from an offset or a time to the batch where reading starts.

It has one entry about every `interval` bytes, at most one per batch, the first at the segment's start. An entry is a
batch's (offset, position) and the greatest timestamp of all batches *before* it in the segment. This running maximum
never falls, although producers' timestamps may, so it can be bisected: the first message at or after a time is before
the first entry whose maximum reaches that time. A header may state a timestamp that is too late. A search that finds
this out lowers the maxima to the true values (metamq.broker.log.disk.times).

The index is derived from the log: if its file is wrong in any way, the index is rebuilt.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from crc32c import crc32c

MAGIC = b"MQIX"
VERSION = 1
NO_TIME = -(2**63)
_HEADER = struct.Struct("<4sIQQQQqqII")  # … count, CRC of the header before it and of the columns after it
_CRC_AT = _HEADER.size - 4


class SparseIndex:
    """The index of one segment, up to `end_offset` and `end_position`. Times are microseconds since 1970."""

    __slots__ = (
        "_maxima", "_next_entry_at", "_offsets", "_positions", "base_offset", "base_position", "end_offset",
        "end_position", "last_append_us", "max_timestamp_us",
    )  # fmt: skip

    def __init__(self, base_offset: int, base_position: int) -> None:
        self.base_offset = base_offset
        self.base_position = base_position
        self.end_offset = base_offset
        self.end_position = base_position
        self.max_timestamp_us = NO_TIME
        self.last_append_us = NO_TIME
        self._offsets = array("Q")
        self._positions = array("Q")
        self._maxima = array("q")
        self._next_entry_at = base_position

    @property
    def memory_bytes(self) -> int:
        """Approximate size in memory."""
        return 400 + 24 * len(self._offsets)

    @property
    def positions(self) -> Sequence[int]:
        """The positions of its entries."""
        return self._positions

    def add(self, size: int, count: int, max_timestamp_us: int, append_time_us: int, interval: int) -> None:
        """Adds the next batch, which is at `end_position` and begins with `end_offset`."""
        position = self.end_position
        if position >= self._next_entry_at:
            self._offsets.append(self.end_offset)
            self._positions.append(position)
            self._maxima.append(self.max_timestamp_us)
            self._next_entry_at = position + interval
        self.end_position = position + size
        self.end_offset += count
        self.last_append_us = append_time_us
        if max_timestamp_us > self.max_timestamp_us:
            self.max_timestamp_us = max_timestamp_us

    def find(self, offset: int) -> tuple[int, int]:
        """(offset, position) of the last entry at or before `offset`, which is in the segment."""
        at = bisect_right(self._offsets, offset) - 1
        return self._offsets[at], self._positions[at]

    def find_time(self, timestamp_us: int) -> tuple[int, int]:
        """The entry where the search for the first message at or after the time starts: (its position, its maximum).

        The caller must first compare the time with `max_timestamp_us`: by the headers, such a message exists.
        """
        at = max(bisect_left(self._maxima, timestamp_us) - 1, 0)
        return self._positions[at], self._maxima[at]

    def learn(self, position: int, greatest_us: int) -> None:
        """Lowers the maxima: no message before `position`, a batch boundary, is later than `greatest_us`."""
        at = bisect_right(self._positions, position) - 1
        while at >= 0 and self._maxima[at] > greatest_us:
            self._maxima[at] = greatest_us
            at -= 1
        if position == self.end_position:
            self.max_timestamp_us = min(self.max_timestamp_us, greatest_us)

    def entry_at(self, position: int) -> int:
        """The position of the last entry at or before `position`; the segment's start if there is none."""
        at = bisect_right(self._positions, position) - 1
        return self._positions[at] if at >= 0 else self.base_position

    def cut(self, position: int) -> None:
        """Removes the last entry before `position` and all after it. The caller adds the batches up to there again."""
        if position >= self.end_position:
            return
        at = max(bisect_left(self._positions, position) - 1, 0)
        self.end_offset = self._offsets[at]
        self.end_position = self._positions[at]
        self.max_timestamp_us = self._maxima[at]
        self.last_append_us = NO_TIME
        self._next_entry_at = self.end_position
        for column in (self._offsets, self._positions, self._maxima):
            del column[at:]

    def of_the_end(self, offset: int, position: int) -> SparseIndex:
        """The index of a copy of the segment from this batch on. Its maxima may be too late: searches lower them."""
        index, at = SparseIndex(offset, position), bisect_right(self._positions, position)
        index.end_offset, index.end_position, index._next_entry_at = self.end_offset, self.end_position, position
        index.max_timestamp_us, index.last_append_us = self.max_timestamp_us, self.last_append_us
        index._offsets = array("Q", (offset, *self._offsets[at:]))
        index._positions = array("Q", (position, *self._positions[at:]))
        index._maxima = array("q", (NO_TIME, *self._maxima[at:]))
        return index

    def to_bytes(self) -> bytes:
        """The bytes of the index's file."""
        columns = b"".join((self._offsets.tobytes(), self._positions.tobytes(), self._maxima.tobytes()))
        header = _HEADER.pack(
            MAGIC, VERSION, self.base_offset, self.base_position, self.end_offset, self.end_position,
            self.max_timestamp_us, self.last_append_us, len(self._offsets), 0,
        )[:_CRC_AT]  # fmt: skip
        crc = crc32c(columns, crc32c(header))
        return b"".join((header, crc.to_bytes(4, "little"), columns))

    @classmethod
    def from_bytes(cls, data: bytes, interval: int) -> SparseIndex | None:
        """The index in a file's bytes, or None if they are incomplete or damaged."""
        if len(data) < _HEADER.size:
            return None
        magic, version, base_offset, base_position, end_offset, end_position, latest, appended, count, crc = (
            _HEADER.unpack_from(data)
        )
        if magic != MAGIC or version != VERSION or len(data) != _HEADER.size + 24 * count:
            return None
        if crc32c(memoryview(data)[_HEADER.size :], crc32c(data[:_CRC_AT])) != crc:
            return None
        index = cls(base_offset, base_position)
        index.end_offset, index.end_position = end_offset, end_position
        index.max_timestamp_us, index.last_append_us = latest, appended
        columns = memoryview(data)[_HEADER.size :]
        index._offsets.frombytes(columns[: 8 * count])
        index._positions.frombytes(columns[8 * count : 16 * count])
        index._maxima.frombytes(columns[16 * count :])
        if count:
            index._next_entry_at = index._positions[-1] + interval
        return index
