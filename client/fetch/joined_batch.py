"""Several stored batches of one partition in one: what `batches(max_messages=...)` gives.

Producers' batches are as small as their traffic; a transaction a batch then costs more than the work in it. Joined are
batches that follow one another without a hole, of one epoch, so that offsets and epoch mean what they do for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message
from metamq.client.typevars import T


def joinable(batches: Iterable[MessageBatch[T]], max_messages: int) -> list[MessageBatch[T]]:
    """The first of the batches, and those behind it that may be joined to it, up to so many messages."""
    found: list[MessageBatch[T]] = []
    messages = 0
    for batch in batches:
        messages += len(batch)
        if found and (messages > max_messages or batch.offset != found[-1].end_offset or batch.epoch != found[0].epoch):
            break
        found.append(batch)
    return found


class JoinedBatch(MessageBatch[T]):
    """Columns are those of its parts, one after the other; each part is decoded when a column is first used."""

    def __init__(self, parts: Sequence[MessageBatch[T]]) -> None:
        first = parts[0]
        self.topic, self.partition, self.offset, self.epoch = first.topic, first.partition, first.offset, first.epoch
        self._parts = parts

    @property
    def is_rejected(self) -> bool:  # type: ignore[override]
        """Whether `decode=` has rejected a message of it."""
        return any(part.is_rejected for part in self._parts)

    @property
    def decodes(self) -> bool:
        """Whether values are made by `decode=`."""
        return self._parts[0].decodes

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self._parts[-1].end_offset

    @property
    def size_bytes(self) -> int:
        """Bytes of the stored batches."""
        return sum(part.size_bytes for part in self._parts)

    @cached_property
    def values(self) -> Sequence[T]:
        """The values, as bytes or as `decode=` makes them. Raises DecodeError for the first one that it rejects."""
        return list(chain.from_iterable(part.values for part in self._parts))

    def _part_with(self, offset: int) -> MessageBatch[T]:
        return next(part for part in self._parts if offset < part.end_offset)

    def undecoded(self, offset: int) -> Message[bytes]:
        """One message with its value as it is stored."""
        return self._part_with(offset).undecoded(offset)

    def decoded_message(self, offset: int) -> Message[T]:
        """One message. Raises DecodeError."""
        return self._part_with(offset).decoded_message(offset)

    def plain_value(self, offset: int) -> bytes:
        """One message's value as it is stored."""
        return self._part_with(offset).plain_value(offset)

    @cached_property
    def keys(self) -> Sequence[bytes | None]:
        """The keys; None for a message without one."""
        return list(chain.from_iterable(part.keys for part in self._parts))

    @cached_property
    def timestamps(self) -> Sequence[int]:
        """Microseconds since 1970, UTC."""
        return list(chain.from_iterable(part.timestamps for part in self._parts))

    @cached_property
    def headers(self) -> Sequence[Mapping[str, bytes]]:
        """Each message's headers, empty for none."""
        return list(chain.from_iterable(part.headers for part in self._parts))

    def __iter__(self) -> Iterator[Message[T]]:
        return chain.from_iterable(self._parts)

    def to_arrow(self) -> Any:
        """As MessageBatch.to_arrow, with one copy: the columns of the parts are put together."""
        batches = [part.to_arrow() for part in self._parts]
        import pyarrow

        return pyarrow.concat_batches(batches)
