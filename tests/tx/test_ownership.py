"""Whose branch it is: what other principals get for an answer, and what is known after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from metamq.broker.transactions.branch_page import branch_page
from metamq.errors import MetamqError, NotAuthorized
from metamq.security.rights import Access, RuleTable, parse_rule
from metamq.tx.store.table import BranchPhase
from metamq.tx.store.verbs import TransactionLimits
from metamq.wire.commands import Branches, BranchInfo, TxReply
from metamq.wire.status import decode_error
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import LOOP, Connection, Replica, new_replica
from tests.tx.sim_disk import modelled_disk

A, B = Xid(1, b"A"), Xid(1, b"B")
WORK = (Verb.START, Verb.SEND, Verb.END)
OK = XACode.OK
WRITES = ("allow * write topic:*",)
AS_SENT: list[tuple[str, tuple[Verb, ...]]] = [
    ("active", WORK[:2]),
    ("idle", WORK),
    ("prepared", (*WORK, Verb.PREPARE)),
    ("decided", (*WORK, Verb.DECIDE)),
]


def access(principal: str, *rules: str) -> Access:
    return Access(principal, RuleTable(parse_rule(*one.split()) for one in (*WRITES, *rules)))


@pytest.fixture
def replica() -> Iterator[Replica]:
    """A master. Its client is `etl`, which may write everything."""
    with modelled_disk() as own:
        made = new_replica(own, "a")
        made.begin_term(1)
        become(made, access("etl"))
        yield made


def become(replica: Replica, rights: Access) -> None:
    """From here on the requests are those of another client."""
    replica.connection = Connection()
    replica.connection.access = rights


def error_of(replica: Replica, opaque: int) -> MetamqError:
    answer = replica.connection.answers[opaque]
    if not isinstance(answer, TxReply):
        return answer
    result = answer.results[-1]
    return decode_error(result.status, result.error)


def principals(replica: Replica) -> dict[Xid, str]:
    return {xid: branch.principal for xid, branch in replica.term.store.branches.items()}


@pytest.mark.parametrize(("state", "verbs"), AS_SENT, ids=[state for state, _ in AS_SENT])
@pytest.mark.parametrize("verb", Verb, ids=[verb.name for verb in Verb])
def test_another_principal_changes_nothing(replica: Replica, state: str, verbs: tuple[Verb, ...], verb: Verb) -> None:
    assert replica.do(A, *verbs, sends=[(0, b"a0")])[-1] is OK
    become(replica, access("other"))
    sends = [(0, b"b0")] if verb is Verb.SEND else None
    if verb is Verb.START:
        assert replica.do(A, verb) == [XACode.DUPID]
    else:
        for session in ("s", "another"):  # also with the name of the owner's session
            error = error_of(replica, replica.ask(A, verb, sends=sends, session=session))
            assert isinstance(error, NotAuthorized)
            assert error.principal == "other"
    assert replica.states() == {A: state}
    assert replica.stored(0) == ([b"a0"] if state == "decided" else [])


def test_a_right_opens_all_branches(replica: Replica) -> None:
    replica.do(A, *WORK, Verb.PREPARE, sends=[(0, b"a0")])
    become(replica, access("operator", "allow operator recover cluster"))
    assert replica.do(A, Verb.COMMIT) == [OK]
    assert replica.stored(0) == [b"a0"]


@pytest.mark.parametrize("rewritten", [False, True])
def test_the_next_master_knows_whose_branch_it_is(replica: Replica, rewritten: bool) -> None:
    replica.do(A, *WORK, Verb.PREPARE, sends=[(0, b"a0"), (1, b"a1")])
    replica.do(B, *WORK, Verb.PREPARE, sends=[(0, b"b0")])
    if rewritten:
        replica.shorten()
    rights = replica.connection.access
    replica.end_term()
    replica.begin_term(2)
    assert principals(replica) == {A: "etl", B: "etl"}
    become(replica, access("other"))
    assert isinstance(error_of(replica, replica.ask(A, Verb.COMMIT)), NotAuthorized)
    become(replica, rights)
    assert replica.do(A, Verb.COMMIT) == [OK]


def test_a_lost_session_of_another_principal_with_the_same_name(replica: Replica) -> None:
    replica.do(A, *WORK, sends=[(0, b"a0")])
    owner = replica.connection
    become(replica, access("other"))
    replica.do(B, *WORK, sends=[(0, b"b0")])
    replica.transactions._session_lost(replica.term, ("other", "s"), replica.connection)
    assert replica.states() == {A: "idle", B: "rollback-only"}
    assert replica.term.sessions == {("etl", "s"): owner}


def test_a_request_that_has_waited_is_checked_again(replica: Replica) -> None:
    term = replica.term
    term.is_settled = False
    waiting = [replica.ask(xid, *WORK, sends=[(0, b"x")]) for xid in (A, B)]
    replica.connection.access = Access("etl", RuleTable(()))
    term.is_settled = True
    LOOP.run_until_complete(
        asyncio.wait_for(replica.transactions._in_slices(replica.transactions._begin_waiting(term)), 10)
    )
    assert all(isinstance(error_of(replica, opaque), NotAuthorized) for opaque in waiting)
    assert replica.states() == {}


def test_one_principal_takes_no_more_than_half_of_the_branches(replica: Replica) -> None:
    replica.term.store.limits = TransactionLimits(branches=20)
    outcomes = [replica.do(Xid(1, b"%d" % number), Verb.START, Verb.END) for number in range(12)]
    assert outcomes == [[OK, OK]] * 10 + [[XACode.RMERR]] * 2
    become(replica, access("other"))
    for number in range(10):
        assert replica.do(Xid(2, b"%d" % number), Verb.START) == [OK]
    assert replica.do(Xid(2, b"more"), Verb.START) == [XACode.RMERR]
    become(replica, access("etl"))
    assert replica.do(Xid(1, b"0"), Verb.ROLLBACK) == [OK]
    assert replica.do(Xid(1, b"10"), Verb.START) == [OK]


def page(replica: Replica, rights: Access, *, all_of_them: bool) -> dict[Xid, BranchInfo]:
    found = branch_page(replica.term, Branches(0, all_of_them), rights)
    return {Xid.unpack(one.xid): one for one in found.branches}


def test_of_other_branches_only_the_ids_of_prepared_ones_are_shown(replica: Replica) -> None:
    replica.do(A, *WORK, Verb.PREPARE, sends=[(0, b"a0")])
    replica.do(B, *WORK, sends=[(0, b"b0")])
    for sees_all in (access("etl"), access("operator", "allow operator recover cluster"), access("admin")):
        assert page(replica, sees_all, all_of_them=False).keys() == {A}
        found = page(replica, sees_all, all_of_them=True)
        assert found.keys() == {A, B}
        assert (found[A].owner, found[A].messages) == ("s", 1)
    for all_of_them in (False, True):
        (shown,) = page(replica, access("other"), all_of_them=all_of_them).values()
        assert (Xid.unpack(shown.xid), shown.state) == (A, BranchPhase.PREPARED.value)
        assert (shown.owner, shown.messages, shown.bytes) == ("", 0, 0)
