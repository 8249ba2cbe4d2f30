"""JournalTransactionStore: a broker's answers to the verbs of XA, and the records that it must write before. Pure.

Theory of operation
-------------------
`ask` looks at the table (metamq.tx.store.table) and returns a VerbStep: the record for the journal, whether the record
must be durable (here, and on every in-sync replica) before the answer, and the answer. The caller writes, waits, and
calls `written`. Only then the state changes, by the same code that reads the journal at a restart. A verb without a
record changes the state at once.

    durable before the answer    PREPARE, COMMIT, COMMIT_ONE_PHASE, DECIDE, an operator's decisions
    written, not waited for      SEND, ROLLBACK of a prepared branch, FORGET: if the record is lost, presumed abort or
                                 a repeated call repairs that

The caller runs one verb of a branch at a time. A branch that is not prepared is dropped by a restart, by its time-out,
or when the connection of its session is lost. A prepared branch ends only by a verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from metamq.errors import BranchMisuse, BranchNotKnown, HeuristicOutcome, RolledBack, TransactionError, TryLater
from metamq.tx.store import records
from metamq.tx.store.branch import Association, BranchState
from metamq.tx.store.fold import Entry, JournalState
from metamq.tx.store.memory import OutcomeMemory
from metamq.tx.store.table import FORGETS, TABLE, BranchPhase, Ruling
from metamq.wire.xa import Verb, XACode, Xid

ROLLED_BACK_KEPT_S = 3600.0
"""Seconds for which the reason of a rollback is kept for the owner; shorter if there are too many branches."""
LOST_SESSION_KEPT_S = 60.0
"""The same after the connection of the owner is lost: most likely the owner has ended. An owner that comes back later
gets the answer that the branch is not known, as after a restart of the broker. In both cases it is rolled back."""


ENDS = (Verb.COMMIT, Verb.ROLLBACK)


class TransactionLimits(NamedTuple):
    """Limits of one broker for transactions that are open at the same time."""

    branches: int = 10_000
    """Open branches. With security on, one user or certificate may have half of them."""
    messages: int = 100_000_000
    """Messages in one branch."""
    journal_bytes: int = 64 << 30
    """Bytes of the journal. Above this limit the broker refuses new work, and still finishes open branches."""
    timeout_s: float = 30.0
    """Seconds for a branch that gives no time-out."""
    timeout_max_s: float = 24 * 3600.0


@dataclass(slots=True)
class VerbRequest:
    """One verb. For a request with several verbs the broker makes one VerbRequest, and changes its verb and epoch."""

    verb: Verb
    xid: Xid
    epoch: int = 0
    """The epoch of the branch, one use of the id; 0: any use."""
    session: str = ""
    timeout_s: float = 0.0
    """START: seconds; 0 is the broker's default."""
    messages: int = -1
    """PREPARE, COMMIT_ONE_PHASE: number of messages that the session has sent; -1: unknown."""
    first: int = 0
    """SEND: number of bodies that the session has sent before."""
    places: tuple[records.BodyPlace, ...] = ()
    owner: str = ""
    principal: str = ""
    """START: see BranchState."""
    follows: tuple[int, ...] = ()
    """PREPARE: see Prepare."""
    followers: tuple[int, ...] = ()
    """DECIDE: see Decide."""


class Answer(NamedTuple):
    """The answer to a verb."""

    code: XACode
    epoch: int


class VerbStep(NamedTuple):
    """The answer to a verb, and the record to write before it."""

    answer: Answer | None
    """None: `error` is the answer."""
    error: TransactionError | None = None
    record: records.Record | None = None
    """The record to write to the journal, with the bodies of the request."""
    durable: bool = False
    """True if the answer must wait until the record cannot be lost."""
    repeated: bool = False
    """SEND: the broker has the bodies already."""


