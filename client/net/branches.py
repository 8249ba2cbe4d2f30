"""Branches of transactions on the client's side: sends verbs to the broker and interprets the answers.

    no answer to                        means
    START, SEND, END                    the branch may exist; the broker rolls it back after its time-out, or its owner
    PREPARE                             OutcomeUnknown: recover() shows the outcome once the broker is back
    COMMIT, ROLLBACK, FORGET            asked again until `timeout_s` is over (each is repeatable); then OutcomeUnknown
    COMMIT_ONE_PHASE, DECIDE            RESOLVE is asked: the branch was committed, or it never will be

A network time-out never counts as a rollback.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    DiskFull,
    MetamqError,
    OutcomeUnknown,
    RolledBack,
    TransactionError,
    TryLater,
)
from metamq.wire import status
from metamq.wire.commands import Branches, BranchesReply, BranchInfo, Command, PutEntry, Tx, TxReply, TxResult
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.wire.frames import Buffer

ANSWER_S = 10.0
RETRY_S = 0.1
PERSISTENT = frozenset({Verb.COMMIT, Verb.ROLLBACK, Verb.FORGET, Verb.RESOLVE})
"""Verbs that are asked again if no answer comes."""


class Encoded(NamedTuple):
    """An encoded batch that is ready to be sent."""

    entry: PutEntry
    batch: bytearray
    messages: int


class BranchDescription(NamedTuple):
    """A branch that waits for its end, as its broker describes it."""

    xid: Xid
    broker_id: int
    epoch: int
    """The number of the use of the id; a later use has another epoch."""
    state: str
    """"prepared", "heuristically completed", ..."""
    owner: str
    messages: int
    bytes: int
    prepared_us: int
    """The time of the prepare in microseconds since 1970; 0 if the branch is not prepared."""
    history: str
    """The id of the broker's history. If it differs from an earlier one, acknowledged data may be lost."""
    follows: int | None = None
    """The broker id of the branch with the same xid whose decision this branch follows by itself."""
    followers: tuple[int, ...] = ()
    """The broker ids of the branches that follow this decided branch."""
    age_ms: int = -1
    """Milliseconds since the prepare, by the broker's clock; -1: not prepared, or the broker does not report it."""


@dataclass(eq=False)
class Branch:
    """A branch from the view of the session that works in it."""

    xid: Xid
    broker_id: int
    session: str
    epoch: int = 0
    batches: int = 0
    """The number of batches that this session has sent and the broker has accepted."""
    history: str = ""
    principal: str = ""
    """In a broker: the principal for which it acts."""


@dataclass(eq=False, repr=False)
class _Request:
    """A request, with its verbs and batches that are left to do."""

    branch: Branch
    verbs: list[Verb]
    batches: list[Encoded]
    done: int = 0
    """The number of verbs that the last answer reports as done."""

    def header(self, timeout_ms: int, messages: int, follows: Sequence[int], followers: Sequence[int]) -> Tx:
        """Returns the header of the request."""
        branch = self.branch
        return Tx(
            [*branch.xid], branch.epoch, branch.session, [*self.verbs], timeout_ms, messages,
            branch.batches, [one.entry for one in self.batches], [*follows], [*followers],
            branch.principal,
        )  # fmt: skip

    def leave_out_what_is_done(self) -> None:
        """Removes the verbs and batches that the last answer reports as done."""
        if Verb.SEND in self.verbs[: self.done]:
            self.branch.batches += len(self.batches)
            self.batches = []
        del self.verbs[: self.done]


def _is_later(error: MetamqError) -> bool:
    """True if the broker answers, but cannot do the request now. A reached limit may last and is not included."""
    return isinstance(error, DiskFull) or (isinstance(error, TryLater) and error.code == XACode.RETRY)


def _was_done(verb: Verb, answer: BranchNotKnown) -> bool:
    """True if a repeated request finds the branch gone, and may count as done by its first try."""
    return verb is Verb.FORGET or (verb is Verb.ROLLBACK and not answer.finished)


def new_session() -> str:
    """Returns a unique name that shows an operator on which host its owner runs."""
    return f"{_host()}:{os.getpid()}:{secrets.token_hex(8)}"


@functools.cache
def _host() -> str:
    return socket.gethostname()[:32]


