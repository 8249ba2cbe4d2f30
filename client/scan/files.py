"""Reads a log in place: from a file of a broker on the same machine.

To send data, a broker reads it, and copies it into the kernel and out of it again. If the reader is on the broker's
machine, and may read its files, the broker sends the place in the file instead. HDFS calls that a short-circuit read.
The broker still says how far the log may be read, and the reader still verifies the checksums.

The answering process does not decide which files are read. A reader opens only regular files below the data folder that
the replica registered in ZooKeeper, of a broker on this machine. Opening does not block, and follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from typing import TYPE_CHECKING

from metamq.wire.batch import HEADER_BYTES, bytes_to_read, read_header
from metamq.wire.limits import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from metamq.wire.buffer_pool import BufferPool
    from metamq.wire.commands import FilePlace

NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.ESTALE)
"""Lasting errors of a file: it belongs to another user, or to another container."""

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
POSITION_MAX = 2**63 - 1

log = logging.getLogger("metamq.client")
_warned = False


class NotItsFile(OSError):
    """The error for a path that cannot be a log of the broker. The broker's answer is wrong, perhaps on purpose."""


def check_place(place: FilePlace, size: int, data: str) -> None:
    """Raises NotItsFile if the place cannot be in a log's file below the data folder `data`."""
    if "\0" in place.path or not is_encodable(place.path) or os.path.normpath(place.path) != place.path:
        raise NotItsFile(errno.EINVAL, "the path is not a normal one", place.path)
    if not os.path.isabs(data) or data == os.sep or os.path.normpath(data) != data:
        raise NotItsFile(errno.EPERM, f"the replica has no data folder registered, but {data!r}", place.path)
    if not place.path.startswith(data + os.sep):
        raise NotItsFile(errno.EPERM, f"it is not below the replica's data folder, {data}", place.path)
    if place.at < 0 or size < 0 or place.at + size > POSITION_MAX:
        raise NotItsFile(errno.EINVAL, f"no file has {size} bytes from {place.at} on", place.path)


def is_encodable(path: str) -> bool:
    """True if a file can have this name."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def warn_once(message: str, *arguments: object) -> None:
    """Logs a warning, once in this process: a broker may name any number of files."""
    global _warned
    if not _warned:
        _warned = True
        log.warning(message, *arguments)


class FileReader:
    """Reads `size` bytes of batches in a file, from a place on. Not thread-safe. The caller must close() it."""

    def __init__(self, place: FilePlace, size: int, buffers: BufferPool, data: str) -> None:
        """`buffers` has the memory for the data. `data` is the data folder that the replica registered.

        Raises NotItsFile; OSError, also if the path has another file here, as it may in another container.
        """
        check_place(place, size, data)
        self.epoch = place.epoch
        """Epoch of the log's last batch when the broker sent this place. Later batches have replaced others."""
        self.has_given = False
        """True if batches were taken from the file."""
        self._buffers = buffers
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
        """Returns the next batches: all of them whole except the last; the first even if it is too large. Empty at the
        end.

        Raises OSError, also if the file is shorter: it was cut.
        """
        left = self._end - self._at
        if left < HEADER_BYTES:
            return memoryview(b"")
        head = os.pread(self._fd, HEADER_BYTES, self._at)
        if len(head) < HEADER_BYTES:
            raise OSError(errno.ESTALE, "the file ends early")
        size = read_header(head).size
        if size > left or size > BATCH_BYTES_MAX:  # damage: the broker's answer will report it
            return memoryview(b"")
        wanted = bytes_to_read(min(max(bytes_max, HEADER_BYTES), left), size, left)
        view = memoryview(self._buffers.take(wanted))[:wanted]
        if os.preadv(self._fd, [view], self._at) < wanted:
            raise OSError(errno.ESTALE, "the file ends early")
        return view

    def skip(self, size: int) -> None:
        """Moves on by `size` bytes, which were taken from the last read."""
        self._at += size
        self.has_given = True

    def close(self) -> None:
        """Closes the file. The data that was read stays."""
        os.close(self._fd)