class JournalTransactionStore:
    """The branches of one broker. Used by one thread."""

    def __init__(self, epoch: int, limits: TransactionLimits | None = None) -> None:
        """`epoch`: the master's epoch. The epochs of branches begin with it, so they are higher than all before."""
        self.journal = JournalState()
        self.limits = limits if limits is not None else TransactionLimits()
        self._master_epoch = epoch
        self._next_epoch = epoch << 32
        self._not_committed = OutcomeMemory()
        """Ids whose owners got the answer that they were not committed. Only requests to this process may come late."""

    @property
    def branches(self) -> dict[Xid, BranchState]:
        """The branches that are not finished."""
        return self.journal.branches

    def ask(self, request: VerbRequest, now_s: float, now_us: int) -> VerbStep:
        """Returns the step for a verb. `now_s` is monotonic, `now_us` the time of day in microseconds."""
        branch = self.branches.get(request.xid)
        if request.epoch >> 32 > self._master_epoch:  # a former master does not know the branches of its successor
            return _refuse(request, TryLater, XACode.RETRY, "it was begun at a later master of this broker id")
        if branch is not None and request.epoch and request.epoch != branch.epoch:
            if request.verb is Verb.RESOLVE and request.epoch < branch.epoch:  # that use is over, and left no record
                return _refuse(request, BranchNotKnown, XACode.NOTA, _stale(request.epoch, branch.epoch))
            return _refuse(request, BranchMisuse, XACode.PROTO, _stale(request.epoch, branch.epoch))
        if (
            branch is not None
            and request.verb is Verb.RESOLVE
            and not request.epoch
            and not branch.is_of(request.session)
        ):
            # Its request may have been lost on its way here, and another session uses the id.
            return _refuse(request, BranchMisuse, XACode.PROTO, "another session uses the id: give the epoch")
        ruling = TABLE[request.verb, branch.state if branch is not None else BranchPhase.NONE]
        if ruling is Ruling.NOTA:
            return self._not_known(request, now_us)
        if ruling is Ruling.DUPID:
            return _refuse(request, BranchMisuse, XACode.DUPID, "the id is in use")
        if request.verb is Verb.START:
            return self._start(request, now_s)
        assert branch is not None
        if ruling is Ruling.PROTO:
            what = f"{request.verb.name} is not allowed while it is {branch.state.value}"
            return _refuse(request, BranchMisuse, XACode.PROTO, what)
        if ruling is Ruling.HEURISTIC:
            return _heuristic(request, branch)
        if ruling is Ruling.ROLLED_BACK:
            return self._rolled_back(request, branch)
        if branch.follows and branch.state is BranchPhase.PREPARED and request.verb in ENDS and not request.epoch:
            what = f"it follows the decision of broker {branch.follows[0]}, and ends without a request"
            return _refuse(request, TryLater, XACode.RETRY, what)
        if ruling is Ruling.COMMITTED:
            return _committed(request, branch.epoch)
        return self._do(request, branch, now_us)

    # -- verbs that the table refuses ---------------------------------------------------------------------------------

    def _not_known(self, request: VerbRequest, now_us: int) -> VerbStep:
        committed = self.journal.memory.epoch_of(request.xid)
        if committed is not None and request.epoch in (0, committed):
            return _committed(request, committed)
        if committed is not None and not (request.verb is Verb.RESOLVE and request.epoch < committed):
            return _refuse(request, BranchMisuse, XACode.PROTO, _stale(request.epoch, committed))
        if request.verb is Verb.RESOLVE:
            self._not_committed.add(records.BranchKey(request.xid, 0), now_us)
        return _refuse(request, BranchNotKnown, XACode.NOTA, "the broker does not know it: it never began, or ended")

    def _rolled_back(self, request: VerbRequest, branch: BranchState) -> VerbStep:
        if request.verb in (Verb.END, Verb.FAIL, Verb.SUSPEND):
            branch.sessions.pop(request.session, None)
        if request.verb in FORGETS:
            del self.branches[request.xid]
        return VerbStep(None, RolledBack(request.xid, branch.rolled_back_code, branch.rolled_back_reason))

    # -- verbs that write nothing -------------------------------------------------------------------------------------

    def _start(self, request: VerbRequest, now_s: float) -> VerbStep:
        if self.journal.memory.epoch_of(request.xid) is not None:
            return _refuse(request, BranchMisuse, XACode.DUPID, "it was committed recently")
        if self._not_committed.epoch_of(request.xid) is not None:
            return _refuse(request, BranchMisuse, XACode.DUPID, "its owner got the answer that it was rolled back")
        if len(self.branches) >= self.limits.branches and not self._drop_rollback_only():
            return _refuse(request, TryLater, XACode.RMERR, f"{len(self.branches):,} branches are open, the limit")
        if request.principal and len(self.branches) >= self.limits.branches // 2 and self._has_half(request.principal):
            what = f"{request.principal!r} has {self.limits.branches // 2:,} open branches, half of all: the most"
            return _refuse(request, TryLater, XACode.RMERR, f"{what} that one user may have")
        self._next_epoch += 1
        branch = BranchState(request.xid, self._next_epoch, BranchPhase.ACTIVE, request.owner, request.principal)
        branch.sessions[request.session] = Association()
        branch.timeout_s = min(request.timeout_s or self.limits.timeout_s, self.limits.timeout_max_s)
        branch.deadline_s = now_s + branch.timeout_s
        self.branches[request.xid] = branch
        return VerbStep(Answer(XACode.OK, branch.epoch))

    def _has_half(self, principal: str) -> bool:
        """True if the principal has half of the branches that may be open. Looks at all: there are many already."""
        own = sum(b.principal == principal and b.state is not BranchPhase.ROLLBACK_ONLY for b in self.branches.values())
        return own >= self.limits.branches // 2

    def _drop_rollback_only(self) -> bool:
        """Forgets the oldest rollback-only branches. They are kept only to give their owners the reason."""
        given_up = [b.xid for b in self.branches.values() if b.state is BranchPhase.ROLLBACK_ONLY and not b.busy]
        for xid in given_up[: 1 + len(given_up) // 10]:  # several at once, since this looks at all branches
            del self.branches[xid]
        return bool(given_up)

    def _join(self, request: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(request.session)
        if request.verb is Verb.RESUME:
            if association is None or not association.suspended:
                return _refuse(request, BranchMisuse, XACode.PROTO, "this session has not suspended its work in it")
            association.suspended = False
        elif association is not None:
            return _refuse(request, BranchMisuse, XACode.PROTO, "this session works in it already")
        else:
            branch.sessions[request.session] = Association(sent=branch.batches_of.get(request.session, 0))
        branch.state = BranchPhase.ACTIVE
        return _ok(branch)

    def _end(self, request: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(request.session)
        if association is None or (association.suspended and request.verb is Verb.SUSPEND):
            return _refuse(request, BranchMisuse, XACode.PROTO, "this session does not work in it")
        if request.verb is Verb.SUSPEND:
            association.suspended = True
        else:
            del branch.sessions[request.session]
        if request.verb is Verb.FAIL:
            branch.becomes_rollback_only(XACode.RBROLLBACK, "its owner reported that its work failed")
        elif not branch.associated:
            branch.state = BranchPhase.IDLE
        return _ok(branch)

    def begin(self, request: VerbRequest, now_s: float) -> VerbStep | None:
        """Does START, SEND and END in one step: most transactions begin so. Returns None if one of the three would be
        refused: then the caller must ask for each of them separately."""
        messages = sum([place.messages for place in request.places])
        if request.epoch or request.first or not 0 < messages <= self.limits.messages or request.xid in self.branches:
            return None
        step = self._start(request, now_s)
        if step.error is not None:
            return None
        branch = self.branches[request.xid]
        branch.state = BranchPhase.IDLE
        branch.sessions.clear()
        branch.batches_of[request.session] = len(request.places)
        branch.messages_of[request.session] = messages
        return step._replace(record=records.Add(branch.key, 0, [*request.places], branch.owner, branch.principal))

    # -- verbs that write ---------------------------------------------------------------------------------------------

    def _do(self, request: VerbRequest, branch: BranchState, now_us: int) -> VerbStep:
        verb = request.verb
        if verb in (Verb.JOIN, Verb.RESUME):
            return self._join(request, branch)
        if verb in (Verb.END, Verb.FAIL, Verb.SUSPEND):
            return self._end(request, branch)
        if verb is Verb.SEND:
            return self._send(request, branch)
        if verb in (Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE):
            return self._finish_work(request, branch, now_us)
        if verb is Verb.COMMIT:
            return _durable(branch, records.Commit(branch.key, 0, now_us))
        if verb is Verb.FORGET:
            return VerbStep(Answer(XACode.OK, branch.epoch), record=records.Forget(branch.key))
        if verb is Verb.ROLLBACK:
            return self._rollback(branch)
        if verb is Verb.RESOLVE:
            del self.branches[branch.xid]
            return self._not_known(request, now_us)
        return _durable(branch, records.Heuristic(branch.key, verb is Verb.HEURISTIC_COMMIT, 0, now_us))

    def _send(self, request: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(request.session)
        if association is None or association.suspended:
            return _refuse(request, BranchMisuse, XACode.PROTO, "this session does not work in it")
        if request.first + len(request.places) <= association.sent:
            return VerbStep(Answer(XACode.OK, branch.epoch), repeated=True)
        if request.first != association.sent:
            what = f"its session has sent {association.sent} batches, not {request.first}"
            return _refuse(request, BranchMisuse, XACode.PROTO, what)
        messages = branch.messages + sum(place.messages for place in request.places)
        if messages > self.limits.messages:
            return _refuse(request, TryLater, XACode.RMERR, f"it would have {messages:,} messages, above the limit")
        association.sent += len(request.places)
        branch.batches_of[request.session] = association.sent
        branch.messages_of[request.session] = branch.messages_of.get(request.session, 0) + messages - branch.messages
        return VerbStep(
            Answer(XACode.OK, branch.epoch),
            record=records.Add(branch.key, len(branch.bodies), [*request.places], branch.owner, branch.principal),
        )

    def _finish_work(self, request: VerbRequest, branch: BranchState, now_us: int) -> VerbStep:
        if branch.suspended:
            return _refuse(request, BranchMisuse, XACode.PROTO, "a session has suspended its work: end that first")
        came = branch.messages_of.get(request.session, 0)
        if request.messages >= 0 and request.messages != came:
            what = f"{request.messages:,} messages were sent in it, the broker has {came:,}"
            branch.becomes_rollback_only(XACode.RBPROTO, what)
            return self._rolled_back(request, branch)
        if not branch.bodies and request.verb is Verb.DECIDE:
            return _refuse(request, BranchMisuse, XACode.PROTO, "it has no messages, so no record for the decision")
        if not branch.bodies:
            del self.branches[request.xid]
            code = XACode.RDONLY if request.verb is Verb.PREPARE else XACode.OK
            return VerbStep(Answer(code, branch.epoch))
        if request.verb is Verb.PREPARE:
            return _durable(branch, records.Prepare(branch.key, branch.messages, now_us, request.follows))
        if request.verb is Verb.DECIDE:
            return _durable(branch, records.Decide(branch.key, 0, now_us, request.followers))
        return _durable(branch, records.Commit(branch.key, 0, now_us))

    def _rollback(self, branch: BranchState) -> VerbStep:
        answer = Answer(XACode.OK, branch.epoch)
        if branch.state is BranchPhase.PREPARED:
            return VerbStep(answer, record=records.RollbackRecord(branch.key))
        del self.branches[branch.xid]  # a restart drops an unprepared branch: no record is needed
        return VerbStep(answer)

    # -- events other than verbs --------------------------------------------------------------------------------------

    def written(self, entry: Entry) -> None:
        """Applies an entry that is in the journal, and durable if it must be."""
        self.journal.apply(entry)

    def expire(self, now_s: float) -> list[BranchState]:
        """Gives up the branches whose time-out is over, and returns them. Forgets old rollback-only branches."""
        given_up = []
        for branch in list(self.branches.values()):
            if branch.state is BranchPhase.ROLLBACK_ONLY:
                latest_s = now_s + (LOST_SESSION_KEPT_S if branch.session_lost else ROLLED_BACK_KEPT_S)
                branch.deadline_s = latest_s if branch.deadline_s is None else min(branch.deadline_s, latest_s)
            if branch.deadline_s is None or branch.deadline_s > now_s or branch.busy:
                continue
            if branch.state is BranchPhase.ROLLBACK_ONLY:
                del self.branches[branch.xid]
                continue
            reason = f"it was not prepared within {branch.timeout_s:g} s"
            branch.becomes_rollback_only(XACode.RBTIMEOUT, reason)
            given_up.append(branch)
        return given_up

    def session_lost(self, principal: str, session: str) -> list[BranchState]:
        """Gives up the branches that a lost session works in or began, and returns them. Clients choose the names of
        sessions, so it concerns only branches of its own principal."""
        lost = [
            one
            for one in self.branches.values()
            if one.principal == principal and (session in one.sessions or session == one.owner)
        ]
        given_up = [one for one in lost if one.state in (BranchPhase.ACTIVE, BranchPhase.IDLE) and not one.busy]
        for branch in lost:
            branch.session_lost = True
        for branch in given_up:
            branch.becomes_rollback_only(XACode.RBCOMMFAIL, "the connection of a session that worked in it was lost")
        return given_up


def _ok(branch: BranchState) -> VerbStep:
    return VerbStep(Answer(XACode.OK, branch.epoch))


def _durable(branch: BranchState, record: records.Record) -> VerbStep:
    return VerbStep(Answer(XACode.OK, branch.epoch), record=record, durable=True)


def _committed(request: VerbRequest, epoch: int) -> VerbStep:
    """Returns the answer to a verb on a committed branch."""
    if request.verb in (Verb.COMMIT, Verb.COMMIT_ONE_PHASE, Verb.DECIDE, Verb.RESOLVE):
        return VerbStep(Answer(XACode.OK, epoch))  # the answer to the first one was lost
    error = BranchNotKnown(request.xid, XACode.NOTA, "it was committed")
    error.finished = "committed"
    return VerbStep(None, error)


def _refuse(request: VerbRequest, kind: type[TransactionError], code: XACode, reason: str) -> VerbStep:
    return VerbStep(None, kind(request.xid, code, reason))


def _stale(requested: int, known: int) -> str:
    when = "an earlier" if requested < known else "a later"
    return f"the request is for {when} use of the id: epoch {requested}, not {known}"


def _heuristic(request: VerbRequest, branch: BranchState) -> VerbStep:
    committed = branch.heuristic_commit
    code = XACode.HEURCOM if committed else XACode.HEURRB
    what = "committed" if committed else "rolled back"
    return VerbStep(None, HeuristicOutcome(request.xid, code, f"an operator has {what} it"))
