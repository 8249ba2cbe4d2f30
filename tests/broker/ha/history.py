"""What producers were told and readers saw, and whether one log could have told them all of it.

acknowledged   is in the log at the end, once, at the offset that its receipt names
sent           is in the log at most once, also when its outcome was unknown
in order       messages of one producer lie in each partition in the order in which it sent them
seen           whatever a reader saw at an offset is there at the end: nothing was taken back
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]
"""(partition, offset)."""


@dataclass
class History:
    """Written by producers and readers as it happens; each has its own keys, so that threads do not meet."""

    acknowledged: dict[bytes, Place] = field(default_factory=dict)
    seen: list[tuple[Place, bytes]] = field(default_factory=list)


def faults(history: History, log: Mapping[str, Sequence[bytes]]) -> list[str]:
    """What is wrong, given the logs at the end: partition -> values by offset. Values are b"producer-number"."""
    found: list[str] = []
    for value, (partition, offset) in history.acknowledged.items():
        values = log[partition]
        if offset >= len(values) or values[offset] != value:
            there = values[offset] if offset < len(values) else None
            found.append(f"{value!r} was acknowledged at {partition}/{offset}, where {there!r} is")
    for value, count in Counter(value for values in log.values() for value in values).items():
        if count > 1:
            found.append(f"{value!r} is there {count} times")
    for partition, values in log.items():
        numbers: dict[bytes, list[int]] = defaultdict(list)
        for value in values:
            producer, _, number = value.partition(b"-")
            numbers[producer].append(int(number))
        for producer, sent in numbers.items():
            if sent != sorted(sent):
                found.append(f"messages of {producer!r} in {partition} are not in the order in which they were sent")
    for (partition, offset), value in history.seen:
        values = log[partition]
        if offset >= len(values) or values[offset] != value:
            there = values[offset] if offset < len(values) else None
            found.append(f"a reader saw {value!r} at {partition}/{offset}, where {there!r} is now")
    return found
