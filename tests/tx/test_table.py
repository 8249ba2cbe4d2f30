"""Each verb in each state gives exactly the code of the XA specification's table, and the state that follows."""

from __future__ import annotations

import itertools

import pytest

from metamq.errors import TransactionError
from metamq.tx.store.fold import Entry
from metamq.tx.store.records import BodyPlace
from metamq.tx.store.table import BranchPhase
from metamq.tx.store.verbs import Answer, JournalTransactionStore, VerbRequest
from metamq.wire.xa import Verb, XACode, Xid

XID = Xid(1, b"g", b"b")
PLACE = BodyPlace("orders", "0123456789abcdef", 0, 3)
OK, RDONLY, NOTA, PROTO, DUPID = XACode.OK, XACode.RDONLY, XACode.NOTA, XACode.PROTO, XACode.DUPID
RB, HEURCOM = XACode.RBROLLBACK, XACode.HEURCOM

# After xa_start ... xa_forget of chapter 6, restated: (code, the state that follows).
EXPECTED: dict[BranchPhase, dict[Verb, tuple[XACode, BranchPhase]]] = {
    BranchPhase.NONE: {
        Verb.START: (OK, BranchPhase.ACTIVE),
        **{verb: (NOTA, BranchPhase.NONE) for verb in Verb if verb is not Verb.START},
    },
    BranchPhase.ACTIVE: {
        Verb.START: (DUPID, BranchPhase.ACTIVE),
        Verb.JOIN: (OK, BranchPhase.ACTIVE),
        Verb.RESUME: (OK, BranchPhase.ACTIVE),
        Verb.SEND: (OK, BranchPhase.ACTIVE),
        Verb.END: (OK, BranchPhase.IDLE),
        Verb.FAIL: (OK, BranchPhase.ROLLBACK_ONLY),
        Verb.SUSPEND: (OK, BranchPhase.IDLE),
        Verb.FORGET: (NOTA, BranchPhase.ACTIVE),
        Verb.RESOLVE: (NOTA, BranchPhase.NONE),
    },
    BranchPhase.IDLE: {
        Verb.START: (DUPID, BranchPhase.IDLE),
        Verb.JOIN: (OK, BranchPhase.ACTIVE),
        Verb.RESUME: (OK, BranchPhase.ACTIVE),
        Verb.END: (OK, BranchPhase.IDLE),
        Verb.FAIL: (OK, BranchPhase.ROLLBACK_ONLY),
        Verb.PREPARE: (OK, BranchPhase.PREPARED),
        Verb.COMMIT_ONE_PHASE: (OK, BranchPhase.NONE),
        Verb.DECIDE: (OK, BranchPhase.DECIDED),
        Verb.ROLLBACK: (OK, BranchPhase.NONE),
        Verb.FORGET: (NOTA, BranchPhase.IDLE),
        Verb.RESOLVE: (NOTA, BranchPhase.NONE),
    },
    BranchPhase.PREPARED: {
        Verb.START: (DUPID, BranchPhase.PREPARED),
        Verb.COMMIT: (OK, BranchPhase.NONE),
        Verb.ROLLBACK: (OK, BranchPhase.NONE),
        Verb.HEURISTIC_COMMIT: (OK, BranchPhase.HEURISTIC),
        Verb.HEURISTIC_ROLLBACK: (OK, BranchPhase.HEURISTIC),
        Verb.FORGET: (NOTA, BranchPhase.PREPARED),
    },
    BranchPhase.ROLLBACK_ONLY: {
        Verb.START: (DUPID, BranchPhase.ROLLBACK_ONLY),
        **dict.fromkeys(
            (Verb.JOIN, Verb.RESUME, Verb.SEND, Verb.END, Verb.FAIL, Verb.SUSPEND), (RB, BranchPhase.ROLLBACK_ONLY)
        ),
        Verb.PREPARE: (RB, BranchPhase.NONE),
        Verb.COMMIT_ONE_PHASE: (RB, BranchPhase.NONE),
        Verb.DECIDE: (RB, BranchPhase.NONE),
        Verb.ROLLBACK: (OK, BranchPhase.NONE),
        Verb.FORGET: (NOTA, BranchPhase.ROLLBACK_ONLY),
        Verb.RESOLVE: (NOTA, BranchPhase.NONE),
    },
    BranchPhase.HEURISTIC: {
        Verb.START: (DUPID, BranchPhase.HEURISTIC),
        **dict.fromkeys(
            (Verb.COMMIT, Verb.ROLLBACK, Verb.HEURISTIC_COMMIT, Verb.HEURISTIC_ROLLBACK, Verb.RESOLVE),
            (HEURCOM, BranchPhase.HEURISTIC),
        ),
        Verb.FORGET: (OK, BranchPhase.NONE),
    },
    BranchPhase.DECIDED: {
        Verb.START: (DUPID, BranchPhase.DECIDED),
        **dict.fromkeys((Verb.COMMIT_ONE_PHASE, Verb.COMMIT, Verb.RESOLVE, Verb.DECIDE), (OK, BranchPhase.DECIDED)),
        Verb.ROLLBACK: (NOTA, BranchPhase.DECIDED),
        Verb.FORGET: (OK, BranchPhase.NONE),
    },
}

