"""Logs without a batch: new logs, emptied logs that begin elsewhere, and damaged logs that are set aside.

*Emptying* takes many changes of files, and a crash may come between any two. So one durable flag decides: the flush
point shows that the log is being emptied, and where it will begin. Before that the log is unchanged. From then on the
other files of the folder do not count, whichever still exist. Every open continues the emptying until a flush point
without the flag ends it. No batch is appended before that.

Removing large files takes time. So obsolete files get names that no log looks for. Any thread removes them later; the
next open removes the rest.

*Many new logs* are made together, with two waits for the disk in all instead of two for each. First all folders and
files are made, the flush points under another name; a wait for the whole disk; then the flush points get their names;
another wait. A crash before the first wait has ended leaves some of the folders, and no flush point under its name. A
crash after it leaves flush points under either name, with their content. So each folder has a whole log, or only files
of an interrupted attempt, as after a crash in make(). metamq.broker.data.made_partitions gets its lines after the
second wait. Only folders that this attempt makes are part of it: another one may be on another disk.

*A damaged log* is set aside as a whole: its folder gets another name. One rename is one step. A crash before the new
log is made leaves a partition without a folder, which counts as damaged, too: metamq.broker.data.made_partitions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from metamq.broker.log.disk import flushed
from metamq.broker.log.disk.derived import make_void
from metamq.broker.log.disk.files import FileCache, Sync, storage_error
from metamq.broker.log.disk.flushed import NO_EPOCHS, FlushFile, FlushPoint
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.disk.segments import Segment, file_path, take_inventory
from metamq.private_files import make_folder, opener

log = logging.getLogger("metamq.broker.log")
TOGETHER = 16
"""Number of new logs for which a wait for the whole disk takes less time than two waits for each log."""


def empty_point(offset: int, position: int) -> FlushPoint:
    """The flush point of an empty log at this place."""
    return FlushPoint(position, offset, offset, position, offset, position, 0, *NO_EPOCHS, clean=True)


def make(folder: str, files: FileCache) -> None:
    """Makes a new log, unless the folder has one. Also completes an interrupted attempt. Any thread.

    It is durable, except for the folder's own name. Raises OSError.
    """
    orphans, path = take_inventory(folder).segments, f"{folder}/{flushed.FILE_NAME}"
    if os.path.exists(path) or any(segment.size_bytes for segment in orphans):
        return
    make_folder(folder)
    for orphan in orphans:
        os.unlink(orphan.path)
    _make_files(folder, files.sync)
    os.rename(path + ".tmp", path)
    files.sync_folder(folder)


def make_all(folders: Sequence[str], files: FileCache) -> None:
    """Does make() for folders on one disk. With many it waits for the whole disk. Any thread. Raises OSError."""
    new = [folder for folder in folders if not os.path.exists(folder)]
    if files.sync_disk is None or len(new) < TOGETHER:
        new = []
    for folder in new:
        make_folder(folder)
        _make_files(folder, lambda _fd: None)
    if new:
        files.sync_disk_of(new[0])
    for folder in new:
        path = f"{folder}/{flushed.FILE_NAME}"
        os.rename(path + ".tmp", path)
    if new:
        files.sync_disk_of(new[0])
    for folder in set(folders).difference(new):
        make(folder, files)


def _make_files(folder: str, sync: Sync) -> None:
    """Makes the files of a new log; its flush point has a temporary name."""
    with open(file_path(folder, 0, 0, "log"), "xb", opener=opener):
        pass
    with open(f"{folder}/{flushed.FILE_NAME}.tmp", "wb", opener=opener) as file:
        file.write(flushed.new_file(empty_point(0, 0)))
        file.flush()
        sync(file.fileno())


def is_half_made(folder: str | os.PathLike[str]) -> bool:
    """True if the folder has only files of an interrupted make(). Raises OSError."""
    found = take_inventory(os.fspath(folder))
    has_bytes = any(segment.size_bytes for segment in found.segments)
    return not (has_bytes or found.snapshots or found.indexes or os.path.exists(f"{folder}/{flushed.FILE_NAME}"))


def decide_to_empty(flush_file: FlushFile, point: FlushPoint) -> None:
    """Decides that the log will be empty and begin where the point says. empty() then does it.

    Raises OSError: then the log is unchanged.
    """
    flush_file.write(point._replace(emptying=True))


def empty(folder: str, files: FileCache, flush_file: FlushFile, point: FlushPoint) -> tuple[Segment, list[str]]:
    """Carries out the decision. Returns the log's only segment and the obsolete files.

    It first makes the decision durable. Raises OSError: then call this again, or open the log again.
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
    """Moves a damaged log away, durably: the next open makes a new one in its place. Returns its new path.

    For a replica that can copy the partition again. The log is not open. Raises StorageError.
    """
    path = os.path.normpath(folder)
    if not os.path.exists(path):  # an earlier attempt was interrupted after the rename
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
    log.warning("%s: the damaged log was moved to %s. Remove it when you no longer need it", name, target)
    return target
