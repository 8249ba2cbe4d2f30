"""Flushes partition logs: before the acknowledgement with group commit, or by count or time.

One fsync of a log serves all requests that wait for it. While it runs in a thread, more appends arrive, and the next
fsync covers all of them. So the slower the disk, the larger the groups, and no request waits for more than two fsyncs.
A flush begins when the loop has handled all requests that have arrived: requests that arrived together share it. The
next flush begins before the requests that waited for the last one get their answers.

A running flush holds descriptors, and a broker may have more dirty partitions than its process may open files. So only
a few flushes run at a time, twice as many as threads. The other partitions queue without a descriptor. If no descriptor
is free, the queue waits for one: this is not a failure of the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from metamq.broker.log_once import LogOnce
from metamq.errors import DiskFull, MetamqError, TooManyOpenFiles, TooManyThreads
from metamq.threads import start

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.log.flush import FlushTicket

log = logging.getLogger("metamq.broker")

TICK_S = 0.1


class Flusher:
    """Runs fsyncs concurrently with the loop. `failed` is called with the first error; the broker must then stop.

    Raises TooManyThreads.

    It has its own queue and threads: an executor's future and a task per fsync would cost as much as a transaction.
    """

    def __init__(self, failed: Callable[[MetamqError], None], *, threads: int = 4) -> None:
        self._failed = failed
        self._to_sync: SimpleQueue[tuple[asyncio.AbstractEventLoop, Partition, FlushTicket] | None] = SimpleQueue()
        """(loop, partition, ticket) for the threads to fsync; None ends one thread."""
        self.flushes = 0
        """Number of flushes since the start: with group commit, fewer than the appends that they acknowledged."""
        self._dirty: dict[Partition, None] = {}
        self._due: dict[Partition, None] = {}
        """Partitions whose flush starts when the loop has handled all requests that have arrived."""
        self._queue: dict[Partition, None] = {}
        """Partitions whose flush starts as soon as fewer flushes run."""
        self._running: set[Partition] = set()
        self._at_once = 2 * threads
        self._retry: asyncio.TimerHandle | None = None
        self._log_once = LogOnce()
        self._waiting: dict[Partition, list[asyncio.Future[bool]]] = {}
        """Futures for the end of the running flush, or of the next one: True if it covered everything."""
        self._threads: list[Thread] = []
        try:
            for number in range(threads):
                thread = Thread(target=self._sync, name=f"metamq-fsync-{number}", daemon=True)
                start(thread)
                self._threads.append(thread)
        except TooManyThreads:
            self.close()
            raise

    def appended(self, partition: Partition) -> None:
        """Notes an append; starts a flush soon if the topic's policy requires one now."""
        self._dirty[partition] = None
        if not partition.flushing and partition not in self._due and partition.flush_due(0):
            if not self._due:
                asyncio.get_running_loop().call_soon(self._start_due)
            self._due[partition] = None

    def _start_due(self) -> None:
        due, self._due = self._due, {}
        for partition in due:
            self.start(partition)

    def replicated(self, partition: Partition, *, must_flush: bool) -> None:
        """Notes an append on a slave. `must_flush`: the master waits for the flush, whatever the policy here."""
        if must_flush:
            partition.flush_wanted_position = partition.log.end_position
        self.appended(partition)

    def start(self, partition: Partition) -> None:
        """Starts a flush, now or when its turn comes. A running flush starts the next one by itself."""
        if partition not in self._running:
            self._queue[partition] = None
            self._fill()

    def _fill(self) -> None:
        """Starts queued flushes, up to the limit of running ones."""
        while self._queue and len(self._running) < self._at_once:
            partition = next(iter(self._queue))
            try:
                ticket = partition.start_flush(time.monotonic_ns() // 1_000_000)
            except TooManyOpenFiles as error:
                self._try_again(error)
                return
            except DiskFull:  # an emptied log that waits for disk space
                ticket = None
            except MetamqError as error:
                self._failed(error)
                ticket = None
            del self._queue[partition]
            if ticket is None:
                _answer(self._waiting.pop(partition, []), True)
                continue
            self._log_once.worked("flushes continue")
            self.flushes += 1
            self._running.add(partition)
            self._to_sync.put((asyncio.get_running_loop(), partition, ticket))

    def _try_again(self, error: TooManyOpenFiles) -> None:
        self._log_once.failed("flushes wait", error)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(TICK_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._fill()

    def _sync(self) -> None:
        """Runs in each of the threads."""
        while (flush := self._to_sync.get()) is not None:
            loop, partition, ticket = flush
            error: Exception | None = None
            try:
                ticket.sync()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(self._ended, partition, ticket, error)

    def _ended(self, partition: Partition, ticket: FlushTicket, error: Exception | None) -> None:
        self._running.discard(partition)
        waiting = self._waiting.pop(partition, [])
        settled = ticket.whole
        try:
            if error is not None:
                raise error
            partition.finish_flush(ticket, self._flushed)
        except TooManyOpenFiles as later:  # storing the flushed point needs a descriptor, too
            settled = False
            self._queue[partition] = None
            self._try_again(later)
        except MetamqError as failure:
            self._failed(failure)
        except Exception as failure:  # else the tasks that wait for the flush would wait without end
            log.critical("%s: a flush ended by an error", partition.name, exc_info=failure)
            self._failed(MetamqError(f"internal error: {failure!r}"))
        self._fill()
        _answer(waiting, settled)

    def _flushed(self, partition: Partition) -> None:
        """Starts the next flush before the requests that this flush served get their answers."""
        if partition.flush_due(0):
            self.start(partition)

    async def _end_of_flush(self, partition: Partition) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append(future)
        return await future

    async def run(self) -> None:
        """Starts the flushes that are due by time, without end."""
        while True:
            await asyncio.sleep(TICK_S)
            self.flush_due(time.monotonic_ns() // 1_000_000)

    def flush_due(self, now_ms: int) -> None:
        """Starts the flushes that are due by time at `now_ms`."""
        for partition in list(self._dirty):
            if partition.closed_by or (partition.dirty_since_ms is None and not partition.flushing):
                del self._dirty[partition]
            elif not partition.flushing and partition.flush_due(now_ms - (partition.dirty_since_ms or now_ms)):
                self.start(partition)

    async def settle(self, partition: Partition) -> None:
        """Waits until everything that is unflushed now is flushed, or the flush fails. The log keeps the error."""
        if partition in self._running:  # the running flush may not cover everything
            await self._end_of_flush(partition)
        self.start(partition)
        while partition in self._running or partition in self._queue:
            if await self._end_of_flush(partition):
                return
            self.start(partition)

    async def drain(self) -> None:
        """Flushes all dirty partitions once, and waits for it."""
        for partition in list(self._dirty):
            self.start(partition)
        while busy := self._running or self._queue:
            await self._end_of_flush(next(iter(busy)))

    def close(self) -> None:
        """Waits for running fsyncs and ends the threads."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._to_sync.put(None)
        for thread in threads:
            thread.join()


def _answer(waiting: list[asyncio.Future[bool]], settled: bool) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(settled)
