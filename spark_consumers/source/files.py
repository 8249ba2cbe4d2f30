"""Reads a log where it lies: in a file of a broker that is on this machine.

What a broker sends it has read before, and it is copied into the kernel and out of it again. Where both are on one
machine, and the reader may read the broker's files, it is told the place instead: HDFS calls that a short-circuit read.
How far the log may be read is the broker's word as before, and the checksums are looked at as ever.

Which files there may be read is not the word of whoever answers: only regular ones below the data folder that the
replica registered in ZooKeeper, of a broker on this machine. To open one waits for nothing, and follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat

from metamq.wire.batch import HEADER_BYTES, bytes_to_read, read_header
from metamq.wire.commands import FilePlace
from metamq.wire.limits import BATCH_BYTES_MAX
from metamq.wire.rooms import Rooms

NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.ESTALE)
"""Why a file cannot be read that will not pass: it is another user's, or another container's."""

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
POSITION_MAX = 2**63 - 1

log = logging.getLogger("metamq.spark")
_warned = False


class NotItsFile(OSError):
    """A broker names what no broker has for a log: it is misled, or misleads."""


def check_place(place: FilePlace, size: int, data: str) -> None:
    """Raises NotItsFile unless the place can be one in a log's file below the data folder `data`."""
    if "\0" in place.path or not is_encodable(place.path) or os.path.normpath(place.path) != place.path:
        raise NotItsFile(errno.EINVAL, "the path is not a plain one", place.path)
    if not os.path.isabs(data) or data == os.sep or os.path.normpath(data) != data:
        raise NotItsFile(errno.EPERM, f"the replica has no data folder registered, but {data!r}", place.path)
    if not place.path.startswith(data + os.sep):
        raise NotItsFile(errno.EPERM, f"it is not below the replica's data folder, {data}", place.path)
    if place.at < 0 or size < 0 or place.at + size > POSITION_MAX:
        raise NotItsFile(errno.EINVAL, f"no file has {size} bytes from {place.at} on", place.path)


def is_encodable(path: str) -> bool:
    """Whether a file can be called so."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def warn_once(message: str, *arguments: object) -> None:
    """A warning, the first time in this process: a broker may name as many files as it likes."""
    global _warned
    if not _warned:
        _warned = True
        log.warning(message, *arguments)


class FileReader:
    """Batches from a place in a file on, `size` bytes of them. Not thread-safe; close() it."""

    def __init__(self, place: FilePlace, size: int, rooms: Rooms, data: str) -> None:
        """What is read goes into `rooms`. `data` is the data folder that the replica registered.

        Raises NotItsFile; OSError, also where the file of that path is another one, as it may be in another container.
        """
        check_place(place, size, data)
        self.epoch = place.epoch
        """Of the log's last batch when this place was told. Later ones stand where others stood."""
        self.has_given = False
        """Whether anything was taken of it."""
        self._rooms = rooms
        self._at = place.at
        self._end = place.at + size
        self._fd = os.open(place.path, FLAGS)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise NotItsFile(errno.EINVAL, "it is no regular file", place.path)
            if (found.st_dev, found.st_ino) != (place.device, place.inode):
                raise OSError(errno.ESTALE, "it is another file", place.path)
            undo.pop_all()

    def read(self, bytes_max: int) -> memoryview:
        """What comes next: whole batches, but for the last; the first even if it is larger. Empty at the end.

        Raises OSError, also where the file is shorter: it was cut.
        """
        left = self._end - self._at
        if left < HEADER_BYTES:
            return memoryview(b"")
        head = os.pread(self._fd, HEADER_BYTES, self._at)
        if len(head) < HEADER_BYTES:
            raise OSError(errno.ESTALE, "the file ends early")
        size = read_header(head).size
        if size > left or size > BATCH_BYTES_MAX:  # damage: the broker tells of it
            return memoryview(b"")
        wanted = bytes_to_read(min(max(bytes_max, HEADER_BYTES), left), size, left)
        view = memoryview(self._rooms.take(wanted))[:wanted]
        if os.preadv(self._fd, [view], self._at) < wanted:
            raise OSError(errno.ESTALE, "the file ends early")
        return view

    def skip(self, size: int) -> None:
        """Goes on behind what was taken of the last that was read."""
        self._at += size
        self.has_given = True

    def close(self) -> None:
        """Closes the file. What was read stays."""
        os.close(self._fd)
