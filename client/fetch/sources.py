"""The choice of a replica to read for each partition of a consumer, and the fetch runners to the replicas.

With read_from="master" that is the master. With "any" a partition goes

    to a slave      that the master's answer prefers, because the reader is far behind
    to a slave      any that offers its topic, while the master cannot be reached: it is *cut off*
    to the master   if a slave's answer prefers it, the slave fails or is gone; if the master can be reached again;
                    and whenever brokers join or leave; it may send the reader to a slave again

Only the request moves, with its current offset: the data of every answer comes after the data that was fetched before.
While the master is cut off, a slave may lack acknowledged messages, so the outage of the master continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from metamq.client.net.cluster import MASTER, RETRY_S, ClusterClient, Source
from metamq.errors import ConnectError, MetamqError

if TYPE_CHECKING:
    from metamq.client.fetch.fetch_queue import FetchRequest
    from metamq.client.fetch.fetch_runner import FetchRunner
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

SHUN_S = 30.0
"""Seconds that a slave that failed for a partition is not used for it."""


@dataclass(eq=False)
class Sources:
    """The sources of one consumer. Not thread-safe: for its loop only."""

    cluster: ClusterClient
    _: KW_ONLY
    reads_slaves: bool
    requests: Callable[[], Iterable[FetchRequest]]
    make_runner: Callable[[Source], FetchRunner]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    ask_again: Callable[[FetchRequest], None]
    """Repeats a request at the source that `choose` returns, instead of the unanswered one."""
    runners: dict[Source, FetchRunner] = field(default_factory=dict, init=False)
    _cut_off: dict[int, asyncio.Event] = field(default_factory=dict, init=False)
    """The broker ids whose master cannot be reached. The event is set when it may be reachable again."""
    _shunned: dict[tuple[TopicPartition, int], float] = field(default_factory=dict, init=False)

    def runner(self, source: Source) -> FetchRunner:
        """Returns the runner to a replica. Starts it on the first call."""
        runner = self.runners.get(source)
        if runner is None:
            runner = self.runners[source] = self.make_runner(source)
            self.spawn(runner.run())
        return runner

    def choose(self, tp: TopicPartition, broker_id: int) -> Source:
        """Returns the source at which to begin to read a partition."""
        self.cluster.follow_slaves(tp.topic)
        slaves = self._slaves_with(tp, broker_id) if broker_id in self._cut_off else []
        return Source(broker_id, slaves[0] if slaves else MASTER)

    def _slaves_with(self, tp: TopicPartition, broker_id: int) -> list[int]:
        """Returns the slaves that may be used for a partition."""
        now = time.monotonic()
        slaves = self.cluster.slaves_with(broker_id, tp.topic) if self.reads_slaves else []
        return [slave for slave in slaves if self._shunned.get((tp, slave), 0.0) <= now]

    def is_substitute(self, request: FetchRequest) -> bool:
        """Returns True if a slave is read because the master cannot be reached."""
        return request.source.replica != MASTER and request.source.broker_id in self._cut_off

    def go(self, request: FetchRequest, source: Source) -> None:
        """Moves a request, which is neither queued nor unanswered, to another source."""
        if source != request.source:
            self.runner(request.source).release(request)
            request.source = source

    def answered(self, request: FetchRequest, preferred_replica: int) -> None:
        """Follows the preference of an answer: a replica to use from now on, or -1 for the same one."""
        broker_id, replica = request.source
        if preferred_replica < 0 or not self.reads_slaves or self.is_substitute(request):
            return
        if replica != MASTER:
            self.go(request, Source(broker_id))
        elif preferred_replica in self._slaves_with(request.tp, broker_id):
            self.go(request, Source(broker_id, preferred_replica))

    def failed(self, request: FetchRequest, error: MetamqError) -> bool:
        """Chooses the source after a failure. Returns True if the request must be sent there at once."""
        broker_id, replica = request.source
        if replica != MASTER:
            self._shunned[request.tp, replica] = time.monotonic() + SHUN_S
            self.go(request, self.choose(request.tp, broker_id))
            return request.source.replica != MASTER or broker_id not in self._cut_off
        if not isinstance(error, ConnectError) or not self._slaves_with(request.tp, broker_id):
            return False
        self._is_cut_off(broker_id)
        self.go(request, self.choose(request.tp, broker_id))
        return True

    def _is_cut_off(self, broker_id: int) -> None:
        if broker_id not in self._cut_off:
            name = self.cluster.broker_name(broker_id)
            log.warning("%s: its master cannot be reached: reading from slaves, as far as they have the data", name)
            self._cut_off[broker_id] = asyncio.Event()
            self.spawn(self._until_back(broker_id))

    async def _until_back(self, broker_id: int) -> None:
        """Waits until there is a master that can be reached."""
        changed = self._cut_off[broker_id]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await changed.wait()
            changed.clear()
            try:
                await self.cluster.connection(broker_id)
                break
            except MetamqError as error:
                log.debug("%s", error)
        del self._cut_off[broker_id]
        log.info("%s can be reached: reading from it again", self.cluster.broker_name(broker_id))
        self._all_again(broker_id)

    def _all_again(self, broker_id: int) -> None:
        for request in list(self.requests()):
            if request.source.broker_id == broker_id and request.source.replica != MASTER:
                self.ask_again(request)

    def changed(self) -> None:
        """Checks all sources after brokers have joined or left."""
        for runner in self.runners.values():
            runner.wake()
        for event in self._cut_off.values():
            event.set()
        for request in list(self.requests()):
            broker_id, replica = request.source
            if replica == MASTER and broker_id not in self.cluster.brokers:
                if self._slaves_with(request.tp, broker_id):
                    self._is_cut_off(broker_id)
                    self.ask_again(request)
            elif replica != MASTER and self.choose(request.tp, broker_id) != request.source:
                self.ask_again(request)
