"""The driver's part of an exactly-once sink: it records the decision, then carries it out.

    commit   records the attempts that win, unless there is a decision already; commits them; then rolls back every
             other branch of the query up to that batch, at the brokers that answer
    abort    Spark also calls it after a failed commit. If there is a decision, carries it out. Else makes sure that no
             running request can decide any more, and rolls the attempts back

After the decision no error may look like a failure: a user who writes again would have the messages twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from metamq.client.net.branches import ANSWER_S
from metamq.errors import ConnectError, MetamqError, Outcome
from metamq.spark_consumers.sink.branch_ends import ROLL_BACK_S, BranchEnds, CommitLost
from metamq.spark_consumers.sink.decision_store import DecisionStore
from metamq.spark_consumers.sink.decisions import JOB, BranchName, Decision, NotOurs, batches_of, ends, ends_of_jobs

if TYPE_CHECKING:
    from metamq.spark_consumers.sink.decision_store import Sink, SinkOwner

log = logging.getLogger("metamq.spark")

T = TypeVar("T")

RETRY_S = 0.2


class CommitUnfinished(MetamqError):
    """The batch is decided, or may be decided: the caller must not write it again."""

    outcome: Outcome = "unknown"


class Committer:
    """The committer of one sink. For one loop. `patience_s`: seconds to wait for ZooKeeper and brokers."""

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
        """Begins a batch write, before its first task. Ends the orphans of other batch writes."""
        own: Sink = await self._patiently(lambda: self.store.begin(self._sink, self._owner.identity))
        await end_orphans(self._ends, self.store, self._sink, own.changed_ms)

    async def claim(self) -> None:
        """Claims the sink for a run of the query, before its first task. Raises NotOurs."""
        await self._patiently(lambda: self.store.claim(self._sink, self._owner))

    async def touch(self) -> None:
        """Reports, in a task, that the batch write is alive. Raises NotOurs."""
        await self._patiently(lambda: self.store.touch(self._sink))

    async def newest_decided(self) -> int | None:
        """Returns the newest decided batch; None if there is none."""

        async def newest() -> int | None:
            known = await self.store.sink(self._sink)
            if known is None or await self.store.decision(self._sink, known.state.floor) is None:
                return None
            return known.state.floor

        return await self._patiently(newest)

    async def commit(self, batch_id: int, winners: Mapping[str, Mapping[int, str]], content: str = "") -> None:
        """Returns once readers see the batch's messages: those of the batch's first commit.

        Raises NotOurs, if these attempts are not used; CommitLost; CommitUnfinished.
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
        """Returns once readers will never see the attempts, or see all of them if that was decided.

        Raises CommitUnfinished for a batch write that was decided: it has not failed.
        """
        try:
            standing = await self._patiently(lambda: self.store.fence(self._sink, self._owner, batch_id, attempts))
        except NotOurs:
            standing = None
        if standing is None:
            await self._best_effort(lambda: self._roll_back(batch_id, attempts))
            if self._is_job:
                await self._best_effort(lambda: self.store.remove_job(self._sink, decided=False))
            return
        try:
            await self.finish(self._sink, batch_id, standing, answer_s=ROLL_BACK_S)  # commit() has waited already
        except CommitLost:
            raise
        except MetamqError as error:
            raise self._unfinished(batch_id, error, decided=True) from error
        if self._is_job:
            hint = "Do not write it again."
            raise CommitUnfinished(f"{self._what(batch_id)} has not failed: all its rows are there", hint=hint)

    async def finish(self, sink: str, newest: int, decision: Decision, answer_s: float = 3 * ANSWER_S) -> None:
        """Carries out the decision about a batch. Raises as commit()."""
        await self._ends.commit(
            sink, newest, decision.winners, answer_s=min(self._patience_s, answer_s), accepts_loss=self._accepts_loss
        )
        if self._is_job:
            await self._best_effort(lambda: self.store.remove_job(sink, decided=True))
        await self._best_effort(lambda: self._sweep(sink, newest, decision))

    async def _sweep(self, sink: str, newest: int, decision: Decision) -> None:
        """Ends the remaining branches of the batches up to a decided one."""
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
        """Rolls back branches that have no decision, and will have none."""
        await self._ends.cluster.look_again()
        names = [(BranchName(self._sink, batch_id, one), broker_id) for one, at in attempts.items() for broker_id in at]
        await self._ends.roll_back([(name.at(broker_id), broker_id) for name, broker_id in names])

    async def _best_effort(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except MetamqError as error:
            log.warning("branches of the sink %s, or its node, may remain: %s", self._sink, error)

    def _what(self, batch_id: int) -> str:
        return f"the batch write {self._sink}" if self._is_job else f"batch {batch_id} of the sink {self._sink}"

    def _unfinished(self, batch_id: int, error: MetamqError, *, decided: bool) -> MetamqError:
        if decided:
            problem = f"{self._what(batch_id)} is decided, but readers do not see it yet: {error.problem}"
            hint = "Start the query again: it finishes that first."
            if self._is_job:
                hint = "Do not write it again: the next exactly-once batch write of the same user finishes it."
        else:
            problem = f"it is unknown if {self._what(batch_id)} was decided: {error.problem}"
            hint = "Start the query again: it finds out."
            if self._is_job:
                hint = "Once ZooKeeper answers, check if its rows are there before you write it again."
        return CommitUnfinished(problem, hint=hint)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retries while ZooKeeper or a broker is unreachable."""
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


GIVEN_UP_AFTER_MS = 48 * 3600 * 1000
"""Milliseconds. More than a task may take (transactionTimeoutMs, a day at most) plus the time until the next one
starts."""
ORPHANS_S = 10.0
"""The most seconds by which the orphans of others delay a batch write."""


async def end_orphans(branch_ends: BranchEnds, store: DecisionStore, own: str, now_ms: int) -> None:
    """Ends orphans: branches of batch writes whose drivers died, or whose tasks came too late.

    Each batch write does this. A driver's Python processes end after a minute without work, so an ephemeral node cannot
    show that a driver runs. A batch write writes its node when it begins, and when each of its tasks begins. A batch
    write that was silent for two days is given up. Its node is removed first: if its driver still runs, it cannot
    decide any more. Errors are only logged. `now_ms`: by ZooKeeper's clock.
    """
    try:
        async with asyncio.timeout(ORPHANS_S):
            await branch_ends.cluster.look_again()
            prepared = await branch_ends.prepared()  # before the nodes: a branch without a node then has no owner
            jobs: dict[str, Decision | None] = {}
            for job in await store.jobs():
                jobs[job] = None  # no branch of the own write is ended, nor of one with an error
                try:
                    if job != own and not await _finish(branch_ends, store, job, now_ms, jobs):
                        del jobs[job]
                except MetamqError as error:
                    log.warning("the batch write %s of another driver is not finished: %s", job, error)
            await branch_ends.end(ends_of_jobs(jobs, prepared))
    except (TimeoutError, MetamqError) as error:
        log.warning("the orphans of other batch writes are not ended: %r", error)


async def _finish(
    branch_ends: BranchEnds, store: DecisionStore, job: str, now_ms: int, jobs: dict[str, Decision | None]
) -> bool:
    """Carries out a batch write's decision; returns False if its node is gone."""
    known = await store.sink(job)
    if known is None:
        return False
    jobs[job] = decision = await store.decision(job, 0)
    is_old = now_ms - known.changed_ms > GIVEN_UP_AFTER_MS
    if decision is None:
        return not (is_old and await store.give_up(job, known))
    if known.state.finished:
        if is_old:
            await store.remove_job(job, decided=True)
        return True
    if not decision.brokers <= branch_ends.cluster.brokers.keys():
        return True  # later, since one of its brokers is down, and would delay this write
    try:
        await branch_ends.commit(job, 0, decision.winners, answer_s=ROLL_BACK_S)
    except CommitLost as error:
        log.error("%s", error.problem)  # nothing else can be done; if its driver runs, it gets the same error
    await store.mark_finished(job, known)
    return True
