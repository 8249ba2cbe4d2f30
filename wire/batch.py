"""A batch: one header and the columns of 1..n messages; the unit on the wire, on disk and in replication.

Theory of operation
-------------------
Work per message makes a queue slow in Python, so no code here works per message. The producer builds a batch
once. The broker checks it, writes its own part of the header in place, and appends it. Consumers and Spark wrap the
same bytes. No process encodes a batch again.

    broker part,   40 bytes   size, epoch, base offset, batch id, append time, unflushed distance, CRC of these.
    producer part, 48 bytes   magic, codec, flags, count, producer id, sequence, sizes, times, CRC of these and of body.
    body                      the columns (metamq.wire.columns), compressed or not, padded with zeros to 8 bytes.

Each part has a CRC, because each has another author. The producer's CRC covers everything that the producer made, so a
flipped bit anywhere between producer and consumer is detected. The broker's CRC covers the fields that the broker adds
later, and the size, which leads to the next batch.

`unflushed_bytes` is the distance between this batch and the flushed point before it, at the time of the append, on the
disk of the master that appended it. Recovery uses it: if a later, intact batch says that a damaged batch was already
flushed, the damage is corruption and not a torn tail.

docs/log-format.md has the grammar, a worked example in bytes, and the downsides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from metamq.errors import CorruptData, MessageTooLarge
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX

Buffer = bytes | bytearray | memoryview

MAGIC = 0x514D  # "MQ" in little-endian order
ALIGNMENT = 8

BROKER_PART = struct.Struct("<IIQQqI")  # the fields that the broker's CRC covers; then the CRC
BROKER_CRC = struct.Struct("<I")
PRODUCER_PART = struct.Struct("<HBBIQIIqqI")  # the fields that the producer's CRC covers, before the body
PRODUCER_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<IIQQqII HBBIQIIqqII")
_SIZE = struct.Struct("<I")

BROKER_CRC_AT = BROKER_PART.size
PRODUCER_AT = BROKER_CRC_AT + BROKER_CRC.size
PRODUCER_CRC_AT = PRODUCER_AT + PRODUCER_PART.size
HEADER_BYTES = PRODUCER_CRC_AT + PRODUCER_CRC.size

assert (PRODUCER_AT, PRODUCER_CRC_AT, HEADER_BYTES) == (40, 84, 88)
assert _HEADER.size == HEADER_BYTES
assert HEADER_BYTES % ALIGNMENT == 0

# Flags: the optional columns of the body.
HAS_KEYS = 0x01
HAS_NULL_KEYS = 0x02  # the key column starts with a validity bitmap
HAS_TIMESTAMPS = 0x04
HAS_HEADERS = 0x08
KNOWN_FLAGS = HAS_KEYS | HAS_NULL_KEYS | HAS_TIMESTAMPS | HAS_HEADERS
KNOWN_CODECS = frozenset(Codec)

EPOCH_BITS = 24
COUNTER_BITS = 40
NO_PRODUCER = 0
UNFLUSHED_UNKNOWN = 0xFFFFFFFF
"""The value for this many unflushed bytes or more, which the field cannot hold."""


class BatchHeader(NamedTuple):
    """The fields of a batch's header, in the order of their bytes. Times are microseconds since 1970, UTC."""

    size: int
    """Bytes of the whole batch, header and padding included."""
    epoch: int
    base_offset: int
    batch_id: int
    append_time_us: int
    unflushed_bytes: int
    broker_crc: int
    magic: int
    codec: int
    flags: int
    count: int  # type: ignore[assignment]  # the field outranks tuple.count
    producer_id: int
    sequence: int
    """Number of this batch among the producer's batches for this partition, from 0."""
    plain_size: int
    """Bytes of the body when decompressed."""
    base_timestamp_us: int
    max_timestamp_us: int
    body_size: int
    """Bytes of the body as stored, before padding."""
    producer_crc: int

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self.base_offset + self.count


def make_batch_id(epoch: int, counter: int) -> int:
    """Makes a batch id, unique in a broker id for all time, since every start as master has a new epoch."""
    assert 0 <= epoch < 1 << EPOCH_BITS
    assert 0 <= counter < 1 << COUNTER_BITS
    return epoch << COUNTER_BITS | counter


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def read_header(buffer: Buffer, at: int = 0) -> BatchHeader:
    """Reads the header at `at`, unchecked. Raises struct.error if the buffer is shorter than a header."""
    return tuple.__new__(BatchHeader, _HEADER.unpack_from(buffer, at))  # as _make(), at half the cost


def seal(
    batch: bytearray,
    *,
    codec: Codec,
    flags: int,
    count: int,
    producer_id: int,
    sequence: int,
    plain_size: int,
    base_timestamp_us: int,
    max_timestamp_us: int,
    body_size: int,
) -> None:
    """Writes the producer part into `batch`, whose body is in place and padded. The last step of a producer."""
    assert len(batch) == HEADER_BYTES + padded(body_size)
    assert 0 < count <= BATCH_COUNT_MAX
    PRODUCER_PART.pack_into(
        batch, PRODUCER_AT, MAGIC, codec, flags, count, producer_id, sequence,
        plain_size, base_timestamp_us, max_timestamp_us, body_size,
    )  # fmt: skip
    struct.pack_into("<I", batch, 0, len(batch))
    view = memoryview(batch)
    PRODUCER_CRC.pack_into(batch, PRODUCER_CRC_AT, _producer_crc(view, 0, len(batch)))


