"""One step of a streaming query: from where it is and what the brokers say to where the next batch ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metamq.client.admin_brokers import Found
from metamq.errors import MetamqError, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from metamq.spark_consumers.admission import admit, is_enough
from metamq.spark_consumers.stream_offsets import Places, StreamOffset, StreamPlace
from metamq.wire.commands import OffsetsResult
from metamq.zk.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    most: int | None = None
    least: int | None = None
    waited_s: float = 0.0
    delay_max_s: float = 0.0
    target: Mapping[TopicPartition, StreamPlace] | None = None
    """Nothing beyond is read, nor a partition that is not in it; None: whatever there is."""


@dataclass(frozen=True, slots=True)
class Step:
    """What comes of it."""

    offset: StreamOffset | None
    """None: there is no batch to be run now."""
    losses: list[MetamqError]
    """Messages that were to be read and are gone."""


def lost_partitions(before: Places, present: Mapping[TopicPartition, str]) -> list[MetamqError]:
    """What is gone with partitions: of the query, but not of the cluster any more, or of a topic made anew."""
    losses: list[MetamqError] = []
    for tp, place in before.items():
        if tp not in present:
            topics = {one.topic for one in present}
            gone = PartitionNotFound(*tp) if tp.topic in topics else TopicNotFound(tp.topic)
            gone.hint = "The query has read from it. Was it deleted, or does the query subscribe to less than before?"
            losses.append(gone)
        elif present[tp] != place.topic_id:
            losses.append(
                TopicNotFound(
                    tp.topic,
                    hint=f"It was deleted and made anew since the query read it: its id is {present[tp]}, "
                    f"not {place.topic_id}.",
                )
            )
    return losses


def begin(
    before: Places, present: Mapping[TopicPartition, str], answers: Mapping[TopicPartition, Found]
) -> dict[TopicPartition, StreamPlace]:
    """Where the next batch begins: partitions that are new are read from their start, once that is known."""
    begun = {}
    for tp, topic_id in present.items():
        known, answer = before.get(tp), answers.get(tp)
        if known is not None and known.topic_id == topic_id:
            begun[tp] = known
        elif isinstance(answer, OffsetsResult):
            begun[tp] = StreamPlace(topic_id, answer.start_offset)
    return begun


def step(
    before: Places,
    begun: dict[TopicPartition, StreamPlace],
    answers: Mapping[TopicPartition, Found],
    limits: Limits,
) -> Step:
    """The next batch. `answers` are of the brokers that could be reached; the others have nothing new."""
    losses: list[MetamqError] = []
    ends: dict[TopicPartition, StreamPlace] = {}
    for tp, place in begun.items():
        answer = answers.get(tp)
        if limits.target is not None and tp not in limits.target and tp not in before:
            continue
        ends[tp] = place
        if isinstance(answer, OffsetsResult):
            if answer.start_offset > place.offset:
                losses.append(OffsetOutOfRange(str(tp), place.offset, answer.start_offset, answer.stable_offset))
            if answer.stable_offset > place.offset:
                ends[tp] = StreamPlace(place.topic_id, answer.stable_offset, answer.epoch)
        if limits.target is not None:
            bound = limits.target.get(tp, place)
            if ends[tp].offset > bound.offset:
                ends[tp] = bound if bound.offset > place.offset else place
    begun = {tp: begun[tp] for tp in ends}
    first = {tp: place.offset for tp, place in begun.items()}
    last = {tp: place.offset for tp, place in ends.items()}
    found = sum(last[tp] - first[tp] for tp in first)
    is_same = begun == dict(before)
    if is_same and not is_enough(found, limits.least, limits.waited_s, limits.delay_max_s):
        return Step(None, losses)
    admitted = admit(first, last, limits.most)
    reached = {}
    for tp, offset in admitted.items():
        whole, none = ends[tp], begun[tp]
        reached[tp] = (
            whole
            if offset == whole.offset
            else none
            if offset == none.offset
            else whole._replace(offset=offset, epoch=-1)
        )
    return Step(StreamOffset(begun, reached), losses)
