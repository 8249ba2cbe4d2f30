"""Flushes partition logs: before the acknowledgement with group commit, and by count or by time.

One fsync of a log serves all that wait on it: while it runs in a thread, further appends gather, and the next fsync
takes all of them. So the slower the disk, the larger the groups, and nobody waits for more than two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from metamq.broker.log import FlushTicket
from metamq.broker.partition import Partition
from metamq.errors import MetamqError

log = logging.getLogger("metamq.broker")

TICK_S = 0.1


class Flusher:
    """Runs fsyncs beside the loop. `failed` is called with the first error, after which the broker has to stop."""

    def __init__(self, failed: Callable[[MetamqError], None], *, threads: int = 4) -> None:
        self._failed = failed
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="metamq-fsync")
        self.flushes = 0
        """Since the start: with group commit, fewer than the appends they acknowledged."""
        self._dirty: dict[Partition, None] = {}
        self._running: dict[Partition, asyncio.Task[None]] = {}

    def appended(self, partition: Partition) -> None:
        """Takes note of an append; starts a flush where the topic's policy asks for one now."""
        self._dirty[partition] = None
        if partition.flush_due(0):
            self.start(partition)

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
        task = asyncio.get_running_loop().create_task(self._flush(partition, ticket))
        self._running[partition] = task
        task.add_done_callback(lambda _: self._ended(partition, task))

    def _ended(self, partition: Partition, task: asyncio.Task[None]) -> None:
        if self._running[partition] is task:  # it may have started the next
            del self._running[partition]

    async def _flush(self, partition: Partition, ticket: FlushTicket) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, ticket.sync)
            partition.finish_flush(ticket)
            if partition.flush_due(0):
                self.start(partition)
        except MetamqError as error:
            self._failed(error)
        except Exception as error:  # nobody waits for this task: those who wait for the flush would wait for ever
            log.critical("%s: a flush ended by an error", partition.name, exc_info=error)
            self._failed(MetamqError(f"internal error: {error!r}"))

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
        if (before := self._running.get(partition)) is not None:  # it need not cover all of it
            await asyncio.wait([before])
        self.start(partition)
        if (covering := self._running.get(partition)) is not None:
            await asyncio.wait([covering])

    async def drain(self) -> None:
        """Flushes all that is dirty, once, and waits for it."""
        for partition in list(self._dirty):
            self.start(partition)
        while self._running:
            await asyncio.wait(self._running.values())

    def close(self) -> None:
        """Waits for fsyncs under way."""
        self._executor.shutdown(wait=True)
