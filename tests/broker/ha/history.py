"""What producers were told and consumers were given, and whether one log could have told them all of it.

acknowledged   is in the log at the end, once, at the offset that its receipt names
sent           is in the log at most once, also when its outcome was unknown
in order       messages of one producer lie in each partition in the order in which it sent them
seen           whatever a consumer was given at an offset is there at the end: nothing was taken back
complete       no consumer of a group, and no reader, was given a message before all that lies before it
committed      never beyond what the group was given, and never back
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]
"""(partition, offset)."""


@dataclass
class History:
    """Written by producers as it happens; each has its own keys, so that threads do not meet."""

    acknowledged: dict[bytes, Place] = field(default_factory=dict)
    seen: list[tuple[Place, bytes]] = field(default_factory=list)


class Given:
    """What one group, or one reader, was given. Any thread."""

    def __init__(self, name: str, *, loss_accepted: bool = False) -> None:
        """`loss_accepted`: what was given may be taken back, and the group set back to before that."""
        self.seen: list[tuple[Place, bytes]] = []
        self.again = 0
        """Messages that were given before: at least once is what is promised."""
        self.commits = 0
        self.faults: list[str] = []
        self.upto: dict[str, int] = defaultdict(int)
        """Up to where everything was given."""
        self._name = name
        self._loss_accepted = loss_accepted
        self._committed: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def batch(self, partition: str, offset: int, values: Sequence[bytes]) -> None:
        """These messages were handed out, from this offset on."""
        with self._lock:
            upto = self.upto[partition]
            if offset > upto:
                self.faults.append(f"{self._name} was given {partition}/{offset}, and nothing from {upto} on")
            self.seen += [((partition, offset + number), value) for number, value in enumerate(values)]
            self.again += max(min(upto, offset + len(values)) - offset, 0)
            self.upto[partition] = max(upto, offset + len(values))

    def committed(self, partition: str, offset: int) -> None:
        """This stands in ZooKeeper: to be told in the order in which it was read, after it was read."""
        with self._lock:
            before, self._committed[partition] = self._committed[partition], offset
            self.commits += offset > before
            if offset < before and not self._loss_accepted:
                self.faults.append(f"the offset of {self._name} for {partition} went from {before} back to {offset}")
            if offset > self.upto[partition]:
                upto = self.upto[partition]
                self.faults.append(f"{self._name} has committed {partition}/{offset}, and was given it up to {upto}")

    def missed(self, log: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What is in the log and was not given, or something else at its place later."""
        with self._lock:
            last = dict(self.seen)
        return [
            f"{self._name} was not given {value!r} at {partition}/{offset}, but {last.get((partition, offset))!r}"
            for partition, values in log.items()
            for offset, value in enumerate(values)
            if last.get((partition, offset)) != value
        ]


def faults(history: History, log: Mapping[str, Sequence[bytes]]) -> list[str]:
    """What is wrong, given the logs at the end: partition -> values by offset. Values are b"producer-number"."""
    return [*_lost(history, log), *_doubled_or_displaced(log), *_taken_back(history.seen, log)]


def faults_after_accepted_loss(history: History, log: Mapping[str, Sequence[bytes]], generation: int) -> list[str]:
    """As faults(): what was acknowledged may be gone, and what was seen as well, if the generation says so."""
    return [*_doubled_or_displaced(log), *(_taken_back(history.seen, log) if generation == 1 else [])]


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
