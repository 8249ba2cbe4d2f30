"""Turns a query's options and the brokers' answers into the offsets where it begins and ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from metamq.errors import ConfigError, OffsetOutOfRange
from metamq.wire.commands import EARLIEST, LATEST, OffsetsResult

if TYPE_CHECKING:
    from metamq.spark_consumers.source.boundaries import Boundary
    from metamq.zk.partitions import TopicPartition


def question(boundary: Boundary, wanted: int) -> int:
    """Returns the question to a broker for one partition: EARLIEST, LATEST or a time."""
    return wanted if boundary.is_time or wanted == EARLIEST else LATEST


def slave_check_for(
    boundary: Boundary, wanted: Mapping[TopicPartition, int], *, is_end: bool
) -> Callable[[TopicPartition, OffsetsResult], bool]:
    """Returns a check if a slave's answer is enough for the start, or the end: it may have less than its master."""

    def slave_check(tp: TopicPartition, answer: OffsetsResult) -> bool:
        if boundary.is_time:
            return is_end or answer.timestamp_us >= 0
        return wanted[tp] in (EARLIEST, LATEST) or answer.start_offset <= wanted[tp] <= answer.stable_offset

    return slave_check


def chosen_offset(
    boundary: Boundary,
    wanted: int,
    tp: TopicPartition,
    answer: OffsetsResult,
    *,
    if_none_at_time: Literal["error", "latest"] = "latest",
    fail_on_data_loss: bool,
) -> int:
    """Returns the offset to begin or to end at. Raises ConfigError, OffsetOutOfRange."""
    if boundary.is_time and answer.timestamp_us < 0 and if_none_at_time == "error":
        raise ConfigError(
            f"{tp} has no message at or after the time that option {boundary.option!r} gives",
            hint="Give an earlier time, or startingOffsetsByTimestampStrategy=latest.",
        )
    if boundary.is_time or wanted in (EARLIEST, LATEST):
        return answer.offset
    inside = min(max(wanted, answer.start_offset), answer.stable_offset)
    if inside != wanted and fail_on_data_loss:
        error = OffsetOutOfRange(str(tp), wanted, answer.start_offset, answer.stable_offset)
        error.hint = f"Correct option {boundary.option!r}; with failOnDataLoss=false the nearest offset is used."
        raise error
    return inside


def check_direction(
    starting: Boundary, ending: Boundary, wanted: int, tp: TopicPartition, start: int, end: int
) -> None:
    """Raises ConfigError if a query would end before it begins. `wanted`: the end for this partition by the option.

    If the end of the log is before the start, the user made no mistake: a new master does not show all of it yet.
    """
    if end < start and (ending.is_time or wanted != LATEST):
        raise ConfigError(
            f"option {starting.option!r} begins {tp} at offset {start}, and option {ending.option!r} ends it at {end}",
            hint="Give a later end, or an earlier start.",
        )
