"""Transactions of the queue alone: no database, no coordinator; over one broker, or several.

    one broker        START .. SEND, END, COMMIT_ONE_PHASE: one request for a small transaction
    several           1  START at one of them, the decider: from here on only this master can decide
                      2  PREPARE at the others, with the decider whose decision they follow
                      3  DECIDE at the decider: the decision is durable, and kept
                      4  COMMIT at the others; then FORGET at the decider

All branches have the same id. If a client crashes before 3, its branches have no decision: their brokers ask the
decider, which then never decides to commit (RESOLVE). If it crashes after 3, the brokers ask one another
(metamq.broker.transactions.followers). So the client needs no log, and the operator needs no recoverer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from metamq.errors import BranchNotKnown, MetamqError, OutcomeUnknown, RolledBack
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.branches import Branch
    from metamq.client.net.cluster import ClusterClient
    from metamq.tx.app.staging import Staging

log = logging.getLogger("metamq.tx")


class LocalWork(GlobalTransaction):
    """One transaction, under one id at all brokers. For one loop; one call at a time."""

    def __init__(
        self,
        cluster: ClusterClient,
        staging: Staging,
        xid: Xid,
        *,
        is_chosen: bool,
        branch_timeout_s: float,
        answer_s: float,
    ) -> None:
        """`is_chosen`: the application has chosen the id, so another client may use it, too. Then START is a request of
        its own: its answer has the epoch. If the commit gets no answer, the client asks about that epoch only."""
        super().__init__(cluster, staging, xid.gtrid, branch_timeout_s=branch_timeout_s, answer_s=answer_s)
        self.xid = xid
        self._is_chosen = is_chosen
        self.in_doubt = False
        """True if the decision may have been made: then nothing may be rolled back."""

    def xid_at(self, broker_id: int) -> Xid:
        """Returns the id, which is the same at all brokers."""
        return self.xid

    async def commit_at_once(self) -> None:
        """Commits without prepare(). Raises RolledBack, OutcomeUnknown, ConnectError, and so on. After an error other
        than OutcomeUnknown nothing is committed, and the caller must call rollback()."""
        brokers = self.reached
        try:
            if len(brokers) > 1:
                await self._commit_at_several(brokers)
            elif brokers:
                if self._is_chosen and not self.branches:
                    await self._ask(brokers[0], [])
                await self.commit_one_phase()
        except BranchNotKnown as error:  # its broker was restarted, or another one is the master
            raise RolledBack(self.xid, XACode.RBTRANSIENT, error.reason) from error

    async def rollback(self, within_s: float | None = None) -> list[MetamqError]:
        """See GlobalTransaction.rollback(). Does nothing while the decision is in doubt: the brokers find it later."""
        return [] if self.in_doubt else await super().rollback(within_s)

    async def _commit_at_several(self, brokers: list[int]) -> None:
        begun = [broker_id for broker_id in brokers if broker_id in self.branches]
        decider = (begun or brokers)[0]
        if not begun:
            await self._ask(decider, [])
        branch = self.branches[decider]
        follows = [decider, int(branch.history.partition(":")[2]), branch.epoch]
        others = [broker_id for broker_id in self.reached if broker_id != decider]
        results = await asyncio.gather(
            *(self._finish(broker_id, Verb.PREPARE, follows=follows) for broker_id in others), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                raise error
        followers = [number for one in self.prepared.values() for number in (one.broker_id, one.epoch)]
        self.in_doubt = True
        try:
            try:
                await self._finish(decider, Verb.DECIDE, followers=followers)
            except OutcomeUnknown:
                await self._client.resolve(branch, self._answer_s)
        except MetamqError as error:
            self.in_doubt = error.outcome == "unknown"
            raise
        await self._commit_followers(branch)

    async def _commit_followers(self, decider: Branch) -> None:
        """Commits at the followers after the decision. If one does not answer, its broker asks the decider later."""
        failures = await self.commit()
        try:
            if not failures:
                await self._client.ask(decider, [Verb.FORGET], timeout_s=self._answer_s)
        except MetamqError as error:
            failures = [error]
        for failure in failures:
            log.info("transaction %s is committed; brokers that did not answer ask the decider: %s", self.xid, failure)
