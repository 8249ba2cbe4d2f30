"""The files derived from a log (indexes, producer states, epochs): load them, rebuild them, remove them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from metamq.broker.log.disk import epochs
from metamq.broker.log.disk.epochs import EpochList
from metamq.broker.log.disk.files import ReadOnlyFiles
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.producers import ProducerStates
from metamq.broker.log.disk.scan import checked_batches, damaged, headers

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import FileCache
    from metamq.broker.log.disk.segments import Segment, SnapshotName
    from metamq.wire.batch import BatchHeader

log = logging.getLogger("metamq.broker.log")

SNAPSHOTS_KEPT = 2
STEP_BYTES = 4 * 1024 * 1024
"""Bytes that are freed at a time when a file is removed. After each step others have PAUSE_SHARE times its time."""
PAUSE_SHARE = 4
PAUSE_S_MIN, PAUSE_S_MAX = 0.004, 0.05
_VOID = ".void.tmp"


def load_index(segment: Segment, interval: int) -> SparseIndex | None:
    """The segment's saved index. None if it is missing, damaged, of another segment, or of a longer one."""
    try:
        with open(segment.index_path, "rb") as file:
            index = SparseIndex.from_bytes(file.read(), interval)
    except FileNotFoundError:
        return None
    if index is None or index.end_position > segment.end_position:
        return None
    if (index.base_offset, index.base_position) != (segment.base_offset, segment.base_position):
        return None
    return index


def load_producers(snapshot: SnapshotName) -> ProducerStates | None:
    """The states in a snapshot, or None if the snapshot is missing or damaged."""
    try:
        with open(snapshot.path, "rb") as file:
            return ProducerStates.from_bytes(file.read(), snapshot.offset, snapshot.position)
    except FileNotFoundError:
        return None


