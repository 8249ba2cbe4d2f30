"""The driver's part of a sink that is exactly once: it records the decision, then brings it about.

    commit   records which attempts win, unless that stands already; commits them; rolls back every other branch of
             the query up to that batch; removes the decisions before
    abort    Spark calls it after a failed commit, too: what is decided is brought about; else nothing can be decided
             any more by what is under way, and the attempts are rolled back

Brokers are asked on connections that are made after a round trip to ZooKeeper: so it is asked who is the master now. A
former one might not know a branch that its successor has prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from metamq.client.branches import ANSWER_S, Branch, TxClient, new_session
from metamq.client.cluster import Cluster
from metamq.errors import BranchNotKnown, ConnectError, MetamqError
from metamq.spark_consumers.decision_store import DecisionStore, NotOurs
from metamq.spark_consumers.decisions import JOB, BranchName, Decision, ends
from metamq.wire.xa import Verb, Xid
from metamq.zk.session import Session

log = logging.getLogger("metamq.spark")

T = TypeVar("T")

RETRY_S = 0.2
AT_ONCE = 32
"""Branches that are ended side by side: brokers write the records of those together."""


class Committer:
    """Of one sink. For one loop. `patience_s`: how long ZooKeeper and brokers are waited for."""

    def __init__(self, session: Session, sink: str, identity: str, patience_s: float) -> None:
        self._session = session
        self._sink = sink
        self._identity = identity
        self._patience_s = patience_s
        self.store = DecisionStore(session)

    async def commit(self, batch_id: int, winners: Mapping[str, Mapping[int, str]]) -> None:
        """Returns once the batch's messages are to be seen, those of the first commit of the batch. Raises
        ConfigError when the sink is another query's; ConnectError, OutcomeUnknown: then it is to be called again."""
        decision = Decision(winners)
        standing = await self._patiently(lambda: self.store.decide(self._sink, self._identity, batch_id, decision))
        if standing is None:
            log.warning("batch %d of sink %s was written before: this attempt is dropped", batch_id, self._sink)
            await self._roll_back(batch_id, winners)
            return
        if standing != decision:
            log.info("batch %d of sink %s was decided before: this attempt is dropped", batch_id, self._sink)
        await self._patiently(lambda: self.finish(self._sink, batch_id))

    async def abort(self, batch_id: int, attempts: Mapping[str, Mapping[int, str]]) -> None:
        """Returns once nothing of the attempts is left, or all of it where it was decided so."""
        try:
            standing = await self._patiently(lambda: self.store.fence(self._sink, self._identity, batch_id))
        except NotOurs:
            standing = None
        if standing is not None:
            await self._patiently(lambda: self.finish(self._sink, batch_id))
            return
        await self._roll_back(batch_id, attempts)
        if self._sink.startswith(JOB):
            await self._patiently(lambda: self.store.remove_job(self._sink, decided=False))

    async def finish(self, sink: str, newest: int) -> None:
        """Brings about all decisions up to a batch that is decided."""
        await self._session.sync()
        decisions = {number: one for number, one in (await self.store.decisions(sink)).items() if number <= newest}
        cluster = Cluster(self._session)
        try:
            client = TxClient(cluster)
            winners = decisions[newest].winners if newest in decisions else {}
            await self._commit(client, sink, newest, winners)
            prepared = []
            for broker_id in await self._broker_ids():
                found = await client.branches(broker_id)
                prepared += [(one.xid, broker_id) for one in found if one.state == "prepared"]
            left = ends(sink, newest, decisions, prepared)
            await _each(left.commit, lambda one: _end(client, *one, Verb.COMMIT))
            await _each(left.rollback, lambda one: _end(client, *one, Verb.ROLLBACK))
        finally:
            await cluster.close()
        if sink.startswith(JOB):
            await self.store.remove_job(sink, decided=True)
        for number in decisions:
            if number < newest:
                await self.store.remove(sink, number)

    async def finish_jobs(self) -> None:
        """Brings about what drivers have decided that are gone. Others may be at it: it can be done twice."""
        for job in await self.store.jobs():
            if job != self._sink and await self.store.decision(job, 0) is not None:
                await self.finish(job, 0)

    async def _commit(
        self, client: TxClient, sink: str, batch_id: int, winners: Mapping[str, Mapping[int, str]]
    ) -> None:
        async def commit(one: tuple[str, int, str]) -> None:
            attempt, broker_id, history = one
            xid = BranchName(sink, batch_id, attempt).at(broker_id)
            branch = Branch(xid, broker_id, new_session())
            try:
                await client.ask(branch, [Verb.COMMIT], timeout_s=self._answer_s)
            except BranchNotKnown as error:  # it was prepared, and nothing but a commit ends it: it is committed
                if not error.finished and branch.history != history:
                    log.error("broker %d has lost data, perhaps with it %s of batch %d", broker_id, xid, batch_id)

        await _each([(attempt, *one) for attempt, at in winners.items() for one in at.items()], commit)

    async def _roll_back(self, batch_id: int, attempts: Mapping[str, Mapping[int, str]]) -> None:
        """Branches that nobody has decided about, nor will. What cannot be now is done with the query's next batch."""
        cluster = Cluster(self._session)
        names = [
            (BranchName(self._sink, batch_id, attempt).at(broker_id), broker_id)
            for attempt, at in attempts.items()
            for broker_id in at
        ]
        try:
            client = TxClient(cluster)
            await _each(names, lambda one: _end(client, *one, Verb.ROLLBACK))
        except MetamqError as error:
            log.warning("branches of batch %d of sink %s are not rolled back yet: %s", batch_id, self._sink, error)
        finally:
            await cluster.close()

    async def _broker_ids(self) -> list[int]:
        names = await self._session.children(self._session.paths.broker_ids())
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def _answer_s(self) -> float:
        return min(self._patience_s, 3 * ANSWER_S)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls again while ZooKeeper or a broker is away."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await call()
            except MetamqError as error:
                is_passing = isinstance(error, ConnectError) or error.retriable or error.outcome == "unknown"
                if not is_passing or time.monotonic() > deadline_s:
                    raise
                log.info("sink %s: %s; trying again", self._sink, error)
            await asyncio.sleep(RETRY_S)


async def _end(client: TxClient, xid: Xid, broker_id: int, verb: Verb) -> None:
    with contextlib.suppress(BranchNotKnown):  # somebody else has
        await client.ask(Branch(xid, broker_id, new_session()), [verb], timeout_s=ANSWER_S)


async def _each(things: Collection[T], end: Callable[[T], Awaitable[None]]) -> None:
    """Side by side. Raises the first error, once all are through."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(thing: T) -> None:
        async with at_once:
            await end(thing)

    results: Iterable[BaseException | None] = await asyncio.gather(*map(one, things), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error
