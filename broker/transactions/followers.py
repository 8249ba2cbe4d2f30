"""Followers: ends transactions over several brokers whose client crashed before all of the brokers knew the outcome.

Such a transaction has no coordinator. A branch at one broker, the *decider*, decides with DECIDE for the branches at
the other brokers. These were prepared before, and know their decider (metamq.tx.app.work has the client's side).

    branch here after the grace     action                                       then.
    a prepared branch that follows  ask the decider with RESOLVE                 COMMIT or ROLLBACK the branch.
    a decided branch                COMMIT at each of its followers              FORGET, when all have answered OK

RESOLVE makes the decider decide: a branch that is undecided by then is never decided later. Its answer is reliable. The
broker that answers is the master in whose epoch the branch began, or has that master's journal; an earlier master
refuses. If the decider's generation has changed, it may have lost its decision: then an operator must decide.

A decision is forgotten only when each follower has answered that its commit is durable. An answer that a broker does
not know the branch is not enough, since a former master could give it. A follower that has answered is not asked again:
it remembers only a limited number of outcomes, and another follower may be down for long.

Branches are ended one after the other. A broker that does not answer is asked only once per round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from metamq.client.net.branches import Branch, TxClient, new_session
from metamq.client.net.cluster import ClusterClient
from metamq.errors import BranchNotKnown, HeuristicOutcome, MetamqError, NotAuthorized, OutcomeUnknown, TransactionError
from metamq.tx.store.table import BranchPhase
from metamq.wire.xa import Verb, XACode

if TYPE_CHECKING:
    from metamq.broker.transactions.processor import TransactionalCommandProcessor
    from metamq.tx.store.branch import BranchState
    from metamq.tx.store.records import BranchKey
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

EVERY_S = 2.0
ASK_S = 5.0


class Followers:
    """Ends the branches that their clients left. Only the broker's loop uses it."""

    def __init__(
        self, broker_id: int, session: Session, transactions: TransactionalCommandProcessor, grace_s: float
    ) -> None:
        """`grace_s`: seconds that a branch is left to its client, which most likely ends it."""
        self._grace_s = grace_s
        self._every_s = min(EVERY_S, grace_s / 4)
        self._broker_id = broker_id
        self._session = session
        self._transactions = transactions
        self._seen: dict[BranchKey, float] = {}
        """Time since which each branch waits."""
        self._logged: dict[BranchKey, str] = {}
        """The last logged reason why each branch waits."""
        self._committed: dict[BranchKey, set[int]] = {}
        """The brokers where each decided branch is committed."""

    async def run(self) -> None:
        """Ends branches, round after round, without end."""
        cluster = ClusterClient(self._session)
        try:
            while True:
                await asyncio.sleep(self._every_s)
                await self.round(TxClient(cluster))
        finally:
            await cluster.close()

    async def round(self, client: TxClient) -> None:
        """Ends the branches that can be ended now."""
        silent: set[int] = set()
        for branch in self._left():
            await self._end(_Patient(client, silent), branch)

    def _left(self) -> list[BranchState]:
        """The branches that have waited for the grace period."""
        now_s = time.monotonic()
        waiting = {branch.key: branch for branch in self._transactions.waiting()}
        self._seen = {key: self._seen.get(key, now_s) for key in waiting}
        self._logged = {key: reason for key, reason in self._logged.items() if key in waiting}
        self._committed = {key: where for key, where in self._committed.items() if key in waiting}
        return [waiting[key] for key, since_s in self._seen.items() if now_s - since_s >= self._grace_s]

    async def _end(self, client: _Patient, branch: BranchState) -> None:
        try:
            if branch.state is BranchPhase.DECIDED:
                await self._commit_followers(client, branch)
            else:
                await self._resolve(client, branch)
        except MetamqError as error:
            if self._logged.get(branch.key) != error.problem:
                self._logged[branch.key] = error.problem
                log.info("branch %s waits: %s", branch.xid, error)

    async def _resolve(self, client: _Patient, branch: BranchState) -> None:
        """Asks the decider of a prepared branch, and ends the branch by its answer."""
        broker_id, generation, epoch = branch.follows
        decider = self._branch(branch, broker_id, epoch)
        try:
            await client.ask(decider, Verb.RESOLVE)
            verb = Verb.COMMIT
        except BranchNotKnown as error:
            if decider.history != f"{broker_id}:{generation}":
                raise MetamqError(
                    f"broker {broker_id}, which should decide it, has lost acknowledged data since",
                    hint="Decide with `metamq tx commit` or `metamq tx rollback`.",
                ) from error
            verb = Verb.ROLLBACK
        await client.ask(self._branch(branch, self._broker_id, branch.epoch), verb)
        log.info("branch %s: %s, as broker %d decided; its client did not end it", branch.xid, verb.name, broker_id)

    async def _commit_followers(self, client: _Patient, branch: BranchState) -> None:
        """Commits at all followers of a decided branch, even if some fail. Raises the first error."""
        committed = self._committed.setdefault(branch.key, set())
        failure: MetamqError | None = None
        for broker_id, epoch in zip(branch.followers[::2], branch.followers[1::2], strict=True):
            if broker_id in committed:
                continue
            try:
                await self._commit_follower(client, self._branch(branch, broker_id, epoch))
                committed.add(broker_id)
            except MetamqError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        await client.ask(self._branch(branch, self._broker_id, branch.epoch), Verb.FORGET)

    async def _commit_follower(self, client: _Patient, follower: Branch) -> None:
        try:
            await client.ask(follower, Verb.COMMIT)
        except HeuristicOutcome as error:
            if error.code != XACode.HEURCOM:
                raise
            await client.ask(follower, Verb.FORGET)  # an operator was faster

    def _branch(self, own: BranchState, broker_id: int, epoch: int) -> Branch:
        """Returns a branch of the same transaction. A client has named it, so it counts only if it belongs to the same
        principal: else a client could end the branches of others by the rights of this broker."""
        return Branch(own.xid, broker_id, new_session(), epoch, principal=own.principal)


class _Patient:
    """Asks brokers, except those that did not answer in this round."""

    def __init__(self, client: TxClient, silent: set[int]) -> None:
        self._client = client
        self._silent = silent

    async def ask(self, branch: Branch, verb: Verb) -> None:
        """Asks the broker. Raises the errors of TxClient.ask()."""
        broker_id = branch.broker_id
        if broker_id in self._silent:
            raise MetamqError(f"broker {broker_id} does not answer")
        try:
            await self._client.ask(branch, [verb], timeout_s=ASK_S)
        except MetamqError as error:
            if isinstance(error, OutcomeUnknown) or not isinstance(error, TransactionError | NotAuthorized):
                self._silent.add(broker_id)
            raise
