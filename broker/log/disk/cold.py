"""Reads of a log that never wait for the disk. A thread reads bytes that are not in memory, then the log tries again.

Theory of operation
-------------------
Each reader of a log that may be behind has a ColdReader: a partition in a fetch session, a partition on a slave's link.
`FileCache.without_waiting(reader)` makes it the present reader. A read of a file then takes its bytes from the page
cache, or raises NotInMemory. A thread carries out the read that was missing, and the reader keeps its result. The
caller repeats its whole read of the log, which takes that result and continues: perhaps to the next NotInMemory.

* A thread knows a file and a range. Only the loop decides about a log: the repeated read makes every check again. So
  retention, a closed partition and changed rights need no special case.
* Bytes below the end of a log change only by a cut. A result has exactly the bytes that the log asked for, all of them
  below its end. So it is right until the log is cut. The owner of a reader does not repeat a read after a cut.
* The error of a thread is raised where the same read would have raised it. So damage and failures have one handling,
  and a failed read is never taken for the end of the data.
* A reader keeps its results only until the repeated read has succeeded or failed. It needs them: the kernel may drop
  the bytes from its cache before.

A reader that continues where it was is read ahead, in a window that doubles. The window is in the page cache, not in
the memory of the broker. When half of it is used, the next one is due; so the disk works while the reader does.

Some file systems do not say which bytes are cached. There a thread reads everything except the bytes that this process
has just written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
LARGE_BYTES = 64 * 1024
"""Smaller reads find a batch; larger ones are part of a stream."""
AHEAD_BYTES_MAX = 8 * 1024 * 1024
"""The largest window of one reader."""
ADVICE_BYTES = 512 * 1024
"""Bytes per request to read ahead. The kernel cuts larger requests off."""


class NotInMemory(Exception):
    """A read would wait for the disk: `size` bytes from byte `at` of the file, or what `make` returns."""

    def __init__(self, path: str, size: int, at: int, make: Callable[[], object] | None = None) -> None:
        super().__init__(path, size, at)
        self.path = path
        self.size = size
        self.at = at
        self.make = make


class ColdReader:
    """The results that one reader waits for, and its window. Used by the broker's loop only."""

    __slots__ = ("__weakref__", "_ahead_to", "_path", "_read_to", "_results", "due", "window_bytes")

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], tuple[int, object]] = {}
        self._path = ""
        self._read_to = 0
        self._ahead_to = 0
        self.window_bytes = 0
        """The size of the window; 0: it does not read ahead."""
        self.due: tuple[str, int, int] | None = None
        """The next window, by file, begin and size, if it is due."""

    def add(self, missing: NotInMemory, result: object) -> None:
        """Keeps the result of a thread: the bytes, fewer at the end of the file, or an Exception."""
        self._results[missing.path, missing.at] = missing.size, result

    def clear(self) -> None:
        """Drops the results."""
        self._results.clear()

    def bytes_of(self, path: str, size: int, at: int) -> memoryview | None:
        """Returns bytes that a thread has read, or None if none has. Raises the error of the thread."""
        asked, result = self._results.get((path, at), (0, None))
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result[:size] if isinstance(result, memoryview) and size <= asked else None

    def made(self, path: str, kind: type[T], make: Callable[[], T]) -> T:
        """Returns what a thread has made of the whole file. Raises NotInMemory, the error of the thread."""
        _asked, result = self._results.get((path, -1), (0, None))
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        if not isinstance(result, kind):
            raise NotInMemory(path, 0, -1, make)
        return result

    def missed(self, missing: NotInMemory, window_bytes_max: int) -> int:
        """Notes a read that a thread does; returns the size of the window to ask for behind it."""
        path, size, at = missing.path, missing.size, missing.at
        if size < LARGE_BYTES:
            return 0
        wanted_bytes = max(2 * self.window_bytes, size) if self._continues(path, at) else size
        self.window_bytes = min(wanted_bytes, window_bytes_max)
        self._path, self._read_to = path, at + size
        self._ahead_to = self._read_to + self.window_bytes
        return self.window_bytes

    def has_read(self, path: str, size: int, at: int) -> None:
        """Notes a read, and perhaps that the next window is due."""
        if size < LARGE_BYTES or not self.window_bytes:
            return
        if not self._continues(path, at):
            self.window_bytes = 0
            return
        if path != self._path:
            self._path, self._ahead_to = path, 0
        self._read_to = at + size
        begin = max(self._ahead_to, self._read_to)
        if begin <= self._read_to + self.window_bytes // 2:
            self.due = path, begin, self.window_bytes
            self._ahead_to = begin + self.window_bytes

    def _continues(self, path: str, at: int) -> bool:
        return abs(at - self._read_to) <= AHEAD_BYTES_MAX if path == self._path else at == 0


def read_in_memory(fd: int, view: memoryview, at: int) -> int | None:
    """Reads the leading bytes that are in the page cache into the view; returns their number.

    None if the system does not say which bytes are cached, as overlayfs in containers.
    """
    if not NO_WAIT:
        return None
    try:
        return os.preadv(fd, [view], at, NO_WAIT)
    except BlockingIOError:
        return 0
    except OSError:
        return None


def read_whole(fd: int, view: memoryview, at: int, ahead_bytes: int) -> memoryview:
    """Reads the bytes for the view, and asks for those behind it. Returns less at the end of the file. Any thread.

    Closes the descriptor. Raises OSError.
    """
    try:
        _advise(fd, at, len(view) + ahead_bytes)
        done = 0
        while done < len(view) and (count := os.preadv(fd, [view[done:]], at + done)):
            done += count
        return view[:done]
    finally:
        os.close(fd)


def read_ahead(fd: int, at: int, size: int) -> None:
    """Asks the kernel to bring these bytes into its cache, and does not wait for them. Closes the descriptor."""
    try:
        _advise(fd, at, size)
    finally:
        os.close(fd)


def _advise(fd: int, at: int, size: int) -> None:
    with contextlib.suppress(OSError):
        for begin in range(at, at + size, ADVICE_BYTES):
            os.posix_fadvise(fd, begin, min(ADVICE_BYTES, at + size - begin), os.POSIX_FADV_WILLNEED)
