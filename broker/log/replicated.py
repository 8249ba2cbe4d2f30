"""Batches that were copied from the master's log: the checks before they are stored, and their split into segments.

A copy is the same log byte for byte, so its batches stay as the master stamped them. Its segments may begin at other
places: that depends on the settings at the time and on where the copying began. Replicas never mention segments to
each other.
"""

from __future__ import annotations

from metamq.errors import CorruptData, ProtocolError
from metamq.wire.batch import BatchHeader, check_stored


class CopyDamaged(CorruptData):
    """Data from the master is damaged, from `offset` on. The log here is unchanged."""

    offset = -1


_HINT = "Nothing of it was stored. The copying begins again from the log's end."


def check_replicated(
    name: str, batches: memoryview, position: int, end_offset: int, end_position: int, last_epoch: int
) -> list[BatchHeader]:
    """Returns the headers of the batches, after checking that they are whole, undamaged, and the next ones of the log.

    Raises CopyDamaged; ProtocolError if they belong to another place.
    """
    if position != end_position:
        raise ProtocolError(f"{name} ends at byte {end_position:,}, the copy begins at byte {position:,}", hint=_HINT)
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
                f"{header.epoch}; expected is offset {offset:,} of epoch {epoch} or later",
                hint=_HINT,
            )
        headers.append(header)
        at += header.size
        offset, epoch = header.end_offset, header.epoch
    return headers


def fitting(headers: list[BatchHeader], used_bytes: int, segment_bytes: int) -> tuple[int, int]:
    """(number, bytes) of the first batches that fit into a segment that already has `used_bytes`.

    Any batch fits into an empty segment.
    """
    end_bytes = used_bytes
    for count, header in enumerate(headers):
        if end_bytes and end_bytes + header.size > segment_bytes:
            return count, end_bytes - used_bytes
        end_bytes += header.size
    return len(headers), end_bytes - used_bytes
