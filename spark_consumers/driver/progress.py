"""One step of a streaming query: computes the end of the next batch from the query's place and the brokers' answers.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from metamq.errors import MetamqError, OffsetDiverged, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from metamq.spark_consumers.driver.stream_offsets import Places, StreamOffset, StreamPlace
from metamq.wire.commands import OffsetsResult

if TYPE_CHECKING:
    from metamq.client.admin.admin_brokers import Found
    from metamq.zk.partitions import TopicPartition

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch."""

    most: int | None = None
    least: int | None = None
    waited_s: float = 0.0
    delay_max_s: float = 0.0
    target: Mapping[TopicPartition, StreamPlace] | None = None
    """The end of the query: it reads these partitions up to these places. None: it has no end."""


@dataclass(frozen=True, slots=True)
class QueryStep:
    """The result of a step."""

    offset: StreamOffset | None
    """None: there is no batch to run now."""
    losses: list[MetamqError]
    """Messages of the query that are lost."""


def lost_partitions(before: Places, present: Mapping[TopicPartition, str]) -> list[MetamqError]:
    """Returns the losses by partitions that the cluster does not have any more, or whose topic was deleted and created
    again."""
    losses: list[MetamqError] = []
    for tp, place in before.items():
        if tp not in present:
            topics = {one.topic for one in present}
            gone = PartitionNotFound(*tp) if tp.topic in topics else TopicNotFound(tp.topic)
            what = str(tp) if tp.topic in topics else f"topic {tp.topic!r}"
            gone.problem = f"{what}, which the query has read, is no longer among its partitions"
            gone.hint = "It was deleted, or the query subscribes to less than before."
            losses.append(gone)
        elif present[tp] != place.topic_id:
            losses.append(TopicNotFound.made_anew(tp.topic, present[tp], place.topic_id))
    return losses


def _lost_messages(tp: TopicPartition, known: StreamPlace, answer: Found | None) -> MetamqError | None:
    """Returns the loss in a partition that still exists: by retention, or by a promotion with an accepted loss."""
    if isinstance(answer, OffsetDiverged):
        return answer
    if isinstance(answer, OffsetsResult) and answer.start_offset > known.offset:
        return OffsetOutOfRange(str(tp), known.offset, answer.start_offset, answer.stable_offset)
    return None


def begin(
    before: Places, present: Mapping[TopicPartition, str], answers: Mapping[TopicPartition, Found]
) -> dict[TopicPartition, StreamPlace]:
    """Returns the places where the next batch begins: where the last one ended.

    A new partition is read from its start, once that is known. If messages are lost, the batch begins at the next
    message that exists: at the log's start, or where the log diverges from the messages that were read.
    """
    begun = {}
    for tp, topic_id in present.items():
        known, answer = before.get(tp), answers.get(tp)
        if known is None or known.topic_id != topic_id:
            if isinstance(answer, OffsetsResult):
                begun[tp] = StreamPlace(topic_id, answer.start_offset)
        elif isinstance(answer, OffsetDiverged):
            begun[tp] = StreamPlace(topic_id, answer.agreed, answer.epoch)
        elif isinstance(answer, OffsetsResult) and answer.start_offset > known.offset:
            begun[tp] = StreamPlace(topic_id, answer.start_offset)
        else:
            begun[tp] = known
    return begun


def reachable(
    target: Places, before: Places, answers: Mapping[TopicPartition, Found]
) -> dict[TopicPartition, StreamPlace]:
    """Returns the target without its unreachable part: if a log diverges from the read messages, it ends there.

    A target that was fixed with the new log stays. If the query is before the divergence, the answer shows that by an
    epoch that is newer than the target's and begins before the target.
    """
    found = dict(target)
    for tp, place in target.items():
        answer = answers.get(tp)
        if isinstance(answer, OffsetDiverged):
            if place.epoch <= before[tp].epoch:
                found[tp] = StreamPlace(place.topic_id, answer.agreed, answer.epoch)
            continue
        known = before.get(tp)
        if known is None or known.topic_id != place.topic_id:
            known = StreamPlace(place.topic_id, 0)
        found[tp] = _before_newer_epochs(place, known, _epochs(answer))
    return found


