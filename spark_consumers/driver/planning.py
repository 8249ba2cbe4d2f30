"""Plans a query: asks for the offsets where it begins and ends, and makes the tasks of its ranges.

The masters answer. If a broker has no master for a moment, and no slave is promoted, a batch query that reads from
slaves uses a slave's answer: its tasks read the slave's messages. Later messages that the master has acknowledged may
be missing, so the driver warns. If the slave does not have a requested offset or time, the driver waits for the master.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from metamq.client.scan.cluster_view import ask_until_answered, offset_inside
from metamq.client.scan.fetch import FetchTask
from metamq.client.scan.ranges import OffsetRange, split
from metamq.errors import ConfigError, MetamqError
from metamq.wire.commands import EARLIEST, LATEST, OffsetsResult
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.scan.cluster_view import SlaveCheck, Topics
    from metamq.spark_consumers.driver.query_view import QueryView
    from metamq.spark_consumers.source.boundaries import Boundary
    from metamq.spark_consumers.source.options import SourceOptions
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.spark")


def batch_ranges(view: QueryView, options: SourceOptions) -> list[OffsetRange]:
    """Returns the ranges of a batch query, one per partition. Raises for a wrong option, and for lost messages."""
    partitions = view.partitions(options.subscription)
    with_slaves = options.read_from == "any"
    starts = find_starts(view, options, partitions, with_slaves=with_slaves)
    wanted = options.ending.questions(partitions)
    slave_check = slave_check_for(options.ending, wanted, is_end=True) if with_slaves else None
    answers = ask(view, options.ending, wanted, partitions, options.poll_timeout_s, slave_check)
    ranges = []
    for tp, topic_id in partitions.items():
        end = chosen_offset(options.ending, wanted[tp], tp, answers[tp], fail_on_data_loss=options.fail_on_data_loss)
        start, _epoch = starts[tp]
        check_direction(options.starting, options.ending, wanted[tp], tp, start, end)
        ranges.append(OffsetRange(tp, topic_id, start, max(end, start)))
    return ranges


def find_starts(
    view: QueryView, options: SourceOptions, partitions: Topics, *, with_slaves: bool = False
) -> dict[TopicPartition, tuple[int, int]]:
    """Returns the query's start by its options, and the epoch of the message before (-1: unknown)."""
    if not partitions:  # the other kinds of subscription raise an error
        log.warning("no topic matches option 'subscribePattern', %r, at present", options.subscription.pattern)
    wanted = options.starting.questions(partitions)
    slave_check = slave_check_for(options.starting, wanted, is_end=False) if with_slaves else None
    answers = ask(view, options.starting, wanted, partitions, options.poll_timeout_s, slave_check)
    starts = {}
    for tp in partitions:
        answer = answers[tp]
        offset = chosen_offset(
            options.starting,
            wanted[tp],
            tp,
            answer,
            if_none_at_time=options.if_no_offset_at_time,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        starts[tp] = offset, answer.epoch if offset == answer.offset else -1
    return starts


def ask(
    view: QueryView,
    boundary: Boundary,
    wanted: Mapping[TopicPartition, int],
    partitions: Topics,
    timeout_s: float,
    slave_check: SlaveCheck | None = None,
) -> dict[TopicPartition, OffsetsResult]:
    """Returns the brokers' answer for every partition. Raises the error of a broker that does not answer in time.

    `slave_check`: checks a slave's answer if there is no master; None: only masters are asked.
    """
    if doubt := boundary.doubt():
        log.warning("%s", doubt)
    questions = {tp: (partitions[tp], question(boundary, wanted[tp])) for tp in partitions}
    return ask_until_answered(view, questions, timeout_s, slave_check)


def tasks(
    view: QueryView,
    options: SourceOptions,
    ranges: Iterable[OffsetRange],
    epochs: Mapping[TopicPartition, tuple[int, int]] | None = None,
    *,
    topics: Collection[str],
    is_last: bool = True,
) -> list[FetchTask]:
    """Returns the tasks for the ranges, cut as the options say.

    `topics`: those of the whole query. `is_last`: it has no further batch.

    `epochs`: (epoch of the message before the range, epoch of its last message), if known.
    """
    pieces = split(ranges, options.min_partitions, options.max_records_per_partition)
    with_slaves = options.read_from == "any"
    access = options.access
    if access.security.is_on and options.token_lifetime_s and pieces:
        access = view.delegated(access, topics, options.token_lifetime_s, keep=not is_last)
    try:
        replicas = view.replicas({piece.tp for piece in pieces}, with_slaves=with_slaves)
    except MetamqError as error:  # tasks look them up
        log.info("the addresses of brokers are unknown at present: %s", error)
        replicas = {}
    begun: set[TopicPartition] = set()
    made = []
    for piece in pieces:
        epoch, last_epoch = (epochs or {}).get(piece.tp, (-1, -1))
        if piece.tp in begun:
            epoch = -1
        begun.add(piece.tp)
        made.append(
            FetchTask(
                wanted=piece,
                replicas=replicas.get(piece.tp, ()),
                access=access,
                epoch=epoch,
                last_epoch=last_epoch,
                fail_on_data_loss=options.fail_on_data_loss,
                with_slaves=with_slaves,
                poll_timeout_s=options.poll_timeout_s,
                in_place=options.read_files,
            )
        )
    return made


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
    hint = f"Correct option {boundary.option!r}; with failOnDataLoss=false the nearest offset is used."
    return offset_inside(tp, wanted, answer, hint if fail_on_data_loss else None)


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
