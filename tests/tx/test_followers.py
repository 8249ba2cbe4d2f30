"""What a broker does about transactions over several brokers, while some of those do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from metamq.broker.transactions.followers import Followers
from metamq.client.net.branches import Branch
from metamq.errors import BranchNotKnown, ConnectError
from metamq.tx.store.branch import BranchState
from metamq.tx.store.table import BranchPhase
from metamq.wire.xa import Verb, XACode, Xid


class Brokers:
    """In the place of a TxClient."""

    def __init__(self) -> None:
        self.down: set[int] = set()
        self.forgetful: set[int] = set()
        """They remember nothing of what was committed before."""
        self.asked: list[tuple[int, Verb]] = []

    async def ask(self, branch: Branch, verbs: Sequence[Verb], *, timeout_s: float) -> XACode:
        (verb,) = verbs
        self.asked.append((branch.broker_id, verb))
        if branch.broker_id in self.down:
            raise ConnectError(f"broker {branch.broker_id}", "a test says so")
        if branch.broker_id in self.forgetful:
            raise BranchNotKnown(branch.xid, XACode.NOTA, "nobody knows it here")
        return XACode.OK


def round_of(followers: Followers, brokers: Brokers) -> list[tuple[int, Verb]]:
    """Who is asked what."""
    brokers.asked = []
    asyncio.run(followers.round(brokers))  # type: ignore[arg-type]
    return brokers.asked


def followers_of(waiting: list[BranchState]) -> Followers:
    transactions: Any = SimpleNamespace(waiting=lambda: waiting)
    session: Any = None
    return Followers(0, session, transactions, 0.0)


def test_a_decision_is_forgotten_though_one_that_was_told_does_not_remember_it_when_the_last_is_up_again() -> None:
    brokers, xid = Brokers(), Xid(1, b"a")
    followers = followers_of([BranchState(xid, 5, BranchPhase.DECIDED, followers=(1, 7, 2, 7, 3, 7))])
    brokers.down = {2}
    told = round_of(followers, brokers)
    assert told == [(1, Verb.COMMIT), (2, Verb.COMMIT), (3, Verb.COMMIT)], "one that is down holds up no other"
    brokers.forgetful = {1, 3}
    assert round_of(followers, brokers) == [(2, Verb.COMMIT)]
    brokers.down = set()
    assert round_of(followers, brokers) == [(2, Verb.COMMIT), (0, Verb.FORGET)]


def test_a_decision_is_not_forgotten_since_a_broker_knows_nothing_of_it() -> None:
    brokers = Brokers()
    followers = followers_of([BranchState(Xid(1, b"a"), 5, BranchPhase.DECIDED, followers=(1, 7))])
    brokers.forgetful = {1}
    for _ in range(2):
        assert round_of(followers, brokers) == [(1, Verb.COMMIT)]


def test_the_branches_of_a_broker_that_does_not_answer_hold_up_no_others() -> None:
    brokers = Brokers()
    branches = [BranchState(Xid(1, b"%d" % n), n + 1, BranchPhase.PREPARED, follows=(1, 1, 5)) for n in range(200)]
    branches.append(BranchState(Xid(1, b"last"), 999, BranchPhase.PREPARED, follows=(2, 1, 5)))
    followers = followers_of(branches)
    brokers.down = {1}
    for _ in range(2):
        assert round_of(followers, brokers) == [(1, Verb.RESOLVE), (2, Verb.RESOLVE), (0, Verb.COMMIT)]
