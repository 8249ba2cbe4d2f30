"""What one attempt at a task writes, exactly once: into branches of its own, prepared at its end, nothing more.

While one request is under way to a broker, what comes for it waits, and goes with the next: a branch takes its batches
one request after the other. The brokers are served side by side, and the task makes the next batches meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from metamq.client.net.branches import Encoded
from metamq.client.net.cluster import ClusterClient
from metamq.errors import ConfigError, MetamqError, TryLater
from metamq.spark_consumers.sink.decisions import BranchName
from metamq.spark_consumers.sink.gathering import Gathered
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.commands import PutEntry
from metamq.wire.compression import Codec
from metamq.wire.limits import ENTRIES_TARGET
from metamq.wire.xa import Verb, XACode, Xid
from metamq.zk.cluster.topics import TopicConfig

OWN_MAX = 5_000
"""With so many of its own, half of what a broker takes, a write does not wait for those of others to end."""
LOOK_S = 2.0
BUFFER_BYTES = 32 * 1024 * 1024
ANSWER_S = 30.0
"""A broker that took a request and does not answer for so long fails the attempt: what it has of it may be gone."""
REQUEST_BYTES = 4 * 1024 * 1024
"""A request takes no further batch above this."""
ROLLBACK_S = 5.0
"""A task that failed waits so long for its branches' roll back; the rest is left to the driver, and to brokers."""


class _NamedWork(GlobalTransaction):
    """Its branches are named as a sink's."""

    def __init__(self, cluster: ClusterClient, name: BranchName, *, branch_timeout_s: float, patience_s: float) -> None:
        super().__init__(
            cluster, None, name.whole, branch_timeout_s=branch_timeout_s,
            answer_s=min(patience_s, ANSWER_S), patience_s=patience_s,
        )  # fmt: skip
        self._name = name
        self._room_patience_s = patience_s

    def xid_at(self, broker_id: int) -> Xid:
        return self._name.at(broker_id)

    async def _ask(self, broker_id: int, verbs: list[Verb], batches: Sequence[Encoded] = (), *more: Any) -> XACode:
        """Waits, too, while a broker has as many branches, or as large a journal, as it may: of others. Raises
        ConfigError where they are this write's own, and will not become fewer."""
        deadline_s = time.monotonic() + self._room_patience_s
        while True:
            try:
                return await super()._ask(broker_id, verbs, batches, *more)
            except TryLater as error:
                if error.code != XACode.RMERR:
                    raise
                if not self.branches[broker_id].epoch:  # it has not begun
                    del self.branches[broker_id]
                await self._check_own(broker_id)
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _check_own(self, broker_id: int) -> None:
        try:
            found = await self._client.branches(broker_id, all_of_them=True)
        except MetamqError:  # as likely to be told the next time
            return
        own = sum(one.xid.gtrid == self.gtrid for one in found)
        if own >= OWN_MAX:
            raise ConfigError(
                f"broker {broker_id} takes no more branches: {own:,} of the {len(found):,} that are open there are of "
                "this write, one for each task with rows there, until it is committed",
                hint="Write in fewer tasks: coalesce(n) before the write.",
            )


class TaskBranches:
    """`add` is for the task's thread, the rest for the loop."""

    def __init__(
        self, cluster: ClusterClient, name: BranchName, codec: Codec, *, branch_timeout_s: float, patience_s: float
    ) -> None:
        """`patience_s`: how long a broker is waited for before the attempt fails."""
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

    def add(self, gathered: Iterable[tuple[Gathered, TopicConfig]]) -> None:
        """Takes messages; waits while too much is under way. Raises what failed before, and MessageTooLarge."""
        for one, config in gathered:
            broker_id, encoded = self._encoded(one, config)
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or self._bytes < BUFFER_BYTES)
                if self._error is not None:
                    raise self._error
                self._bytes += len(encoded.batch)
            self._loop.call_soon_threadsafe(self._put, broker_id, encoded)

    def _encoded(self, gathered: Gathered, config: TopicConfig) -> tuple[int, Encoded]:
        place = gathered.target.place or self._next(config)
        batch = gathered.columns.encode(base_timestamp_us=time.time_ns() // 1000, codec=self._codec)
        entry = PutEntry(config.topic, config.id, place[1], len(batch))
        return place[0], Encoded(entry, batch, gathered.columns.messages)

    def _next(self, config: TopicConfig) -> tuple[int, int]:
        """A partition for rows that may go anywhere: of a broker that is there, if one is."""
        living = {one: count for one, count in config.partitions.items() if one in self._cluster.brokers}
        places = [(one, index) for one, count in (living or config.partitions).items() for index in range(count)]
        self._turn += 1
        return places[self._turn % len(places)]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _put(self, broker_id: int, encoded: Encoded) -> None:
        self._waiting.setdefault(broker_id, deque()).append(encoded)
        if broker_id not in self._running:
            self._running[broker_id] = asyncio.ensure_future(self._send_unsent(broker_id))

    async def _send_unsent(self, broker_id: int) -> None:
        """Sends what waits for a broker, until nothing does."""
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
        """Returns once all of it is prepared: for each broker where there is a branch its history. Raises what failed;
        then nothing of it may be committed."""
        while self._running:
            await asyncio.gather(*self._running.values())
        if self._error is not None:
            raise self._error
        await self._work.prepare()
        return {broker_id: branch.history for broker_id, branch in self._work.prepared.items()}

    async def give_up(self) -> None:
        """Rolls back what can be rolled back now. What is not prepared brokers roll back themselves, some seconds after
        its worker is gone; the rest the driver does."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(ROLLBACK_S):
                await self._work.rollback()
        except (TimeoutError, MetamqError):
            pass
