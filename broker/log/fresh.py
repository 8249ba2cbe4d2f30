"""Logs without a batch: new ones, those that are emptied to begin elsewhere, and what is put aside for one.

*Emptying* takes many changes of files, and a crash may come between any two. So one durable word decides: the flush
point says that the log is being emptied, and where it is to begin. Before that the log is what it was. From then on no
other file of the folder counts, whichever of them are still there, and every open goes on with the emptying until a
flush point without the word ends it. No batch is appended before that.

Large files take their time to go, so those that do not count get names under which no log looks for anything; whoever
has time removes them, the next open at the latest.

*A damaged log* is put aside as a whole: its folder gets another name. One rename is one step. A crash before the new
log is made leaves a partition whose folder is missing, which is damaged, too: metamq.broker.data.made_partitions.
"""

from __future__ import annotations

import logging
import os
import time

from metamq.broker.log.disk import flushed
from metamq.broker.log.disk.derived import make_void
from metamq.broker.log.disk.files import FileCache, storage_error
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushFile, FlushPoint
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.segments import Segment, file_path, take_inventory
from metamq.private_files import make_folder, opener

log = logging.getLogger("metamq.broker.log")


def empty_point(offset: int, position: int) -> FlushPoint:
    """The flush point of a log that begins, and ends, there."""
    return FlushPoint(position, offset, offset, position, offset, position, 0, *NO_EPOCHS, clean=True)


def make(folder: str, files: FileCache) -> None:
    """Makes a new log, unless one is there, also over what is left of an attempt that was broken off. Any thread.

    Durable but for the folder's own name. Raises OSError.
    """
    leftovers, path = take_inventory(folder).segments, f"{folder}/{flushed.FILE_NAME}"
    if os.path.exists(path) or any(segment.size_bytes for segment in leftovers):
        return
    make_folder(folder)
    for leftover in leftovers:
        os.unlink(leftover.path)
    with open(file_path(folder, 0, 0, "log"), "xb", opener=opener):
        pass
    temporary = path + ".tmp"
    with open(temporary, "wb", opener=opener) as file:
        file.write(flushed.new_file(empty_point(0, 0)))
        file.flush()
        files.sync(file.fileno())
    os.rename(temporary, path)
    files.sync_folder(folder)


def is_half_made(folder: str | os.PathLike[str]) -> bool:
    """Whether there is nothing but what make() leaves where it is broken off. Raises OSError."""
    found = take_inventory(os.fspath(folder))
    has_bytes = any(segment.size_bytes for segment in found.segments)
    return not (has_bytes or found.snapshots or found.indexes or os.path.exists(f"{folder}/{flushed.FILE_NAME}"))


def decide_to_empty(flush_file: FlushFile, point: FlushPoint) -> None:
    """From the return on the log is one without a batch that begins where the point says, once empty() has returned.

    Raises OSError: then the log is what it was.
    """
    flush_file.write(point._replace(emptying=True))


def empty(folder: str, files: FileCache, flush_file: FlushFile, point: FlushPoint) -> tuple[Segment, list[str]]:
    """Does what was decided; returns the log's only segment, and the void files.

    The decision is made durable first. Raises OSError: then this is to be called again, or the log to be opened again.
    """
    flush_file.write_other(point._replace(emptying=True))
    void = make_void(sorted(entry.path for entry in os.scandir(folder) if entry.name != flushed.FILE_NAME))
    segment = _first_segment(folder, files, point)
    files.sync_folder(folder)
    flush_file.write_both(point._replace(emptying=False))
    return segment, void


def _first_segment(folder: str, files: FileCache, point: FlushPoint) -> Segment:
    offset, position = point.start_offset, point.start_position
    segment = Segment(file_path(folder, offset, position, "log"), offset, position, 0)
    files.create(segment.path)
    segment.index = SparseIndex(offset, position)
    return segment


def set_aside(folder: str | os.PathLike[str], name: str, files: FileCache, *, now_us: int) -> str:
    """Moves a damaged log away, durably: the next open makes a new one in its place. Returns where it is now.

    For a replica that can copy the partition anew. The log is not open. Raises StorageError.
    """
    path = os.path.normpath(folder)
    if not os.path.exists(path):  # an attempt before was broken off behind this
        return path
    wanted = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_us / 1_000_000))}"
    target, number = wanted, 1
    while os.path.exists(target):
        number += 1
        target = f"{wanted}-{number}"
    try:
        os.rename(path, target)
        files.sync_folder(os.path.dirname(path))
    except OSError as error:
        raise storage_error(name, "moving the damaged log away", error) from error
    log.warning("%s: the damaged log was moved to %s, which may be removed once nobody needs it", name, target)
    return target
