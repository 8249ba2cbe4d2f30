"""Which replica each of a consumer's partitions is read from, and the fetch runners to them.

With read_from="master" that is the master. With "any" a partition goes

    to a slave      that the master's answer prefers, since the reader is far behind
    to a slave      any that offers its topic, while the master cannot be reached: it is *cut off*
    to the master   when a slave's answer prefers it, the slave fails, or is gone; when the master can be reached again;
                    and whenever brokers come or go, to be sent away anew if it is still far behind

Only the request moves, with the offset that it has come to: whatever an answer has, comes after what was fetched
before. What a slave has when the master is cut off need not be all that was acknowledged, so that remains an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from metamq.client.fetch.fetch_queue import FetchRequest
from metamq.client.fetch.fetch_runner import FetchRunner
from metamq.client.net.cluster import MASTER, RETRY_S, ClusterClient, Source
from metamq.errors import ConnectError, MetamqError
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

SHUN_S = 30.0
"""How long a slave that failed for a partition is not asked for it."""


class Sources:
    """A consumer's. Used by its loop only."""

    def __init__(
        self,
        cluster: ClusterClient,
        *,
        reads_slaves: bool,
        requests: Callable[[], Iterable[FetchRequest]],
        make_runner: Callable[[Source], FetchRunner],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        ask_anew: Callable[[FetchRequest], None],
    ) -> None:
        """`ask_anew`: a request is to be made again, wherever `choose` says, in place of what is under way."""
        self.runners: dict[Source, FetchRunner] = {}
        self._cluster = cluster
        self._reads_slaves = reads_slaves
        self._requests = requests
        self._make_runner = make_runner
        self._spawn = spawn
        self._ask_anew = ask_anew
        self._cut_off: dict[int, asyncio.Event] = {}
        """Broker ids whose master cannot be reached; set when it may be again."""
        self._shunned: dict[tuple[TopicPartition, int], float] = {}

    def runner(self, source: Source) -> FetchRunner:
        """The runner to a replica; made when it is first asked for."""
        runner = self.runners.get(source)
        if runner is None:
            runner = self.runners[source] = self._make_runner(source)
            self._spawn(runner.run())
        return runner

    def choose(self, tp: TopicPartition, broker_id: int) -> Source:
        """Where to begin to read a partition."""
        self._cluster.follow_slaves(tp.topic)
        slaves = self._slaves_with(tp, broker_id) if broker_id in self._cut_off else []
        return Source(broker_id, slaves[0] if slaves else MASTER)

    def _slaves_with(self, tp: TopicPartition, broker_id: int) -> list[int]:
        """The slaves that may be asked for a partition."""
        now = time.monotonic()
        slaves = self._cluster.slaves_with(broker_id, tp.topic) if self._reads_slaves else []
        return [slave for slave in slaves if self._shunned.get((tp, slave), 0.0) <= now]

    def is_substitute(self, request: FetchRequest) -> bool:
        """Whether a slave is read since the master cannot be reached."""
        return request.source.replica != MASTER and request.source.broker_id in self._cut_off

    def go(self, request: FetchRequest, source: Source) -> None:
        """The request, which is neither queued nor under way, is to be made there."""
        if source != request.source:
            self.runner(request.source).release(request)
            request.source = source

    def answered(self, request: FetchRequest, preferred_replica: int) -> None:
        """An answer to the request says who had better be asked next, -1: the same."""
        broker_id, replica = request.source
        if preferred_replica < 0 or not self._reads_slaves or self.is_substitute(request):
            return
        if replica != MASTER:
            self.go(request, Source(broker_id))
        elif preferred_replica in self._slaves_with(request.tp, broker_id):
            self.go(request, Source(broker_id, preferred_replica))

    def failed(self, request: FetchRequest, error: MetamqError) -> bool:
        """The request failed; True: it is to be made at once, elsewhere."""
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
            name = self._cluster.broker_name(broker_id)
            log.warning("%s: its master cannot be reached: reading on from slaves, as far as they have it", name)
            self._cut_off[broker_id] = asyncio.Event()
            self._spawn(self._until_back(broker_id))

    async def _until_back(self, broker_id: int) -> None:
        """Until there is a master that can be reached."""
        changed = self._cut_off[broker_id]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await changed.wait()
            changed.clear()
            try:
                await self._cluster.connection(broker_id)
                break
            except MetamqError as error:
                log.debug("%s", error)
        del self._cut_off[broker_id]
        log.info("%s can be reached: reading from it again", self._cluster.broker_name(broker_id))
        self._all_anew(broker_id)

    def _all_anew(self, broker_id: int) -> None:
        for request in list(self._requests()):
            if request.source.broker_id == broker_id and request.source.replica != MASTER:
                self._ask_anew(request)

    def changed(self) -> None:
        """Brokers have come or gone."""
        for runner in self.runners.values():
            runner.wake()
        for event in self._cut_off.values():
            event.set()
        for request in list(self._requests()):
            broker_id, replica = request.source
            if replica == MASTER and broker_id not in self._cluster.brokers:
                if self._slaves_with(request.tp, broker_id):
                    self._is_cut_off(broker_id)
                    self._ask_anew(request)
            elif replica != MASTER and self.choose(request.tp, broker_id) != request.source:
                self._ask_anew(request)
