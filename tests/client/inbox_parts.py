"""What the tests of the inbox share: batches of numbers, and short ways to put and take them."""

from __future__ import annotations

from typing import Any

from metamq.client.fetch.inbox import Inbox, InFlightBatch, PartitionState
from metamq.client.fetch.message_batch import MessageBatch
from metamq.wire.batch import read_header, stamp
from metamq.wire.columns import encode
from metamq.zk.partitions import TopicPartition

TP = TopicPartition("t", "0-0")
OTHER = TopicPartition("t", "0-1")


def batch(tp: TopicPartition, offset: int, count: int, epoch: int = 1) -> MessageBatch[Any]:
    data = encode([b"%d" % number for number in range(offset, offset + count)], base_timestamp_us=0)
    stamp(data, 0, epoch=epoch, base_offset=offset, batch_id=1, append_time_us=0, unflushed_bytes=0)
    return MessageBatch(tp, read_header(data), memoryview(data), offset)


def inbox_with(*states: PartitionState) -> Inbox:
    inbox = Inbox(lambda: True)
    for state in states:
        inbox.add(state)
    return inbox


def take(inbox: Inbox, *, whole: bool = False) -> InFlightBatch:
    with inbox.lock:
        hand = inbox.take(whole=whole)
    assert hand is not None
    return hand


def nothing_to_take(inbox: Inbox) -> bool:
    with inbox.lock:
        return inbox.take(whole=False) is None


def offset_of(fields: tuple[Any, ...]) -> int:
    offset: int = fields[2]
    return offset
