"""Walks the batches of a segment: whole and checked, or only their headers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from metamq.errors import CorruptData
from metamq.wire.batch import (
    HEADER_BYTES,
    MAGIC,
    PRODUCER_AT,
    UNFLUSHED_UNKNOWN,
    BatchHeader,
    check_broker_part,
    check_stored,
    read_header,
)
from metamq.wire.limits import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import FileCache
    from metamq.broker.log.disk.segments import Segment

LOCATION = struct.Struct("<I4xQ28xI")
"""Size, base offset and count of a batch: enough to find a batch, and much cheaper than the whole header."""

_CHUNK_BYTES = 1 << 20
_MAGIC_BYTES = MAGIC.to_bytes(2, "little")

assert LOCATION.size <= HEADER_BYTES


def checked_batches(
    files: FileCache, segment: Segment, position: int
) -> Iterator[tuple[int, BatchHeader | None, str | None]]:
    """(position, header, None) for each intact batch from `position` to the segment's end.

    At the first damage it yields (position, header or None, the problem) and ends. Raises OSError.
    """
    end = segment.end_position
    wanted = _CHUNK_BYTES
    while position < end:
        chunk = memoryview(read_at(files, segment, position, min(wanted, end - position)))
        wanted = _CHUNK_BYTES
        at_end = position + len(chunk) >= end
        used = 0
        while used < len(chunk):
            left = len(chunk) - used
            if not at_end:
                needed = _bytes_needed(chunk, used)
                if needed > left:
                    wanted = max(wanted, needed)
                    break
            header, problem = check_stored(chunk, used, len(chunk))
            yield position + used, header, problem
            if header is None or problem is not None:
                return
            used += header.size
        position += used


def _bytes_needed(chunk: memoryview, at: int) -> int:
    if len(chunk) - at < HEADER_BYTES:
        return HEADER_BYTES
    size: int = LOCATION.unpack_from(chunk, at)[0]
    return min(max(size, HEADER_BYTES), BATCH_BYTES_MAX)


def read_at(files: FileCache, segment: Segment, position: int, size: int) -> bytes | memoryview:
    """Reads `size` bytes of the segment. Raises CorruptData if the file is shorter than expected, OSError."""
    data = files.read(segment.path, size, position - segment.base_position)
    if len(data) != size:
        raise CorruptData(
            segment.path,
            f"{size} bytes expected, the file has {len(data)}",
            position=position,
            hint="The file was changed while the broker ran. Stop the broker and see `metamq log verify`.",
        )
    return data


def headers(files: FileCache, segment: Segment, position: int, block_bytes: int) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each batch from `position` to the segment's end. Reads bodies only between near headers.

    Raises CorruptData if the broker's checksum does not match, OSError.
    """
    end = segment.end_position
    while position < end:
        block = memoryview(read_at(files, segment, position, min(block_bytes + HEADER_BYTES, end - position)))
        used = 0
        while used + HEADER_BYTES <= len(block):
            header = read_header(block, used)
            problem = check_broker_part(block, used, header)
            if problem is not None:
                raise damaged(segment.path, position + used, problem)
            yield position + used, header
            used += header.size
        if not used:
            raise damaged(segment.path, position, f"{len(block)} bytes are less than a header")
        position += used


def find_batch(
    files: FileCache, segment: Segment, offset: int, at: tuple[int, int], block_bytes: int
) -> tuple[int, int]:
    """(base offset, position) of the batch that holds `offset`; the search starts at the batch `at`.

    Raises CorruptData if the headers do not lead there, OSError.
    """
    base, position = at
    end = segment.end_position
    while position < end:
        block = read_at(files, segment, position, min(block_bytes + HEADER_BYTES, end - position))
        used = 0
        while used + HEADER_BYTES <= len(block):
            size, found, count = LOCATION.unpack_from(block, used)
            if found != base or size < HEADER_BYTES:
                raise damaged(segment.path, position + used, f"offset {found} instead of {base}")
            if offset < base + count:
                return base, position + used
            base += count
            used += size
        if not used:
            raise damaged(segment.path, position, f"{len(block)} bytes are less than a header")
        position += used
    raise damaged(segment.path, position, f"the segment ends before offset {offset}")


def find_flushed_claim(files: FileCache, segment: Segment, position: int, bad: int, own_epochs: range) -> int | None:
    """The position of an intact batch at or after `position` that proves that `bad` was already flushed, or None.

    Only batches of `own_epochs` count: a copied batch describes its master's disk. Raises OSError.
    """
    for at, header in find_intact(files, segment, position):
        known = header.epoch in own_epochs and header.unflushed_bytes != UNFLUSHED_UNKNOWN
        if known and at - header.unflushed_bytes > bad:
            return at
    return None


def find_intact(files: FileCache, segment: Segment, position: int) -> Iterator[tuple[int, BatchHeader]]:
    """The intact batches at or after `position`, wherever they begin, even behind damage or inside each other.

    Batches begin on multiples of 8, so every such place with the magic is tried. Raises OSError.
    """
    end = segment.end_position
    overlap = BATCH_BYTES_MAX
    while position + HEADER_BYTES <= end:
        data = bytes(read_at(files, segment, position, min(2 * overlap, end - position)))
        block = memoryview(data)
        last = position + len(block) >= end
        limit = len(block) if last else overlap
        at = _next_magic(data, 0, limit)
        while at is not None:
            header, problem = check_stored(block, at, len(block))
            if problem is None and header is not None:
                yield position + at, header
            at = _next_magic(data, at + 8, limit)
        if last:
            return
        position += overlap


def _next_magic(data: bytes, start: int, limit: int) -> int | None:
    at = data.find(_MAGIC_BYTES, start + PRODUCER_AT)
    while at >= 0 and at - PRODUCER_AT < limit:
        if at % 8 == 0:
            return at - PRODUCER_AT
        at = data.find(_MAGIC_BYTES, at + 1)
    return None


def damaged(what: str, position: int, reason: str) -> CorruptData:
    """The error for damage that is found while the log is in use."""
    return CorruptData(
        what,
        reason,
        position=position,
        hint="`metamq log verify` shows the extent. A slave copies such a log again by itself. For a master, promote a "
        "slave that is in sync: `metamq ha status` names it, or shows the other steps.",
    )
