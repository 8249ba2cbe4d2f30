"""From where a query is to begin or to end, and from what the brokers say, to offsets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from metamq.errors import ConfigError, OffsetOutOfRange
from metamq.spark_consumers.source.boundaries import Boundary
from metamq.wire.commands import EARLIEST, LATEST, OffsetsResult
from metamq.zk.partitions import TopicPartition


def question(boundary: Boundary, wanted: int) -> int:
    """What to ask a broker for one partition: EARLIEST, LATEST or a time."""
    return wanted if boundary.is_time or wanted == EARLIEST else LATEST


def at_a_slave(
    boundary: Boundary, wanted: Mapping[TopicPartition, int], *, is_end: bool
) -> Callable[[TopicPartition, OffsetsResult], bool]:
    """Whether what a slave says of a partition tells where to begin, or to end: it may have less than its master."""

    def will_do(tp: TopicPartition, answer: OffsetsResult) -> bool:
        if boundary.is_time:
            return is_end or answer.timestamp_us >= 0
        return wanted[tp] in (EARLIEST, LATEST) or answer.start_offset <= wanted[tp] <= answer.stable_offset

    return will_do


def starting_offset(
    boundary: Boundary,
    wanted: int,
    tp: TopicPartition,
    answer: OffsetsResult,
    *,
    if_none_at_time: Literal["error", "latest"],
    fail_on_data_loss: bool,
) -> int:
    """Where to begin with a partition. Raises ConfigError, OffsetOutOfRange."""
    if boundary.is_time:
        if answer.timestamp_us < 0 and if_none_at_time == "error":
            raise ConfigError(
                f"{tp} has no message at or after the time that option {boundary.option!r} gives",
                hint="Give an earlier time, or startingOffsetsByTimestampStrategy=latest.",
            )
        return answer.offset
    if wanted in (EARLIEST, LATEST):
        return answer.offset
    return _explicit(boundary, wanted, tp, answer, fail_on_data_loss)


def ending_offset(
    boundary: Boundary, wanted: int, tp: TopicPartition, answer: OffsetsResult, *, fail_on_data_loss: bool
) -> int:
    """Where to end. Raises OffsetOutOfRange."""
    if boundary.is_time or wanted == LATEST:
        return answer.offset
    return _explicit(boundary, wanted, tp, answer, fail_on_data_loss)


def check_direction(
    starting: Boundary, ending: Boundary, wanted: int, tp: TopicPartition, start: int, end: int
) -> None:
    """Raises ConfigError where a query is to end before it begins. `wanted`: what the end is for this partition.

    That the end of the log is before the beginning is no fault of the user's: a new master does not show all of it yet.
    """
    if end < start and (ending.is_time or wanted != LATEST):
        raise ConfigError(
            f"{tp} is to be read from offset {start} on, by option {starting.option!r}, and up to {end}, by option "
            f"{ending.option!r}",
            hint="Give a later end, or an earlier start.",
        )


def _explicit(
    boundary: Boundary, wanted: int, tp: TopicPartition, answer: OffsetsResult, fail_on_data_loss: bool
) -> int:
    inside = min(max(wanted, answer.start_offset), answer.stable_offset)
    if inside != wanted and fail_on_data_loss:
        error = OffsetOutOfRange(str(tp), wanted, answer.start_offset, answer.stable_offset)
        error.hint = f"Correct option {boundary.option!r}; with failOnDataLoss=false the nearest offset is taken."
        raise error
    return inside
