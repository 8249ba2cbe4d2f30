"""Open files: a bounded cache of descriptors, whole writes, and the fsync of folders.

A broker with thousands of partitions has more segments than a process may have descriptors. So files are opened when
they are needed, and the least recently used file is closed. A flush works on duplicates of descriptors, so an eviction
cannot close a file that the flush thread uses.

The cache leaves the last descriptors of the process to code outside of it, and gives back its own if that code needs
more. If no descriptor is left, the disk has not failed: `storage_error` returns TooManyOpenFiles, and the caller tries
again later. So code opens files before it changes anything, or changes only what can be changed again.

Closing a file with unflushed bytes loses no write error. If no fsync reported an error yet, Linux keeps it with the
inode and reports it to the first fsync after the next open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from metamq.broker.log.disk.cold import ColdReader, NotInMemory, read_in_memory
from metamq.errors import DiskFull, StorageError, TooManyOpenFiles
from metamq.private_files import FILE_MODE
from metamq.wire.buffer_pool import SMALL_BYTES, BufferPool

if TYPE_CHECKING:
    from array import array

    from metamq.broker.log.disk.index import SparseIndex

Buffer = bytes | bytearray | memoryview
Write = Callable[[int, Buffer, int], int]
Sync = Callable[[int], None]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KEPT_BYTES = 16 * 1024 * 1024
"""Bytes of buffers for large reads that are kept for reuse."""
TIMES_BYTES = 32 * 1024 * 1024
"""Bytes of timestamps kept for searches by time; the largest batch takes a quarter of it."""
DESCRIPTORS_LEFT = 16
"""Descriptors of the process's limit that the cache leaves free, for files and folders opened outside of it."""
RESERVED_DESCRIPTORS = 4
"""Descriptors that a change of a log in several steps needs at most at one time."""
RECENT_BYTES = 4 * 1024 * 1024
"""Bytes at the end of a file that was just written: they are in memory, even if the system does not say so."""


class BoundedCache(Generic[K, V]):
    """A cache of the most recently used values, bounded in bytes. The newest value stays, however large it is."""

    __slots__ = ("_bytes", "_bytes_max", "_size_of", "_values")

    def __init__(self, bytes_max: int, size_of: Callable[[V], int]) -> None:
        """`size_of` returns the bytes of a value, which must not change."""
        self._bytes_max = bytes_max
        self._size_of = size_of
        self._bytes = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, or None if it is not cached."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Adds a value, or replaces it."""
        self.forget(key)
        self._values[key] = value
        self._bytes += self._size_of(value)
        while self._bytes > self._bytes_max and len(self._values) > 1:
            self._bytes -= self._size_of(self._values.popitem(last=False)[1])

    def forget(self, key: K) -> None:
        """Drops a value."""
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= self._size_of(value)