SUSPENDED = {
    (Verb.RESUME, BranchPhase.ACTIVE),
    (Verb.RESUME, BranchPhase.IDLE),
    (Verb.END, BranchPhase.IDLE),
    (Verb.FAIL, BranchPhase.IDLE),
}
"""What is allowed there to a session that has suspended its work."""


class Driver:
    """A store whose journal is always written at once."""

    def __init__(self) -> None:
        self.store = JournalTransactionStore(1)
        self.lsn = 0

    def do(self, verb: Verb, session: str = "a", now_s: float = 0.0, **fields: object) -> XACode:
        asked = VerbRequest(verb, XID, session=session, **fields)  # type: ignore[arg-type]
        if verb is Verb.SEND and "places" not in fields:
            asked.places = (PLACE,)
        step = self.store.ask(asked, now_s, 1)
        if step.record is not None:
            self.store.written(Entry(self.lsn, self.lsn * 100, [step.record], [50] * len(asked.places)))
            self.lsn += 1
        if step.error is not None:
            assert step.answer is None
            return XACode(step.error.code)
        assert isinstance(step.answer, Answer)
        return step.answer.code

    @property
    def state(self) -> BranchPhase:
        branch = self.store.branches.get(XID)
        return branch.state if branch is not None else BranchPhase.NONE

    def bring_to(self, state: BranchPhase, *, suspended: bool = False) -> None:
        """Session "a" has sent three messages, and works in it where anybody does."""
        ways = {
            BranchPhase.NONE: [],
            BranchPhase.ACTIVE: [Verb.START, Verb.SEND],
            BranchPhase.IDLE: [Verb.START, Verb.SEND, Verb.END],
            BranchPhase.PREPARED: [Verb.START, Verb.SEND, Verb.END, Verb.PREPARE],
            BranchPhase.ROLLBACK_ONLY: [Verb.START, Verb.SEND, Verb.FAIL],
            BranchPhase.HEURISTIC: [Verb.START, Verb.SEND, Verb.END, Verb.PREPARE, Verb.HEURISTIC_COMMIT],
            BranchPhase.DECIDED: [Verb.START, Verb.SEND, Verb.END, Verb.DECIDE],
        }
        way = list(ways[state])
        if suspended:
            way = [Verb.START, Verb.SEND, Verb.SUSPEND]
        for verb in way:
            assert self.do(verb) == OK
        if suspended and state is BranchPhase.ACTIVE:
            assert self.do(Verb.JOIN, session="b") == OK
        assert self.state is state


@pytest.mark.parametrize("state", BranchPhase)
@pytest.mark.parametrize("verb", Verb)
def test_every_verb_in_every_state(verb: Verb, state: BranchPhase) -> None:
    driver = Driver()
    driver.bring_to(state, suspended=(verb, state) in SUSPENDED)
    code, follows = EXPECTED[state].get(verb, (PROTO, state))
    if (verb, state) == (Verb.JOIN, BranchPhase.ACTIVE):
        assert driver.do(verb, session="another") == code
    elif verb is Verb.SEND:
        assert driver.do(verb, first=1) == code
    else:
        assert driver.do(verb) == code
    if (verb, state) == (Verb.FAIL, BranchPhase.ACTIVE) or (verb, state) == (Verb.FAIL, BranchPhase.IDLE):
        assert follows is BranchPhase.ROLLBACK_ONLY
    assert driver.state is follows


