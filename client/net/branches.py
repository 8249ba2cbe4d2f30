"""Branches of transactions, as a client asks their brokers: verbs, carried there, and what an answer means.

    no answer to                        means
    START, SEND, END                    the branch may be there; it is rolled back after its time, or by its owner
    PREPARE                             OutcomeUnknown: recover() tells once the broker is there again
    COMMIT, ROLLBACK, FORGET            asked again until `timeout_s` is over: each may be repeated; then OutcomeUnknown
    COMMIT_ONE_PHASE, DECIDE            RESOLVE is asked: it was committed, or it never will be

A network time-out is never taken for a roll back.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from metamq.client.net.cluster import ClusterClient
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
from metamq.wire.commands import Command, PutEntry
from metamq.wire.frames import Buffer
from metamq.wire.tx_commands import Branches, BranchesReply, BranchInfo, Tx, TxReply, TxResult
from metamq.wire.xa import Verb, XACode, Xid

ANSWER_S = 10.0
RETRY_S = 0.1
PERSISTENT = frozenset({Verb.COMMIT, Verb.ROLLBACK, Verb.FORGET, Verb.RESOLVE})
"""Verbs that are asked again when no answer comes."""


class Encoded(NamedTuple):
    """A batch that is ready to go."""

    entry: PutEntry
    batch: bytearray
    messages: int


class BranchDescription(NamedTuple):
    """A branch that waits for its end, as its broker knows it."""

    xid: Xid
    broker_id: int
    epoch: int
    """Which use of the id it is."""
    state: str
    """"prepared", "heuristically completed", ..."""
    owner: str
    messages: int
    bytes: int
    prepared_us: int
    """Microseconds since 1970; 0 when it is not prepared."""
    history: str
    """Of the broker: another one than before means that what was acknowledged may be gone."""
    follows: int | None = None
    """The broker id of the branch with the same id whose decision this one follows, without anybody's help."""
    followers: tuple[int, ...] = ()
    """Of a decided branch: the broker ids where others follow it."""


class Branch:
    """A branch as who works in it knows it."""

    def __init__(self, xid: Xid, broker_id: int, session: str) -> None:
        self.xid = xid
        self.broker_id = broker_id
        self.session = session
        self.epoch = 0
        self.batches = 0
        """That this session has sent, and the broker has taken."""
        self.history = ""


class _Asked:
    """What of a request is left to be done."""

    def __init__(self, branch: Branch, verbs: list[Verb], batches: list[Encoded]) -> None:
        self.branch = branch
        self.verbs = verbs
        self.batches = batches
        self.done = 0
        """Verbs that the last answer tells to be carried out."""

    def header(self, timeout_ms: int, messages: int, follows: Sequence[int], followers: Sequence[int]) -> Tx:
        """Of the request for it."""
        branch = self.branch
        return Tx(
            [*branch.xid], branch.epoch, branch.session, [*self.verbs], timeout_ms, messages,
            branch.batches, [one.entry for one in self.batches], [*follows], [*followers],
        )  # fmt: skip

    def leave_out_what_is_done(self) -> None:
        """As the last answer tells."""
        if Verb.SEND in self.verbs[: self.done]:
            self.branch.batches += len(self.batches)
            self.batches = []
        del self.verbs[: self.done]


def _is_later(error: MetamqError) -> bool:
    """Whether the broker is there, and cannot do it at present. That a limit is reached may last."""
    return isinstance(error, DiskFull) or (isinstance(error, TryLater) and error.code == XACode.RETRY)


def _was_done(verb: Verb, answer: BranchNotKnown) -> bool:
    """Whether one that asks again and finds the branch gone may take that for its own doing."""
    return verb is Verb.FORGET or (verb is Verb.ROLLBACK and not answer.finished)


def new_session() -> str:
    """A name that nobody else has, and that tells people where its owner runs."""
    return f"{_host()}:{os.getpid()}:{secrets.token_hex(8)}"


@functools.cache
def _host() -> str:
    return socket.gethostname()[:32]