def stamp(
    batch: bytearray | memoryview,
    at: int,
    *,
    epoch: int,
    base_offset: int,
    batch_id: int,
    append_time_us: int,
    unflushed_bytes: int,
) -> None:
    """Writes the broker part of the batch at `at`, in place. The size is already there and checked."""
    assert base_offset >= 0
    (size,) = _SIZE.unpack_from(batch, at)
    unflushed_bytes = min(unflushed_bytes, UNFLUSHED_UNKNOWN)
    part = BROKER_PART.pack(size, epoch, base_offset, batch_id, append_time_us, unflushed_bytes)
    batch[at : at + PRODUCER_AT] = part + BROKER_CRC.pack(crc32c(part))


def _producer_crc(view: memoryview, at: int, end: int) -> int:
    crc: int = crc32c(view[at + HEADER_BYTES : end], crc32c(view[at + PRODUCER_AT : at + PRODUCER_CRC_AT]))
    return crc


def check_outline(header: BatchHeader, available: int, batch_bytes_max: int = BATCH_BYTES_MAX) -> str | None:
    """The problem of the header's lengths, or None. Reads no body."""
    if header.magic != MAGIC:
        return f"magic is {header.magic:#06x}, not {MAGIC:#06x}"
    if header.size != HEADER_BYTES + padded(header.body_size):
        return f"size {header.size} does not fit a body of {header.body_size} bytes"
    if header.size > available:
        return f"size {header.size} is more than the {available} bytes available"
    if not 0 < header.count <= BATCH_COUNT_MAX:
        return f"count {header.count} is outside 1..{BATCH_COUNT_MAX}"
    if header.codec not in KNOWN_CODECS:
        return f"codec {header.codec} is not known to this release"
    if header.flags & ~KNOWN_FLAGS:
        return f"flags {header.flags:#04x} are not known to this release"
    if header.plain_size > batch_bytes_max or header.size > batch_bytes_max:
        return f"body of {header.plain_size} bytes is over the limit of {batch_bytes_max}"
    if header.codec == Codec.NONE and header.plain_size != header.body_size:
        return f"plain size {header.plain_size} differs from the body's {header.body_size}"
    return None


def check_from_producer(buffer: memoryview, at: int, end: int, batch_bytes_max: int) -> BatchHeader:
    """Checks a producer's batch, which fills `buffer[at:end]`. Its broker part is not set yet.

    Raises CorruptData, or MessageTooLarge if only the limit is exceeded.
    """
    if end - at < HEADER_BYTES:
        raise CorruptData("batch", f"{end - at} bytes are less than a header")
    header = read_header(buffer, at)
    if header.magic == MAGIC and max(header.size, header.plain_size) > batch_bytes_max:
        raise MessageTooLarge("batch", max(header.size, header.plain_size), batch_bytes_max)
    problem = check_outline(header, end - at, batch_bytes_max)
    if problem is None and header.size != end - at:
        problem = f"size {header.size} is not the {end - at} bytes it came in"
    if problem is None and _producer_crc(buffer, at, end) != header.producer_crc:
        problem = "the producer's checksum does not match"
    if problem is not None:
        raise CorruptData("batch", problem)
    return header


def check_stored(buffer: memoryview, at: int, end: int) -> tuple[BatchHeader | None, str | None]:
    """Checks the stored batch that starts at `at`, with both checksums.

    Returns (header, None), or (header or None, the problem). It never raises, since recovery decides the next step.
    """
    if end - at < HEADER_BYTES:
        return None, f"{end - at} bytes are less than a header"
    header = read_header(buffer, at)
    problem = check_broker_part(buffer, at, header) or check_outline(header, end - at)
    if problem is None and _producer_crc(buffer, at, at + header.size) != header.producer_crc:
        problem = "the producer's checksum does not match"
    return header, problem


def check_broker_part(buffer: memoryview, at: int, header: BatchHeader) -> str | None:
    """The problem of the broker part, or None. An intact broker part is enough to trust the offsets and the size."""
    if crc32c(buffer[at : at + BROKER_CRC_AT]) != header.broker_crc:
        return "the broker's checksum does not match"
    if header.size < HEADER_BYTES or header.size % ALIGNMENT:
        return f"size {header.size} is not that of a batch"
    return None


def bytes_to_read(wanted: int, first_bytes: int, available: int) -> int:
    """Bytes to read of a log whose first batch has `first_bytes`: the wanted number, or the first batch alone.

    The first batch is whole, even if larger. A part of the second batch is useless, and may be as large.
    """
    return first_bytes if wanted < min(2 * first_bytes, available) else wanted


def walk(buffer: memoryview) -> Iterator[tuple[int, BatchHeader]]:
    """(position in the buffer, header) of each batch in fetched bytes, with both checksums verified.

    Skips an incomplete batch at the end: a fetch may be cut there. Raises CorruptData on damage.
    """
    at, end = 0, len(buffer)
    while end - at >= HEADER_BYTES:
        header = read_header(buffer, at)
        problem = check_broker_part(buffer, at, header)
        if problem is None and header.size > end - at:
            return
        problem = problem or check_outline(header, end - at)
        if problem is None and _producer_crc(buffer, at, at + header.size) != header.producer_crc:
            problem = "the producer's checksum does not match"
        if problem is not None:
            raise CorruptData("fetched batch", problem, position=at)
        yield at, header
        at += header.size
