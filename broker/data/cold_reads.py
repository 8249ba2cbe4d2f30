"""The threads that read what is not in memory, for all readers of logs. Used by the broker's loop only.

Owners (connections and links) take turns, so an owner with many cold partitions delays only itself. An owner limits the
number of its own reads. A running read holds one descriptor, which it owns: neither retention nor an eviction closes
it. The memory of running reads is bounded by the number of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from metamq.broker.log.disk.cold import AHEAD_BYTES_MAX, ColdReader, NotInMemory, read_ahead, read_whole
from metamq.threads import start_pool

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import FileCache

THREADS = 4
AHEAD_BYTES_ALL = 128 * 1024 * 1024
"""The windows of all readers together."""


@dataclass(eq=False, slots=True)
class _Job:
    reader: ColdReader
    missing: NotInMemory
    done: Callable[[], None]


class ColdReads:
    """The threads, and the reads that wait for one."""

    def __init__(self, files: FileCache) -> None:
        """Raises TooManyThreads."""
        self._files = files
        self._pool = start_pool(THREADS, "metamq-read")
        self._queues: dict[object, deque[_Job]] = {}
        """The waiting reads by owner. The first owner has the next turn."""
        self._running = 0
        self._is_closed = False
        self._ahead: WeakSet[ColdReader] = WeakSet()
        """The readers that have a window."""

    def start(self, owner: object, reader: ColdReader, missing: NotInMemory, done: Callable[[], None]) -> None:
        """Reads what was missing, gives it to the reader and calls `done` in the loop, unless the owner is dropped."""
        self._queues.setdefault(owner, deque()).append(_Job(reader, missing, done))
        self._start_next()

    def drop(self, owner: object) -> None:
        """Forgets the waiting reads of an owner. `done` of its running ones is still called."""
        self._queues.pop(owner, None)

    def read_ahead(self, reader: ColdReader) -> None:
        """Brings the reader's next window into the page cache, if it is due."""
        if reader.due is None or self._is_closed:
            return
        path, at, size = reader.due
        reader.due = None
        with contextlib.suppress(OSError):  # the read itself raises it
            self._pool.submit(read_ahead, self._files.duplicate(path), at, size)

    @property
    def _window_bytes_max(self) -> int:
        return min(AHEAD_BYTES_MAX, AHEAD_BYTES_ALL // (len(self._ahead) + 1))

    def _start_next(self) -> None:
        while self._queues and self._running < THREADS:
            owner = next(iter(self._queues))
            queue = self._queues.pop(owner)
            job = queue.popleft()
            if queue:
                self._queues[owner] = queue  # at the end
            self._running += 1
            self._run(job)

    def _run(self, job: _Job) -> None:
        loop, missing = asyncio.get_running_loop(), job.missing
        try:
            future = loop.run_in_executor(self._pool, missing.make or self._reading(job.reader, missing))
        except OSError as error:  # it cannot be opened
            loop.call_soon(self._ended, job, error)
        else:
            future.add_done_callback(lambda done: self._ended(job, done.exception() or done.result()))

    def _reading(self, reader: ColdReader, missing: NotInMemory) -> Callable[[], object]:
        ahead_bytes = reader.missed(missing, self._window_bytes_max)
        if ahead_bytes:
            self._ahead.add(reader)
        fd = self._files.duplicate(missing.path)
        return partial(read_whole, fd, self._files.buffer(missing.size), missing.at, ahead_bytes)

    def _ended(self, job: _Job, result: object) -> None:
        self._running -= 1
        if self._is_closed:
            return
        self._start_next()
        job.reader.add(job.missing, result)
        job.done()

    def close(self) -> None:
        """Waits for the running reads."""
        self._is_closed = True
        self._queues.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
