"""Verifying what a log has on the disk, a little at a time, beside all else.

A *piece* is the flushed part of one segment, as a value of its own: any thread may read it. It is walked as recovery
walks a log: both checksums of each batch, and that offsets join. The walk knows nothing of the log, which goes on
meanwhile: a segment may be removed by retention, cut, or emptied. So whatever a step finds counts only if the log still
has the piece after the step; `DurableLog.has_piece` tells.

What comes from the page cache tells nothing of the disk below it, and a scrub must not fill that cache with what nobody
reads. So bytes that were not cached are dropped again once they are verified, and those that were are left where they
are. A file is open only while it is read: what retention removes gives its room back at once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from metamq.broker.log.disk.files import ReadOnlyFiles
from metamq.broker.log.disk.scan import checked_batches
from metamq.broker.log.disk.segments import Segment
from metamq.errors import CorruptData
from metamq.wire.batch import BatchHeader

STEP_BYTES = 1 << 20
STEP_BATCHES = 256
"""The interpreter is shared with the broker's loop: a step of small batches is to be over soon, too."""
_UNREADABLE = {errno.EIO, errno.EUCLEAN, errno.EILSEQ}
"""What a read of a bad disk raises, and of a file system that has checksums of its own."""
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)


class ColdFiles(ReadOnlyFiles):
    """Reads files without keeping them open, or in the page cache when they were not there. Any thread."""

    __slots__ = ()

    def read(self, path: str, size: int, at: int) -> memoryview:
        """As FileCache.read()."""
        view = memoryview(bytearray(size))
        fd = os.open(path, os.O_RDONLY)
        try:
            if _NO_WAIT:
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_RANDOM)  # no more is read than was asked for
            cached = _read_cached(fd, view, at)
            if cached == size:
                return view
            count = cached + os.preadv(fd, [view[cached:]], at + cached)
            if _NO_WAIT:
                os.posix_fadvise(fd, at + cached, size - cached, os.POSIX_FADV_DONTNEED)
            return view[:count]
        finally:
            os.close(fd)


def _read_cached(fd: int, view: memoryview, at: int) -> int:
    """How many of the bytes were in the page cache, and are in the view now."""
    if not _NO_WAIT:
        return 0
    try:
        return os.preadv(fd, [view], at, _NO_WAIT)
    except OSError:  # none, or the file system cannot tell
        return 0


class Walk:
    """One piece being verified, from the batch at `begin` on, (offset, position). `step()` is for any thread."""

    def __init__(
        self, piece: Segment, begin: tuple[int, int] | None = None, *, step_batches: int = STEP_BATCHES
    ) -> None:
        self.piece = piece
        self._due, self.position = begin or (piece.base_offset, piece.base_position)
        """Up to this position all is good."""
        self.problem: str | None = None
        """What is wrong there."""
        self.busy_s = 0.0
        """Processor time of the last step."""
        self._step_batches = step_batches
        self._batches = checked_batches(ColdFiles(1), piece, self.position)

    @property
    def is_over(self) -> bool:
        """Whether the piece is verified, or damaged."""
        return self.problem is not None or self.position >= self.piece.end_position

    def step(self) -> None:
        """Verifies a little more. Raises OSError for what says nothing of the bytes, such as a lack of descriptors; the
        next step then tries the same again."""
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
                return f"offset {header.base_offset} where {self._due} is due"
            self.position += header.size
            self._due = header.end_offset
        return None
