"""Which master wrote what: where the first batch of each epoch lies in one log.

Theory of operation
-------------------
Where the logs of two replicas part is read off two such lists. It rests on three facts:

- an epoch has one master ever, and every batch carries the epoch of the master that appended it. So an epoch names one
  sequence of batches, and two logs that hold batches of it hold the same ones, as far as both go;
- what lies *below* an epoch's first batch is the same in both, too. A replica takes a batch only where its log ends,
  and only from a master with which it agreed about all that is below. So whoever has a batch of epoch e has, below e,
  what e's master had when e began;
- along a log epochs never fall.

Hence: two logs are equal up to the end of the latest epoch that both have batches of, the nearer of its two ends, and
no further. An epoch ends where the next one's first batch begins, or with the log. Both sides have the whole list of
the other, so one exchange settles it, however many masters came and went in between; asking epoch by epoch, as Kafka
does since KIP-101, takes several (KIP-279).

*An epoch without a batch* in this log has no entry, and needs none. The rule compares bytes that are there. An empty
epoch has none that could differ, and it moves nobody's end, since an epoch ends at a *batch* of a later one. What made
RocketMQ's logs diverge unnoticed (a master's epoch is refused because the one before it is empty, and what it appends
counts as the former master's) cannot come up: nothing but the batches themselves says whose they are.

Retention takes an epoch's first batches away. Its entry then stands at the log's start: the ends, which are all that
the rule asks for, are where they were.

*The file* `epochs` beside the log saves a start from asking every segment. It is derived from the log, and may be
missing, or older than the log after a power cut, or newer. Since an epoch begins at the same place in every log that
has it, one look tells: a list whose last epoch is that of the log's last batch is the list of a log that is equal to
this one up to that batch. Anything else is made anew from the batches' headers.
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
_HEADER = struct.Struct("<4sII")  # magic, version, entries; a CRC of it all ends the file
_ENTRY = struct.Struct("<IQQ")
_CRC = struct.Struct("<I")
_POSITION = attrgetter("position")


class Epoch(NamedTuple):
    """A place in the log that an epoch begins or ends at."""

    epoch: int
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class EpochList:
    """The epochs of one log, oldest first; epochs and places rise. A value: each change gives a new list."""

    entries: tuple[Epoch, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, int]]) -> EpochList:
        """The list of these (epoch, offset, position), as of entries that came over the wire.

        Raises ValueError when epochs or places do not rise.
        """
        epochs = tuple(map(Epoch._make, entries))
        for before, after in pairwise(epochs):
            if not (before.epoch < after.epoch and before.offset < after.offset and before.position < after.position):
                raise ValueError(f"{after} does not follow {before}")
        return cls(epochs)

    @property
    def last(self) -> int:
        """The epoch of the log's last batch; -1 when there is none."""
        return self.entries[-1].epoch if self.entries else -1

    def add(self, epoch: int, offset: int, position: int) -> EpochList:
        """With a batch of `epoch` at the log's end. It changes something only when it is the epoch's first.

        Raises ValueError when the epoch is lower than that of the last batch: no log has such a batch. What an entry
        at the end names is not in the log: retention took it, or a power cut.
        """
        if epoch == self.last:
            return self
        there = self.cut(position)
        if epoch < there.last:
            raise ValueError(f"epoch {epoch} after epoch {there.last}")
        return EpochList((*there.entries, Epoch(epoch, offset, position)))

    def cut(self, position: int) -> EpochList:
        """Of the log up to `position`."""
        count = bisect_left(self.entries, position, key=_POSITION)
        return self if count == len(self.entries) else EpochList(self.entries[:count])

    def drop_prefix(self, offset: int, position: int) -> EpochList:
        """Of the log from there on; the epoch that covers the place begins there now.

        It stays even if none of its batches does: an empty log still tells whose batch was the last.
        """
        gone = bisect_right(self.entries, position, key=_POSITION)
        if not gone or (gone == 1 and self.entries[0].position == position):
            return self
        covering = Epoch(self.entries[gone - 1].epoch, offset, position)
        return EpochList((covering, *self.entries[gone:]))

    def ends(self, end_offset: int, end_position: int) -> tuple[Epoch, ...]:
        """Where each epoch ends in a log that ends there."""
        ends = [(after.offset, after.position) for after in self.entries[1:]] + [(end_offset, end_position)]
        return tuple(Epoch(entry.epoch, *end) for entry, end in zip(self.entries, ends, strict=False))

    def epoch_before(self, position: int) -> int:
        """The epoch of the batch that ends at `position`, a batch boundary; -1 when the list does not know it."""
        count = bisect_left(self.entries, position, key=_POSITION)
        return self.entries[count - 1].epoch if count else -1

    def agrees_with_reader(self, offset: int, epoch: int, start_offset: int, end_offset: int) -> int:
        """Up to where a reader that is at `offset`, behind a message of `epoch`, has read what this log has.

        That is `offset` itself, unless somebody accepted a loss since. Then the log has less of that epoch: they agree
        up to its end here. Or it has nothing of it: what was before that epoch is not known from one number, not even
        that it was anything of this log, and the answer is where the log begins. So the reader may get something again,
        and misses nothing. An epoch of -1 is not known, and agrees.
        """
        if epoch < 0 or offset <= start_offset:
            return offset
        for entry, end in zip(self.entries, self.ends(end_offset, 0), strict=True):
            if entry.epoch == epoch:
                return min(offset, end.offset)
        return start_offset

    def epoch_of_reader(self, offset: int) -> int:
        """The epoch of the message before `offset`; -1 when the log does not know it."""
        found = [entry.epoch for entry in self.entries if entry.offset < offset]
        return found[-1] if found else -1

    def after(self, offset: int, end_offset: int) -> list[tuple[int, int]]:
        """(epoch, the offset where it ends) of the messages from `offset` on, in a log that ends at `end_offset`."""
        ends = self.ends(end_offset, 0)
        reached = [(entry, min(end.offset, end_offset)) for entry, end in zip(self.entries, ends, strict=True)]
        return [(entry.epoch, end) for entry, end in reached if offset < end and entry.offset < end]

    def is_of(self, start_position: int, end_position: int, last_epoch: int) -> bool:
        """Whether this is the list of the log between these positions, whose last batch is of `last_epoch`.

        In a log without a batch any epoch may have been the last.
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
        """The list as its file has it."""
        body = _HEADER.pack(MAGIC, VERSION, len(self.entries)) + b"".join(_ENTRY.pack(*e) for e in self.entries)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> EpochList | None:
        """The list of a file's bytes, or None when they are not a whole one."""
        body_size = len(data) - _CRC.size
        if body_size < _HEADER.size or crc32c(data[:body_size]) != _CRC.unpack_from(data, body_size)[0]:
            return None
        magic, version, count = _HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION or body_size != _HEADER.size + count * _ENTRY.size:
            return None
        return cls(tuple(map(Epoch._make, _ENTRY.iter_unpack(data[_HEADER.size : body_size]))))
