"""Housekeeping at intervals: retention, checkpoints, and the check of the free disk space."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from metamq.broker.log.steps import FLUSH, Steps
from metamq.broker.log_once import LogOnce
from metamq.errors import CorruptData, DiskFull, MetamqError, TooManyOpenFiles
from metamq.threads import start_pool
from metamq.zk.names import partition_name

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.broker.transactions.processor import TransactionalCommandProcessor

log = logging.getLogger("metamq.broker")

T = TypeVar("T")

TRIM_RETRY_S = 1.0
DISK_CHECK_S = 0.05
"""Short enough: the bytes that a broker writes in this time fit into the reserve."""


class Housekeeping:
    """Runs in the broker's loop, one partition at a time; a thread waits for the disk.

    All logs belong to the loop. So a log's state changes here, between two steps, and the thread runs the steps:
    metamq.broker.log.steps explains why that is safe.
    """

    def __init__(
        self,
        topics: Topics,
        folder: DataFolder,
        status: ReplicaStatus,
        transactions: TransactionalCommandProcessor,
        flusher: Flusher,
        config: BrokerConfig,
        failed: Callable[[MetamqError], None],
    ) -> None:
        self._topics = topics
        self._folder = folder
        self._status = status
        self._transactions = transactions
        self._flusher = flusher
        self._executor = start_pool(1, "metamq-housekeeping")
        self._config = config
        self._failed = failed
        self._log_once = LogOnce()
        self._due = asyncio.Event()
        self._due.set()
        topics.trimmed = self._due.set
        self._trims_wait = False
        """True if hidden messages could not be removed yet."""
        self.check_disk()

    async def watch_disk(self) -> None:
        """Checks the disk until cancelled. It is a separate task: during a long round the disk may fill up."""
        while True:
            self.check_disk()
            await asyncio.sleep(DISK_CHECK_S)

    async def run(self) -> None:
        """Runs rounds until cancelled. Between them it tries only the trims that wait."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            pause_s = next_s - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, TRIM_RETRY_S) if self._trims_wait else pause_s):
                    await self._due.wait()
            if self._due.is_set() or loop.time() >= next_s:
                self._due.clear()
                await self._round(self._look_after)
                next_s = loop.time() + self._config.retention_check_s
            else:
                await self._round(self._trim)

    def check_disk(self) -> None:
        """Refuses writes if less than the reserve is free, and accepts them again above it."""
        free_bytes = self._folder.free_bytes()
        # Prepared branches must fit on the disk beside the reserve.
        reserve_bytes = self._config.disk_reserve_bytes + self._transactions.figures.promised_bytes
        full = free_bytes < reserve_bytes
        if full and self._status.disk_full is None:
            self._status.disk_full = DiskFull(str(self._folder.path), free_bytes, reserve_bytes)
            log.error("writes are refused: %s", self._status.disk_full)
            self._due.set()
        elif not full and self._status.disk_full is not None:
            self._status.disk_full = None
            log.warning("writes are accepted again: %s bytes are free", f"{free_bytes:,}")

    async def _round(self, work: Callable[[Partition], Awaitable[None]]) -> None:
        self._trims_wait = False
        for partition in self._topics.partitions():
            if partition.closed_by is not None:
                continue
            try:
                await work(partition)
            except CorruptData as error:
                self._topics.is_damaged(partition, error)
            except TooManyOpenFiles as error:
                self._log_once.failed("retention and checkpoints wait", error)
                return
            except DiskFull as error:
                self._log_once.failed("retention and checkpoints of some partitions wait", error)
            except MetamqError as error:
                if partition.closed_by is None:  # an error of a partition that was closed meanwhile does not count
                    self._failed(error)
                    return
            self.check_disk()
            await asyncio.sleep(0)
        self._log_once.worked("retention and checkpoints continue")

    async def _look_after(self, partition: Partition) -> None:
        await self._trim(partition)
        # Asked for each partition: a commit since the start of this round may have appended to this one.
        keep_from, drop_before = await self._transactions.kept(partition, self._folder.generation)
        steps = partition.log.retain(time.time_ns() // 1000, keep_from, drop_before)
        fields = {"topic": partition.topic, "partition": partition_name(self._config.id, partition.index)}
        for segment in await self._carry_out(partition, steps):
            log.info(
                "%s: retention removed offsets %d to %d, %s bytes: %s",
                partition.name, segment.base_offset, segment.end_offset - 1, f"{segment.size_bytes:,}", segment.path,
                extra=fields,
            )  # fmt: skip
        await self._carry_out(partition, partition.log.checkpoint())

    async def _trim(self, partition: Partition) -> None:
        """Removes messages that were deleted by a trim."""
        if not partition.log.has_hidden:
            return
        others_wait, self._trims_wait = self._trims_wait, True
        keep_from, _ = await self._transactions.kept(partition, self._folder.generation)
        before = partition.log.start_offset, partition.log.start_position
        steps = partition.log.remove_hidden(time.time_ns() // 1000, keep_from)
        if await self._carry_out(partition, steps):
            self._trims_wait = others_wait
        size = partition.log.start_position - before[1]
        if size:
            log.info(
                "%s: a trim removed offsets %d to %d, %s bytes",
                partition.name, before[0], partition.log.start_offset - 1, f"{size:,}",
                extra={"topic": partition.topic, "partition": partition_name(self._config.id, partition.index)},
            )  # fmt: skip

    async def _carry_out(self, partition: Partition, steps: Steps[T]) -> T:
        loop = asyncio.get_running_loop()
        result: Any = None
        error: OSError | None = None
        while True:
            try:
                step = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                done: T = end.value
                return done
            result = error = None
            if step == FLUSH:
                await self._flusher.settle(partition)
                continue
            try:
                result = await loop.run_in_executor(self._executor, step)
            except OSError as raised:
                error = raised

    def close(self) -> None:
        """Waits for the current step."""
        self._executor.shutdown(wait=True)