class FileCache:
    """Descriptors of the files of many partition logs, at most `limit` open at once (duplicates aside).

    Only the thread that creates it may use it, except for sync(), sync_disk() and sync_folder(). `write` and `sync` are
    os.pwrite and os.fsync, or those of a test's faulty disk. `sync_disk` is metamq.broker.log.disk.whole_disk's.
    """

    __slots__ = (
        "_buffers", "_open", "_thread", "_write", "_written", "indexes", "limit", "reader", "sync", "sync_disk", "times"
    )  # fmt: skip

    def __init__(
        self,
        limit: int = 512,
        *,
        write: Write = os.pwrite,
        sync: Sync = os.fsync,
        sync_disk: Sync | None = None,
        index_bytes_max: int = 16 << 20,
    ) -> None:
        self.limit = max(limit, 1)
        self.sync = sync
        self.sync_disk = sync_disk
        """One fsync for a whole disk, or None."""
        self.indexes: BoundedCache[str, SparseIndex] = BoundedCache(index_bytes_max, lambda index: index.memory_bytes)
        """The recently used indexes of sealed segments, by their paths."""
        self.times: BoundedCache[tuple[str, int, int, int], array[int]] = BoundedCache(
            TIMES_BYTES, lambda times: 8 * len(times)
        )
        """The timestamps of recently searched batches, by path, position, checksum and hidden messages."""
        self.reader: ColdReader | None = None
        """The reader that must not wait for the disk; None: a read waits."""
        self._write = write
        self._written: dict[str, int] = {}
        """The ends of open files that were written."""
        self._open: OrderedDict[str, int] = OrderedDict()
        self._buffers = BufferPool(KEPT_BYTES)
        self._thread = threading.get_ident()

    @property
    def open_count(self) -> int:
        """Number of open descriptors."""
        return len(self._open)

    def descriptor(self, path: str) -> int:
        """The file's descriptor, open for reading and writing; valid until the next call. Raises OSError."""
        fd = self._open.get(path)
        if fd is None:
            return self._add(path, os.O_RDWR)
        self._open.move_to_end(path)
        return fd

    def create(self, path: str) -> int:
        """Like descriptor(), but creates the file, which must not exist."""
        return self._add(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _add(self, path: str, flags: int) -> int:
        while len(self._open) >= self.limit:
            self._evict()
        fd = self.opened(lambda: os.open(path, flags, FILE_MODE))
        self._open[path] = fd
        return fd

    def _evict(self) -> None:
        path, fd = self._open.popitem(last=False)
        self._written.pop(path, None)
        os.close(fd)

    def opened(self, open_it: Callable[[], int]) -> int:
        """Calls `open_it` and returns its descriptor. If no descriptor is free, closes files of the cache and retries.

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
                if self._open and fd >= descriptors_max() - DESCRIPTORS_LEFT:  # the kernel gives the lowest free number
                    self._evict()
                return fd

    def reserve_descriptors(self) -> None:
        """Frees enough descriptors for a change in several steps. Raises OSError."""
        free: list[int] = []
        try:
            while len(free) < RESERVED_DESCRIPTORS:
                free.append(self.opened(lambda: os.open(os.devnull, os.O_RDONLY)))
        finally:
            for fd in free:
                os.close(fd)

    def duplicate(self, path: str) -> int:
        """A new descriptor that the caller owns and closes, in any thread."""
        return self.opened(lambda: os.dup(self.descriptor(path)))

    def forget(self, path: str) -> None:
        """Closes the file, if it is open."""
        fd = self._open.pop(path, None)
        self._written.pop(path, None)
        if fd is not None:
            os.close(fd)

    @contextlib.contextmanager
    def without_waiting(self, reader: ColdReader) -> Iterator[None]:
        """Reads in this block raise NotInMemory instead of waiting: metamq.broker.log.disk.cold."""
        self.reader = reader
        try:
            yield
        finally:
            self.reader = None

    def read(self, path: str, size: int, at: int) -> bytes | memoryview:
        """Reads `size` bytes from byte `at` on; fewer at the end of the file. Raises OSError, NotInMemory."""
        fd = self.descriptor(path)
        if self.reader is not None:
            return self._read_in_memory(self.reader, fd, path, size, at)
        if size <= SMALL_BYTES:
            return os.pread(fd, size, at)
        view = self.buffer(size)
        return view[: os.preadv(fd, [view], at)]

    def _read_in_memory(self, reader: ColdReader, fd: int, path: str, size: int, at: int) -> memoryview:
        found = reader.bytes_of(path, size, at)
        if found is not None:
            reader.has_read(path, size, at)
            return found
        view = self.buffer(size)
        count = read_in_memory(fd, view, at)
        if count is None and at + size > self._written.get(path, at + size + RECENT_BYTES) - RECENT_BYTES:
            count = os.preadv(fd, [view], at)
        if count != size:  # perhaps the end of the file: a read that may wait finds out
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a thread reads ahead, not the kernel in the loop
            raise NotInMemory(path, size, at)
        reader.has_read(path, size, at)
        return view

    def buffer(self, size: int) -> memoryview:
        """Returns memory for a read."""
        return memoryview(self._buffers.take(size))[:size]

    def write(self, path: str, data: Buffer, at: int) -> None:
        """Writes all of `data` at byte `at`, in several writes if necessary. Raises OSError."""
        fd = self.descriptor(path)
        written = self._write(fd, data, at)
        while written < len(data):
            more = self._write(fd, memoryview(data)[written:], at + written)
            if more <= 0:
                raise OSError(errno.EIO, "the disk takes no more bytes", path)
            written += more
        self._written[path] = at + len(data)

    def sync_folder(self, path: str) -> None:
        """Makes the file names in a folder durable. Raises OSError."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        own = threading.get_ident() == self._thread
        fd = self.opened(lambda: os.open(path, flags)) if own else os.open(path, flags)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def sync_disk_of(self, path: str) -> None:
        """Makes everything durable on the disk of a folder, if there is `sync_disk`. Any thread. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if self.sync_disk is not None:
                self.sync_disk(fd)
        finally:
            os.close(fd)

    def replace(self, path: str, data: Buffer) -> None:
        """Replaces the content of a small file: after a crash of the process it has the old or the new content.

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
                os.unlink(temporary)  # on a full disk it would take up the remaining space
            raise
        finally:
            os.close(fd)
        os.rename(temporary, path)

    def close(self) -> None:
        """Closes every descriptor."""
        while self._open:
            os.close(self._open.popitem()[1])


class ReadOnlyFiles(FileCache):
    """A file cache that only reads."""

    __slots__ = ()

    def _add(self, path: str, flags: int) -> int:
        return super()._add(path, os.O_RDONLY)


def descriptors_max() -> int:
    """The maximum number of descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def no_descriptor(what: str, error: OSError) -> TooManyOpenFiles | None:
    """The error to raise if an OSError says that no descriptor is left; None for any other OSError."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return TooManyOpenFiles(what, descriptors_max() if error.errno == errno.EMFILE else None)


def is_full(error: OSError) -> bool:
    """True if the disk is full. Space may become free again."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


SHORTAGES = (DiskFull, TooManyOpenFiles)
"""Errors after which nothing has failed and nothing has changed: a retry can succeed later."""


def shortage(what: str, error: OSError) -> StorageError | None:
    """One of SHORTAGES if an OSError says so, else None."""
    return DiskFull(what, 0, 0) if is_full(error) else no_descriptor(what, error)


def storage_error(name: str, action: str, error: OSError) -> StorageError:
    """The error to raise for an OSError. If it is one of SHORTAGES, nothing has been done."""
    return shortage(f"{name}: {action}", error) or disk_error(name, action, error)


def disk_error(name: str, action: str, error: OSError) -> StorageError:
    """The error to raise for an OSError of the disk, or for any OSError in the middle of a change."""
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    return StorageError(
        f"{name}: {action} failed: {reason}{where}",
        hint="Check the disk (`dmesg`, `df`), then start the broker again: it recovers its logs by itself.",
    )
