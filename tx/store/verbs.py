"""JournalTransactionStore: what a broker answers to the verbs of XA, and what it has to write down first. Pure.

Theory of operation
-------------------
`ask` looks at the table (metamq.tx.store.table) and gives a Step: what is to be written to the journal, whether that
has to be durable (here, and on every in-sync replica) before it counts, and the answer. The caller writes, waits, and
calls `written`; only then the state changes, by the same fold that reads the journal at a restart. A verb that writes
nothing is done at once.

    durable before the answer    PREPARE, COMMIT, COMMIT_ONE_PHASE, DECIDE, an operator's decisions
    written, not waited for      SEND, ROLLBACK of what is prepared, FORGET: presumed abort, or the call repeated, mends
                                 what is lost of these

One verb of a branch at a time: the caller sees to it. What is not prepared is dropped by a restart, by its time-out and
with the connection of who works in it; what is prepared, by nothing but a verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    HeuristicOutcome,
    RolledBack,
    TransactionError,
    TryLater,
)
from metamq.tx.store.branch import Association, BranchState
from metamq.tx.store.fold import Entry, JournalState
from metamq.tx.store.memory import OutcomeMemory
from metamq.tx.store.records import (
    Add,
    BodyPlace,
    BranchKey,
    Commit,
    Decide,
    Forget,
    Heuristic,
    Prepare,
    Record,
    RollbackRecord,
)
from metamq.tx.store.table import FORGETS, TABLE, BranchPhase, Ruling
from metamq.wire.xa import Verb, XACode, Xid

ROLLED_BACK_KEPT_S = 3600.0
"""So long it is kept why a branch was given up, for its owner; shorter where there are too many branches."""
LOST_SESSION_KEPT_S = 60.0
"""The same, once the connection of its owner is lost, who most likely has ended. One that comes back later is told that
the branch is not known, as after a restart of the broker: it was not prepared, so it is rolled back either way."""


ENDS = (Verb.COMMIT, Verb.ROLLBACK)


class TransactionLimits(NamedTuple):
    """How much may be open at once in one broker."""

    branches: int = 10_000
    messages: int = 100_000_000
    """Of one branch."""
    journal_bytes: int = 64 << 30
    """Of the journal: beyond it nothing more is taken, but what is there can be finished."""
    timeout_s: float = 30.0
    """Of a branch that names none."""
    timeout_max_s: float = 24 * 3600.0


@dataclass(slots=True)
class VerbRequest:
    """One verb, as it came. A request with several makes one of these, and changes verb and epoch."""

    verb: Verb
    xid: Xid
    epoch: int = 0
    """Which use of the id is meant; 0: whichever there is."""
    session: str = ""
    timeout_s: float = 0.0
    """START: 0 is the broker's default."""
    messages: int = -1
    """PREPARE, COMMIT_ONE_PHASE: how many the session has sent; -1: it does not say."""
    first: int = 0
    """SEND: how many bodies the session has sent before."""
    places: tuple[BodyPlace, ...] = ()
    owner: str = ""
    follows: tuple[int, ...] = ()
    """PREPARE: as in Prepare."""
    followers: tuple[int, ...] = ()
    """DECIDE: as in Decide."""


class Answer(NamedTuple):
    """What a verb is answered with."""

    code: XACode
    epoch: int


class VerbStep(NamedTuple):
    """What follows from a verb."""

    answer: Answer | None
    """None: `error` is the answer."""
    error: TransactionError | None = None
    record: Record | None = None
    """To be written to the journal, with the bodies that came."""
    durable: bool = False
    """Whether the answer waits until the record cannot be lost."""
    repeated: bool = False
    """SEND: the bodies are here already."""


