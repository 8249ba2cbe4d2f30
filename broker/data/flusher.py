"""Flushes partition logs: before the acknowledgement with group commit, and by count or by time.

One fsync of a log serves all that wait on it: while it runs in a thread, further appends gather, and the next fsync
takes all of them. So the slower the disk, the larger the groups, and nobody waits for more than two. A flush begins
when the loop has gone through what has come by then, so that requests that came together share it; the next one begins
before those that waited for the last are answered.

A flush holds descriptors while it runs, and a broker may have more dirty partitions than its process may open files. So
a few flushes are out at a time, twice as many as threads, and the other partitions queue, without a descriptor. Where
none is left all the same, the queue waits for one: that is no failure of the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from metamq.broker.data.partition import Partition
from metamq.broker.log import FlushTicket
from metamq.broker.trouble import Trouble
from metamq.errors import DiskFull, MetamqError, TooManyOpenFiles, TooManyThreads
from metamq.threads import start

log = logging.getLogger("metamq.broker")

TICK_S = 0.1


class Flusher:
    """Runs fsyncs beside the loop. `failed` is called with the first error, after which the broker has to stop.

    Raises TooManyThreads.

    A queue and threads of its own: an executor's future and a task cost each fsync as much as a transaction costs.
    """

    def __init__(self, failed: Callable[[MetamqError], None], *, threads: int = 4) -> None:
        self._failed = failed
        self._handed_over: SimpleQueue[tuple[asyncio.AbstractEventLoop, Partition, FlushTicket] | None] = SimpleQueue()
        """What threads are to fsync, and whom to tell; None ends one."""
        self.flushes = 0
        """Since the start: with group commit, fewer than the appends they acknowledged."""
        self._dirty: dict[Partition, None] = {}
        self._due: dict[Partition, None] = {}
        """Whose flush starts when the loop has gone through what has come."""
        self._queue: dict[Partition, None] = {}
        """Whose flush starts as soon as fewer are out."""
        self._running: set[Partition] = set()
        self._at_once = 2 * threads
        self._retry: asyncio.TimerHandle | None = None
        self._trouble = Trouble()
        self._waiting: dict[Partition, list[asyncio.Future[bool]]] = {}
        """Who waits for the end of the flush under way, or of the next one: whether it took all that there was."""
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
        """Takes note of an append; a flush starts soon where the topic's policy asks for one now."""
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
        """As `appended`, on a slave. `must_flush`: the master waits for the flush, whatever the policy here."""
        if must_flush:
            partition.flush_wanted_position = partition.log.end_position
        self.appended(partition)

    def start(self, partition: Partition) -> None:
        """Starts a flush, at once or in its turn, unless one runs, which then starts the next by itself."""
        if partition not in self._running:
            self._queue[partition] = None
            self._fill()

    def _fill(self) -> None:
        """Starts as many of the flushes that queue as may be out."""
        while self._queue and len(self._running) < self._at_once:
            partition = next(iter(self._queue))
            try:
                ticket = partition.start_flush(time.monotonic_ns() // 1_000_000)
            except TooManyOpenFiles as error:
                self._try_again(error)
                return
            except DiskFull:  # a log that waits for room to be emptied
                ticket = None
            except MetamqError as error:
                self._failed(error)
                ticket = None
            del self._queue[partition]
            if ticket is None:
                _answer(self._waiting.pop(partition, []), True)
                continue
            self._trouble.is_over("flushes go on")
            self.flushes += 1
            self._running.add(partition)
            self._handed_over.put((asyncio.get_running_loop(), partition, ticket))

    def _try_again(self, error: TooManyOpenFiles) -> None:
        self._trouble.lasts("flushes wait", error)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(TICK_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._fill()

    def _sync(self) -> None:
        """One of the threads."""
        while (flush := self._handed_over.get()) is not None:
            loop, partition, ticket = flush
            error: Exception | None = None
            try:
                ticket.sync()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._ended, partition, ticket, error)

    def _ended(self, partition: Partition, ticket: FlushTicket, error: Exception | None) -> None:
        self._running.discard(partition)
        waiting = self._waiting.pop(partition, [])
        settled = ticket.whole
        try:
            if error is not None:
                raise error
            partition.finish_flush(ticket, self._flushed)
        except TooManyOpenFiles as later:  # to note the end of the flush takes one, too
            settled = False
            self._queue[partition] = None
            self._try_again(later)
        except MetamqError as failure:
            self._failed(failure)
        except Exception as failure:  # nobody else learns of it: those who wait for the flush would wait for ever
            log.critical("%s: a flush ended by an error", partition.name, exc_info=failure)
            self._failed(MetamqError(f"internal error: {failure!r}"))
        self._fill()
        _answer(waiting, settled)

    def _flushed(self, partition: Partition) -> None:
        """What was appended meanwhile need not wait until those are answered whom this flush has served."""
        if partition.flush_due(0):
            self.start(partition)

    async def _end_of_flush(self, partition: Partition) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append(future)
        return await future

    async def run(self) -> None:
        """Flushes by time, for ever."""
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
        """Until all that is unflushed now has been flushed; or the flush has failed, which the log remembers."""
        if partition in self._running:  # it need not cover all of it
            await self._end_of_flush(partition)
        self.start(partition)
        while partition in self._running or partition in self._queue:
            if await self._end_of_flush(partition):
                return
            self.start(partition)

    async def drain(self) -> None:
        """Flushes all that is dirty, once, and waits for it."""
        for partition in list(self._dirty):
            self.start(partition)
        while busy := self._running or self._queue:
            await self._end_of_flush(next(iter(busy)))

    def close(self) -> None:
        """Waits for fsyncs under way."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._handed_over.put(None)
        for thread in threads:
            thread.join()


def _answer(waiting: list[asyncio.Future[bool]], settled: bool) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(settled)
