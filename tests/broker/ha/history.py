"""What producers were told and consumers were given, and whether one log could have told them all of it.

acknowledged   is in the log at the end, once, at the offset that its receipt names
sent           is in the log at most once, also when its outcome was unknown
in order       messages of one producer lie in each partition in the order in which it sent them
seen           whatever a consumer was given at an offset is there at the end: nothing was taken back
complete       no consumer of a group, and no reader, was given a message before all that lies before it
committed      never beyond what the group was given, and never back

Where losses were accepted, what was acknowledged after the last of them is there; a reader that saw what was taken
back was told, at which offset, before it was given anything else; and a group was given what stands there now.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

Place = tuple[str, int]
"""(partition, offset)."""


@dataclass
class History:
    """Written by producers as it happens; each has its own keys, so that threads do not meet."""

    acknowledged: dict[bytes, Place] = field(default_factory=dict)
    seen: list[tuple[Place, bytes]] = field(default_factory=list)


class Given:
    """What one group, or one reader, was given. Any thread."""

    def __init__(self, name: str, *, may_change: bool = False) -> None:
        """`may_change`: something else may be given at a place, and the group set back, since losses are accepted."""
        self.again = 0
        """Messages that were given before: at least once is what is promised."""
        self.losses_told = 0
        self.commits = 0
        self.faults: list[str] = []
        self._name = name
        self._may_change = may_change
        self._given: dict[str, list[bytes]] = defaultdict(list)
        """By offset, what was given there last."""
        self._committed: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many places there are at which something was given."""
        with self._lock:
            return sum(map(len, self._given.values()))

    @property
    def seen(self) -> list[tuple[Place, bytes]]:
        """All of it."""
        return [one for partition in list(self._given) for one in self._seen_of(partition)]

    def _seen_of(self, partition: str) -> list[tuple[Place, bytes]]:
        with self._lock:
            return [((partition, offset), value) for offset, value in enumerate(self._given[partition])]

    def batch(self, partition: str, offset: int, values: Sequence[bytes]) -> None:
        """These messages were handed out, from this offset on."""
        with self._lock:
            given = self._given[partition]
            if offset > len(given):
                self.faults.append(f"{self._name} was given {partition}/{offset}, and nothing from {len(given)} on")
                given += [b""] * (offset - len(given))
            before = given[offset : offset + len(values)]
            self.again += len(before)
            if not self._may_change and before != list(values[: len(before)]):
                at = next(n for n, (old, new) in enumerate(zip(before, values, strict=False)) if old != new)
                place = f"{partition}/{offset + at}"
                self.faults.append(f"{self._name} was given {before[at]!r} at {place}, and then {values[at]!r}")
            given[offset : offset + len(values)] = values

    def told(self, partition: str, agreed: int) -> None:
        """The reader was told that what it has from there on was given up."""
        with self._lock:
            self.losses_told += 1
            if not self._may_change:
                del self._given[partition][agreed:]

    def committed(self, partition: str, offset: int) -> None:
        """This stands in ZooKeeper: to be told in the order in which it was read, after it was read."""
        with self._lock:
            before, self._committed[partition] = self._committed[partition], offset
            self.commits += offset > before
            if offset < before and not self._may_change:
                self.faults.append(f"the offset of {self._name} for {partition} went from {before} back to {offset}")
            upto = len(self._given[partition])
            if offset > upto:
                self.faults.append(f"{self._name} has committed {partition}/{offset}, and was given it up to {upto}")

    def zookeeper_goes_back(self) -> None:
        """Offsets that are committed go back, once, since they stand in ZooKeeper; what was given is not forgotten."""
        with self._lock:
            self._committed.clear()

    def taken_back(self, log: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What was given, and is not in the log."""
        with self._lock:
            wrong = [partition for partition, given in self._given.items() if given != log[partition][: len(given)]]
        return [fault for partition in wrong for fault in _taken_back(self._seen_of(partition), log)]

    def missed(self, log: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What is in the log and was not given, or something else at its place later."""
        with self._lock:
            return [
                f"{self._name} was not given {value!r} at {partition}/{offset}, but {given!r}"
                for partition, values in log.items()
                if self._given[partition][: len(values)] != values
                for offset, (value, given) in enumerate(zip_longest(values, self._given[partition][: len(values)]))
                if given != value
            ]


def faults(history: History, log: Mapping[str, Sequence[bytes]]) -> list[str]:
    """What is wrong, given the logs at the end: partition -> values by offset. Values are b"producer-number".

    Where losses were accepted, the history is what was acknowledged after the last one, and what readers have that were
    told of all of them.
    """
    return [*_lost(history, log), *_doubled_or_displaced(log), *_taken_back(history.seen, log)]


def _lost(history: History, log: Mapping[str, Sequence[bytes]]) -> list[str]:
    found = []
    for value, (partition, offset) in history.acknowledged.items():
        values = log[partition]
        if offset >= len(values) or values[offset] != value:
            there = values[offset] if offset < len(values) else None
            found.append(f"{value!r} was acknowledged at {partition}/{offset}, where {there!r} is")
    return found


def _doubled_or_displaced(log: Mapping[str, Sequence[bytes]]) -> list[str]:
    found = []
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
    return found


def _taken_back(seen: Sequence[tuple[Place, bytes]], log: Mapping[str, Sequence[bytes]]) -> list[str]:
    found = []
    for (partition, offset), value in seen:
        values = log[partition]
        if offset >= len(values) or values[offset] != value:
            there = values[offset] if offset < len(values) else None
            found.append(f"a reader saw {value!r} at {partition}/{offset}, where {there!r} is now")
    return found
