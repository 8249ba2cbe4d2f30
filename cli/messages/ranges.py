"""The part of topics that a command reads: which partitions, from which place, up to which place."""

from __future__ import annotations

import sys
from collections.abc import Collection
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from metamq import Consumer
from metamq.cli.context import current
from metamq.cli.show.output import say
from metamq.errors import ConfigError, ConnectError, NotAuthorized, PartitionNotFound, TopicNotFound
from metamq.zk.names import is_pattern
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import PartitionDescription

Place = Literal["earliest", "latest"] | datetime | int
Ends = dict[TopicPartition, int]
Found = dict[TopicPartition, "PartitionDescription"]

NEVER = sys.maxsize
"""The end of a partition that is read without an end."""


class PollingConsumer(Consumer[bytes]):
    """A consumer whose loops end often: the command then checks for signals and a closed output."""

    _asks_for_the_end = False

    def has_all_partitions(self) -> bool:
        """Returns True if this consumer has all partitions of its plan, and the owners of the others run."""
        return self._background.run(self._core.end.has_all_partitions())


def matching_topics(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the topics; for a pattern such as "flights-*", the topics that exist now. Raises TopicNotFound."""
    if not any(map(is_pattern, names)):
        return names
    with current().admin() as admin:
        existing = list(admin.topics())
    return tuple(dict.fromkeys(topic for name in names for topic in _matching(name, existing)))


def _matching(name: str, existing: Collection[str]) -> Collection[str]:
    if not is_pattern(name):
        return [name]
    found = [topic for topic in existing if fnmatchcase(topic, name)]
    if not found:
        error = TopicNotFound(name, hint="`metamq topic list` shows the topics.")
        error.problem = f"no topic matches {name!r}"
        raise error
    return found


def describe_partitions(topics: tuple[str, ...], chosen: tuple[str, ...]) -> Found:
    """Returns the partitions of the topics: all, or those with the chosen names. Raises PartitionNotFound."""
    with current().admin() as admin:
        described = [admin.describe_topic(topic) for topic in topics]
    for name in chosen:
        if not any(name == part.partition for one in described for part in one.partitions):
            raise PartitionNotFound(topics[0], name, tuple(described[0].config.partition_names))
    return {
        TopicPartition(one.topic, part.partition): part
        for one in described
        for part in one.partitions
        if not chosen or part.partition in chosen
    }


def end_of(tp: TopicPartition, found: PartitionDescription) -> int:
    """Returns the end of the partition at the start of the command. Raises ConnectError if it is unknown, and
    NotAuthorized without the right to read."""
    if isinstance(found.error, NotAuthorized):
        raise found.error
    if found.stable_offset is None:
        reason = "it is not registered in ZooKeeper" if found.address is None else f"{tp}: {found.problem}"
        raise ConnectError(f"broker {found.broker_id}", reason, hint="`metamq doctor` checks every part.")
    return found.stable_offset


def ends_of(consumer: PollingConsumer, partitions: Found, until: Place | None, *, at_end: bool) -> Ends:
    """Returns the offset after the last message to read, for each partition: with `at_end`, at most its present end.

    A time moves the consumer: seek to its start afterwards.
    """
    if isinstance(until, datetime):
        seek(consumer, until, partitions)
        positions = consumer.health().partitions
        return {tp: positions[tp].done_offset for tp in partitions if tp in positions}
    ends = {tp: NEVER if until is None else _offset_of(tp, found, until) for tp, found in partitions.items()}
    return {tp: min(end, end_of(tp, partitions[tp])) if at_end else end for tp, end in ends.items()}


def _offset_of(tp: TopicPartition, found: PartitionDescription, place: Literal["earliest", "latest"] | int) -> int:
    if isinstance(place, int) and place >= 0:
        return place
    end = end_of(tp, found)
    assert found.start_offset is not None
    if isinstance(place, int):
        return max(end + place, found.start_offset)
    return end if place == "latest" else found.start_offset


def seek(consumer: Consumer[bytes], place: Place, partitions: Found) -> Ends:
    """Seeks to the place in each of the partitions, within its log. Returns the offset for which to wait, where it is
    above the present end. Says it if the log begins later."""
    awaited = {}
    for tp in consumer.assignment:
        found = partitions.get(tp)
        if found is None:
            continue
        if isinstance(place, int):
            end = end_of(tp, found)
            assert found.start_offset is not None
            wanted = end + place if place < 0 else place
            consumer.seek(tp, min(max(wanted, found.start_offset), end))
            if wanted > end:
                awaited[tp] = wanted
            elif 0 <= place < found.start_offset:
                say(f"{tp} begins at offset {found.start_offset}: the messages before it were removed.")
        else:
            consumer.seek(tp, place)
    return awaited


def check_range(place: Place, until: Place | None) -> None:
    """Raises ConfigError if the range is empty, whatever the log has."""
    same_kind = isinstance(place, int) and isinstance(until, int) and (place < 0) == (until < 0)
    times = isinstance(place, datetime) and isinstance(until, datetime)
    if (same_kind or times) and until <= place:  # type: ignore[operator]
        raise ConfigError("--until is not after --from", hint="Give a later offset or time as --until.")
