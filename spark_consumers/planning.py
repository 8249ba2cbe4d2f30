"""Plans who reads what: asks for the offsets where a query begins and ends, and makes the tasks of its ranges."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from metamq.errors import MetamqError
from metamq.spark_consumers.boundaries import Boundary
from metamq.spark_consumers.cluster_view import ClusterView, Topics
from metamq.spark_consumers.fetch import FetchTask
from metamq.spark_consumers.options import SourceOptions
from metamq.spark_consumers.pushdown import Narrowing
from metamq.spark_consumers.ranges import OffsetRange, split
from metamq.spark_consumers.resolving import ending_offset, question, starting_offset
from metamq.wire.commands import OffsetsResult
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.spark")

ASK_AGAIN_S = 0.2


def batch_ranges(view: ClusterView, options: SourceOptions) -> list[OffsetRange]:
    """What a batch query reads, a range a partition. Raises what is wrong with the options, or what was lost."""
    partitions = view.partitions(options.subscription)
    starts = find_starts(view, options, partitions)
    wanted = options.ending.questions(partitions)
    answers = ask(view, options.ending, wanted, partitions, options.poll_timeout_s)
    ranges = []
    for tp, topic_id in partitions.items():
        end = ending_offset(options.ending, wanted[tp], tp, answers[tp], fail_on_data_loss=options.fail_on_data_loss)
        ranges.append(OffsetRange(tp, topic_id, starts[tp], max(end, starts[tp])))
    return ranges


def narrowed(view: ClusterView, options: SourceOptions, ranges: list[OffsetRange], to: Narrowing) -> list[OffsetRange]:
    """The ranges without what the query's filters rule out."""
    ranges = to.applied(ranges)
    if to.not_before_us is None:
        return ranges
    questions = {one.tp: (one.topic_id, to.not_before_us) for one in ranges}
    answers = ask_until_answered(view, questions, options.poll_timeout_s)
    return [one._replace(start=min(max(one.start, answers[one.tp].offset), one.end)) for one in ranges]


def find_starts(view: ClusterView, options: SourceOptions, partitions: Topics) -> dict[TopicPartition, int]:
    """Where the query begins, by its options."""
    wanted = options.starting.questions(partitions)
    answers = ask(view, options.starting, wanted, partitions, options.poll_timeout_s)
    return {
        tp: starting_offset(
            options.starting,
            wanted[tp],
            tp,
            answers[tp],
            if_none_at_time=options.if_no_offset_at_time,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        for tp in partitions
    }


def ask(
    view: ClusterView,
    boundary: Boundary,
    wanted: Mapping[TopicPartition, int],
    partitions: Topics,
    timeout_s: float,
) -> dict[TopicPartition, OffsetsResult]:
    """The brokers' answer for every partition. Raises the error of one that does not come in time."""
    questions = {tp: (partitions[tp], question(boundary, wanted[tp])) for tp in partitions}
    return ask_until_answered(view, questions, timeout_s)


def ask_until_answered(
    view: ClusterView, questions: Mapping[TopicPartition, tuple[str, int]], timeout_s: float
) -> dict[TopicPartition, OffsetsResult]:
    """As ask(), with what to ask for."""
    deadline = time.monotonic() + timeout_s
    answers: dict[TopicPartition, OffsetsResult] = {}
    left = dict(questions)
    while left:
        for tp, found in view.offsets(left).items():
            if isinstance(found, OffsetsResult):
                answers[tp] = found
                del left[tp]
            elif not found.retriable or time.monotonic() > deadline:
                raise found
            else:
                log.info("where %s begins and ends is asked again: %s", tp, found)
        if left:
            time.sleep(ASK_AGAIN_S)
    return answers


def tasks(
    view: ClusterView,
    options: SourceOptions,
    ranges: Iterable[OffsetRange],
    epochs: Mapping[TopicPartition, int] | None = None,
) -> list[FetchTask]:
    """The tasks for ranges, cut as the options say. `epochs`: of the message before each range, where it is known."""
    pieces = split(ranges, options.min_partitions, options.max_records_per_partition)
    with_slaves = options.read_from == "any"
    try:
        replicas = view.replicas({piece.tp for piece in pieces}, with_slaves=with_slaves)
    except MetamqError as error:  # tasks look them up
        log.info("where brokers are is not known at present: %s", error)
        replicas = {}
    begun: set[TopicPartition] = set()
    made = []
    for piece in pieces:
        epoch = -1 if piece.tp in begun else (epochs or {}).get(piece.tp, -1)
        begun.add(piece.tp)
        made.append(
            FetchTask(
                wanted=piece,
                replicas=replicas.get(piece.tp, ()),
                zookeeper=options.zookeeper,
                root=options.root,
                epoch=epoch,
                fail_on_data_loss=options.fail_on_data_loss,
                with_slaves=with_slaves,
                poll_timeout_s=options.poll_timeout_s,
            )
        )
    return made
