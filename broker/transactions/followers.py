"""Followers: ends transactions over several brokers whose client died before all of them knew the outcome.

Such a transaction has no coordinator: a branch at one broker, the *decider*, decides with DECIDE for those at the
others, which were prepared before and know whose decision they follow (metamq.tx.app.work tells the client's side).

    here, and left for its grace    what is done                                 then
    a prepared branch that follows  the decider is asked with RESOLVE            COMMIT, or ROLLBACK of it
    a decided branch                COMMIT at each of its followers              FORGET, once each has answered OK

RESOLVE makes the decider decide: what was not decided by then never will be. It answers for sure, since whoever answers
either is the master whose epoch the branch was begun in, or has the journal of that one; an earlier master refuses. A
decider whose generation has changed may have lost its decision: then a person has to decide.

A decision is forgotten on the word of each follower that it has committed, which is durable there; not because a broker
says that it knows nothing of it, as a former master might. So who has said it is not asked again: it remembers only so
many outcomes, and another follower may be down for long.

Branches are ended one after the other. A broker that does not answer is asked once in a round.
"""

from __future__ import annotations

import asyncio
import logging
import time

from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.client.net.branches import Branch, TxClient, new_session
from metamq.client.net.cluster import ClusterClient
from metamq.errors import BranchNotKnown, HeuristicOutcome, MetamqError, OutcomeUnknown, TransactionError
from metamq.tx.store.branch import BranchState
from metamq.tx.store.records import BranchKey
from metamq.tx.store.table import BranchPhase
from metamq.wire.xa import Verb, XACode, Xid
from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

EVERY_S = 2.0
ASK_S = 5.0


class Followers:
    """Used by the broker's loop only."""

    def __init__(
        self, broker_id: int, session: Session, transactions: TransactionalCommandProcessor, grace_s: float
    ) -> None:
        """`grace_s`: so long a branch is left to the client that is most likely about to end it."""
        self._grace_s = grace_s
        self._every_s = min(EVERY_S, grace_s / 4)
        self._broker_id = broker_id
        self._session = session
        self._transactions = transactions
        self._seen: dict[BranchKey, float] = {}
        """Since when each waits."""
        self._told: dict[BranchKey, str] = {}
        """Why each waits, as the log has it."""
        self._committed: dict[BranchKey, set[int]] = {}
        """Of each that is decided: the brokers where it is committed."""

    async def run(self) -> None:
        """For ever."""
        cluster = ClusterClient(self._session)
        try:
            while True:
                await asyncio.sleep(self._every_s)
                await self.round(TxClient(cluster))
        finally:
            await cluster.close()

    async def round(self, client: TxClient) -> None:
        """Ends what can be ended now."""
        silent: set[int] = set()
        for branch in self._left():
            await self._end(_Patient(client, silent), branch)

    def _left(self) -> list[BranchState]:
        """What nobody has ended for so long."""
        now_s = time.monotonic()
        waiting = {branch.key: branch for branch in self._transactions.waiting()}
        self._seen = {key: self._seen.get(key, now_s) for key in waiting}
        self._told = {key: reason for key, reason in self._told.items() if key in waiting}
        self._committed = {key: where for key, where in self._committed.items() if key in waiting}
        return [waiting[key] for key, since_s in self._seen.items() if now_s - since_s >= self._grace_s]

    async def _end(self, client: _Patient, branch: BranchState) -> None:
        try:
            if branch.state is BranchPhase.DECIDED:
                await self._tell(client, branch)
            else:
                await self._ask(client, branch)
        except MetamqError as error:
            if self._told.get(branch.key) != error.problem:
                self._told[branch.key] = error.problem
                log.info("branch %s waits: %s", branch.xid, error)

    async def _ask(self, client: _Patient, branch: BranchState) -> None:
        """Asks whom a prepared branch follows."""
        broker_id, generation, epoch = branch.follows
        decider = self._branch(branch.xid, broker_id, epoch)
        try:
            await client.ask(decider, Verb.RESOLVE)
            verb = Verb.COMMIT
        except BranchNotKnown as error:
            if decider.history != f"{broker_id}:{generation}":
                raise MetamqError(
                    f"broker {broker_id}, which was to decide about it, has lost acknowledged data since",
                    hint="Decide with `metamq tx commit` or `metamq tx rollback`.",
                ) from error
            verb = Verb.ROLLBACK
        await client.ask(self._branch(branch.xid, self._broker_id, branch.epoch), verb)
        log.info("branch %s, which nobody had ended: %s, as broker %d says", branch.xid, verb.name, broker_id)

    async def _tell(self, client: _Patient, branch: BranchState) -> None:
        """Tells those that follow a decided branch, whatever becomes of the others. Raises the first error."""
        committed = self._committed.setdefault(branch.key, set())
        failure: MetamqError | None = None
        for broker_id, epoch in zip(branch.followers[::2], branch.followers[1::2], strict=True):
            if broker_id in committed:
                continue
            try:
                await self._tell_one(client, self._branch(branch.xid, broker_id, epoch))
                committed.add(broker_id)
            except MetamqError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        await client.ask(self._branch(branch.xid, self._broker_id, branch.epoch), Verb.FORGET)

    async def _tell_one(self, client: _Patient, follower: Branch) -> None:
        try:
            await client.ask(follower, Verb.COMMIT)
        except HeuristicOutcome as error:
            if error.code != XACode.HEURCOM:
                raise
            await client.ask(follower, Verb.FORGET)  # an operator was faster

    def _branch(self, xid: Xid, broker_id: int, epoch: int) -> Branch:
        branch = Branch(xid, broker_id, new_session())
        branch.epoch = epoch
        return branch


class _Patient:
    """Asks brokers, and none that has not answered in this round."""

    def __init__(self, client: TxClient, silent: set[int]) -> None:
        self._client = client
        self._silent = silent

    async def ask(self, branch: Branch, verb: Verb) -> None:
        """Raises as TxClient.ask()."""
        broker_id = branch.broker_id
        if broker_id in self._silent:
            raise MetamqError(f"broker {broker_id} does not answer")
        try:
            await self._client.ask(branch, [verb], timeout_s=ASK_S)
        except MetamqError as error:
            if isinstance(error, OutcomeUnknown) or not isinstance(error, TransactionError):
                self._silent.add(broker_id)
            raise
