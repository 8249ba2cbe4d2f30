"""What a query's filters say about where to read. Pure; filters are Spark's, known by the names of their classes.

Each filter stays with Spark as well: here it only spares reading what it would throw away. Of a time only the lower
bound counts. Times need not rise with the offset, so the last message before a time is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from metamq.client.producer_face import timestamp_us
from metamq.spark_consumers.ranges import OffsetRange


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Nothing outside of it is in the query's result; None: no bound."""

    topics: frozenset[str] | None = None
    partitions: frozenset[str] | None = None
    first_offset: int = 0
    end_offset: int | None = None
    not_before_us: int | None = None

    def applied(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """The ranges without what offsets and names rule out."""
        narrowed = []
        for one in ranges:
            if self.topics is not None and one.tp.topic not in self.topics:
                continue
            if self.partitions is not None and one.tp.partition not in self.partitions:
                continue
            end = one.end if self.end_offset is None else min(one.end, self.end_offset)
            narrowed.append(one._replace(start=max(one.start, self.first_offset), end=end))
        return [one for one in narrowed if one.size > 0]


def narrowing(filters: Iterable[Any]) -> Narrowing:
    """All of the filters together; one that says nothing here is passed over."""
    found = Narrowing()
    for one in filters:
        attribute: list[str] = list(getattr(one, "attribute", ()))
        if len(attribute) == 1 and hasattr(one, "value"):
            found = _narrowed(found, attribute[0], type(one).__name__, one.value)
    return found


def _narrowed(found: Narrowing, column: str, kind: str, value: Any) -> Narrowing:
    if column in ("topic", "partition") and kind in ("EqualTo", "EqualNullSafe", "In"):
        names = frozenset(value if kind == "In" else [value])
        if column == "topic":
            return replace(found, topics=names if found.topics is None else found.topics & names)
        return replace(found, partitions=names if found.partitions is None else found.partitions & names)
    if column == "offset":
        return _narrowed_offsets(found, kind, value)
    has_lower_bound = kind in ("EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual")
    if column == "timestamp" and has_lower_bound and isinstance(value, datetime) and value.tzinfo is not None:
        bound = max(timestamp_us(value) or 0, 0)
        return replace(found, not_before_us=max(bound, found.not_before_us or 0))
    return found


def _narrowed_offsets(found: Narrowing, kind: str, value: Any) -> Narrowing:
    numbers = [one for one in (value if kind == "In" else [value]) if type(one) is int]
    if not numbers:
        return found
    first, last = min(numbers), max(numbers)
    if kind == "GreaterThan":
        first += 1
    if kind == "LessThan":
        last -= 1
    if kind in ("EqualTo", "EqualNullSafe", "In", "GreaterThan", "GreaterThanOrEqual"):
        found = replace(found, first_offset=max(found.first_offset, first))
    if kind in ("EqualTo", "EqualNullSafe", "In", "LessThan", "LessThanOrEqual"):
        end = last + 1
        found = replace(found, end_offset=end if found.end_offset is None else min(found.end_offset, end))
    return found
