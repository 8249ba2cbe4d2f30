"""What a broker does now and then: retention, checkpoints, and a look at the free disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from metamq.broker.config import BrokerConfig
from metamq.broker.data_folder import DataFolder
from metamq.broker.partition import Partition
from metamq.broker.processors import Processors
from metamq.broker.topics import Topics
from metamq.errors import CorruptData, DiskFull, MetamqError

log = logging.getLogger("metamq.broker")

DISK_CHECK_S = 0.05
"""Short enough for what a broker writes meanwhile to fit into the reserve."""


class Housekeeping:
    """Runs in the broker's loop, a partition at a time, so that clients are not kept waiting."""

    def __init__(
        self,
        topics: Topics,
        folder: DataFolder,
        processors: Processors,
        config: BrokerConfig,
        failed: Callable[[MetamqError], None],
    ) -> None:
        self._topics = topics
        self._folder = folder
        self._processors = processors
        self._config = config
        self._failed = failed
        self._next_round = 0.0
        self.check_disk()

    async def run(self) -> None:
        """For ever."""
        while True:
            self.check_disk()
            if time.monotonic() >= self._next_round:
                await self._round()
                self._next_round = time.monotonic() + self._config.retention_check_s
            await asyncio.sleep(DISK_CHECK_S)

    def check_disk(self) -> None:
        """Refuses writes below the reserve, accepts them again above it."""
        free_bytes = self._folder.free_bytes()
        reserve_bytes = self._config.disk_reserve_bytes
        full = free_bytes < reserve_bytes
        if full and self._processors.refuse_writes is None:
            self._processors.refuse_writes = DiskFull(str(self._folder.path), free_bytes, reserve_bytes)
            log.error("writes are refused: %s", self._processors.refuse_writes)
            self._next_round = 0.0
        elif not full and isinstance(self._processors.refuse_writes, DiskFull):
            self._processors.refuse_writes = None
            log.warning("writes are accepted again: %s bytes are free", f"{free_bytes:,}")

    async def _round(self) -> None:
        for partition in self._topics.partitions():
            if partition.closed_by is not None:
                continue
            try:
                self._look_after(partition)
            except CorruptData as error:
                log.critical("%s is not served any more: %s", partition.name, error)
                partition.close(error, clean=False)
            except MetamqError as error:
                self._failed(error)
                return
            self.check_disk()
            await asyncio.sleep(0)

    def _look_after(self, partition: Partition) -> None:
        for segment in partition.log.apply_retention(time.time_ns() // 1000):
            log.info("%s: retention removed %s", partition.name, segment)
        partition.checkpoint()
