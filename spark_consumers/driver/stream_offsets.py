"""The offsets of a streaming query, in the form in which Spark keeps them in the query's checkpoint. Pure.

    {"at": "start", "v": 1}                                             before the first batch
    {"from": {"flights": {"id": "5f0c…", "partitions": {"0-0": [10, 3]}}},
     "to":   {"flights": {"id": "5f0c…", "partitions": {"0-0": [25, 3]}}}, "v": 1}

Spark asks for the offset before the first batch two or three times, also after a crash, and "latest" may move between.
So that offset is a mark, and the real start of the first batch is in its end, in `from`. Once Spark has stored the end,
the batch is the same in each run. The same holds for partitions that are added later.

A place is an offset and the epoch of the message before it (-1: unknown). The epoch shows a reader that a promotion
gave up messages that it has read. The topic id shows that a topic was deleted and created again.

Spark compares offsets as texts: the same places always give the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from metamq.errors import CorruptData
from metamq.zk.partitions import TopicPartition, partition_order

VERSION = 1
START: dict[str, Any] = {"at": "start", "v": VERSION}


class StreamPlace(NamedTuple):
    """The place up to which one partition was read."""

    topic_id: str
    offset: int
    epoch: int = -1


Places = Mapping[TopicPartition, StreamPlace]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The start and the end of a batch, in every partition of the query."""

    begun: Places
    reached: Places


def to_json(offset: StreamOffset) -> dict[str, Any]:
    """Returns the document that Spark keeps."""
    return {"from": _places_to_json(offset.begun), "to": _places_to_json(offset.reached), "v": VERSION}


def _places_to_json(places: Places) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for tp in sorted(places, key=partition_order):
        topic_id, offset, epoch = places[tp]
        topic = document.setdefault(tp.topic, {"id": topic_id, "partitions": {}})
        assert topic["id"] == topic_id
        topic["partitions"][tp.partition] = [offset, epoch]
    return document


def from_json(document: Mapping[str, Any]) -> StreamOffset | None:
    """Reads a document that Spark kept; None for the mark before the first batch. Raises CorruptData if it has another
    format."""
    try:
        if document["v"] != VERSION:
            raise CorruptData(
                "the checkpoint", f"its format is {document['v']}", hint="A newer metamq wrote it: upgrade metamq here."
            )
        if "at" in document:
            return None
        return StreamOffset(_places_from_json(document["from"]), _places_from_json(document["to"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "If another source wrote it, give the query a checkpoint of its own."
        raise CorruptData("the checkpoint", f"no offsets of metamq: {error!r}", hint=hint) from error


def _places_from_json(document: Mapping[str, Any]) -> dict[TopicPartition, StreamPlace]:
    return {
        TopicPartition(topic, partition): StreamPlace(str(entry["id"]), int(offset), int(epoch))
        for topic, entry in document.items()
        for partition, (offset, epoch) in entry["partitions"].items()
    }


def first_places(start: StreamOffset | None, end: StreamOffset) -> dict[TopicPartition, StreamPlace]:
    """Returns the places from which the batch from `start` to `end` is read.

    Usually that is where the last batch ended. `from` of the end is used in three cases: the partition is new; messages
    are lost and it begins before that place; or its epoch is unknown, because no batch has read up to that place. There
    may be batches between `start` and `end`: with asynchronous progress tracking Spark does not store each.
    """
    before = start.reached if start is not None else {}
    found = {}
    for tp, place in end.reached.items():
        known, begun = before.get(tp), end.begun[tp]
        goes_on = known is not None and known.topic_id == place.topic_id
        if known is None or not goes_on or begun.offset < known.offset or begun.epoch < 0:
            found[tp] = begun
        else:
            found[tp] = known
    return found
