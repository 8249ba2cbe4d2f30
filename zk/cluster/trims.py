"""The trims of a topic, in its configuration: the offset before which each partition's messages are deleted.

Every replica applies them to its own log, whenever it reads the configuration: also one that was away, and one that is
promoted. The configuration is exported and restored with the cluster. So no replica shows the messages again.

An offset alone does not name messages: after an accepted loss a new master stores other messages at the same offsets.
So a trim has an epoch, too. It deletes the messages before its offset that have this epoch or an earlier one. A message
of a later epoch was stored after the command, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from metamq.errors import ConfigError
from metamq.zk.documents import fields

NUMBER_MAX = (1 << 63) - 1


class Trim(NamedTuple):
    """The messages of one partition that are deleted: those before `offset`, of `epoch` and earlier ones."""

    offset: int
    epoch: int


Trims = Mapping[str, Trim]
"""By the partition's name."""
NO_TRIMS: Trims = {}


def trims_of(document: Mapping[str, Any]) -> Trims:
    """Reads the part of the topic's document. Raises ValueError, TypeError."""
    return {name: Trim(*pair) for name, pair in fields(document).items()}


def check_trims(topic: str, trims: Trims) -> None:
    """Raises ConfigError if a trim is not a pair of numbers. Its partition may be gone, with its broker."""
    for name, trim in trims.items():
        if not all(type(number) is int and 0 <= number <= NUMBER_MAX for number in trim):
            hint = "It has to be two whole numbers, an offset and an epoch, from 0 on."
            raise ConfigError(f"topic {topic!r}: the trim of partition {name} is {[*trim]!r}", hint=hint)


def check_trims_follow(topic: str, before: Trims, after: Trims) -> None:
    """Raises ConfigError if a trim goes back: messages that are deleted at one replica would come back at another."""
    for name, trim in before.items():
        new = after.get(name)
        if new is None or (new.offset < trim.offset and new.epoch <= trim.epoch):
            raise ConfigError(
                f"topic {topic!r}: the messages of partition {name} before offset {trim.offset:,} are deleted, and "
                "cannot come back",
                hint="Read the topic's configuration again.",
            )
