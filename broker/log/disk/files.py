"""Open files: a bounded cache of descriptors, whole writes, and the fsync of folders.

A broker with thousands of partitions has more segments than a process may have descriptors, so files are opened when
they are needed and the least recently used is closed again. A flush works on duplicates, which no eviction can close
under its thread.

The cache leaves the last descriptors of the process to what is opened elsewhere, and gives its own back for that. Where
none is left all the same, that is no failure of the disk: `storage_error` makes TooManyOpenFiles of it, and the same is
tried again later. So whatever opens a file does it before it changes anything, or changes what may be changed again.

Closing a file whose bytes are not flushed yet loses no write error: Linux keeps an error that nobody was told of with
the inode and gives it to the first fsync after the next open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable

from metamq.broker.log.disk.index import IndexCache
from metamq.broker.log.disk.times_cache import TimesCache
from metamq.errors import DiskFull, StorageError, TooManyOpenFiles
from metamq.private_files import FILE_MODE
from metamq.wire.rooms import SMALL_BYTES, Rooms

Buffer = bytes | bytearray | memoryview
Write = Callable[[int, Buffer, int], int]
Sync = Callable[[int], None]

KEPT_BYTES = 16 * 1024 * 1024
"""Memory of large reads that is used again."""
TIMES_BYTES = 32 * 1024 * 1024
"""Memory of timestamps that were looked up by; the largest batch has a quarter of it."""
DESCRIPTORS_LEFT = 16
"""What the cache leaves of the process's limit, for files and folders that are opened outside of it."""
ROOM = 4
"""Descriptors that a change of a log in several steps needs at most at once."""


class FileCache:
    """Descriptors of the files of many partition logs, at most `limit` open at once (duplicates aside).

    One thread only, that which makes it, except for sync() and sync_folder(). `write` and `sync` are os.pwrite and
    os.fsync, or a test's faulty disk.
    """

    __slots__ = ("_open", "_rooms", "_thread", "_write", "indexes", "limit", "sync", "times")

    def __init__(
        self, limit: int = 512, *, write: Write = os.pwrite, sync: Sync = os.fsync, index_bytes_max: int = 16 << 20
    ) -> None:
        self.limit = max(limit, 1)
        self.sync = sync
        self.indexes = IndexCache(index_bytes_max)
        self.times = TimesCache(TIMES_BYTES)
        self._write = write
        self._open: OrderedDict[str, int] = OrderedDict()
        self._rooms = Rooms(KEPT_BYTES)
        self._thread = threading.get_ident()

    @property
    def open_count(self) -> int:
        """Descriptors that are open now."""
        return len(self._open)

    def descriptor(self, path: str) -> int:
        """The file's descriptor, open for reading and writing; good until the next call. Raises OSError."""
        fd = self._open.get(path)
        if fd is None:
            return self._add(path, os.O_RDWR)
        self._open.move_to_end(path)
        return fd

    def create(self, path: str) -> int:
        """As descriptor(), for a file that must not exist yet."""
        return self._add(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _add(self, path: str, flags: int) -> int:
        while len(self._open) >= self.limit:
            self._evict()
        fd = self.opened(lambda: os.open(path, flags, FILE_MODE))
        self._open[path] = fd
        return fd

    def _evict(self) -> None:
        os.close(self._open.popitem(last=False)[1])

    def opened(self, open_it: Callable[[], int]) -> int:
        """What `open_it` gives, if need be after closing files of the cache: others may have used up the descriptors.

        Raises OSError.
        """
        evictable = len(self._open)
        while True:
            try:
                fd = open_it()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not (evictable and self._open):
                    raise
                evictable -= 1
                self._evict()
            else:
                if self._open and fd >= descriptors_max() - DESCRIPTORS_LEFT:  # the lowest that is free
                    self._evict()
                return fd

    def make_room(self) -> None:
        """Before a change of several steps: there are descriptors for them. Raises OSError."""
        free: list[int] = []
        try:
            while len(free) < ROOM:
                free.append(self.opened(lambda: os.open(os.devnull, os.O_RDONLY)))
        finally:
            for fd in free:
                os.close(fd)

    def duplicate(self, path: str) -> int:
        """A descriptor of the caller's own, to be closed by it, in any thread."""
        return self.opened(lambda: os.dup(self.descriptor(path)))

    def forget(self, path: str) -> None:
        """Closes the file if it is open."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def read(self, path: str, size: int, at: int) -> bytes | memoryview:
        """`size` bytes from byte `at` on, fewer where the file ends. Raises OSError."""
        fd = self.descriptor(path)
        if size <= SMALL_BYTES:
            return os.pread(fd, size, at)
        view = memoryview(self._rooms.take(size))[:size]
        return view[: os.preadv(fd, [view], at)]

    def write(self, path: str, data: Buffer, at: int) -> None:
        """Writes all of `data` at byte `at`, however many writes that takes. Raises OSError."""
        fd = self.descriptor(path)
        written = self._write(fd, data, at)
        while written < len(data):
            more = self._write(fd, memoryview(data)[written:], at + written)
            if more <= 0:
                raise OSError(errno.EIO, "the disk takes no more bytes", path)
            written += more

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable. Raises OSError."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        own = threading.get_ident() == self._thread
        fd = self.opened(lambda: os.open(path, flags)) if own else os.open(path, flags)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def replace(self, path: str, data: Buffer) -> None:
        """Writes a small file whole: its old content or its new one is found after a crash of the process.

        Raises OSError.
        """
        temporary = path + ".tmp"
        fd = self.opened(lambda: os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE))
        try:
            written = 0
            while written < len(data):
                more = self._write(fd, memoryview(data)[written:], written)
                if more <= 0:
                    raise OSError(errno.EIO, "the disk takes no more bytes", temporary)
                written += more
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # on a full disk it would keep what room there is
            raise
        finally:
            os.close(fd)
        os.rename(temporary, path)

    def close(self) -> None:
        """Closes every descriptor."""
        while self._open:
            os.close(self._open.popitem()[1])


class ReadOnlyFiles(FileCache):
    """A file cache that can only read."""

    __slots__ = ()

    def _add(self, path: str, flags: int) -> int:
        return super()._add(path, os.O_RDONLY)


def descriptors_max() -> int:
    """How many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def no_descriptor(what: str, error: OSError) -> TooManyOpenFiles | None:
    """The error to raise where an OSError says that no descriptor is left; None where it says something else."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return TooManyOpenFiles(what, descriptors_max() if error.errno == errno.EMFILE else None)


def is_full(error: OSError) -> bool:
    """Whether the disk has no room, which it may have again."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


SHORTAGES = (DiskFull, TooManyOpenFiles)
"""Nothing has failed, and nothing was changed: what is short comes back."""


def shortage(what: str, error: OSError) -> StorageError | None:
    """One of SHORTAGES where an OSError says so, else None."""
    return DiskFull(what, 0, 0) if is_full(error) else no_descriptor(what, error)


def storage_error(name: str, action: str, error: OSError) -> StorageError:
    """The error to raise for an OSError; one of SHORTAGES where that is the reason: nothing has been done then."""
    return shortage(f"{name}: {action}", error) or disk_error(name, action, error)


def disk_error(name: str, action: str, error: OSError) -> StorageError:
    """The error to raise for an OSError of the disk, or in the middle of a change."""
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    return StorageError(
        f"{name}: {action} failed: {reason}{where}",
        hint="Look at the disk (`dmesg`, `df`), then start the broker again: it recovers its logs by itself.",
    )
