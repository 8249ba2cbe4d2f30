"""The transactions of one producer: one at a time of each thread, or asyncio task. The core of both faces.

    begin ─▶ send ... ─▶ commit                      producer.transaction(), and tpc_commit() without tpc_prepare()
                     └─▶ prepare ─▶ commit           tpc_*
                     └─▶ rollback

Whoever works in a transaction is known by its thread (of the blocking Producer) or task (of asyncio's), as XA has it of
threads of control: what other threads send meanwhile is not part of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from metamq.client.model import time_of
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.client.producer.partitioner import partitioner_named
from metamq.client.producer.producer_core import ProducerCore
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

log = logging.getLogger("metamq.tx")

Owner = threading.Thread | asyncio.Task[Any]

STAGED_BYTES_MAX = 4 * 1024 * 1024


class RecoveredXid(Xid):
    """An Xid that tpc_recover() has found prepared."""

    prepared: datetime
    """When, at the first of its brokers."""
    owner: str
    """Host, process and session that began it."""
    database: str
    """The broker ids at which it is prepared, as "0,2"."""
    messages: int


_routes: WeakKeyDictionary[ProducerCore, Routes] = WeakKeyDictionary()


def routes_of(core: ProducerCore) -> Routes:
    """A producer's, for all of its transactions."""
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


class Open:
    """A transaction under way."""

    def __init__(
        self, core: ProducerCore, routes: Routes, owner: Owner, xid: Xid, timeout_s: float, *, is_tpc: bool
    ) -> None:
        self.owner = owner
        self.xid = xid
        self.is_tpc = is_tpc
        self.prepared: bool | None = None
        """Whether there is something to commit; None: it is not prepared."""
        self.was_tried = False
        """To prepare it: what of that was done, when it did not succeed, nobody knows."""
        staging = Staging(routes)
        self.work = LocalWork(
            core.cluster, staging, xid, is_chosen=is_tpc, branch_timeout_s=timeout_s, answer_s=ANSWER_S
        )
        self.outbox = Outbox(core, core.loop, self.work, core.options)