class JournalTransactionStore:
    """The branches of one broker. Used by one thread."""

    def __init__(self, epoch: int, limits: TransactionLimits | None = None) -> None:
        """`epoch`: the master's term; ids of uses of an Xid begin with it, so they are higher than all before."""
        self.journal = JournalState()
        self.limits = limits if limits is not None else TransactionLimits()
        self._term = epoch
        self._next_epoch = epoch << 32
        self._never = OutcomeMemory()
        """Ids whose owners were told that they were not committed. Only what this process was sent may come late."""

    @property
    def branches(self) -> dict[Xid, BranchState]:
        """Those that are not finished."""
        return self.journal.branches

    def ask(self, asked: VerbRequest, now_s: float, now_us: int) -> VerbStep:
        """What follows from a verb. `now_s` is monotonic, `now_us` the time of day in microseconds."""
        branch = self.branches.get(asked.xid)
        if asked.epoch >> 32 > self._term:  # a former master knows nothing of what its successor began
            return _refuse(asked, TryLater, XACode.RETRY, "it was begun at a later master of this broker id")
        if branch is not None and asked.epoch and asked.epoch != branch.epoch:
            if asked.verb is Verb.RESOLVE and asked.epoch < branch.epoch:  # that use is over, and left nothing
                return _refuse(asked, BranchNotKnown, XACode.NOTA, _stale(asked.epoch, branch.epoch))
            return _refuse(asked, BranchMisuse, XACode.PROTO, _stale(asked.epoch, branch.epoch))
        if branch is not None and asked.verb is Verb.RESOLVE and not asked.epoch and not branch.is_of(asked.session):
            # Its request may have been lost on its way here, and the id was in use: by somebody else.
            return _refuse(asked, BranchMisuse, XACode.PROTO, "it is another session's: which use is meant?")
        ruling = TABLE[asked.verb, branch.state if branch is not None else BranchPhase.NONE]
        if ruling is Ruling.NOTA:
            return self._not_known(asked, now_us)
        if ruling is Ruling.DUPID:
            return _refuse(asked, BranchMisuse, XACode.DUPID, "the id is in use")
        if asked.verb is Verb.START:
            return self._start(asked, now_s)
        assert branch is not None
        if ruling is Ruling.PROTO:
            what = f"{asked.verb.name} is not allowed while it is {branch.state.value}"
            return _refuse(asked, BranchMisuse, XACode.PROTO, what)
        if ruling is Ruling.HEURISTIC:
            return _heuristic(asked, branch)
        if ruling is Ruling.ROLLED_BACK:
            return self._rolled_back(asked, branch)
        if branch.follows and branch.state is BranchPhase.PREPARED and asked.verb in ENDS and not asked.epoch:
            what = f"it follows the decision of broker {branch.follows[0]}, and ends by itself"
            return _refuse(asked, TryLater, XACode.RETRY, what)
        if ruling is Ruling.COMMITTED:
            return _committed(asked, branch.epoch)
        return self._do(asked, branch, now_us)

    # -- what the table says is no ------------------------------------------------------------------------------------

    def _not_known(self, asked: VerbRequest, now_us: int) -> VerbStep:
        committed = self.journal.memory.epoch_of(asked.xid)
        if committed is not None and asked.epoch in (0, committed):
            return _committed(asked, committed)
        if committed is not None and not (asked.verb is Verb.RESOLVE and asked.epoch < committed):
            return _refuse(asked, BranchMisuse, XACode.PROTO, _stale(asked.epoch, committed))
        if asked.verb is Verb.RESOLVE:
            self._never.add(BranchKey(asked.xid, 0), now_us)
        return _refuse(asked, BranchNotKnown, XACode.NOTA, "nobody knows it here: it never was, or is finished")

    def _rolled_back(self, asked: VerbRequest, branch: BranchState) -> VerbStep:
        if asked.verb in (Verb.END, Verb.FAIL, Verb.SUSPEND):
            branch.sessions.pop(asked.session, None)
        if asked.verb in FORGETS:
            del self.branches[asked.xid]
        return VerbStep(None, RolledBack(asked.xid, branch.rolled_back_code, branch.rolled_back_reason))

    # -- verbs that write nothing -------------------------------------------------------------------------------------

    def _start(self, asked: VerbRequest, now_s: float) -> VerbStep:
        if self.journal.memory.epoch_of(asked.xid) is not None:
            return _refuse(asked, BranchMisuse, XACode.DUPID, "it was committed not long ago")
        if self._never.epoch_of(asked.xid) is not None:
            return _refuse(asked, BranchMisuse, XACode.DUPID, "its owner was told that it was rolled back")
        if len(self.branches) >= self.limits.branches and not self._made_room():
            return _refuse(asked, TryLater, XACode.RMERR, f"{len(self.branches):,} branches are open, the most allowed")
        self._next_epoch += 1
        branch = BranchState(asked.xid, self._next_epoch, BranchPhase.ACTIVE, asked.owner)
        branch.sessions[asked.session] = Association()
        branch.timeout_s = min(asked.timeout_s or self.limits.timeout_s, self.limits.timeout_max_s)
        branch.deadline_s = now_s + branch.timeout_s
        self.branches[asked.xid] = branch
        return VerbStep(Answer(XACode.OK, branch.epoch))

    def _made_room(self) -> bool:
        """Forgets the oldest of what was given up: it is kept to tell its owners why, and holds up nobody."""
        given_up = [b.xid for b in self.branches.values() if b.state is BranchPhase.ROLLBACK_ONLY and not b.busy]
        for xid in given_up[: 1 + len(given_up) // 10]:  # several, since all branches were looked at
            del self.branches[xid]
        return bool(given_up)

    def _join(self, asked: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(asked.session)
        if asked.verb is Verb.RESUME:
            if association is None or not association.suspended:
                return _refuse(asked, BranchMisuse, XACode.PROTO, "this session has not suspended its work in it")
            association.suspended = False
        elif association is not None:
            return _refuse(asked, BranchMisuse, XACode.PROTO, "this session works in it already")
        else:
            branch.sessions[asked.session] = Association(sent=branch.batches_of.get(asked.session, 0))
        branch.state = BranchPhase.ACTIVE
        return _ok(branch)

    def _end(self, asked: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(asked.session)
        if association is None or (association.suspended and asked.verb is Verb.SUSPEND):
            return _refuse(asked, BranchMisuse, XACode.PROTO, "this session does not work in it")
        if asked.verb is Verb.SUSPEND:
            association.suspended = True
        else:
            del branch.sessions[asked.session]
        if asked.verb is Verb.FAIL:
            branch.becomes_rollback_only(XACode.RBROLLBACK, "its work failed, as its owner said")
        elif not branch.associated:
            branch.state = BranchPhase.IDLE
        return _ok(branch)

    def begin(self, asked: VerbRequest, now_s: float) -> VerbStep | None:
        """START, SEND and END in one, which is how most transactions begin: what these three come to. None where one of
        them would be refused: then they are to be asked for, each by itself."""
        messages = sum([place.messages for place in asked.places])
        if asked.epoch or asked.first or not 0 < messages <= self.limits.messages or asked.xid in self.branches:
            return None
        step = self._start(asked, now_s)
        if step.error is not None:
            return None
        branch = self.branches[asked.xid]
        branch.state = BranchPhase.IDLE
        branch.sessions.clear()
        branch.batches_of[asked.session] = len(asked.places)
        branch.messages_of[asked.session] = messages
        return step._replace(record=Add(branch.key, 0, [*asked.places], branch.owner))

    # -- verbs that write ---------------------------------------------------------------------------------------------

    def _do(self, asked: VerbRequest, branch: BranchState, now_us: int) -> VerbStep:
        verb = asked.verb
        if verb in (Verb.JOIN, Verb.RESUME):
            return self._join(asked, branch)
        if verb in (Verb.END, Verb.FAIL, Verb.SUSPEND):
            return self._end(asked, branch)
        if verb is Verb.SEND:
            return self._send(asked, branch)
        if verb in (Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE):
            return self._finish_work(asked, branch, now_us)
        if verb is Verb.COMMIT:
            return _durable(branch, Commit(branch.key, 0, now_us))
        if verb is Verb.FORGET:
            return VerbStep(Answer(XACode.OK, branch.epoch), record=Forget(branch.key))
        if verb is Verb.ROLLBACK:
            return self._rollback(branch)
        if verb is Verb.RESOLVE:
            del self.branches[branch.xid]
            return self._not_known(asked, now_us)
        return _durable(branch, Heuristic(branch.key, verb is Verb.HEURISTIC_COMMIT, 0, now_us))

    def _send(self, asked: VerbRequest, branch: BranchState) -> VerbStep:
        association = branch.sessions.get(asked.session)
        if association is None or association.suspended:
            return _refuse(asked, BranchMisuse, XACode.PROTO, "this session does not work in it")
        if asked.first + len(asked.places) <= association.sent:
            return VerbStep(Answer(XACode.OK, branch.epoch), repeated=True)
        if asked.first != association.sent:
            what = f"its session has sent {association.sent} batches, and not {asked.first}"
            return _refuse(asked, BranchMisuse, XACode.PROTO, what)
        messages = branch.messages + sum(place.messages for place in asked.places)
        if messages > self.limits.messages:
            return _refuse(asked, TryLater, XACode.RMERR, f"it would have {messages:,} messages: too many")
        association.sent += len(asked.places)
        branch.batches_of[asked.session] = association.sent
        branch.messages_of[asked.session] = branch.messages_of.get(asked.session, 0) + messages - branch.messages
        return VerbStep(
            Answer(XACode.OK, branch.epoch), record=Add(branch.key, len(branch.bodies), [*asked.places], branch.owner)
        )

    def _finish_work(self, asked: VerbRequest, branch: BranchState, now_us: int) -> VerbStep:
        if branch.suspended:
            return _refuse(asked, BranchMisuse, XACode.PROTO, "somebody's work in it is suspended, and not ended")
        came = branch.messages_of.get(asked.session, 0)
        if asked.messages >= 0 and asked.messages != came:
            what = f"{asked.messages:,} messages were sent in it, {came:,} came"
            branch.becomes_rollback_only(XACode.RBPROTO, what)
            return self._rolled_back(asked, branch)
        if not branch.bodies and asked.verb is Verb.DECIDE:
            return _refuse(asked, BranchMisuse, XACode.PROTO, "it has no messages, and so no record to decide with")
        if not branch.bodies:
            del self.branches[asked.xid]
            code = XACode.RDONLY if asked.verb is Verb.PREPARE else XACode.OK
            return VerbStep(Answer(code, branch.epoch))
        if asked.verb is Verb.PREPARE:
            return _durable(branch, Prepare(branch.key, branch.messages, now_us, asked.follows))
        if asked.verb is Verb.DECIDE:
            return _durable(branch, Decide(branch.key, 0, now_us, asked.followers))
        return _durable(branch, Commit(branch.key, 0, now_us))

    def _rollback(self, branch: BranchState) -> VerbStep:
        answer = Answer(XACode.OK, branch.epoch)
        if branch.state is BranchPhase.PREPARED:
            return VerbStep(answer, record=RollbackRecord(branch.key))
        del self.branches[branch.xid]  # a restart drops what is not prepared: nothing has to be written
        return VerbStep(answer)

    # -- what happens by itself ---------------------------------------------------------------------------------------

    def written(self, entry: Entry) -> None:
        """An entry is in the journal; if it is to be durable, it is."""
        self.journal.apply(entry)

    def expire(self, now_s: float) -> list[BranchState]:
        """Gives up the branches whose time is over, and returns them; forgets those that nobody asked for since."""
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

    def session_lost(self, session: str) -> list[BranchState]:
        """Nobody is behind a session any more: gives up what it works in, or has begun, and returns that."""
        lost = [one for one in self.branches.values() if session in one.sessions or session == one.owner]
        given_up = [one for one in lost if one.state in (BranchPhase.ACTIVE, BranchPhase.IDLE) and not one.busy]
        for branch in lost:
            branch.session_lost = True
        for branch in given_up:
            branch.becomes_rollback_only(XACode.RBCOMMFAIL, "the connection of who worked in it was lost")
        return given_up


def _ok(branch: BranchState) -> VerbStep:
    return VerbStep(Answer(XACode.OK, branch.epoch))


def _durable(branch: BranchState, record: Record) -> VerbStep:
    return VerbStep(Answer(XACode.OK, branch.epoch), record=record, durable=True)


def _committed(asked: VerbRequest, epoch: int) -> VerbStep:
    """To whoever asks of a branch that is committed."""
    if asked.verb in (Verb.COMMIT, Verb.COMMIT_ONE_PHASE, Verb.DECIDE, Verb.RESOLVE):
        return VerbStep(Answer(XACode.OK, epoch))  # the answer to the first one was lost
    error = BranchNotKnown(asked.xid, XACode.NOTA, "it was committed")
    error.finished = "committed"
    return VerbStep(None, error)


def _refuse(asked: VerbRequest, kind: type[TransactionError], code: XACode, reason: str) -> VerbStep:
    return VerbStep(None, kind(asked.xid, code, reason))


def _stale(asked: int, known: int) -> str:
    when = "an earlier" if asked < known else "a later"
    return f"this is for {when} use of the id: {asked}, and not {known}"


def _heuristic(asked: VerbRequest, branch: BranchState) -> VerbStep:
    committed = branch.heuristic_commit
    code = XACode.HEURCOM if committed else XACode.HEURRB
    what = "committed" if committed else "rolled back"
    return VerbStep(None, HeuristicOutcome(asked.xid, code, f"an operator has {what} it"))