def test_nothing_of_the_table_is_left_out() -> None:
    assert len(list(itertools.product(Verb, BranchPhase))) == 16 * 7
    assert sum(len(row) for row in EXPECTED.values()) > 50


def test_a_suspended_branch_is_not_prepared() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE, suspended=True)
    assert driver.do(Verb.PREPARE) == PROTO
    assert driver.do(Verb.END) == OK
    assert driver.do(Verb.PREPARE) == OK


def test_who_did_not_begin_or_join_may_neither_send_nor_end() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.ACTIVE)
    assert driver.do(Verb.SEND, session="b") == PROTO
    assert driver.do(Verb.END, session="b") == PROTO
    assert driver.do(Verb.RESUME, session="b") == PROTO
    assert driver.do(Verb.JOIN) == PROTO
    assert driver.state is BranchPhase.ACTIVE


def test_a_branch_without_messages_is_read_only_and_writes_nothing() -> None:
    driver = Driver()
    for verb, code in ((Verb.START, OK), (Verb.END, OK), (Verb.PREPARE, RDONLY), (Verb.COMMIT, NOTA)):
        assert driver.do(verb) == code
    assert driver.lsn == 0


def test_a_lost_message_is_found_when_it_is_prepared() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.PREPARE, messages=5) == XACode.RBPROTO
    assert driver.state is BranchPhase.NONE or driver.do(Verb.ROLLBACK) == OK


def test_a_batch_is_taken_once_and_in_order() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.ACTIVE)
    assert driver.do(Verb.SEND, first=0) == OK  # its answer was lost
    assert driver.store.branches[XID].messages == 3
    assert driver.do(Verb.SEND, first=2) == PROTO  # the one before was lost
    assert driver.do(Verb.SEND, first=1) == OK
    assert driver.store.branches[XID].messages == 6


def test_a_commit_can_be_repeated_and_its_id_is_not_taken_again() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.PREPARED)
    assert driver.do(Verb.COMMIT) == OK
    assert driver.do(Verb.COMMIT) == OK
    assert driver.do(Verb.START) == DUPID
    assert driver.do(Verb.ROLLBACK) == NOTA
    step = driver.store.ask(VerbRequest(Verb.ROLLBACK, XID), 0.0, 1)
    assert step.error is not None
    assert step.error.finished == "committed"  # type: ignore[attr-defined]


def test_what_is_meant_for_an_earlier_use_of_the_id_does_nothing() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.PREPARED)
    first = driver.store.branches[XID].epoch
    assert driver.do(Verb.ROLLBACK) == OK
    driver.bring_to(BranchPhase.PREPARED)
    assert driver.store.branches[XID].epoch > first
    for verb in (Verb.COMMIT, Verb.ROLLBACK):
        assert driver.do(verb, epoch=first) == PROTO
    assert driver.state is BranchPhase.PREPARED


def test_what_was_resolved_as_not_committed_never_will_be() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.RESOLVE) == NOTA
    assert driver.do(Verb.START) == DUPID  # it was on its way


def test_what_was_committed_is_resolved_so() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.COMMIT_ONE_PHASE) == OK
    assert driver.do(Verb.RESOLVE) == OK


def test_a_decision_is_kept_until_it_is_forgotten_and_then_remembered_as_any_commit() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.DECIDE, followers=(2, 3)) == OK
    branch = driver.store.branches[XID]
    assert branch.followers == (2, 3)
    assert driver.store.expire(1e9) == []
    assert driver.store.session_lost("", "a") == []
    assert driver.do(Verb.FORGET) == OK
    for verb in (Verb.DECIDE, Verb.RESOLVE, Verb.COMMIT):
        assert driver.do(verb) == OK
    assert driver.do(Verb.START) == DUPID


def test_a_follower_is_told_that_the_use_it_followed_left_nothing() -> None:
    """Its decider gave up, and the id is in use again: that this one commits is not the follower's decision."""
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    first = driver.store.branches[XID].epoch
    assert driver.do(Verb.ROLLBACK) == OK
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.RESOLVE, epoch=first) == NOTA
    assert driver.state is BranchPhase.IDLE
    assert driver.do(Verb.DECIDE) == OK
    assert driver.do(Verb.RESOLVE, epoch=first) == NOTA
    assert driver.state is BranchPhase.DECIDED


