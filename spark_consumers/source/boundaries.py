"""The start or the end of a query: one place for all partitions, or one for each, as offsets or as times."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from metamq.errors import ConfigError, MetamqError
from metamq.wire.commands import EARLIEST, LATEST
from metamq.words import count
from metamq.zk.names import check_topic, parse_partition
from metamq.zk.partitions import TopicPartition, partition_order

T = TypeVar("T")

_EXAMPLE = '{"flights": {"0-0": 23, "0-1": -2}}'
_MARKS = {"earliest": EARLIEST, "latest": LATEST}
_NAMED_MAX = 5
_TIME_MAX_MS = 253_402_300_799_999
"""The end of the year 9999. A larger number is probably in microseconds."""
_FOR_EVER_MS = 2**63 - 1
"""Java's Long.MaxValue: after every message, as in Spark's Kafka source."""
_LIKELY_SECONDS = range(10**9, 10**10)
"""The years 2001 to 2286 in seconds. In milliseconds these numbers are in 1970, from which few have messages."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The start or the end of a query, as the option `option` gives it."""

    option: str
    everywhere: int | None
    """A mark, EARLIEST or LATEST, or a time in microseconds; None: see `each`."""
    each: Mapping[TopicPartition, int] | None = None
    """Offsets or marks, or times, by partition."""
    is_time: bool = False
    topics: Mapping[str, int] = field(default_factory=dict)
    """Marks, or times, for all partitions of a topic; `each` overrides them."""

    def questions(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns for each partition its offset or mark, or its time.

        Raises ConfigError if the option names partitions, but not exactly these.
        """
        if self.each is None:
            assert self.everywhere is not None
            return dict.fromkeys(partitions, self.everywhere)
        found = {tp: wanted for tp in partitions if (wanted := self.wanted(tp)) is not None}
        missing, beyond = set(partitions) - set(found), set(self.each) - set(partitions)
        if missing:
            hint = "Name every partition of the topics that are read; -2 is the earliest offset, -1 the latest."
            raise ConfigError(f"option {self.option!r} lacks {_named(missing)}", hint=hint)
        if beyond:
            hint = f"There are: {_named(partitions)}."
            raise ConfigError(f"option {self.option!r} names {_named(beyond)}, which is not read", hint=hint)
        unread = set(self.topics) - {tp.topic for tp in partitions}
        if unread:
            hint = f"There are: {', '.join(sorted({tp.topic for tp in partitions}))}."
            raise ConfigError(f"option {self.option!r} names topic {min(unread)!r}, which is not read", hint=hint)
        return found

    def wanted(self, tp: TopicPartition | None) -> int | None:
        """Returns the value for one partition, or None if the option does not name it."""
        if self.each is None:
            return self.everywhere
        return self.each.get(tp, self.topics.get(tp.topic)) if tp is not None else None

    def doubt(self) -> str | None:
        """Returns a warning about a time that is valid, but probably a mistake."""
        if not self.is_time:
            return None
        times = [*([] if self.everywhere is None else [self.everywhere]), *(self.each or {}).values()]
        times += self.topics.values()
        time_ms = next((us // 1000 for us in times if us // 1000 in _LIKELY_SECONDS), None)
        if time_ms is None:
            return None
        return f"option {self.option!r} has the time {time_ms}, in 1970, probably in seconds: give milliseconds"


def check_order(starting: Boundary, ending: Boundary) -> None:
    """Raises ConfigError if a query would end before it begins, as far as the options show that without the logs."""
    if starting.is_time != ending.is_time:
        return
    named: list[TopicPartition | None] = [*(starting.each or ()), *(ending.each or ()), None]
    named += [TopicPartition(topic, "") for topic in (*starting.topics, *ending.topics)]
    for tp in named:
        start, end = starting.wanted(tp), ending.wanted(tp)
        if start is not None and end is not None and 0 <= end < start:
            where = "" if tp is None else f" for {tp if tp.partition else tp.topic}"
            problem = f"option {ending.option!r} ends{where} before {starting.option!r} begins"
            raise ConfigError(problem, hint="Give a later end, or an earlier start.")


def _named(partitions: Collection[TopicPartition]) -> str:
    shown = sorted(partitions, key=partition_order)[:_NAMED_MAX]
    more = len(partitions) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {count(more, 'other')}" if more else "")


def offsets_boundary(option: str, text: str, *, refused: int | None = None) -> Boundary:
    """Parses `startingOffsets` or `endingOffsets`. `refused` is the mark that makes no sense there."""
    allowed = [name for name, mark in _MARKS.items() if mark != refused]
    mark = _MARKS.get(text.strip().lower())
    if mark is not None:
        if mark == refused:
            raise ConfigError(f"option {option!r} is {text!r}", hint=f"Choose {allowed[0]!r}, or offsets: {_EXAMPLE}.")
        return Boundary(option, mark)
    topics, each = _topics_and_partitions(option, text)
    for name, wanted in topics.items():
        offset = _MARKS.get(wanted.strip().lower()) if isinstance(wanted, str) else wanted
        if offset not in _MARKS.values() or offset == refused:
            choices = " or ".join(f'{{"{name}": "{one}"}}' for one in allowed)
            problem = f"option {option!r} has {wanted!r} for topic {name!r}"
            raise ConfigError(problem, hint=f"For a whole topic: {choices}; for its partitions, offsets: {_EXAMPLE}.")
        topics[name] = offset
    for tp, offset in each.items():
        if offset < EARLIEST or offset == refused:
            name = allowed[0] if len(allowed) == 1 else "earliest or latest"
            hint = f"An offset is 0 or more; {' and '.join(str(_MARKS[one]) for one in allowed)}: {name}."
            raise ConfigError(f"option {option!r} has the offset {offset} for {tp}", hint=hint)
    return Boundary(option, None, each, topics=topics)


def time_boundary(option: str, text: str) -> Boundary:
    """Parses `startingTimestamp` or `endingTimestamp`: one time for all partitions."""
    if not text.strip().isdecimal() or (time_us := _time_us(int(text))) is None:
        hint = "Give the milliseconds since 1970, UTC, as in 1735689600000."
        raise ConfigError(f"option {option!r} is {text!r}, not a time", hint=hint)
    return Boundary(option, time_us, is_time=True)


def times_boundary(option: str, text: str) -> Boundary:
    """Parses `…OffsetsByTimestamp`: a time for each partition, or for all of a topic."""
    topics, each = _topics_and_partitions(option, text)
    of_topics = {name: _checked_time(option, f"topic {name!r}", time_ms) for name, time_ms in topics.items()}
    of_partitions = {tp: _checked_time(option, str(tp), time_ms) for tp, time_ms in each.items()}
    return Boundary(option, None, of_partitions, is_time=True, topics=of_topics)


def _checked_time(option: str, where: str, time_ms: object) -> int:
    time_us = _time_us(time_ms) if type(time_ms) is int else None
    if time_us is None:
        hint = "Give the milliseconds since 1970, UTC."
        raise ConfigError(f"option {option!r} has the time {time_ms!r} for {where}", hint=hint)
    return time_us


def _time_us(time_ms: int) -> int | None:
    """Returns microseconds; None if no message can have this time."""
    if time_ms == _FOR_EVER_MS:
        return _FOR_EVER_MS
    return time_ms * 1000 if 0 <= time_ms <= _TIME_MAX_MS else None


def _topics_and_partitions(option: str, text: str) -> tuple[dict[str, Any], dict[TopicPartition, int]]:
    """Reads JSON: returns the values for whole topics, unchecked, and the numbers by partition. Raises ConfigError."""
    document = json_map(option, text, _EXAMPLE)
    topics: dict[str, Any] = {}
    found: dict[TopicPartition, int] = {}
    for topic, partitions in document.items():
        if type(partitions) in (str, int):
            checked(option, check_topic, topic)
            topics[topic] = partitions
            continue
        if not isinstance(partitions, dict):
            raise ConfigError(f"option {option!r}: {topic!r} has no map of partitions", hint=f"As in {_EXAMPLE}.")
        for partition, number in partitions.items():
            if type(number) is not int:
                problem = f"option {option!r} has {number!r} for {topic}/{partition}, not a whole number"
                raise ConfigError(problem, hint=f"As in {_EXAMPLE}.")
            found[checked_partition(option, topic, partition)] = number
    return topics, found


def json_map(option: str, text: str, example: str) -> dict[str, Any]:
    """Returns a JSON object that is not empty. Raises ConfigError."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option {option!r} is not JSON: {error}", hint=f"As in {example}.") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"option {option!r} is not a JSON object with topics", hint=f"As in {example}.")
    return document


def checked_partition(option: str, topic: str, partition: object) -> TopicPartition:
    """Returns the partition if both names are valid. Raises ConfigError that names the option."""
    checked(option, check_topic, topic)
    checked(option, parse_partition, partition)  # refuses other types than strings, too
    return TopicPartition(topic, str(partition))


def checked(option: str, check: Callable[[Any], T], value: object) -> T:
    """Returns the result of the check. Its error becomes a ConfigError that names the option."""
    try:
        return check(value)
    except MetamqError as error:
        raise ConfigError(f"option {option!r}: {error.problem}", hint=error.hint) from None
