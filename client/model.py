"""The values that users receive: a partition's name, the receipt of `send`, and a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Generic, NamedTuple

from metamq.client.typevars import T
from metamq.zk.partitions import TopicPartition, partition_order

__all__ = ["Message", "Receipt", "ReceiptRange", "TopicPartition", "message_of", "partition_order", "time_of"]


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_of(timestamp: int) -> datetime:
    """Returns the aware datetime (UTC) of a timestamp in microseconds since 1970."""
    return EPOCH + timedelta(microseconds=timestamp)


class Receipt(NamedTuple):
    """The place where one message is stored. `timestamp` is in microseconds since 1970, UTC."""

    topic: str
    partition: str
    offset: int
    timestamp: int

    @property
    def time(self) -> datetime:
        """The `timestamp` as an aware datetime, UTC."""
        return time_of(self.timestamp)


# Not a NamedTuple: a field `count` would hide tuple.count.
@dataclass(frozen=True, slots=True)
class ReceiptRange:
    """The place of `count` messages of one `send_many`: they have the offsets `offset`, `offset + 1`, and so on."""

    topic: str
    partition: str
    offset: int
    count: int


class Message(NamedTuple, Generic[T]):
    """One message that a consumer receives. `T` is `bytes`, or the type that `decode=` returns.

    `offset` counts the messages of the partition from 0. `timestamp` is in microseconds since 1970, UTC.
    """

    topic: str
    partition: str
    offset: int
    key: bytes | None
    value: T
    headers: Mapping[str, bytes]
    timestamp: int

    @property
    def time(self) -> datetime:
        """The `timestamp` as an aware datetime, UTC."""
        return time_of(self.timestamp)


message_of: Callable[[Iterable[Any]], Message[Any]] = partial(tuple.__new__, Message)
"""Makes a message from its fields, like `Message._make` but at C speed."""
