"""Verifies the bytes of a log on the disk, in small steps, in the background.

A *piece* is a copy of the flushed part of one segment: any thread may read it. It is walked as in recovery: both
checksums of each batch, and the sequence of offsets. The walk does not know the log, which continues meanwhile:
retention may remove a segment, or the log may be cut or emptied. So a problem counts only if the log still has the
piece after the step: see `DurableLog.has_piece`.

Bytes from the page cache prove nothing about the disk, and a scrub must not fill that cache with bytes that no client
reads. So bytes that were not cached are dropped from the cache after they are verified; cached bytes stay. If the file
system does not say which bytes are cached, all of them stay: the kernel then drops what is read once first. A file is
open only while it is read: a file that retention removes then frees its space at once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from metamq.broker.log.disk.files import ReadOnlyFiles
from metamq.broker.log.disk.scan import checked_batches
from metamq.errors import CorruptData

if TYPE_CHECKING:
    from metamq.broker.log.disk.segments import Segment
    from metamq.wire.batch import BatchHeader

STEP_BYTES = 1 << 20
STEP_BATCHES = 256
"""Batches of a step. The broker's loop shares the interpreter, so a step of small batches must be short, too."""
_UNREADABLE = {errno.EIO, errno.EUCLEAN, errno.EILSEQ}
"""Errors of a read from a bad disk, or from a file system with its own checksums."""
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)


class ColdFiles(ReadOnlyFiles):
    """Reads files without keeping them open. Drops bytes from the page cache that were not in it. Any thread."""

    __slots__ = ()

    def read(self, path: str, size: int, at: int) -> memoryview:
        """Reads like FileCache.read()."""
        view = memoryview(bytearray(size))
        fd = os.open(path, os.O_RDONLY)
        try:
            if _NO_WAIT:
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_RANDOM)  # no read-ahead
            cached = _read_cached(fd, view, at)
            if cached == size:
                return view
            begin = cached or 0
            count = begin + os.preadv(fd, [view[begin:]], at + begin)
            if cached is not None:
                os.posix_fadvise(fd, at + begin, size - begin, os.POSIX_FADV_DONTNEED)
            return view[:count]
        finally:
            os.close(fd)


def _read_cached(fd: int, view: memoryview, at: int) -> int | None:
    """Reads the leading bytes that are in the page cache into the view; returns their number, or None if the system
    does not say which bytes are cached."""
    if not _NO_WAIT:
        return None
    try:
        return os.preadv(fd, [view], at, _NO_WAIT)
    except BlockingIOError:
        return 0
    except OSError:  # the file system does not support this, as overlayfs in containers
        return None


class Walk:
    """The verification of one piece, from the batch at `begin`, (offset, position). Any thread may call `step()`."""

    def __init__(
        self, piece: Segment, begin: tuple[int, int] | None = None, *, step_batches: int = STEP_BATCHES
    ) -> None:
        self.piece = piece
        self._due, self.position = begin or (piece.base_offset, piece.base_position)
        """The position up to which everything is intact."""
        self.problem: str | None = None
        """The problem at `position`."""
        self.busy_s = 0.0
        """Processor seconds of the last step."""
        self._step_batches = step_batches
        self._batches = checked_batches(ColdFiles(1), piece, self.position)

    @property
    def is_over(self) -> bool:
        """True if the piece is verified, or damaged."""
        return self.problem is not None or self.position >= self.piece.end_position

    def step(self) -> None:
        """Verifies a little more. Raises OSError for errors that do not mean damage, such as a lack of descriptors;
        the next step then repeats this one."""
        began_s = time.thread_time()
        try:
            self.problem = self._verify(self._batches)
        except CorruptData as error:  # the file ends too soon
            self.problem = error.reason
        except FileNotFoundError:
            self.problem = f"the file {self.piece.path} is missing"
        except OSError as error:
            if error.errno not in _UNREADABLE:
                self._batches = checked_batches(ColdFiles(1), self.piece, self.position)
                raise
            self.problem = f"it cannot be read: {error.strerror}"
        finally:
            self.busy_s = time.thread_time() - began_s

    def _verify(self, batches: Iterator[tuple[int, BatchHeader | None, str | None]]) -> str | None:
        limit = self.position + STEP_BYTES
        for _ in range(self._step_batches):
            if self.position >= min(limit, self.piece.end_position):
                break
            _position, header, problem = next(batches)
            if header is None or problem is not None:
                return problem or "there is no header"
            if header.base_offset != self._due:
                return f"offset {header.base_offset} instead of {self._due}"
            self.position += header.size
            self._due = header.end_offset
        return None
