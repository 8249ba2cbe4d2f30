"""An open global transaction: messages to any number of brokers, a branch at each. The core of every API except XA's.

A branch begins with the first batch that goes to its broker. So a small transaction costs one request per broker to
prepare it, and one to commit it: START, SEND, END and PREPARE go in one request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from metamq.client.net.branches import Branch, Encoded, TxClient, new_session
from metamq.client.net.inboxes import topic_or_inbox
from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    ConnectError,
    Fenced,
    MetamqError,
    OutcomeUnknown,
    RolledBack,
    Timeout,
    TransactionError,
)
from metamq.wire.xa import FORMAT_ID, Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.producer.outgoing import AnyMessage
    from metamq.tx.app.staging import Staging

_DECIDING = (Verb.COMMIT_ONE_PHASE, Verb.DECIDE)
"""Verbs that decide: without their answer the outcome of the transaction is unknown."""


class GlobalTransaction:
    """One transaction. For one loop; one call at a time."""

    def __init__(
        self,
        cluster: ClusterClient,
        staging: Staging | None,
        gtrid: bytes,
        *,
        branch_timeout_s: float,
        answer_s: float,
        patience_s: float = 0.0,
        note_answer: Callable[[int, str], None] = lambda broker_id, problem: None,
        principal: str = "",
    ) -> None:
        """`staging`: None if the caller makes the batches, for send_encoded(). `branch_timeout_s`: seconds
        until brokers roll back unprepared branches; 0: each broker's own limit, from its START on. `patience_s`:
        seconds to wait for a broker at which a branch begins, or that cannot continue a branch now. For a new branch
        the wait is at least `answer_s`. `note_answer` gets the id of each broker that was asked, and the reason that
        it did not answer, or "". `principal`: in a broker, the principal for which it acts."""
        self.gtrid = gtrid
        self.branches: dict[int, Branch] = {}
        """Branches that were begun, by broker id."""
        self.prepared: dict[int, Branch] = {}
        """Branches that must be committed or rolled back, by broker id."""
        self._cluster = cluster
        self._client = TxClient(cluster)
        self._staging = staging
        self._taken: Counter[int] = Counter() if staging is None else staging.taken
        self._session = new_session()
        self._branch_timeout_s = branch_timeout_s
        self._deadline = time.monotonic() + branch_timeout_s
        self._answer_s = answer_s
        self._patience_s = patience_s
        self._note_answer = note_answer
        self._principal = principal

    def xid_at(self, broker_id: int) -> Xid:
        """Returns the id of the branch at a broker."""
        return Xid(FORMAT_ID, self.gtrid, str(broker_id).encode())

    @property
    def name(self) -> str:
        """The name for errors, the log, and `metamq tx show`."""
        return self.xid_at(0).whole

    @property
    def is_empty(self) -> bool:
        """True if nothing was sent."""
        return not self.branches and not self._taken

    def knows(self, topic: str) -> bool:
        """True if the client knows the topic's configuration. Any thread."""
        return topic in self._cluster.configs

    async def send_many(self, topic: str, messages: Sequence[AnyMessage]) -> None:
        """Takes messages; sends full batches. Raises TopicNotFound, MessageTooLarge, ConfigError, and TransactionError
        if a broker has given up the branch."""
        staging = self._staging
        assert staging is not None
        config = await topic_or_inbox(self._cluster, topic)
        taken = 0
        while taken < len(messages):
            taken = staging.add_many(config, messages, taken)
            for broker_id in staging.full_at:
                await self._ask(broker_id, [Verb.SEND], staging.full(broker_id))

    async def send_encoded(self, broker_id: int, batches: Sequence[Encoded]) -> None:
        """Sends the caller's batches, after its earlier ones; one call at a time for each broker. Raises the errors of
        send_many()."""
        self._taken[broker_id] += sum(one.messages for one in batches)
        await self._ask(broker_id, [Verb.SEND], batches)

    async def _ask(
        self,
        broker_id: int,
        verbs: list[Verb],
        batches: Sequence[Encoded] = (),
        follows: Sequence[int] = (),
        followers: Sequence[int] = (),
    ) -> XACode:
        branch = self.branches.get(broker_id)
        left_s = 0.0
        timeout_s = self._answer_s
        if branch is None:
            left_s = self._left_s(broker_id)
            timeout_s = max(timeout_s, self._patience_s)  # a new branch has nothing to lose by waiting
            branch = Branch(self.xid_at(broker_id), broker_id, self._session, principal=self._principal)
            self.branches[broker_id] = branch
            verbs = [Verb.START, *verbs]
        try:
            code = await self._client.ask(
                branch, verbs, batches, timeout_s=timeout_s, answer_s=self._answer_s, later_s=self._patience_s,
                branch_timeout_s=left_s, messages=self._taken[broker_id], follows=follows, followers=followers,
            )  # fmt: skip
            self._note_answer(broker_id, "")
            return code
        except (ConnectError, Fenced) as error:
            self._note_answer(broker_id, error.problem)
            raise
        except OutcomeUnknown as error:
            self._note_answer(broker_id, error.problem)
            if verbs[-1] in _DECIDING:
                raise
            what = f"{error.reason}; nothing was decided, and it can only be rolled back"
            raise RolledBack(branch.xid, XACode.RBCOMMFAIL, what) from error
        except BranchMisuse as error:
            if error.code is XACode.DUPID:  # another client uses the id: its branch must not be rolled back
                del self.branches[broker_id]
            raise

    def _left_s(self, broker_id: int) -> float:
        """Returns the rest of the time-out, for a broker that has no branch yet. Raises RolledBack."""
        if not self._branch_timeout_s:
            return 0.0
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            reason = f"it was not committed within {self._branch_timeout_s:g} s"
            raise RolledBack(self.xid_at(broker_id), XACode.RBTIMEOUT, reason)
        return max(left_s, 0.001)  # for a broker 0 means its own limit

    async def _finish(
        self, broker_id: int, last: Verb, follows: Sequence[int] = (), followers: Sequence[int] = ()
    ) -> None:
        rest = [] if self._staging is None else self._staging.rest(broker_id)
        verbs = [Verb.SEND, Verb.END, last] if rest else [Verb.END, last]
        code = await self._ask(broker_id, verbs, rest, follows, followers)
        if code is not XACode.RDONLY and last is Verb.PREPARE:
            self.prepared[broker_id] = self.branches[broker_id]

    @property
    def reached(self) -> list[int]:
        """The brokers that take part."""
        return sorted({*self.branches, *self._taken})

    async def prepare(self) -> None:
        """Prepares every branch. Raises the first error; then the caller must call rollback()."""
        results = await asyncio.gather(
            *(self._finish(broker_id, Verb.PREPARE) for broker_id in self.reached), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def commit_one_phase(self) -> None:
        """Commits the only branch. Raises RolledBack, OutcomeUnknown, ConnectError."""
        (broker_id,) = self.reached
        try:
            await self._finish(broker_id, Verb.COMMIT_ONE_PHASE)
        except OutcomeUnknown:
            await self._client.resolve(self.branches[broker_id], self._answer_s)

    async def commit(self) -> list[MetamqError]:
        """Commits the prepared branches; returns the errors: failed branches stay prepared, for a recoverer."""
        return await self._each(self.prepared.values(), self._commit_one)

    async def rollback(self, within_s: float | None = None) -> list[MetamqError]:
        """Rolls back all branches, in `within_s` seconds at most; returns the errors. Brokers drop unprepared branches
        later."""

        async def roll_back(branch: Branch) -> None:
            try:
                async with asyncio.timeout(within_s) as limit:
                    await self._rollback_one(branch)
            except TimeoutError as error:
                if within_s is None or not limit.expired():
                    raise
                raise Timeout(f"the rollback at broker {branch.broker_id}", within_s) from error

        return await self._each(self.branches.values(), roll_back)

    async def _commit_one(self, branch: Branch) -> None:
        try:
            await self._client.ask(branch, [Verb.COMMIT], timeout_s=self._answer_s)
        except (ConnectError, Fenced, OutcomeUnknown) as error:
            self._note_answer(branch.broker_id, error.problem)
            raise

    async def _rollback_one(self, branch: Branch) -> None:
        if not branch.epoch and await self._belongs_to_another(branch):
            return
        try:
            await self._client.ask(branch, [Verb.RESOLVE], timeout_s=self._answer_s)
        except BranchNotKnown:
            return  # a request that is still on its way cannot begin it later
        except BranchMisuse:  # it is prepared
            await self._client.ask(branch, [Verb.ROLLBACK], timeout_s=self._answer_s)
            return
        raise TransactionError(branch.xid, XACode.RMERR, "it is committed, and cannot be rolled back")

    async def _belongs_to_another(self, branch: Branch) -> bool:
        """Returns True if the id belongs to another client. Called if START got no answer: an application may have
        chosen an id that is in use. If False, the branch knows its epoch afterwards. Raises as branches()."""
        for one in await self._client.branches(branch.broker_id, all_of_them=True):
            if one.xid == branch.xid and one.owner != branch.session:
                return True
            if one.xid == branch.xid:
                branch.epoch = one.epoch
        return False

    async def _each(self, branches: Iterable[Branch], end: Callable[[Branch], Awaitable[None]]) -> list[MetamqError]:
        found = await asyncio.gather(*(end(branch) for branch in list(branches)), return_exceptions=True)
        errors = [error for error in found if error is not None]
        for error in errors:
            if not isinstance(error, MetamqError):
                raise error
        return [error for error in errors if isinstance(error, MetamqError)]
