"""What batch writes have left whose drivers died, or whose tasks came too late: ended by the next batch write.

A driver's Python processes end after a minute without work, so no ephemeral node can tell that a driver lives. The node
of a batch write is written when it begins and by its tasks when they do; one of which nothing was heard for two days is
given up. It is removed first: so its driver, should it live, decides nothing any more.
"""

from __future__ import annotations

import asyncio
import logging

from metamq.errors import MetamqError
from metamq.spark_consumers.sink.branch_ends import ROLL_BACK_S, BranchEnds, CommitLost
from metamq.spark_consumers.sink.decision_store import DecisionStore
from metamq.spark_consumers.sink.decisions import Decision, ends_of_jobs

log = logging.getLogger("metamq.spark")

GIVEN_UP_AFTER_MS = 48 * 3600 * 1000
"""More than a task may take, a day at most (transactionTimeoutMs), and what may lie between one start and the next."""
LEFTOVERS_S = 10.0
"""A batch write is held up by those of others no longer than this."""


async def end_leftovers(branch_ends: BranchEnds, store: DecisionStore, own: str, now_ms: int) -> None:
    """As far as can be done now; never raises for it. `now_ms`: by ZooKeeper's clock."""
    try:
        async with asyncio.timeout(LEFTOVERS_S):
            await branch_ends.cluster.look_again()
            prepared = await branch_ends.prepared()  # before the nodes: what has none then has been given up
            jobs: dict[str, Decision | None] = {}
            for job in await store.jobs():
                jobs[job] = None  # of one's own, and where there is an error: left alone
                try:
                    if job != own and not await _finish(branch_ends, store, job, now_ms, jobs):
                        del jobs[job]
                except MetamqError as error:
                    log.warning("the batch write %s, of another driver, is not finished: %s", job, error)
            await branch_ends.end(ends_of_jobs(jobs, prepared))
    except (TimeoutError, MetamqError) as error:
        log.warning("what other batch writes have left is not ended: %r", error)


async def _finish(
    branch_ends: BranchEnds, store: DecisionStore, job: str, now_ms: int, jobs: dict[str, Decision | None]
) -> bool:
    """Commits what it has decided; False when there is no node of it any more."""
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
        return True  # later: its broker is down, and would be waited for
    try:
        await branch_ends.commit(job, 0, decision.winners, answer_s=ROLL_BACK_S)
    except CommitLost as error:
        log.error("%s", error.problem)  # nothing can be done about it, and its driver is told if it lives
    await store.mark_finished(job, known)
    return True
