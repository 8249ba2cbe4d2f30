"""Ends orphans: branches of batch writes whose drivers died, or whose tasks came too late. Each batch write does it.

A driver's Python processes end after a minute without work, so an ephemeral node cannot show that a driver lives. A
batch write writes its node when it begins, and when each of its tasks begins. A batch write that was silent for two
days is given up. Its node is removed first: if its driver still lives, it cannot decide any more.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from metamq.errors import MetamqError
from metamq.spark_consumers.sink.branch_ends import ROLL_BACK_S, BranchEnds, CommitLost
from metamq.spark_consumers.sink.decisions import Decision, ends_of_jobs

if TYPE_CHECKING:
    from metamq.spark_consumers.sink.decision_store import DecisionStore

log = logging.getLogger("metamq.spark")

GIVEN_UP_AFTER_MS = 48 * 3600 * 1000
"""More than a task may take (transactionTimeoutMs, a day at most) and the time from one task's start to the next."""
ORPHANS_S = 10.0
"""Most seconds that a batch write is delayed by those of others."""


async def end_orphans(branch_ends: BranchEnds, store: DecisionStore, own: str, now_ms: int) -> None:
    """Ends the orphans that can be ended now; an error is only logged. `now_ms`: by ZooKeeper's clock."""
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
        return True  # later: one of its brokers is down, and would delay this write
    try:
        await branch_ends.commit(job, 0, decision.winners, answer_s=ROLL_BACK_S)
    except CommitLost as error:
        log.error("%s", error.problem)  # nothing else can be done; if its driver lives, it gets the same error
    await store.mark_finished(job, known)
    return True