def test_a_former_master_tells_nothing_of_what_its_successor_began() -> None:
    driver = Driver()
    for verb in Verb:
        assert driver.do(verb, epoch=(2 << 32) + 1) == XACode.RETRY


def test_who_only_knows_its_id_may_not_end_a_branch_that_follows() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.IDLE)
    assert driver.do(Verb.PREPARE, follows=(1, 0, 7)) == OK
    branch = driver.store.branches[XID]
    for verb in (Verb.COMMIT, Verb.ROLLBACK):
        assert driver.do(verb) == XACode.RETRY
    assert driver.store.branches[XID] is branch
    assert driver.do(Verb.COMMIT, epoch=branch.epoch) == OK


def test_nothing_is_decided_without_a_record() -> None:
    driver = Driver()
    assert [driver.do(verb) for verb in (Verb.START, Verb.END)] == [OK, OK]
    assert driver.do(Verb.DECIDE, followers=(2,)) == PROTO


def test_time_ends_what_is_not_prepared_and_nothing_else() -> None:
    driver = Driver()
    driver.do(Verb.START, timeout_s=5)
    driver.do(Verb.SEND)
    driver.do(Verb.END)
    assert driver.store.expire(4.9) == []
    assert len(driver.store.expire(5.0)) == 1
    assert driver.do(Verb.PREPARE) == XACode.RBTIMEOUT
    assert driver.state is BranchPhase.NONE
    driver.bring_to(BranchPhase.PREPARED)
    assert driver.store.expire(1e9) == []
    assert driver.do(Verb.COMMIT) == OK


def test_why_a_branch_was_given_up_is_kept_for_an_hour() -> None:
    driver = Driver()
    driver.do(Verb.START, timeout_s=5)
    driver.store.expire(5.0)
    driver.store.expire(6.0)
    assert driver.state is BranchPhase.ROLLBACK_ONLY
    driver.store.expire(6.0 + 3600)
    assert driver.state is BranchPhase.NONE


@pytest.mark.parametrize("times_out_first", [False, True])
def test_why_a_branch_of_a_lost_session_was_given_up_is_kept_for_a_minute(times_out_first: bool) -> None:
    driver = Driver()
    driver.do(Verb.START, timeout_s=5)
    if times_out_first:
        driver.store.expire(5.0)
        driver.store.expire(6.0)
    driver.store.session_lost("", "a")
    driver.store.expire(6.0)
    driver.store.expire(6.0 + 59)
    assert driver.state is BranchPhase.ROLLBACK_ONLY
    driver.store.expire(6.0 + 60)
    assert driver.state is BranchPhase.NONE


def test_a_lost_session_ends_its_branches_but_not_the_prepared_ones() -> None:
    driver = Driver()
    driver.bring_to(BranchPhase.ACTIVE)
    assert driver.store.session_lost("", "b") == []
    assert len(driver.store.session_lost("", "a")) == 1
    assert driver.do(Verb.SEND, first=1) == XACode.RBCOMMFAIL
    assert driver.do(Verb.ROLLBACK) == OK
    driver.bring_to(BranchPhase.PREPARED)
    assert driver.store.session_lost("", "a") == []
    assert driver.state is BranchPhase.PREPARED


def test_what_is_being_made_durable_is_left_alone() -> None:
    driver = Driver()
    driver.do(Verb.START, timeout_s=5)
    driver.store.branches[XID].busy = True
    assert driver.store.expire(100.0) == []
    assert driver.store.session_lost("", "a") == []


def test_errors_name_the_branch_and_travel() -> None:
    from metamq.wire import status

    driver = Driver()
    step = driver.store.ask(VerbRequest(Verb.COMMIT, XID), 0.0, 1)
    assert isinstance(step.error, TransactionError)
    assert str(XID) in str(step.error)
    travelled = status.decode_error(*status.encode_error(step.error))
    assert type(travelled) is type(step.error)
    assert (travelled.code, str(travelled)) == (step.error.code, str(step.error))  # type: ignore[attr-defined]
