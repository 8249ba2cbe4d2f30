"""The transactions of one producer: one at a time for each thread, or asyncio task. The core of both APIs.

    begin ─▶ send ... ─▶ commit                      producer.transaction(), and tpc_commit() without tpc_prepare()
                     └─▶ prepare ─▶ commit           tpc_*
                     └─▶ rollback

A transaction belongs to a thread (of the blocking Producer) or to a task (of the asyncio Producer), as XA defines it
for threads of control. Messages of other threads or tasks are not part of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from metamq.client import telemetry
from metamq.client.model import time_of
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.client.producer.partitioner import partitioner_named
from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    ConfigError,
    MetamqError,
    OutcomeUnknown,
    RolledBack,
    TransactionError,
)
from metamq.tx.app.local import LocalWork
from metamq.tx.app.outbox import Outbox
from metamq.tx.app.staging import Routes, Staging
from metamq.wire.compression import codec_named
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.producer.producer_core import ProducerCore

log = logging.getLogger("metamq.tx")

Owner = threading.Thread | asyncio.Task[Any]

STAGED_BYTES_MAX = 4 * 1024 * 1024


class RecoveredXid(Xid):
    """An Xid that tpc_recover() has found prepared."""

    prepared: datetime
    """Time of its PREPARE, the earliest of all brokers."""
    owner: str
    """Host, process and session of the client that began it."""
    database: str
    """The broker ids at which it is prepared, as "0,2"."""
    messages: int


_routes: WeakKeyDictionary[ProducerCore, Routes] = WeakKeyDictionary()


def routes_of(core: ProducerCore) -> Routes:
    """Returns the producer's routes, which all of its transactions use."""
    routes = _routes.get(core)
    if routes is None:
        options = core.options
        routes = _routes[core] = Routes(
            min(options.batch_bytes, STAGED_BYTES_MAX),
            options.max_message_bytes,
            partitioner_named(options.partitioner),
            codec_named(options.compression),
            None,
        )
    return routes


class OpenTransaction:
    """A transaction that has begun and not ended."""

    def __init__(
        self, core: ProducerCore, routes: Routes, owner: Owner, xid: Xid, timeout_s: float, *, is_tpc: bool
    ) -> None:
        self.owner = owner
        self.xid = xid
        self.is_tpc = is_tpc
        self.prepared: bool | None = None
        """True if there is something to commit; False if not; None: it is not prepared."""
        self.prepare_called = False
        """True once prepare() was called. If it did not succeed, some brokers may have prepared their branches."""
        staging = Staging(routes)
        self.work = LocalWork(
            core.cluster, staging, xid, is_chosen=is_tpc, branch_timeout_s=timeout_s, answer_s=ANSWER_S
        )
        self.outbox = Outbox(core, core.loop, self.work, core.options)


