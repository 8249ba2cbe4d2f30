"""Flushes partition logs: before the acknowledgement with group commit, and by count or by time.

One fsync of a log serves all that wait on it: while it runs in a thread, further appends gather, and the next fsync
takes all of them. So the slower the disk, the larger the groups, and nobody waits for more than two. A flush begins
when the loop has gone through what has come by then, so that requests that came together share it; the next one begins
before those that waited for the last are answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from metamq.broker.log import FlushTicket
from metamq.broker.partition import Partition
from metamq.errors import MetamqError

log = logging.getLogger("metamq.broker")

TICK_S = 0.1


class Flusher:
    """Runs fsyncs beside the loop. `failed` is called with the first error, after which the broker has to stop.

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
        self._running: set[Partition] = set()
        self._waiting: dict[Partition, list[asyncio.Future[None]]] = {}
        """Who waits for the end of the flush under way."""
        self._threads = [
            Thread(target=self._sync, name=f"metamq-fsync-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

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
            self._start_or_fail(partition)

    def _start_or_fail(self, partition: Partition) -> None:
        try:
            self.start(partition)
        except MetamqError as error:
            self._failed(error)

    def replicated(self, partition: Partition, *, must_flush: bool) -> None:
        """As `appended`, on a slave. `must_flush`: the master waits for the flush, whatever the policy here."""
        if must_flush:
            partition.flush_wanted_position = partition.log.end_position
        self.appended(partition)

    def start(self, partition: Partition) -> None:
        """Starts a flush unless one runs, which then starts the next by itself. Raises StorageError."""
        ticket = partition.start_flush(time.monotonic_ns() // 1_000_000)
        if ticket is None:
            return
        self.flushes += 1
        self._running.add(partition)
        self._handed_over.put((asyncio.get_running_loop(), partition, ticket))

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
        try:
            if error is not None:
                raise error
            partition.finish_flush(ticket, self._flushed)
        except MetamqError as failure:
            self._failed(failure)
        except Exception as failure:  # nobody else learns of it: those who wait for the flush would wait for ever
            log.critical("%s: a flush ended by an error", partition.name, exc_info=failure)
            self._failed(MetamqError(f"internal error: {failure!r}"))
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _flushed(self, partition: Partition) -> None:
        """What was appended meanwhile need not wait until those are answered whom this flush has served."""
        if partition.flush_due(0):
            self._start_or_fail(partition)

    async def _end_of_flush(self, partition: Partition) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append(future)
        await future

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
        """Until all that is unflushed now has been flushed; or the flush has failed, which the log remembers.

        Raises StorageError.
        """
        if partition in self._running:  # it need not cover all of it
            await self._end_of_flush(partition)
        self.start(partition)
        if partition in self._running:
            await self._end_of_flush(partition)

    async def drain(self) -> None:
        """Flushes all that is dirty, once, and waits for it."""
        for partition in list(self._dirty):
            self.start(partition)
        while self._running:
            await self._end_of_flush(next(iter(self._running)))

    def close(self) -> None:
        """Waits for fsyncs under way."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._handed_over.put(None)
        for thread in threads:
            thread.join()
