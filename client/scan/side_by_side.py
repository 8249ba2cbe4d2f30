"""Reads ranges side by side, ahead of the caller: a few threads, each with one range at a time.

A thread waits while LOOK_AHEAD_BYTES of batches are ready for the caller. So the memory of a scan does not depend on
the size of the topic, and the rows of a partition come in the order of their offsets. The threads begin with the first
batch that is wanted, and end with the iterator.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from metamq import threads
from metamq.client.scan.arrow_batches import ArrowBatches
from metamq.client.scan.fetch import FetchTask, fetch

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_AHEAD_BYTES = 32 * 1024 * 1024
THREADS_MAX = 8


def record_batches(tasks: Sequence[FetchTask], schema: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    """Yields the batches of all tasks. Raises the first error of any task."""
    reading = _Reading(tasks, schema)
    try:
        reading.start(min(len(tasks), os.cpu_count() or 1, THREADS_MAX))
        while (batch := reading.take()) is not None:
            yield batch
    finally:
        reading.stop()


class _Reading:
    """The state that the threads of one iterator share."""

    def __init__(self, tasks: Sequence[FetchTask], schema: pa.Schema) -> None:
        self._left = deque(tasks)
        self._schema = schema
        self._ready: deque[Any] = deque()
        self._ready_bytes = 0
        self._running = 0
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._changed = threading.Condition()

    def start(self, count: int) -> None:
        """Starts the threads. Raises TooManyThreads."""
        for _ in range(count):
            thread = threading.Thread(target=self._run, name="metamq-scan", daemon=True)
            with self._changed:
                self._running += 1
            try:
                threads.start(thread)
            except BaseException:
                self._ended(None)
                raise

    def stop(self) -> None:
        """Makes the threads end. Does not wait for them: one may wait for a broker's answer."""
        with self._changed:
            self._is_over.set()
            self._ready.clear()
            self._changed.notify_all()

    def take(self) -> pa.RecordBatch | None:
        """Returns the next batch; None if all tasks are read. Raises the first error of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or not self._running)
            if self._error is not None:
                raise self._error.with_traceback(None)
            if not self._ready:
                return None
            batch = self._ready.popleft()
            self._ready_bytes -= batch.nbytes
            self._changed.notify_all()
            return batch

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                for batch in ArrowBatches(task.wanted, self._schema).of(fetch(task, self._is_over)):
                    if not self._put(batch):
                        return
        except BaseException as error:  # also a bug in metamq: otherwise the caller would take the error for the end
            self._ended(error)
        else:
            self._ended(None)

    def _next(self) -> FetchTask | None:
        with self._changed:
            return self._left.popleft() if self._left and not self._is_over.is_set() else None

    def _put(self, batch: pa.RecordBatch) -> bool:
        """Passes a batch to the caller. Returns False if the caller wants no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over.is_set() or self._ready_bytes < LOOK_AHEAD_BYTES)
            if not self._is_over.is_set():
                self._ready.append(batch)
                self._ready_bytes += batch.nbytes
                self._changed.notify_all()
            return not self._is_over.is_set()

    def _ended(self, error: BaseException | None) -> None:
        with self._changed:
            self._running -= 1
            if error is not None:
                self._error = self._error or error
                self._is_over.set()
            self._changed.notify_all()
