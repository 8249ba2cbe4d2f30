"""Idempotent producers: the last batches of each one that this partition stored, so that no batch is stored twice.

A producer numbers its batches for a partition from 0 and repeats a batch until it gets an answer. The last five batches
of each producer are kept, as many as it may have in flight. The answer to a repeat of one of them is its place. The
answer to an older repeat says only that it is stored. A batch beyond the next number is refused, since its predecessor
is missing.

The log accepts any sequence number of an unknown producer as new. Either it is the producer's first batch, or the log
dropped the state because the producer stored nothing for `producer_expiry_ms`. A repeat older than that would be stored
a second time, but producers give up on a batch long before.

A repeat has as many messages as the stored batch, so the place in its answer ends within the log. A batch with the same
id and number but another count is not a repeat. It is refused: there is no place to wait for.

The state is a function of the log, except for removed batches. So it is saved next to the log, as of a position.
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
_HEADER = struct.Struct("<4sIQQI")  # magic, version, offset, position, producers; the file ends with a CRC of all
_PRODUCER = struct.Struct("<QqI")  # id, last append, batches
_BATCH = struct.Struct("<IQIq")
_CRC = struct.Struct("<I")
_SEQUENCES = 1 << 32


@dataclass(frozen=True, slots=True)
class New:
    """The batch is not stored yet and has the expected number."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The batch is already stored. `base_offset` is -1 if its place is no longer known."""

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
        """Decides if a producer's batch of `count` messages is new or a repeat.

        Raises SequenceGap if an earlier batch is missing, ProtocolError if another batch has its number.
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
                        f"{name} has batch {sequence} of this producer with {stored}, but its repeat has {count:,}",
                        hint="Two producers use the same id: give each producer a random id of its own.",
                    )
                return Duplicate(batch.base_offset, batch.append_time_us)
        if (expected - sequence) % _SEQUENCES < _SEQUENCES // 2:
            return _LONG_AGO
        raise SequenceGap(name, expected, sequence)

    def record(self, producer_id: int, sequence: int, base_offset: int, count: int, append_time_us: int) -> None:
        """Adds a stored batch of a producer."""
        batch = StoredBatch(sequence, base_offset, count, append_time_us)
        batches = self._batches.get(producer_id)
        if batches is None:
            self._batches[producer_id] = [batch]
            return
        batches.append(batch)
        if len(batches) > KEPT_BATCHES:
            del batches[0]

    def before(self, offset: int) -> ProducerStates:
        """The states as of an offset, as far as they are kept."""
        states = ProducerStates()
        for producer_id, batches in self._batches.items():
            kept = [batch for batch in batches if batch.base_offset < offset]
            if kept:
                states._batches[producer_id] = kept
        return states

    def expire(self, before_us: int) -> None:
        """Forgets the producers whose last append was before this time."""
        for producer_id in [p for p, b in self._batches.items() if b[-1].append_time_us < before_us]:
            del self._batches[producer_id]

    def to_bytes(self, offset: int, position: int) -> bytes:
        """The bytes of a snapshot file with the states as of (offset, position)."""
        parts = [_HEADER.pack(MAGIC, VERSION, offset, position, len(self._batches))]
        for producer_id, batches in self._batches.items():
            parts.append(_PRODUCER.pack(producer_id, batches[-1].append_time_us, len(batches)))
            parts.extend([_BATCH.pack(*batch) for batch in batches])
        body = b"".join(parts)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes, offset: int, position: int) -> ProducerStates | None:
        """The states in a snapshot file, or None if it is incomplete, damaged, or of another place."""
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
