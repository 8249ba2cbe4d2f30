"""Batches that were copied from the master's log: what is checked before any of them is stored, and where they fit.

A copy is the same log byte by byte, so its batches stay as the master stamped them. Its segments need not begin at the
same places: that depends on the settings of the day and on where the copying began, and nothing that replicas tell one
another mentions segments.
"""

from __future__ import annotations

from metamq.errors import CorruptData, ProtocolError
from metamq.wire.batch import BatchHeader, check_stored


class CopyDamaged(CorruptData):
    """What came from the master is damaged, from `offset` on; the log here is what it was."""

    offset = -1


_HINT = "Nothing of it was stored: the copying is to begin anew, from the log's end."


def check_replicated(
    name: str, batches: memoryview, position: int, end_offset: int, end_position: int, last_epoch: int
) -> list[BatchHeader]:
    """The headers of the batches, which are whole, undamaged, and the next ones of the log that ends there.

    Raises CopyDamaged, ProtocolError when they belong somewhere else.
    """
    if position != end_position:
        raise ProtocolError(f"{name} ends at byte {end_position:,}, the copy is of byte {position:,}", hint=_HINT)
    headers = []
    at, offset, epoch = 0, end_offset, last_epoch
    while at < len(batches):
        header, problem = check_stored(batches, at, len(batches))
        if header is None or problem is not None:
            reason = problem or "there is no header"
            damage = CopyDamaged(f"the copy of {name}", reason, position=position + at, hint=_HINT)
            damage.offset = offset
            raise damage
        if header.base_offset != offset or header.epoch < epoch:
            raise ProtocolError(
                f"{name}: at byte {position + at:,} the copy has offset {header.base_offset:,} of epoch "
                f"{header.epoch}, due is offset {offset:,}, after epoch {epoch}",
                hint=_HINT,
            )
        headers.append(header)
        at += header.size
        offset, epoch = header.end_offset, header.epoch
    return headers


def fitting(headers: list[BatchHeader], used_bytes: int, segment_bytes: int) -> tuple[int, int]:
    """How many of the batches a segment has room for that has `used_bytes` already, and their bytes.

    An empty segment takes any batch.
    """
    end_bytes = used_bytes
    for count, header in enumerate(headers):
        if end_bytes and end_bytes + header.size > segment_bytes:
            return count, end_bytes - used_bytes
        end_bytes += header.size
    return len(headers), end_bytes - used_bytes
