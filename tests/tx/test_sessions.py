"""Who is behind a branch: what is kept of sessions, and what becomes of the branches that they leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metamq.broker.transactions.processor import FIGURES_S
from metamq.security.rights import UNLIMITED
from metamq.tx.store.verbs import TransactionLimits
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import Replica, new_replica
from tests.tx.sim_disk import modelled_disk

A, B = Xid(1, b"A"), Xid(1, b"B")
WORK = (Verb.START, Verb.SEND, Verb.END)
OK = XACode.OK


@pytest.fixture
def replica() -> Iterator[Replica]:
    with modelled_disk() as own:
        made = new_replica(own, "a")
        made.begin_term(1)
        yield made


def asked(replica: Replica, xid: Xid, verb: Verb, session: str) -> list[XACode] | None:
    opaque = replica.ask(xid, verb, session=session)
    replica.flush(replica.journal)
    return replica.connection.codes(opaque)


def test_a_session_whose_branches_another_one_ends_leaves_nothing(replica: Replica) -> None:
    for number in range(20):
        xid = Xid(1, b"%d" % number)
        replica.ask(xid, *WORK, sends=[(0, b"x")], session="worker")
        assert asked(replica, xid, Verb.PREPARE, "manager") == [OK]
        assert asked(replica, xid, Verb.COMMIT, "manager") == [OK]
    replica.ask(A, *WORK, sends=[(0, b"a0")], session="open")
    replica.ask(B, Verb.START, session="began")
    replica.ask(B, Verb.JOIN, session="joined")
    replica.transactions.tick(FIGURES_S)
    assert {name for _, name in replica.term.sessions} == {"open", "began", "joined"}
    assert asked(replica, A, Verb.ROLLBACK, "manager") == [OK]
    replica.transactions.tick(3 * FIGURES_S)
    assert {name for _, name in replica.term.sessions} == {"began", "joined"}


def test_what_was_given_up_holds_up_nobody(replica: Replica) -> None:
    """The oldest of it goes first; its owner is told that nobody knows it, and not why."""
    replica.transactions.limits = TransactionLimits(branches=30)
    replica.connection.access = UNLIMITED  # with security on, one user has at most half of them
    replica.end_term()
    replica.begin_term(2)
    assert asked(replica, A, Verb.START, "busy") == [OK]
    for number in range(29):
        assert asked(replica, Xid(1, b"%d" % number), Verb.START, f"s{number}") == [OK]
    assert asked(replica, B, Verb.START, "s") == [XACode.RMERR]
    for number in range(29):
        replica.term.store.session_lost("", f"s{number}")
    for number in range(29):
        assert asked(replica, Xid(2, b"%d" % number), Verb.START, "s") == [OK]
        assert len(replica.states()) <= 30
        if not number:
            assert asked(replica, Xid(1, b"28"), Verb.END, "s28") == [XACode.RBCOMMFAIL]
    assert replica.states()[A] == "active"
    assert asked(replica, Xid(3, b"x"), Verb.START, "s") == [XACode.RMERR]


@pytest.mark.parametrize("state", ["active", "idle"])
def test_who_asks_what_became_of_a_request_that_was_lost_drops_no_branch_of_another(
    replica: Replica, state: str
) -> None:
    """Its id was in use, so the request would have been refused."""
    verbs = WORK if state == "idle" else WORK[:2]
    replica.ask(A, *verbs, sends=[(0, b"a0")], session="theirs")
    assert asked(replica, A, Verb.RESOLVE, "ours") == [XACode.PROTO]
    assert replica.states() == {A: state}
    assert asked(replica, A, Verb.RESOLVE, "theirs") == [XACode.NOTA]
    assert replica.states() == {}