class TxClient:
    """Sends requests about branches to brokers. Not thread-safe: for one loop."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster

    async def ask(
        self,
        branch: Branch,
        verbs: Sequence[Verb],
        batches: Sequence[Encoded] = (),
        *,
        timeout_s: float = ANSWER_S,
        answer_s: float | None = None,
        later_s: float = 0.0,
        branch_timeout_s: float = 0.0,
        messages: int = -1,
        follows: Sequence[int] = (),
        followers: Sequence[int] = (),
    ) -> XACode:
        """Sends verbs to the broker, which does them in order up to the first that fails. Returns the last code.

        `answer_s` limits the wait for each answer in seconds; None means `timeout_s`. For `later_s` seconds, a request
        that the broker cannot do at present is asked again.

        Raises the TransactionError of the verb that failed; OutcomeUnknown if no answer came within `timeout_s`
        seconds; ConnectError or Fenced if the request was certainly not done.
        """
        request = _Request(branch, [*verbs], [*batches])
        began_s = time.monotonic()
        deadline_s, later_until_s = began_s + timeout_s, began_s + later_s
        unsure: MetamqError | None = None
        while True:
            header = request.header(int(branch_timeout_s * 1000), messages, follows, followers)
            is_answered, request.done = False, 0
            try:
                until_s = min(deadline_s, time.monotonic() + (answer_s or timeout_s))
                reply = await self._once(branch, header, [one.batch for one in request.batches], until_s)
                is_answered = True
                code = self._settle(request, reply, repeated=unsure is not None)
                request.leave_out_what_is_done()
                return code
            except MetamqError as error:
                now_s = time.monotonic() + RETRY_S
                if _is_later(error) and now_s <= later_until_s:
                    request.leave_out_what_is_done()
                    deadline_s = max(deadline_s, later_until_s)
                elif is_answered or isinstance(error, TransactionError):
                    raise
                else:
                    if error.outcome == "unknown":
                        unsure = error
                    again = error.retriable and (unsure is None or PERSISTENT.issuperset(request.verbs))
                    if not again or now_s > deadline_s:
                        raise self._given_up(branch, unsure or error, sure=unsure is None) from None
            await asyncio.sleep(RETRY_S)

    async def _once(self, branch: Branch, header: Tx, bodies: list[Buffer], deadline_s: float) -> TxReply:
        connection = await self._cluster.connection(branch.broker_id)
        left_s = max(deadline_s - time.monotonic(), 0.01)
        packed = await connection.request(Command.TX, header, bodies, timeout_s=left_s)
        return TxReply(*packed[: len(TxReply._fields)])

    def _given_up(self, branch: Branch, error: MetamqError, *, sure: bool) -> MetamqError:
        if sure:
            return error
        return OutcomeUnknown(branch.xid, XACode.RMFAIL, f"no answer from broker {branch.broker_id}: {error.problem}")

    def _settle(self, request: _Request, reply: TxReply, *, repeated: bool) -> XACode:
        branch = request.branch
        branch.history = reply.history
        code = int(XACode.OK)
        for packed in reply.results:
            number, code, epoch, refused = packed[: len(TxResult._fields)]
            if number != status.OK:
                error = status.decode_error(number, refused)
                if repeated and isinstance(error, BranchNotKnown) and _was_done(request.verbs[-1], error):
                    return XACode.OK  # the first answer was lost
                if error.outcome == "unknown" and not isinstance(error, TransactionError):  # the broker's disk failed
                    raise OutcomeUnknown(
                        branch.xid, XACode.RMFAIL, f"broker {branch.broker_id}: {error.problem}"
                    ) from error
                raise error
            branch.epoch = epoch
            request.done += 1
        return XACode(code)

    async def resolve(self, branch: Branch, timeout_s: float) -> None:
        """Waits until the branch is committed. Call it after a COMMIT_ONE_PHASE without an answer.

        Raises RolledBack if the branch is not committed and never will be, and OutcomeUnknown if no broker answers.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self.ask(branch, [Verb.RESOLVE], timeout_s=max(deadline_s - time.monotonic(), 0.1))
                return
            except BranchNotKnown:
                reason = "it was not committed before the connection was lost"
                raise RolledBack(branch.xid, XACode.RBCOMMFAIL, reason) from None
            except (BranchMisuse, TryLater):  # the commit is in progress, or another broker is the master by now
                if time.monotonic() > deadline_s:
                    raise OutcomeUnknown(
                        branch.xid, XACode.RMFAIL, f"it took longer than {round(timeout_s, 3):g} s"
                    ) from None
            except TransactionError:
                raise
            except MetamqError as error:  # a failed question says nothing about the earlier request
                raise self._given_up(branch, error, sure=False) from None
            await asyncio.sleep(RETRY_S)

    async def branches(
        self, broker_id: int, *, all_of_them: bool = False, of_others: bool = False
    ) -> list[BranchDescription]:
        """Returns the branches of a broker that are prepared, or finished by an operator; with `all_of_them`, all
        branches.

        Raises ConnectError, Fenced or Timeout: then the branches are unknown, which does not mean that there are none.
        With `of_others` raises NotAuthorized if the broker would leave out the prepared branches of other principals.
        """
        found: list[BranchDescription] = []
        after, more = 0, True
        while more:
            connection = await self._cluster.connection(broker_id)
            query = Branches(after, all_of_them, of_others)
            packed = await connection.request(Command.BRANCHES, query, timeout_s=ANSWER_S)
            reply = BranchesReply(*packed[: len(BranchesReply._fields)])
            for one in reply.branches:
                info = BranchInfo(*one[: len(BranchInfo._fields)])
                found.append(
                    BranchDescription(
                        Xid.unpack(info.xid),
                        broker_id,
                        info.epoch,
                        info.state,
                        info.owner,
                        info.messages,
                        info.bytes,
                        info.prepared_us,
                        reply.history,
                        info.follows[0] if info.follows else None,
                        tuple(info.followers[::2]),
                        info.age_ms,
                    )
                )
                after = info.epoch
            more = reply.more
        return found
