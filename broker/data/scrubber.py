"""Looks for damage before a reader meets it: verifies all logs in the background, and the batches that readers report.

A *pass* verifies the flushed part of every log, including the journal of transactions. It begins `scrub_every_s` after
the previous one began. It verifies at most `scrub_bytes_per_s`, and takes at most a fiftieth of a processor, which is
the effective limit for small batches. The broker's own logs come first, then the others in random order: so a broker
that often restarts, and begins each pass from scratch, still reaches all logs over time.

A *report* comes from a reader that received a damaged batch. It is no proof, since the damage may have happened on the
way, and the reader may be wrong or hostile. So the broker verifies its own bytes. It reads one batch per report, at
most REPORTS_PER_S. At most REPORTS_MAX reports wait, and at most REPORTS_OF_PARTITION_MAX of one partition.

A separate thread reads the files. A problem counts only if the log still has those bytes afterwards:
metamq.broker.log.scrub explains why.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metamq.broker.log.disk.files import no_descriptor
from metamq.broker.log.disk.scan import damaged
from metamq.broker.log.scrub import Walk
from metamq.broker.log_once import LogOnce
from metamq.errors import CorruptData, MetamqError
from metamq.threads import start_pool
from metamq.zk.names import OWN

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.log.disk.segments import Segment

log = logging.getLogger("metamq.broker")

IDLE_SHARE = 50
"""The scrub pauses this many times as long as a step has kept a processor busy."""
REPORTS_MAX = 100
REPORTS_OF_PARTITION_MAX = 10
REPORTS_PER_S = 10.0
RETRY_S = 1.0
"""Seconds that the scrub waits for a free descriptor before it tries again."""


class Scrubber:
    """Verifies logs. Only the broker's loop uses it, except for statistics(). `found` is called with certain damage."""

    def __init__(self, topics: Topics, config: BrokerConfig, found: Callable[[Partition, CorruptData], None]) -> None:
        self._topics = topics
        self._config = config
        self._found = found
        self._executor = start_pool(1, "metamq-scrub")
        self._reports: dict[tuple[Partition, int], None] = {}
        """(partition, offset) of damaged batches, in the order of the reports."""
        self._reported = asyncio.Event()
        self._log_once = LogOnce()
        self._verified_bytes = self._pass_bytes = 0
        self._pass_ended_s = time.time()
        self._is_complete = False
        """True if a pass has ended since the start."""

    def report(self, partition: Partition, offset: int) -> None:
        """Notes that a reader received a damaged batch with this offset."""
        of_one = sum(place is partition for place, _offset in self._reports)
        if of_one < REPORTS_OF_PARTITION_MAX and len(self._reports) < REPORTS_MAX:
            self._reports[partition, offset] = None
            self._reported.set()

    async def run(self) -> None:
        """Verifies all logs, pass after pass, without end."""
        if not self._config.scrub_bytes_per_s:
            return
        while True:
            began_s, self._pass_bytes = time.monotonic(), 0
            partitions = list(self._topics.partitions())
            random.shuffle(partitions)
            for partition in sorted(partitions, key=lambda one: not one.topic.startswith(OWN)):
                await self._verify(partition)
            self._pass_ended_s, self._is_complete = time.time(), True
            await asyncio.sleep(max(began_s + self._config.scrub_every_s - time.monotonic(), 0.0))

    async def run_reports(self) -> None:
        """Verifies the batches that readers report, without end."""
        while True:
            await self._reported.wait()
            while self._reports:
                partition, offset = next(iter(self._reports))
                del self._reports[partition, offset]
                await self._look_at(partition, offset)
                await asyncio.sleep(1 / REPORTS_PER_S)
            self._reported.clear()

    async def _verify(self, partition: Partition) -> None:
        await asyncio.sleep(0)  # there may be thousands of empty partitions
        cuts = partition.cuts
        pieces = partition.log.pieces() if partition.closed_by is None else []
        for piece in pieces:
            walk = Walk(piece)
            while not walk.is_over and _is_same(partition, cuts, piece):
                before = walk.position
                if not await self._step(partition, cuts, walk):
                    return
                count = walk.position - before
                self._verified_bytes += count
                self._pass_bytes += count
                await asyncio.sleep(max(count / self._config.scrub_bytes_per_s, IDLE_SHARE * walk.busy_s))

    async def _step(self, partition: Partition, cuts: int, walk: Walk) -> bool:
        """Runs one step of a walk in the thread. Returns False if this log must not be verified further."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, walk.step)
                break
            except OSError as error:
                lack = no_descriptor("verifying logs", error)
                if lack is None:
                    log.warning("%s: %s was not verified: %s", partition.name, walk.piece.path, error)
                    return False
                self._log_once.failed("logs are not verified at present", lack)
            await asyncio.sleep(RETRY_S)  # else the pass would end without having verified anything
            if not _is_same(partition, cuts, walk.piece):
                return False
        self._log_once.worked("logs are verified again")
        if walk.problem is None or not _is_same(partition, cuts, walk.piece):
            return True
        self._found(partition, damaged(walk.piece.path, walk.position, walk.problem))
        return False

    async def _look_at(self, partition: Partition, offset: int) -> None:
        if partition.closed_by is not None:
            return
        cuts = partition.cuts
        try:
            place = partition.log.place_of(offset)
        except CorruptData as error:
            self._found(partition, error)
            return
        except MetamqError as error:
            log.warning("%s: a reader's report of offset %d was not verified: %s", partition.name, offset, error)
            return
        if place is None:
            return
        piece, begin = place
        walk = Walk(piece, begin, step_batches=1)
        if await self._step(partition, cuts, walk) and walk.problem is None:
            log.warning(
                "%s: a reader got damaged bytes at offset %d, but they are intact here: check the reader's machine and "
                "the network between", partition.name, offset,
            )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Values for STATS and metrics. Any thread."""
        return {
            "bytes_per_s": self._config.scrub_bytes_per_s,
            "verified_bytes": self._verified_bytes,
            "pass_bytes": self._pass_bytes,
            "pass_age_s": round(time.time() - self._pass_ended_s, 1),
            "is_complete": self._is_complete,
        }

    def close(self) -> None:
        """Waits for the running step."""
        self._executor.shutdown(wait=True)


def _is_same(partition: Partition, cuts: int, piece: Segment) -> bool:
    """True if the log still has these bytes. Then their damage is damage of the log."""
    return partition.closed_by is None and partition.cuts == cuts and partition.log.has_piece(piece)
