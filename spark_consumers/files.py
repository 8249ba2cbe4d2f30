"""Reads a log where it lies: in a file of a broker that is on this machine.

What a broker sends it has read before, and it is copied into the kernel and out of it again. Where both are on one
machine, and the reader may read the broker's files, it is told the place instead: HDFS calls that a short-circuit read.
How far the log may be read is the broker's word as before, and the checksums are looked at as ever.
"""

from __future__ import annotations

import contextlib
import errno
import os

from metamq.wire.batch import HEADER_BYTES, bytes_to_read, read_header
from metamq.wire.commands import FilePlace
from metamq.wire.rooms import Rooms

NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.ESTALE)
"""Why a file cannot be read that will not pass: it is another user's, or another container's."""


class FileReader:
    """Batches from a place in a file on, `size` bytes of them. Not thread-safe; close() it."""

    def __init__(self, place: FilePlace, size: int, rooms: Rooms) -> None:
        """What is read goes into `rooms`. Raises OSError, also where the file of that path is another one, as it may be
        in another container."""
        self.epoch = place.epoch
        """Of the log's last batch when this place was told. Later ones stand where others stood."""
        self.has_given = False
        """Whether anything was taken of it."""
        self._rooms = rooms
        self._at = place.at
        self._end = place.at + size
        self._fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            found = os.fstat(self._fd)
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
        if size > left:
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
