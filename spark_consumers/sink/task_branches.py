"""The branches of one task attempt, exactly once: it writes into branches of its own, and prepares them at its end.

While a request to a broker runs, new batches for the broker wait, and go with the next request: a branch takes its
batches one request after the other. Different brokers are served at the same time, while the task makes more batches.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from metamq.client.net.branches import Encoded
from metamq.errors import ConfigError, MetamqError, TryLater
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.commands import PutEntry
from metamq.wire.limits import ENTRIES_TARGET
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.producer.batching import TargetBatch
    from metamq.spark_consumers.sink.decisions import BranchName
    from metamq.wire.compression import Codec
    from metamq.zk.cluster.topics import TopicConfig

OWN_MAX = 5_000
"""Half of a broker's limit of branches. At the limit, a write that has so many fails; other writes wait."""
LOOK_S = 2.0
BUFFER_BYTES = 32 * 1024 * 1024
ANSWER_S = 30.0
"""An attempt fails after this number of seconds without an answer: the broker may have lost the attempt's messages."""
REQUEST_BYTES = 4 * 1024 * 1024
"""A request of this size in bytes takes no further batch."""
ROLLBACK_S = 5.0
"""Seconds for which a failed task waits for the rollback; the driver and the brokers do the rest."""


class _NamedWork(GlobalTransaction):
    """A transaction whose branches have a sink's names."""

    def __init__(self, cluster: ClusterClient, name: BranchName, *, branch_timeout_s: float, patience_s: float) -> None:
        super().__init__(
            cluster, None, name.whole, branch_timeout_s=branch_timeout_s,
            answer_s=min(patience_s, ANSWER_S), patience_s=patience_s,
        )  # fmt: skip
        self._name = name
        self._capacity_patience_s = patience_s

    def xid_at(self, broker_id: int) -> Xid:
        return self._name.at(broker_id)

    async def _ask(self, broker_id: int, verbs: list[Verb], batches: Sequence[Encoded] = (), *more: Any) -> XACode:
        """Sends verbs. Also waits while a broker has its limit of branches, or of journal bytes, from other writes.
        Raises ConfigError if they are this write's own: then waiting does not help."""
        deadline_s = time.monotonic() + self._capacity_patience_s
        while True:
            try:
                return await super()._ask(broker_id, verbs, batches, *more)
            except TryLater as error:
                if error.code != XACode.RMERR:
                    raise
                if not self.branches[broker_id].epoch:  # the branch has not begun
                    del self.branches[broker_id]
                await self._check_own(broker_id)
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _check_own(self, broker_id: int) -> None:
        try:
            found = await self._client.branches(broker_id, all_of_them=True)
        except MetamqError:  # the next look is as likely to succeed
            return
        own = sum(one.xid.gtrid == self.gtrid for one in found)
        if own >= OWN_MAX:
            raise ConfigError(
                f"broker {broker_id} takes no more branches: {own:,} of its {len(found):,} open branches belong "
                "to this write, which has one for each task with rows there",
                hint="Write in fewer tasks: coalesce(n) before the write.",
            )


class TaskBranches:
    """The branches. The task's thread calls `add`, the loop calls the rest."""

    def __init__(
        self, cluster: ClusterClient, name: BranchName, codec: Codec, *, branch_timeout_s: float, patience_s: float
    ) -> None:
        """`patience_s`: seconds to wait for a broker before the attempt fails."""
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._codec = codec
        self._work = _NamedWork(cluster, name, branch_timeout_s=branch_timeout_s, patience_s=patience_s)
        self._waiting: dict[int, deque[Encoded]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._changed = threading.Condition()
        self._bytes = 0
        self._error: Exception | None = None
        self._turn = random.randrange(1 << 20)

    # -- the task's thread --------------------------------------------------------------------------------------------

    def add(self, target_batches: Iterable[tuple[TargetBatch, TopicConfig]]) -> None:
        """Takes messages; waits while the buffer is full. Raises an earlier error, and MessageTooLarge."""
        for one, config in target_batches:
            broker_id, encoded = self._encoded(one, config)
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or self._bytes < BUFFER_BYTES)
                if self._error is not None:
                    raise self._error
                self._bytes += len(encoded.batch)
            self._loop.call_soon_threadsafe(self._put, broker_id, encoded)

    def _encoded(self, target_batch: TargetBatch, config: TopicConfig) -> tuple[int, Encoded]:
        place = target_batch.target.place or self._next(config)
        batch = target_batch.columns.encode(base_timestamp_us=time.time_ns() // 1000, codec=self._codec)
        entry = PutEntry(config.topic, config.id, place[1], len(batch))
        return place[0], Encoded(entry, batch, target_batch.columns.messages)

    def _next(self, config: TopicConfig) -> tuple[int, int]:
        """Returns a partition for rows without a target, at a live broker if there is one."""
        living = {one: count for one, count in config.partitions.items() if one in self._cluster.brokers}
        places = [(one, index) for one, count in (living or config.partitions).items() for index in range(count)]
        self._turn += 1
        return places[self._turn % len(places)]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _put(self, broker_id: int, encoded: Encoded) -> None:
        self._waiting.setdefault(broker_id, deque()).append(encoded)
        if broker_id not in self._running:
            self._running[broker_id] = asyncio.ensure_future(self._send_waiting(broker_id))

    async def _send_waiting(self, broker_id: int) -> None:
        """Sends the waiting batches for a broker, until there are none."""
        waiting = self._waiting[broker_id]
        try:
            while waiting and self._error is None:
                batches = [waiting.popleft()]
                size = len(batches[0].batch)
                while waiting and size < REQUEST_BYTES and len(batches) < ENTRIES_TARGET:
                    batches.append(waiting.popleft())
                    size += len(batches[-1].batch)
                await self._work.send_encoded(broker_id, batches)
                with self._changed:
                    self._bytes -= size
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            del self._running[broker_id]

    async def prepare(self) -> dict[int, str]:
        """Prepares all branches; returns the history of each broker that has one. Raises the error that failed the
        attempt; then nothing of it may be committed."""
        while self._running:
            await asyncio.gather(*self._running.values())
        if self._error is not None:
            raise self._error
        await self._work.prepare()
        return {broker_id: branch.history for broker_id, branch in self._work.prepared.items()}

    async def give_up(self) -> None:
        """Rolls back the branches that can be rolled back now. Brokers roll back unprepared ones some seconds after the
        worker has ended; the driver ends the others."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(ROLLBACK_S):
                await self._work.rollback()
        except (TimeoutError, MetamqError):
            pass