class Transactions:
    """Of one producer. What is `async` is for its loop; the rest for the thread or task that the transaction is of."""

    def __init__(self, core: ProducerCore) -> None:
        self.lock = threading.Lock()
        """Held by who begins or leaves anything here."""
        self.blocks: WeakSet[Any] = WeakSet()
        """What has a `send` of its own, and was entered: the producer's is refused in it."""
        self._core = core
        self._routes = routes_of(core)
        self._open: dict[Owner, Open] = {}

    def of(self, owner: Owner | None) -> Open | None:
        """The transaction that a thread or task works in."""
        return self._open.get(owner) if owner is not None else None

    @property
    def any(self) -> bool:
        """Whether any thread or task works in one, or a block was entered."""
        return bool(self._open or self.blocks)

    def _check_untried(self, one: Open) -> None:
        """Raises what failed it; BranchMisuse where its prepare() was interrupted, also when that has not ended yet."""
        if one.was_tried:
            if one.outbox.failed is not None:
                raise one.outbox.failed.with_traceback(None)
            raise misuse(one.xid, "its tpc_prepare() was interrupted, or has failed: it can only be rolled back")

    def begin(self, owner: Owner | None, xid: Xid, timeout_s: float, *, is_tpc: bool) -> Open:
        """From here on what `owner` sends is part of it. With the lock.

        Raises BranchMisuse; ConfigError outside of any task.
        """
        if owner is None:
            raise ConfigError("a transaction is worked in by a task", hint="Call it in a coroutine.")
        for gone in [each for each in self._open if _is_gone(each)]:  # its brokers roll it back after its time
            self._open.pop(gone, None)
        known = self._open.get(owner)
        if known is not None:
            kind = "a two-phase transaction" if known.is_tpc else "a transaction"
            raise misuse(xid, f"{kind}, {known.xid}, is under way here")
        self._open[owner] = made = Open(self._core, self._routes, owner, xid, timeout_s, is_tpc=is_tpc)
        return made

    def leave(self, one: Open) -> None:
        """What its owner sends from here on is part of nothing. With the lock."""
        if self._open.get(one.owner) is one:
            del self._open[one.owner]

    def leave_all(self) -> list[Open]:
        """Nobody works in anything any more. With the lock."""
        found = list(self._open.values())
        self._open.clear()
        return found

    # -- the loop's ---------------------------------------------------------------------------------------------------

    async def prepare(self, one: Open) -> bool:
        """Prepares it everywhere; False when there is nothing in it. Raises what makes it impossible: then, and when it
        is interrupted, it can only be rolled back."""
        self._check_untried(one)
        one.was_tried = True
        await one.outbox.settle()
        one.outbox.closed = True
        try:
            await one.work.prepare()
        except BranchNotKnown as error:
            raise RolledBack(one.xid, XACode.RBTRANSIENT, error.reason) from error
        one.prepared = bool(one.work.prepared)
        return one.prepared

    async def commit(self, one: Open) -> None:
        """Commits it, prepared or not. Raises OutcomeUnknown: then what is prepared is to be committed again, and what
        was not is found out about by its brokers. After any other error it is rolled back."""
        if one.prepared is not None:
            for error in await one.work.commit():
                raise error
            one.outbox.end(None)
            return
        try:
            self._check_untried(one)
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

    async def rollback(self, one: Open) -> list[MetamqError]:
        """Rolls it back; returns what failed: unless it is prepared, its brokers roll it back after its time."""
        await one.outbox.give_up()
        failures = await one.work.rollback()
        reason = one.outbox.failed or RolledBack(one.xid, XACode.RBROLLBACK, "its transaction was rolled back")
        one.outbox.end(reason)
        return failures

    async def tpc_rollback(self, one: Open) -> None:
        """Rolls it back. Raises where a branch that was not told may be prepared, which nothing would end: then it is
        to be called again."""
        failures = await self.rollback(one)
        if failures and (one.prepared or one.was_tried):
            raise failures[0]
        warn_of_untold(one, failures)

    # -- transactions that others have left ---------------------------------------------------------------------------

    async def _broker_ids(self) -> list[int]:
        session = self._core.cluster.session
        names = await session.children(session.paths.broker_ids())
        return sorted(int(name) for name in names if name.isdecimal())

    async def recover(self) -> list[RecoveredXid]:
        """What is prepared, at whatever broker. All of it, or an error."""
        client = TxClient(self._core.cluster)
        found: dict[Xid, list[BranchDescription]] = {}
        for broker_id in await self._broker_ids():
            for branch in await client.branches(broker_id):
                if branch.state == "prepared" and branch.follows is None:
                    found.setdefault(branch.xid, []).append(branch)
        return [_recovered(xid, branches) for xid, branches in found.items()]

    async def finish(self, xid: Xid, verb: Verb) -> None:
        """COMMIT or ROLLBACK at every broker that knows it. Raises BranchNotKnown when none does, or when a ROLLBACK
        comes to one that has committed it: no other is asked then. Raises what a broker that did not do it answered, or
        that it did not: then it is to be called again."""
        client, session = TxClient(self._core.cluster), new_session()
        not_known: list[BranchNotKnown] = []
        failed: list[MetamqError] = []
        done = 0
        for broker_id in await self._broker_ids():
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
            nobody = BranchNotKnown(xid, XACode.NOTA, "no broker knows it: it never was, or is finished")
            raise next((error for error in not_known if error.finished), nobody)

    def _is_mixed(self, xid: Xid, broker_id: int) -> TransactionError:
        what = f"it is committed at broker {broker_id}, and now rolled back at others"
        return TransactionError(xid, XACode.HEURMIX, what, hint="Only what was never committed may be rolled back.")


def _is_gone(owner: Owner) -> bool:
    return not owner.is_alive() if isinstance(owner, threading.Thread) else owner.done()


def warn_of_untold(one: Open, failures: Sequence[MetamqError]) -> None:
    """Its rollback did not reach these brokers."""
    for failure in failures:
        log.warning(
            "transaction %s is rolled back, and a broker could not be told: %s. It was not prepared, so it is never "
            "committed: that broker ends it after its time-out, and refuses the id until then",
            one.xid,
            failure,
        )


def misuse(xid: object, reason: str, hint: str | None = None) -> BranchMisuse:
    """The error, to be raised."""
    return BranchMisuse(xid, XACode.PROTO, reason, hint=hint)


def _recovered(xid: Xid, branches: list[BranchDescription]) -> RecoveredXid:
    found = RecoveredXid(*xid)
    found.prepared = time_of(min(branch.prepared_us for branch in branches))
    found.owner = branches[0].owner
    found.database = ",".join(str(branch.broker_id) for branch in branches)
    found.messages = sum(branch.messages for branch in branches)
    return found