class TxClient:
    """Asks brokers. For one loop."""

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
        """Has verbs carried out, in this order up to the first that fails; returns the code of the last.

        `answer_s`: for an answer it waits so long at most; None: as for the whole. `later_s`: so long it asks again for
        what the broker cannot do at present.

        Raises the TransactionError of the verb that failed; OutcomeUnknown when no answer came within `timeout_s`;
        ConnectError, Fenced when it was certainly not done.
        """
        asked = _Asked(branch, [*verbs], [*batches])
        began_s = time.monotonic()
        deadline_s, later_until_s = began_s + timeout_s, began_s + later_s
        unsure: MetamqError | None = None
        while True:
            header = asked.header(int(branch_timeout_s * 1000), messages, follows, followers)
            is_answered, asked.done = False, 0
            try:
                until_s = min(deadline_s, time.monotonic() + (answer_s or timeout_s))
                reply = await self._once(branch, header, [one.batch for one in asked.batches], until_s)
                is_answered = True
                code = self._settle(asked, reply, repeated=unsure is not None)
                asked.leave_out_what_is_done()
                return code
            except MetamqError as error:
                now_s = time.monotonic() + RETRY_S
                if _is_later(error) and now_s <= later_until_s:
                    asked.leave_out_what_is_done()
                    deadline_s = max(deadline_s, later_until_s)
                elif is_answered or isinstance(error, TransactionError):
                    raise
                else:
                    if error.outcome == "unknown":
                        unsure = error
                    again = error.retriable and (unsure is None or PERSISTENT.issuperset(asked.verbs))
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

    def _settle(self, asked: _Asked, reply: TxReply, *, repeated: bool) -> XACode:
        branch = asked.branch
        branch.history = reply.history
        code = int(XACode.OK)
        for packed in reply.results:
            number, code, epoch, refused = packed[: len(TxResult._fields)]
            if number != status.OK:
                error = status.decode_error(number, refused)
                if repeated and isinstance(error, BranchNotKnown) and _was_done(asked.verbs[-1], error):
                    return XACode.OK  # the first answer was lost
                if error.outcome == "unknown" and not isinstance(error, TransactionError):  # its disk has failed
                    raise OutcomeUnknown(
                        branch.xid, XACode.RMFAIL, f"broker {branch.broker_id}: {error.problem}"
                    ) from error
                raise error
            branch.epoch = epoch
            asked.done += 1
        return XACode(code)

    async def resolve(self, branch: Branch, timeout_s: float) -> None:
        """After a COMMIT_ONE_PHASE without an answer: returns when the branch is committed.

        Raises RolledBack when it is not, and never will be; OutcomeUnknown when nobody answers.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self.ask(branch, [Verb.RESOLVE], timeout_s=max(deadline_s - time.monotonic(), 0.1))
                return
            except BranchNotKnown:
                reason = "it was not committed before the connection was lost"
                raise RolledBack(branch.xid, XACode.RBCOMMFAIL, reason) from None
            except (BranchMisuse, TryLater):  # it is on its way, or another one is the master by now
                if time.monotonic() > deadline_s:
                    raise OutcomeUnknown(branch.xid, XACode.RMFAIL, f"it took longer than {timeout_s:g} s") from None
            except TransactionError:
                raise
            except MetamqError as error:  # that nobody could be asked says nothing of what was asked before
                raise self._given_up(branch, error, sure=False) from None
            await asyncio.sleep(RETRY_S)

    async def branches(self, broker_id: int, *, all_of_them: bool = False) -> list[BranchDescription]:
        """The branches of a broker that are prepared, or finished by an operator; or all. Raises ConnectError, Fenced,
        Timeout: then nothing is known, and not that there are none."""
        found: list[BranchDescription] = []
        after, more = 0, True
        while more:
            connection = await self._cluster.connection(broker_id)
            packed = await connection.request(Command.BRANCHES, Branches(after, all_of_them), timeout_s=ANSWER_S)
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
                    )
                )
                after = info.epoch
            more = reply.more
        return found