def unlink(path: str) -> None:
    """Removes a file, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def unlink_all(paths: list[str]) -> None:
    """Removes files in this order; skips missing ones. Raises OSError."""
    for path in paths:
        unlink(path)


def remove_file(path: str) -> None:
    """Removes a void file, if it exists; a large one in steps.

    To free gigabytes in one step can keep the file system from serving writes. A file with another name stays whole: an
    archive has it. Raises OSError.
    """
    with contextlib.suppress(OSError):
        status = os.stat(path)
        for size in range(status.st_size - STEP_BYTES, 0, -STEP_BYTES) if status.st_nlink == 1 else ():
            began_s = time.monotonic()
            os.truncate(path, size)
            time.sleep(min(max(PAUSE_SHARE * (time.monotonic() - began_s), PAUSE_S_MIN), PAUSE_S_MAX))
    unlink(path)


def remove_orphans(paths: list[str]) -> None:
    """Removes the files that remain of an emptied log. It may take long."""
    try:
        for path in paths:
            remove_file(path)
    except OSError as error:
        log.warning("files of an emptied log remain until the next start: %s", error)


def make_void(paths: list[str]) -> list[str]:
    """Renames files, in this order: no log finds them any more. Returns their new names.

    Any thread may remove the renamed files later; other files may use the old names by then. After a crash the next
    open removes them. Raises OSError.
    """
    void = []
    for path in paths:
        target = path if path.endswith(_VOID) else path + _VOID
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
            void.append(target)
    return void


def complete_index(files: FileCache, segment: Segment, interval: int) -> SparseIndex:
    """The segment's whole index: the saved part from its file, the rest from the log.

    Raises CorruptData if the log is damaged, OSError.
    """
    index = load_index(segment, interval) or SparseIndex(segment.base_offset, segment.base_position)
    extend_index(files, segment, index, interval)
    return index


def complete_index_in_thread(piece: Segment, interval: int) -> SparseIndex:
    """The whole index of a copy of a segment that no append changes meanwhile. Any thread. Raises as above."""
    files = ReadOnlyFiles(1)
    try:
        return complete_index(files, piece, interval)
    finally:
        files.close()


def extend_index(files: FileCache, segment: Segment, index: SparseIndex, interval: int) -> None:
    """Adds the batches between the end of the index and the end of the segment. Raises CorruptData, OSError."""
    for position, header in _intact_batches(files, segment, index.end_position):
        if header.base_offset != index.end_offset:
            raise damaged(segment.path, position, f"offset {header.base_offset} instead of {index.end_offset}")
        index.add(header.size, header.count, header.max_timestamp_us, header.append_time_us, interval)


def cut_index(files: FileCache, segment: Segment, index: SparseIndex, position: int, interval: int) -> None:
    """Cuts the index at the last batch boundary at or below `position`. Raises CorruptData, OSError."""
    boundary = index.entry_at(position)
    for at, header in _intact_batches(files, segment, boundary):
        if at + header.size > position:
            break
        boundary = at + header.size
    index.cut(boundary)
    for at, header in _intact_batches(files, segment, index.end_position):
        if at == boundary:
            break
        index.add(header.size, header.count, header.max_timestamp_us, header.append_time_us, interval)


def _intact_batches(files: FileCache, segment: Segment, position: int) -> Iterator[tuple[int, BatchHeader]]:
    for at, header, problem in checked_batches(files, segment, position):
        if header is None or problem is not None:
            raise damaged(segment.path, at, problem or "there is no header")
        yield at, header


def rebuild_producers(
    files: FileCache, segments: list[Segment], snapshots: list[SnapshotName], end_position: int
) -> ProducerStates:
    """The states as of `end_position`: the newest intact snapshot up to there, plus the log behind it.

    Raises CorruptData if the log is damaged, OSError.
    """
    states, position = ProducerStates(), segments[0].base_position
    for snapshot in reversed(snapshots):
        if position <= snapshot.position <= end_position:
            loaded = load_producers(snapshot)
            if loaded is not None:
                states, position = loaded, snapshot.position
                break
    for segment in segments:
        if segment.end_position <= position:
            continue
        for at, header in _intact_batches(files, segment, max(position, segment.base_position)):
            if at >= end_position:
                return states
            if header.producer_id:
                states.record(
                    header.producer_id, header.sequence, header.base_offset, header.count, header.append_time_us
                )
    return states


def load_epochs(folder: str) -> EpochList | None:
    """The saved list of epochs, or None if it is missing or damaged."""
    try:
        with open(f"{folder}/{epochs.FILE_NAME}", "rb") as file:
            return EpochList.from_bytes(file.read())
    except FileNotFoundError:
        return None


def rebuild_epochs(
    files: FileCache, segments: list[Segment], index_of: Callable[[Segment], SparseIndex], interval: int
) -> EpochList:
    """The list from the batches' headers. Reads each segment's first header; more only if epochs change inside.

    Raises CorruptData if the log is damaged there, OSError.
    """
    filled = [segment for segment in segments if segment.size_bytes]
    firsts = [_epoch_at(files, segment, segment.base_position) for segment in filled]
    found = EpochList()
    for segment, first, following in zip(filled, firsts, [*firsts[1:], None], strict=False):
        if first < found.last:
            raise damaged(segment.path, segment.base_position, f"epoch {first} after epoch {found.last}")
        found = found.add(first, segment.base_offset, segment.base_position)
        if first != following:
            found = _add_epochs_within(files, segment, index_of(segment), interval, found)
    return found


def _add_epochs_within(
    files: FileCache, segment: Segment, index: SparseIndex, interval: int, found: EpochList
) -> EpochList:
    """Adds the epochs that begin inside of the segment. Epochs never fall in a log, so bisection of the index works."""
    beyond = 0
    while True:
        last = found.last
        beyond = bisect_right(index.positions, last, lo=beyond, key=lambda at: _epoch_at(files, segment, at))
        for position, header in headers(files, segment, index.positions[beyond - 1], interval):
            if header.epoch > last:
                found = found.add(header.epoch, header.base_offset, position)
                break
        else:
            return found


def _epoch_at(files: FileCache, segment: Segment, position: int) -> int:
    _position, header = next(headers(files, segment, position, 0))
    return header.epoch


def superfluous(snapshots: list[SnapshotName], segments: list[Segment]) -> list[SnapshotName]:
    """The snapshots that are not needed: neither among the last two nor at the start of a segment.

    With a snapshot at each segment's start, the states can be rebuilt after a cut at any place. A snapshot from before
    the log's start is harmful: the batches after it are gone, so producers would seem to have skipped batches.
    """
    bases = {segment.base_position for segment in segments}
    start = segments[0].base_position
    latest = snapshots[-SNAPSHOTS_KEPT:]
    return [s for s in snapshots if s.position < start or not (s in latest or s.position in bases)]
