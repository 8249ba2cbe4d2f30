"""Ranges of offsets, and cutting them into one piece for each task. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition


class OffsetRange(NamedTuple):
    """The messages from `start` up to `end` of one partition."""

    tp: TopicPartition
    topic_id: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of messages."""
        return self.end - self.start


def split(ranges: Iterable[OffsetRange], at_least: int | None, most_messages: int | None) -> list[OffsetRange]:
    """Returns ranges with messages, of at most `most_messages` each, and `at_least` of them if there are enough.

    The larger a range, the more pieces it is cut into; no piece is empty.
    """
    pieces = [piece for one in ranges if one.size > 0 for piece in _cut_by_size(one, most_messages)]
    if at_least is None or len(pieces) >= at_least:
        return pieces
    total = sum(piece.size for piece in pieces)
    wanted = min(at_least, total)
    parts: list[OffsetRange] = []
    passed = 0
    for piece in pieces:
        share = (passed + piece.size) * wanted // total - passed * wanted // total
        passed += piece.size
        parts += cut(piece, max(1, share))
    return parts


def _cut_by_size(one: OffsetRange, most_messages: int | None) -> list[OffsetRange]:
    return [one] if most_messages is None else cut(one, -(-one.size // most_messages))


def cut(one: OffsetRange, pieces: int) -> list[OffsetRange]:
    """Cuts the range into this number of pieces of nearly the same size; fewer if there are fewer messages."""
    pieces = min(pieces, one.size)
    ends = [one.start + one.size * number // pieces for number in range(pieces + 1)]
    return [one._replace(start=start, end=end) for start, end in pairwise(ends)]
