"""Several stored batches of one partition in one batch: the result of `batches(max_messages=...)`.

Producers with little traffic send small batches. Then one transaction per batch costs more than the work in it. Batches
are joined if they follow one another without a gap and have the same epoch. So offsets and epoch mean the same as in a
single batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.typevars import T

if TYPE_CHECKING:
    from metamq.client.model import Message


def joinable(batches: Iterable[MessageBatch[T]], max_messages: int) -> list[MessageBatch[T]]:
    """Returns the first batch and the following ones that can be joined to it, up to this number of messages."""
    found: list[MessageBatch[T]] = []
    messages = 0
    for batch in batches:
        messages += len(batch)
        if found and (messages > max_messages or batch.offset != found[-1].end_offset or batch.epoch != found[0].epoch):
            break
        found.append(batch)
    return found


class JoinedBatch(MessageBatch[T]):
    """A batch whose columns are those of its parts in order. Each part is decoded when a column is first used."""

    def __init__(self, parts: Sequence[MessageBatch[T]]) -> None:
        first = parts[0]
        self.topic, self.partition, self.offset, self.epoch = first.topic, first.partition, first.offset, first.epoch
        self._parts = parts

    def add(self, part: MessageBatch[T]) -> None:
        """Adds a batch at the end. Columns of the whole must not be used before."""
        self._parts = [*self._parts, part]  # a new list: other threads may read the old one

    def drop_before(self, offset: int) -> Sequence[MessageBatch[T]]:
        """Drops the parts that end at or before an offset, except for the last part. Returns them."""
        if self._parts[0].end_offset > offset:  # mostly
            return ()
        dropped = [part for part in self._parts[:-1] if part.end_offset <= offset]
        self._parts = self._parts[len(dropped) :]
        return dropped

    @property
    def is_rejected(self) -> bool:  # type: ignore[override]
        """True if `decode=` has rejected a message of the batch."""
        return any(part.is_rejected for part in self._parts)

    @property
    def decodes(self) -> bool:
        """True if `decode=` converts the values."""
        return self._parts[0].decodes

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self._parts[-1].end_offset

    @property
    def size_bytes(self) -> int:
        """The bytes of the stored batches."""
        return sum(part.size_bytes for part in self._parts)

    @cached_property
    def values(self) -> Sequence[T]:
        """The values, as bytes or as `decode=` returns them. Raises DecodeError for the first value that it rejects."""
        return list(chain.from_iterable(part.values for part in self._parts))

    def _part_with(self, offset: int) -> MessageBatch[T]:
        return next(part for part in self._parts if offset < part.end_offset)

    def undecoded(self, offset: int) -> Message[bytes]:
        """Returns one message with its value as it is stored."""
        return self._part_with(offset).undecoded(offset)

    def decoded_message(self, offset: int) -> Message[T]:
        """Returns one message. Raises DecodeError."""
        return self._part_with(offset).decoded_message(offset)

    def plain_value(self, offset: int) -> bytes:
        """Returns one message's value as it is stored."""
        return self._part_with(offset).plain_value(offset)

    @cached_property
    def keys(self) -> Sequence[bytes | None]:
        """The keys; None for a message without one."""
        return list(chain.from_iterable(part.keys for part in self._parts))

    @cached_property
    def timestamps(self) -> Sequence[int]:
        """The timestamps in microseconds since 1970, UTC."""
        return list(chain.from_iterable(part.timestamps for part in self._parts))

    @cached_property
    def headers(self) -> Sequence[Mapping[str, bytes]]:
        """The headers of each message; empty for a message without headers."""
        return list(chain.from_iterable(part.headers for part in self._parts))

    def distinct_headers(self, name: bytes) -> Iterator[Mapping[str, bytes]]:
        """Iterates over the different headers with this name in them. Raises UndecodableBatch."""
        return chain.from_iterable(part.distinct_headers(name) for part in self._parts)

    def __iter__(self) -> Iterator[Message[T]]:
        return chain.from_iterable(self._parts)

    def to_arrow(self) -> Any:
        """Returns a pyarrow.RecordBatch like MessageBatch.to_arrow, with one copy to concatenate the parts' columns."""
        batches = [part.to_arrow() for part in self._parts]
        import pyarrow

        return pyarrow.concat_batches(batches)
