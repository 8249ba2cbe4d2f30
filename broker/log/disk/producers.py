"""Idempotent producers: what this partition stored of each, so that a repeated batch is not stored twice.

A producer numbers its batches for a partition from 0 and repeats a batch until it is answered. Per producer the last
five batches are kept, as many as it may have under way; a repeat of one of them is answered with where it is stored,
an older repeat as stored somewhere, and a batch beyond the next is refused, since its predecessor is missing.

What the log does not know, it takes: any sequence of an unknown producer is new. Either it is the producer's first
batch, or the state was dropped because the producer stored nothing for `producer_expiry_ms`. Then a repeat older than
that would be stored a second time: producers give up on a batch long before.

A repeat has as many messages as the batch that is stored: so what is answered with its place ends within the log. A
batch with the same id and number and another count is no repeat. It is refused: it has no place to wait for.

The state is a function of the log, except for what retention removed; so it is saved beside it, as of a position.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from metamq import words
from metamq.errors import ProtocolError, SequenceGap
from metamq.wire.batch import NO_PRODUCER

KEPT_BATCHES = 5
MAGIC = b"MQPS"
VERSION = 1
_HEADER = struct.Struct("<4sIQQI")  # magic, version, offset, position, producers; a CRC of it all ends the file
_PRODUCER = struct.Struct("<QqI")  # id, last append, batches
_BATCH = struct.Struct("<IQIq")
_CRC = struct.Struct("<I")
_SEQUENCES = 1 << 32


@dataclass(frozen=True, slots=True)
class New:
    """The batch was not stored yet and is the one that is due."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The batch is stored already. `base_offset` is -1 when it is too long ago to say where."""

    base_offset: int
    append_time_us: int


NEW = New()
_LONG_AGO = Duplicate(-1, -1)


class StoredBatch(NamedTuple):
    """One of the last batches of a producer."""

    sequence: int
    base_offset: int
    messages: int
    append_time_us: int


class ProducerStates:
    """The states of all producers of one partition."""

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: dict[int, list[StoredBatch]] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerStates) and self._batches == other._batches

    __hash__ = None  # type: ignore[assignment]

    def check(self, name: str, producer_id: int, sequence: int, count: int) -> New | Duplicate:
        """What to do with a producer's batch of `count` messages.

        Raises SequenceGap when an earlier one is missing, ProtocolError when another batch has its number.
        """
        if producer_id == NO_PRODUCER:
            return NEW
        batches = self._batches.get(producer_id)
        if batches is None:
            return NEW
        expected = (batches[-1].sequence + 1) % _SEQUENCES
        if sequence == expected:
            return NEW
        for batch in batches:
            if batch.sequence == sequence:
                if batch.messages != count:
                    stored = words.count(batch.messages, "message")
                    raise ProtocolError(
                        f"{name} has batch {sequence} of this producer with {stored}, its repeat has {count:,}",
                        hint="Two producers use the same id: give each its own, at random.",
                    )
                return Duplicate(batch.base_offset, batch.append_time_us)
        if (expected - sequence) % _SEQUENCES < _SEQUENCES // 2:
            return _LONG_AGO
        raise SequenceGap(name, expected, sequence)

    def record(self, producer_id: int, sequence: int, base_offset: int, count: int, append_time_us: int) -> None:
        """A batch of a producer was stored."""
        batch = StoredBatch(sequence, base_offset, count, append_time_us)
        batches = self._batches.get(producer_id)
        if batches is None:
            self._batches[producer_id] = [batch]
            return
        batches.append(batch)
        if len(batches) > KEPT_BATCHES:
            del batches[0]

    def before(self, offset: int) -> ProducerStates:
        """What they stored below an offset, as far as it is kept."""
        states = ProducerStates()
        for producer_id, batches in self._batches.items():
            kept = [batch for batch in batches if batch.base_offset < offset]
            if kept:
                states._batches[producer_id] = kept
        return states

    def expire(self, before_us: int) -> None:
        """Forgets the producers whose last batch was appended before that time."""
        for producer_id in [p for p, b in self._batches.items() if b[-1].append_time_us < before_us]:
            del self._batches[producer_id]

    def to_bytes(self, offset: int, position: int) -> bytes:
        """The states as of (offset, position), as a snapshot file has them."""
        parts = [_HEADER.pack(MAGIC, VERSION, offset, position, len(self._batches))]
        for producer_id, batches in self._batches.items():
            parts.append(_PRODUCER.pack(producer_id, batches[-1].append_time_us, len(batches)))
            parts.extend([_BATCH.pack(*batch) for batch in batches])
        body = b"".join(parts)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes, offset: int, position: int) -> ProducerStates | None:
        """The states of a snapshot file, or None when it is not a whole one of that place."""
        body_size = len(data) - _CRC.size
        if body_size < _HEADER.size or crc32c(data[:body_size]) != _CRC.unpack_from(data, body_size)[0]:
            return None
        magic, version, at_offset, at_position, producers = _HEADER.unpack_from(data)
        if (magic, version, at_offset, at_position) != (MAGIC, VERSION, offset, position):
            return None
        states = cls()
        at = _HEADER.size
        for _ in range(producers):
            producer_id, _last_us, count = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            batches = _BATCH.iter_unpack(memoryview(data)[at : at + count * _BATCH.size])
            states._batches[producer_id] = [StoredBatch._make(batch) for batch in batches]
            at += count * _BATCH.size
        return states
