"""Looks for damage before a reader meets it: verifies all logs in the background, and what readers report.

A *pass* goes over what is flushed of every log, the journal of transactions included, and begins `scrub_every_s` after
the one before began. It verifies no more than `scrub_bytes_per_s`, and takes no more than a fiftieth of a processor,
which is what bounds it where batches are small. The broker's own logs come first and the others in random order: a
broker that is often restarted, and begins anew each time, comes to all of them by and by.

A *report* is a reader's word that a batch came damaged. It is no proof, since the damage may have come on the way, and
the reader may lie: so the broker verifies its own bytes. One batch is read for each report, REPORTS_PER_S at most; no
more than REPORTS_MAX reports wait, and no more than OF_ONE_MAX of one partition.

Files are read in a thread of its own. What is found there counts only if the log still has those bytes afterwards;
metamq.broker.log.scrub says why.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from metamq.broker.config import BrokerConfig
from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import OWN, Topics
from metamq.broker.log.disk.files import no_descriptor
from metamq.broker.log.disk.scan import damaged
from metamq.broker.log.disk.segments import Segment
from metamq.broker.log.scrub import Walk
from metamq.broker.trouble import Trouble
from metamq.errors import CorruptData, MetamqError
from metamq.threads import start_pool

log = logging.getLogger("metamq.broker")

IDLE_SHARE = 50
"""For so many times as long as a step has kept a processor busy, the scrub pauses."""
REPORTS_MAX = 100
OF_ONE_MAX = 10
REPORTS_PER_S = 10.0
RETRY_S = 1.0
"""So long the scrub waits for descriptors, before it looks again."""


class Scrubber:
    """Used by the broker's loop only, but for statistics(). `found` is called with damage that is certain."""

    def __init__(self, topics: Topics, config: BrokerConfig, found: Callable[[Partition, CorruptData], None]) -> None:
        self._topics = topics
        self._config = config
        self._found = found
        self._executor = start_pool(1, "metamq-scrub")
        self._reports: dict[tuple[Partition, int], None] = {}
        """The offsets that came damaged, in the order in which they were told."""
        self._reported = asyncio.Event()
        self._trouble = Trouble()
        self._verified_bytes = self._pass_bytes = 0
        self._pass_ended_s = time.time()
        self._is_complete = False
        """Whether a pass has ended since the start."""

    def report(self, partition: Partition, offset: int) -> None:
        """A reader says that the batch with this offset came damaged."""
        of_one = sum(place is partition for place, _offset in self._reports)
        if of_one < OF_ONE_MAX and len(self._reports) < REPORTS_MAX:
            self._reports[partition, offset] = None
            self._reported.set()

    async def run(self) -> None:
        """Verifies all that there is, pass by pass, for ever."""
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
        """Looks at what readers report, for ever."""
        while True:
            await self._reported.wait()
            while self._reports:
                partition, offset = next(iter(self._reports))
                del self._reports[partition, offset]
                await self._look_at(partition, offset)
                await asyncio.sleep(1 / REPORTS_PER_S)
            self._reported.clear()

    async def _verify(self, partition: Partition) -> None:
        await asyncio.sleep(0)  # there may be thousands, and nothing in them
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
        """One step of a walk, in the thread; False: this log is not to be looked at any more."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, walk.step)
                break
            except OSError as error:
                lack = no_descriptor("verifying logs", error)
                if lack is None:
                    log.warning("%s: %s was not verified: %s", partition.name, walk.piece.path, error)
                    return False
                self._trouble.lasts("logs are not verified at present", lack)
            await asyncio.sleep(RETRY_S)  # a pass that went on would end without having verified anything
            if not _is_same(partition, cuts, walk.piece):
                return False
        self._trouble.is_over("logs are verified again")
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
            log.warning("%s: what a reader reports at offset %d was not verified: %s", partition.name, offset, error)
            return
        if place is None:
            return
        piece, begin = place
        walk = Walk(piece, begin, step_batches=1)
        if await self._step(partition, cuts, walk) and walk.problem is None:
            log.warning(
                "%s: a reader got damaged bytes at offset %d, which are sound here: look at the reader's machine and "
                "the network between", partition.name, offset,
            )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """For STATS and metrics. Any thread."""
        return {
            "bytes_per_s": self._config.scrub_bytes_per_s,
            "verified_bytes": self._verified_bytes,
            "pass_bytes": self._pass_bytes,
            "pass_age_s": round(time.time() - self._pass_ended_s, 1),
            "is_complete": self._is_complete,
        }

    def close(self) -> None:
        """Waits for the step under way."""
        self._executor.shutdown(wait=True)


def _is_same(partition: Partition, cuts: int, piece: Segment) -> bool:
    """Whether the log still has these bytes, so that damage of them is damage of the log."""
    return partition.closed_by is None and partition.cuts == cuts and partition.log.has_piece(piece)
