"""The epochs of one log: the place where the first batch of each epoch begins.

Theory of operation
-------------------
Two such lists show where the logs of two replicas diverge. This rests on three facts:

- An epoch has one master, and every batch carries the epoch of the master that appended it. So an epoch names one
  sequence of batches. If two logs hold batches of an epoch, these batches are the same as far as both logs go.
- All bytes *below* an epoch's first batch are the same in both logs, too. A replica takes a batch only where its log
  ends, and only from a master with which it agreed about everything below. So a replica with a batch of epoch e has,
  below e, the bytes that e's master had when e began.
- Epochs never fall along a log.

Therefore two logs are equal up to the end of the latest epoch of which both have batches (the smaller of the two
ends), and no further. An epoch ends where the first batch of the next epoch begins, or at the end of the log. Each
side has the whole list of the other, so one exchange is enough, however many masters there were in between. Kafka asks
epoch by epoch since KIP-101, and needs several exchanges (KIP-279).

*An epoch without a batch* has no entry in the list and needs no entry. The rule compares bytes that exist. An empty
epoch has no bytes that could differ. It does not move the end of another epoch either, since an epoch ends at a *batch*
of a later one. In RocketMQ, logs could diverge unnoticed: a replica refused a master's epoch because the epoch before
it was empty, and the new batches counted as the former master's. This cannot happen here, because only the batches name
their epoch.

Retention removes an epoch's first batches. Its entry then points to the log's start. The rule uses only the ends, and
they do not change.

*The file* `epochs` next to the log saves a start from reading every segment. It is derived from the log. It may be
missing, or, after a power cut, older or newer than the log. An epoch begins at the same place in every log that has
it. So one check is enough: if the last epoch of the list is the epoch of the log's last batch, then the list belongs
to a log that is equal to this one up to that batch. Otherwise the list is rebuilt from the batches' headers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from crc32c import crc32c

FILE_NAME = "epochs"
MAGIC = b"MQEP"
VERSION = 1
_HEADER = struct.Struct("<4sII")  # magic, version, entries; the file ends with a CRC of all
_ENTRY = struct.Struct("<IQQ")
_CRC = struct.Struct("<I")
_POSITION = attrgetter("position")


class Epoch(NamedTuple):
    """The place in the log where an epoch begins or ends."""

    epoch: int
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class EpochList:
    """The epochs of one log, oldest first; epochs and places rise. Immutable: each change returns a new list."""

    entries: tuple[Epoch, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, int]]) -> EpochList:
        """The list of these (epoch, offset, position), for entries that came over the wire.

        Raises ValueError if epochs or places do not rise.
        """
        epochs = tuple(map(Epoch._make, entries))
        for before, after in pairwise(epochs):
            if not (before.epoch < after.epoch and before.offset < after.offset and before.position < after.position):
                raise ValueError(f"{after} does not follow {before}")
        return cls(epochs)

    @property
    def last(self) -> int:
        """The epoch of the log's last batch; -1 if the log has no batch."""
        return self.entries[-1].epoch if self.entries else -1

    def add(self, epoch: int, offset: int, position: int) -> EpochList:
        """Returns the list with a batch of `epoch` at the log's end. It changes only if this batch is its first.

        Removes entries at or above `position` first: their batches are gone, by retention or a power cut. Raises
        ValueError if the epoch is lower than that of the last batch: no log has such a batch.
        """
        if epoch == self.last:
            return self
        there = self.cut(position)
        if epoch < there.last:
            raise ValueError(f"epoch {epoch} after epoch {there.last}")
        return EpochList((*there.entries, Epoch(epoch, offset, position)))

    def cut(self, position: int) -> EpochList:
        """Returns the list of the log cut at `position`."""
        count = bisect_left(self.entries, position, key=_POSITION)
        return self if count == len(self.entries) else EpochList(self.entries[:count])

    def drop_prefix(self, offset: int, position: int) -> EpochList:
        """Returns the list of the log that starts at this place. The epoch that covers the place begins there.

        This entry stays even if none of its batches does: an empty log still knows the epoch of its last batch.
        """
        gone = bisect_right(self.entries, position, key=_POSITION)
        if not gone or (gone == 1 and self.entries[0].position == position):
            return self
        covering = Epoch(self.entries[gone - 1].epoch, offset, position)
        return EpochList((covering, *self.entries[gone:]))

    def ends(self, end_offset: int, end_position: int) -> tuple[Epoch, ...]:
        """The end of each epoch, in a log that ends at this place."""
        ends = [(after.offset, after.position) for after in self.entries[1:]] + [(end_offset, end_position)]
        return tuple(Epoch(entry.epoch, *end) for entry, end in zip(self.entries, ends, strict=False))

    def epoch_before(self, position: int) -> int:
        """The epoch of the batch that ends at `position`, a batch boundary; -1 if the list does not know it."""
        count = bisect_left(self.entries, position, key=_POSITION)
        return self.entries[count - 1].epoch if count else -1

    def agrees_with_reader(self, offset: int, epoch: int, start_offset: int, end_offset: int) -> int:
        """The offset up to which a reader and this log agree. The reader is at `offset`, after a message of `epoch`.

        The answer is `offset`, unless an operator accepted a loss of messages since. If the log has fewer messages of
        that epoch, the answer is the epoch's end here. If it has no message of that epoch, the answer is the log's
        start: one number does not say what was before that epoch. So the reader may get messages again, but misses
        none. An epoch of -1 is unknown and agrees with every log.
        """
        if epoch < 0 or offset <= start_offset:
            return offset
        for entry, end in zip(self.entries, self.ends(end_offset, 0), strict=True):
            if entry.epoch == epoch:
                return min(offset, end.offset)
        return start_offset

    def epoch_of_reader(self, offset: int) -> int:
        """The epoch of the message before `offset`; -1 if the log does not know it."""
        found = [entry.epoch for entry in self.entries if entry.offset < offset]
        return found[-1] if found else -1

    def after(self, offset: int, end_offset: int) -> list[tuple[int, int]]:
        """(epoch, its end offset) of the messages from `offset` on, in a log that ends at `end_offset`."""
        ends = self.ends(end_offset, 0)
        reached = [(entry, min(end.offset, end_offset)) for entry, end in zip(self.entries, ends, strict=True)]
        return [(entry.epoch, end) for entry, end in reached if offset < end and entry.offset < end]

    def is_of(self, start_position: int, end_position: int, last_epoch: int) -> bool:
        """True if this is the list of the log between these positions whose last batch has `last_epoch`.

        In a log without a batch the last epoch may be any.
        """
        if start_position == end_position:
            return all(entry.position == start_position for entry in self.entries)
        return (
            self.last == last_epoch
            and bool(self.entries)
            and self.entries[0].position == start_position
            and self.entries[-1].position < end_position
        )

    def to_bytes(self) -> bytes:
        """The bytes of the list's file."""
        body = _HEADER.pack(MAGIC, VERSION, len(self.entries)) + b"".join(_ENTRY.pack(*e) for e in self.entries)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> EpochList | None:
        """The list in a file's bytes, or None if they are incomplete or damaged."""
        body_size = len(data) - _CRC.size
        if body_size < _HEADER.size or crc32c(data[:body_size]) != _CRC.unpack_from(data, body_size)[0]:
            return None
        magic, version, count = _HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION or body_size != _HEADER.size + count * _ENTRY.size:
            return None
        return cls(tuple(map(Epoch._make, _ENTRY.iter_unpack(data[_HEADER.size : body_size]))))
