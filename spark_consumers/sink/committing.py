"""The driver's part of a sink that is exactly once: it records the decision, then brings it about.

    commit   records which attempts win, unless that stands already; commits them; then, as far as brokers answer,
             rolls back every other branch of the query up to that batch
    abort    Spark calls it after a failed commit, too: what is decided is brought about; else nothing can be decided
             any more by what is under way, and the attempts are rolled back

Once it is decided no error may look like a failure: who writes again then has it twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from metamq.client.net.branches import ANSWER_S
from metamq.errors import ConnectError, MetamqError, Outcome
from metamq.spark_consumers.sink.branch_ends import ROLL_BACK_S, BranchEnds, CommitLost
from metamq.spark_consumers.sink.decision_store import DecisionStore, Sink, SinkOwner
from metamq.spark_consumers.sink.decisions import JOB, BranchName, Decision, NotOurs, batches_of, ends
from metamq.spark_consumers.sink.leftovers import end_leftovers

log = logging.getLogger("metamq.spark")

T = TypeVar("T")

RETRY_S = 0.2


class CommitUnfinished(MetamqError):
    """The batch may be decided, or is: it is not to be written again by whoever gets this."""

    outcome: Outcome = "unknown"


class Committer:
    """Of one sink. For one loop. `patience_s`: how long ZooKeeper and brokers are waited for."""

    def __init__(
        self, branch_ends: BranchEnds, sink: str, owner: SinkOwner, patience_s: float, *, accepts_loss: bool = False
    ) -> None:
        self._ends = branch_ends
        self._sink = sink
        self._owner = owner
        self._patience_s = patience_s
        self._accepts_loss = accepts_loss
        self.store = DecisionStore(branch_ends.cluster.session)

    @property
    def _is_job(self) -> bool:
        return self._sink.startswith(JOB)

    async def begin_job(self) -> None:
        """Before the first task of a batch write. Ends what others have left."""
        own: Sink = await self._patiently(lambda: self.store.begin(self._sink, self._owner.identity))
        await end_leftovers(self._ends, self.store, self._sink, own.changed_ms)

    async def claim(self) -> None:
        """Before the first task of a query's run. Raises NotOurs."""
        await self._patiently(lambda: self.store.claim(self._sink, self._owner))

    async def touch(self) -> None:
        """In a task of a batch write: it is alive. Raises NotOurs."""
        await self._patiently(lambda: self.store.touch(self._sink))

    async def newest_decided(self) -> int | None:
        """The newest batch that was decided about; None when none was."""

        async def newest() -> int | None:
            known = await self.store.sink(self._sink)
            if known is None or await self.store.decision(self._sink, known.state.floor) is None:
                return None
            return known.state.floor

        return await self._patiently(newest)

    async def commit(self, batch_id: int, winners: Mapping[str, Mapping[int, str]], content: str = "") -> None:
        """Returns once the batch's messages are to be seen, those of the first commit of the batch.

        Raises NotOurs, when nothing of these attempts counts; CommitLost; CommitUnfinished.
        """
        decision = Decision(winners, content)
        try:
            standing = await self._patiently(lambda: self.store.decide(self._sink, self._owner, batch_id, decision))
        except MetamqError as error:
            if not _is_passing(error):
                raise
            raise self._unfinished(batch_id, error, decided=False) from error
        if standing.winners != winners:
            log.warning("%s was decided before: this attempt is dropped", self._what(batch_id))
        try:
            await self._patiently(lambda: self.finish(self._sink, batch_id, standing))
        except CommitLost:
            raise
        except MetamqError as error:
            raise self._unfinished(batch_id, error, decided=True) from error

    async def abort(self, batch_id: int, attempts: Mapping[str, Mapping[int, str]]) -> None:
        """Returns once nothing of the attempts will be seen, or all of it where it was decided so.

        Raises CommitUnfinished of a batch write that was decided: it has not failed.
        """
        try:
            standing = await self._patiently(lambda: self.store.fence(self._sink, self._owner, batch_id))
        except NotOurs:
            standing = None
        if standing is None:
            await self._best_effort(lambda: self._roll_back(batch_id, attempts))
            if self._is_job:
                await self._best_effort(lambda: self.store.remove_job(self._sink, decided=False))
            return
        try:
            await self.finish(self._sink, batch_id, standing, answer_s=ROLL_BACK_S)  # commit() has been patient already
        except CommitLost:
            raise
        except MetamqError as error:
            raise self._unfinished(batch_id, error, decided=True) from error
        if self._is_job:
            hint = "Do not write it again."
            raise CommitUnfinished(f"{self._what(batch_id)} has not failed: all its rows are there", hint=hint)

    async def finish(self, sink: str, newest: int, decision: Decision, answer_s: float = 3 * ANSWER_S) -> None:
        """Brings about a batch that is decided. Raises as commit()."""
        await self._ends.commit(
            sink, newest, decision.winners, answer_s=min(self._patience_s, answer_s), accepts_loss=self._accepts_loss
        )
        if self._is_job:
            await self._best_effort(lambda: self.store.remove_job(sink, decided=True))
        await self._best_effort(lambda: self._sweep(sink, newest, decision))

    async def _sweep(self, sink: str, newest: int, decision: Decision) -> None:
        """Ends what is left of the batches up to a decided one."""
        prepared = await self._ends.prepared()
        decisions = {newest: decision}
        for number in batches_of(sink, newest, prepared) - {newest}:
            older = await self.store.decision(sink, number)
            if older is not None:
                decisions[number] = older
        await self._ends.end(ends(sink, newest, decisions, prepared))
        if not self._is_job:
            await self.store.trim(sink, newest)

    async def _roll_back(self, batch_id: int, attempts: Mapping[str, Mapping[int, str]]) -> None:
        """Branches that nobody has decided about, nor will."""
        await self._ends.cluster.look_again()
        names = [(BranchName(self._sink, batch_id, one), broker_id) for one, at in attempts.items() for broker_id in at]
        await self._ends.roll_back([(name.at(broker_id), broker_id) for name, broker_id in names])

    async def _best_effort(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except MetamqError as error:
            log.warning("branches of the sink %s, or its node, are left, perhaps: %s", self._sink, error)

    def _what(self, batch_id: int) -> str:
        return f"the batch write {self._sink}" if self._is_job else f"batch {batch_id} of the sink {self._sink}"

    def _unfinished(self, batch_id: int, error: MetamqError, *, decided: bool) -> MetamqError:
        if decided:
            problem = f"{self._what(batch_id)} is decided, and will be seen, but is not yet: {error.problem}"
            hint = "Start the query again: it finishes that first."
            if self._is_job:
                hint = "Do not write it again: the next exactly-once batch write, whosever, finishes it."
        else:
            problem = f"nobody knows whether {self._what(batch_id)} was decided: {error.problem}"
            hint = "Start the query again: it asks."
            if self._is_job:
                hint = "Look whether its rows are there once ZooKeeper answers, before it is written again."
        return CommitUnfinished(problem, hint=hint)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls again while ZooKeeper or a broker is away."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await call()
            except MetamqError as error:
                if not _is_passing(error) or time.monotonic() > deadline_s:
                    raise
                log.info("sink %s: %s; trying again", self._sink, error)
            await asyncio.sleep(RETRY_S)


def _is_passing(error: MetamqError) -> bool:
    return isinstance(error, ConnectError) or error.retriable or error.outcome == "unknown"