def _before_newer_epochs(target: StreamPlace, known: StreamPlace, epochs: list[tuple[int, int]]) -> StreamPlace:
    """Returns the target, or the last place before it in its history; `epochs` are the epochs from `known` on."""
    common = known
    for epoch, until in epochs:
        if epoch > target.epoch >= 0:
            return common if common.offset < target.offset else target
        common = known._replace(offset=until, epoch=epoch)
    return target


def step(
    before: Places,
    begun: dict[TopicPartition, StreamPlace],
    answers: Mapping[TopicPartition, Found],
    limits: BatchLimits,
) -> QueryStep:
    """Returns the next batch. Without a target, a broker that could not be reached has no new messages."""
    losses = []
    ends: dict[TopicPartition, StreamPlace] = {}
    for tp, place in begun.items():
        known = before.get(tp)
        if known is not None and known.topic_id != place.topic_id:
            known = None
        loss = _lost_messages(tp, known, answers.get(tp)) if known is not None else None
        if loss is not None:
            losses.append(loss)
        if limits.target is None:
            ends[tp] = _end(place, answers.get(tp))
        elif _is_in(limits.target, tp, place):
            bound = limits.target[tp]
            ends[tp] = bound if bound.offset > place.offset else place
        elif known is not None:
            ends[tp] = place
    begun = {tp: begun[tp] for tp in ends}
    first = {tp: place.offset for tp, place in begun.items()}
    last = {tp: place.offset for tp, place in ends.items()}
    found = sum(last[tp] - first[tp] for tp in first)
    is_same = begun == dict(before)
    if is_same and not is_enough(found, limits.least, limits.waited_s, limits.delay_max_s):
        return QueryStep(None, losses)
    admitted = admit(first, last, limits.most)
    reached = {tp: _reached(offset, begun[tp], ends[tp], answers.get(tp)) for tp, offset in admitted.items()}
    return QueryStep(StreamOffset(begun, reached), losses)


def _is_in(target: Mapping[TopicPartition, StreamPlace], tp: TopicPartition, place: StreamPlace) -> bool:
    return tp in target and target[tp].topic_id == place.topic_id


def _end(place: StreamPlace, answer: Found | None) -> StreamPlace:
    if isinstance(answer, OffsetsResult) and answer.stable_offset > place.offset:
        return StreamPlace(place.topic_id, answer.stable_offset, answer.epoch)
    return place


def _reached(offset: int, begun: StreamPlace, end: StreamPlace, answer: Found | None) -> StreamPlace:
    """Returns the place at `offset`, or shortly before it if the answer has no epochs up to `offset`."""
    if offset in (begun.offset, end.offset):
        return begun if offset == begun.offset else end
    if begun.epoch == end.epoch >= 0:  # epochs rise
        return end._replace(offset=offset)
    known = [(epoch, until) for epoch, until in _epochs(answer) if until > begun.offset]
    for epoch, until in known:
        if offset <= until:
            return end._replace(offset=offset, epoch=epoch)
    if known:
        return end._replace(epoch=known[-1][0], offset=known[-1][1])
    return end._replace(offset=offset, epoch=-1)


def _epochs(answer: Found | None) -> list[tuple[int, int]]:
    return answer.epochs if isinstance(answer, OffsetsResult) else []


def admit(begun: Mapping[K, int], ends: Mapping[K, int], most: int | None) -> dict[K, int]:
    """Returns the end of each partition's share: in proportion to its messages, and at least one message if it has any.

    So a trigger may take more than `most`, by at most one message for each partition.
    """
    sizes = {tp: max(ends[tp] - begun[tp], 0) for tp in begun}
    total = sum(sizes.values())
    if most is None or total <= most:
        return {tp: begun[tp] + sizes[tp] for tp in begun}
    return {tp: begun[tp] + (max(sizes[tp] * most // total, 1) if sizes[tp] else 0) for tp in begun}


def is_enough(found: int, least: int | None, waited_s: float, delay_max_s: float) -> bool:
    """True if `found` messages make a batch: as many as wanted, or any after the longest wait."""
    if least is None or found >= least:
        return found > 0
    return found > 0 and waited_s >= delay_max_s