class Transactions:
    """The transactions of one producer. The loop calls the `async` methods; the owner's thread or task the others."""

    def __init__(self, core: ProducerCore) -> None:
        self.lock = threading.Lock()
        """Held while a transaction or a block begins or is left."""
        self.blocks: WeakSet[Any] = WeakSet()
        """Entered blocks with a `send` of their own: inside of them the producer's `send` is refused."""
        self._core = core
        self._routes = routes_of(core)
        self._open: dict[Owner, OpenTransaction] = {}

    def of(self, owner: Owner | None) -> OpenTransaction | None:
        """Returns the transaction that a thread or task works in."""
        return self._open.get(owner) if owner is not None else None

    @property
    def any(self) -> bool:
        """True if a thread or task works in a transaction, or a block was entered."""
        return bool(self._open or self.blocks)

    def _check_not_prepared(self, one: OpenTransaction) -> None:
        """Raises the error that failed it; BranchMisuse if its prepare() was interrupted, or still runs."""
        if one.prepare_called:
            if one.outbox.failed is not None:
                raise one.outbox.failed.with_traceback(None)
            raise misuse(one.xid, "its tpc_prepare() was interrupted, or has failed: it can only be rolled back")

    def begin(self, owner: Owner | None, xid: Xid, timeout_s: float, *, is_tpc: bool) -> OpenTransaction:
        """Begins a transaction, which takes the messages of `owner` from now on. The caller holds the lock.

        Raises BranchMisuse; ConfigError outside of any task.
        """
        if owner is None:
            raise ConfigError("a transaction needs an asyncio task", hint="Call it in a coroutine.")
        for gone in [each for each in self._open if _is_gone(each)]:  # its brokers roll it back after its time-out
            self._open.pop(gone, None)
        known = self._open.get(owner)
        if known is not None:
            kind = "a two-phase transaction" if known.is_tpc else "a transaction"
            raise misuse(xid, f"{kind}, {known.xid}, is open in this thread or task")
        self._open[owner] = made = OpenTransaction(self._core, self._routes, owner, xid, timeout_s, is_tpc=is_tpc)
        return made

    def leave(self, one: OpenTransaction) -> None:
        """Leaves a transaction: it takes no more messages of its owner. The caller holds the lock."""
        if self._open.get(one.owner) is one:
            del self._open[one.owner]

    def leave_all(self) -> list[OpenTransaction]:
        """Leaves all transactions, and returns them. The caller holds the lock."""
        found = list(self._open.values())
        self._open.clear()
        return found

    # -- in the loop --------------------------------------------------------------------------------------------------

    async def prepare(self, one: OpenTransaction) -> bool:
        """Prepares it at all brokers; returns False if there is nothing in it. After an error or an interrupt it can
        only be rolled back."""
        self._check_not_prepared(one)
        one.prepare_called = True
        await one.outbox.settle()
        one.outbox.closed = True
        try:
            await one.work.prepare()
        except BranchNotKnown as error:
            raise RolledBack(one.xid, XACode.RBTRANSIENT, error.reason) from error
        one.prepared = bool(one.work.prepared)
        return one.prepared

    async def commit(self, one: OpenTransaction) -> None:
        """Commits it, prepared or not. Raises OutcomeUnknown: the caller must commit a prepared transaction again; for
        one that is not prepared the brokers find the outcome. After any other error it is rolled back."""
        with telemetry.operation("commit_transaction"):
            await self._commit(one)

    async def _commit(self, one: OpenTransaction) -> None:
        if one.prepared is not None:
            if errors := await one.work.commit():
                open_ones = [error for error in errors if not isinstance(error, BranchNotKnown)]
                if not open_ones:  # another client has ended it
                    one.outbox.end(errors[0])
                raise (open_ones or errors)[0]
            one.outbox.end(None)
            return
        try:
            self._check_not_prepared(one)
            one.outbox.check()
            await one.outbox.settle()
            await one.work.commit_at_once()
        except OutcomeUnknown as error:
            one.outbox.end(error)
            raise
        except BaseException as error:
            interrupted = OutcomeUnknown(one.xid, XACode.RMFAIL, "its commit was interrupted")
            one.outbox.failed = error if isinstance(error, MetamqError) else interrupted
            await asyncio.shield(self.rollback(one))
            raise
        one.outbox.end(None)

    async def rollback(self, one: OpenTransaction) -> list[MetamqError]:
        """Rolls it back; returns the errors. A broker that failed rolls it back after its time-out, if not prepared."""
        await one.outbox.give_up()
        failures = await one.work.rollback()
        reason = one.outbox.failed or RolledBack(one.xid, XACode.RBROLLBACK, "its transaction was rolled back")
        one.outbox.end(reason)
        return failures

    async def tpc_rollback(self, one: OpenTransaction) -> None:
        """Rolls it back. Raises if a broker that did not answer may have prepared its branch: nothing would end that
        branch, so the caller must call again."""
        failures = await self.rollback(one)
        if failures and (one.prepared or one.prepare_called):
            raise failures[0]
        warn_of_unreached(one, failures)

    # -- transactions that other clients have left --------------------------------------------------------------------

    async def recover(self) -> list[RecoveredXid]:
        """Returns the transactions that are prepared at any broker. Returns all of them, or raises."""
        client = TxClient(self._core.cluster)
        found: dict[Xid, list[BranchDescription]] = {}
        for broker_id in await self._core.cluster.broker_ids():
            for branch in await client.branches(broker_id):
                if branch.state == "prepared" and branch.follows is None:
                    found.setdefault(branch.xid, []).append(branch)
        return [_recovered(xid, branches) for xid, branches in found.items()]

    async def finish(self, xid: Xid, verb: Verb) -> None:
        """Does COMMIT or ROLLBACK at every broker that knows the id. Raises BranchNotKnown if no broker knows it. If a
        ROLLBACK finds that a broker has committed it, raises that at once, and asks no other broker. Raises the error
        of a broker that refused or did not answer: then the caller must call again."""
        client, session = TxClient(self._core.cluster), new_session()
        not_known: list[BranchNotKnown] = []
        failed: list[MetamqError] = []
        done = 0
        for broker_id in await self._core.cluster.broker_ids():
            try:
                await client.ask(Branch(xid.check(), broker_id, session), [verb], timeout_s=ANSWER_S)
                done += 1
            except BranchNotKnown as error:
                if verb is Verb.ROLLBACK and error.finished:
                    raise (self._is_mixed(xid, broker_id) if done else error) from None
                not_known.append(error)
            except MetamqError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        if not done:
            nobody = BranchNotKnown(xid, XACode.NOTA, "no broker knows it: it never began, or is finished")
            raise next((error for error in not_known if error.finished), nobody)

    def _is_mixed(self, xid: Xid, broker_id: int) -> TransactionError:
        what = f"it is committed at broker {broker_id}, and now rolled back at others"
        return TransactionError(xid, XACode.HEURMIX, what, hint="Roll back only ids that were never committed.")


def _is_gone(owner: Owner) -> bool:
    return not owner.is_alive() if isinstance(owner, threading.Thread) else owner.done()


def warn_of_unreached(one: OpenTransaction, failures: Sequence[MetamqError]) -> None:
    """Logs that the rollback did not reach these brokers."""
    for failure in failures:
        log.warning(
            "transaction %s is rolled back, but a broker did not answer: %s. It was not prepared, so it is never "
            "committed: that broker ends it after its time-out, and refuses the id until then",
            one.xid,
            failure,
        )


def misuse(xid: object, reason: str, hint: str | None = None) -> BranchMisuse:
    """Returns the error."""
    return BranchMisuse(xid, XACode.PROTO, reason, hint=hint)


def _recovered(xid: Xid, branches: list[BranchDescription]) -> RecoveredXid:
    found = RecoveredXid(*xid)
    found.prepared = time_of(min(branch.prepared_us for branch in branches))
    found.owner = branches[0].owner
    found.database = ",".join(str(branch.broker_id) for branch in branches)
    found.messages = sum(branch.messages for branch in branches)
    return found
