"""The choice of a message's partition: a pure function over the topic's *configured* partitions, available or not.

A choice over the available partitions would move keys whenever a broker restarts, and break the order of a key's
messages. Messages for the partition of a missing broker wait.
"""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c

from metamq.errors import ConfigError
from metamq.words import count

Partitioner = Callable[[str, bytes, int], int]
"""(topic, key, number of partitions) -> index among the topic's partitions in numeric order. It must be fast."""


def by_key_hash(topic: str, key: bytes, count: int) -> int:
    """Returns the CRC-32C of the key, scaled to the number of partitions. The default for messages with a key.

    The number comes from the high bits of the sum. Keys that differ in their last digit may agree in its low bits.
    """
    return int(crc32c(key)) * count >> 32


class RoundRobin:
    """Chooses the partitions in turn, whatever the key is. Messages without a key never reach a partitioner."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes, count: int) -> int:
        number = self._next.get(topic, 0)
        self._next[topic] = number + 1
        return number % count


def partitioner_named(choice: str | Partitioner) -> Partitioner:
    """Returns the partitioner of a name ("key_hash", "round_robin") or a callable. Raises ConfigError."""
    if callable(choice):
        return choice
    if choice == "key_hash":
        return by_key_hash
    if choice == "round_robin":
        return RoundRobin()
    raise ConfigError(f"unknown partitioner {choice!r}", hint="Choose 'key_hash', 'round_robin', or give a callable.")


def check_number(number: object, partitions: int) -> None:
    """Raises ConfigError unless a partitioner may return this for a topic of so many partitions."""
    if not isinstance(number, int) or not 0 <= number < partitions:
        raise ConfigError(
            f"the partitioner returned {number!r} for a topic of {count(partitions, 'partition')}",
            hint="It must return an index among them: 0, 1, and so on.",
        )
