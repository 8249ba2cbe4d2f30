"""Claims, commits and releases in common transactions: few requests, and the same outcomes as one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from metamq.errors import CorruptData, MetamqError, OwnershipLost
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups import ownership, together
from metamq.zk.groups.members import owned_partitions
from metamq.zk.groups.ownership import CommittedOffset, NotYet, Ownership, read_offset
from metamq.zk.nodes import ANY_VERSION, Op
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

pytestmark = pytest.mark.usefixtures("sharing")

Until = Callable[..., Awaitable[None]]
GROUP, TOPIC_ID = "etl", "0123456789abcdef"
MANY = [TopicPartition("flights", f"0-{index}") for index in range(240)]


class Transactions:
    """Counts the transactions of a session, and loses answers: `lose` has the next losses, "before" or "after"."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.lose: list[str] = []
        self._servers = session.servers
        self._multi = session.multi
        monkeypatch.setattr(session, "multi", self.multi)

    async def multi(self, operations: Sequence[Op]) -> Any:
        self.count += 1
        loss = self.lose.pop() if self.lose else ""
        results = await self._multi(operations) if loss != "before" else []
        if loss:
            raise ConnectionLost(self._servers, f"lost {loss} the write, by the test")
        return results


async def claim(
    session: Session, consumer_id: str, partitions: Sequence[TopicPartition], freed: set[TopicPartition] | None = None
) -> list[Ownership | NotYet | MetamqError]:
    for topic in {tp.topic for tp in partitions}:
        await ownership.prepare(session, GROUP, topic)
    wanted = [(tp, TOPIC_ID) for tp in partitions]
    note = (freed if freed is not None else set()).add
    return await together.claim_all(session, GROUP, wanted, consumer_id, freed=note)


async def owned(session: Session, consumer_id: str, partitions: Sequence[TopicPartition]) -> list[Ownership]:
    return done(await claim(session, consumer_id, partitions))


def done(outcomes: Sequence[object]) -> list[Ownership]:
    claims = [outcome for outcome in outcomes if isinstance(outcome, Ownership)]
    assert len(claims) == len(outcomes), outcomes
    return claims


async def committed(session: Session, tp: TopicPartition) -> int | None:
    stored = await read_offset(session, GROUP, tp)
    return stored[0].committed.offset if stored is not None and stored[0].committed is not None else None


def test_many_partitions_take_few_transactions(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            transactions = Transactions(session, monkeypatch)
            claims = await owned(session, "one", MANY)
            assert transactions.count == 5, "two operations a claim"
            for step in (0, 7):
                claims = done(await together.commit_all(session, [(one, n + step, 1) for n, one in enumerate(claims)]))
            assert transactions.count == 5 + 3 + 3
            assert [await committed(session, tp) for tp in MANY] == [index + 7 for index in range(len(MANY))]
            assert await together.release_all(session, [(one, (9_000, 2)) for one in claims]) == [None] * len(MANY)
            assert transactions.count == 5 + 3 + 3 + 5
            assert await owned_partitions(session, GROUP) == {}
            again = await owned(session, "two", MANY)
            assert {one.committed for one in again} == {CommittedOffset(9_000, 2, TOPIC_ID)}

    asyncio.run(scenario())


def test_a_claim_of_many_partitions_takes_few_reads(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            asked: list[int] = []
            submit = session._channel.link.submit
            monkeypatch.setattr(session._channel.link, "submit", lambda *given: asked.append(1) or submit(*given))
            held = await owned(session, "one", MANY)
            assert await together.release_all(session, [(one, None) for one in held]) == [None] * len(MANY)
            asked.clear()
            await owned(session, "two", MANY)
            assert len(asked) < 15

    asyncio.run(scenario())


def test_a_partition_whose_version_does_not_fit_spoils_no_other(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            claims = await owned(one, "one", MANY[:120])
            stolen = MANY[57]
            await two.delete(two.paths.owner(GROUP, *stolen), ANY_VERSION)
            await owned(two, "two", [stolen])
            outcomes = await together.commit_all(one, [(held, 100, 1) for held in claims])
            assert [type(outcome) for outcome in outcomes].count(OwnershipLost) == 1
            assert isinstance(outcomes[57], OwnershipLost)
            assert [await committed(one, tp) for tp in MANY[:120]] == [100] * 57 + [None] + [100] * 62
            releases = [(held, (200, 1)) for held in claims]  # with the versions of before the commits, too
            outcomes = await together.release_all(one, releases)
            assert [outcome for outcome in outcomes if outcome is not None] == [outcomes[57]]
            assert await owned_partitions(one, GROUP) == {stolen: "two"}

    asyncio.run(scenario())


def test_partitions_of_others_are_awaited_and_the_rest_is_claimed(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            theirs = await owned(two, "two", MANY[10:14])
            freed: set[TopicPartition] = set()
            outcomes = await claim(one, "one", MANY[:30], freed)
            assert outcomes[10:14] == [NotYet(tp, "two") for tp in MANY[10:14]]
            assert all(isinstance(outcome, Ownership) for outcome in outcomes[:10] + outcomes[14:])
            assert await together.release_all(two, [(held, None) for held in theirs[1:]]) == [None] * 3
            await until(lambda: freed == set(MANY[11:14]))

    asyncio.run(scenario())


def test_two_claim_the_same_partitions_at_the_same_time(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            some = MANY[:100]
            ones, twos = await asyncio.gather(claim(one, "one", some), claim(two, "two", list(reversed(some))))
            for first, second in zip(ones, reversed(twos), strict=True):
                assert {type(first), type(second)} == {Ownership, NotYet}

    asyncio.run(scenario())


def test_an_offset_that_cannot_be_read_spoils_no_other(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await ownership.prepare(session, GROUP, "flights")
            await session.create(session.paths.offset(GROUP, *MANY[3]), b"{")
            outcomes = await claim(session, "one", MANY[:6])
            assert isinstance(outcomes[3], CorruptData)
            assert [type(outcome) for outcome in outcomes].count(Ownership) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("loss", ["before", "after"])
def test_an_answer_that_is_lost_is_the_outcome_of_its_transaction(
    servers: str, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            claims = await owned(session, "one", MANY[:150])
            transactions = Transactions(session, monkeypatch)
            transactions.lose = [loss]
            outcomes = await together.commit_all(session, [(held, 5, 1) for held in claims])
            assert [isinstance(outcome, ConnectionLost) for outcome in outcomes] == [True] * 100 + [False] * 50
            again = await together.commit_all(session, [(held, 6, 1) for held in claims[:100]])
            assert all(isinstance(outcome, Ownership) for outcome in again), "a lost write was our own"
            assert [await committed(session, tp) for tp in MANY[:150]] == [6] * 100 + [5] * 50

    asyncio.run(scenario())


SEED = random.randrange(1 << 32)


class Game:
    """Two consumers and what each may believe, against the nodes. `last[tp]` made the last claim of a partition."""

    def __init__(self, sessions: Sequence[Session], monkeypatch: pytest.MonkeyPatch, random_: random.Random) -> None:
        self.sessions = sessions
        self.transactions = [Transactions(session, monkeypatch) for session in sessions]
        self.random = random_
        self.claims: list[dict[TopicPartition, Ownership]] = [{}, {}]
        self.last: dict[TopicPartition, int] = {}
        self.possible: dict[TopicPartition, set[int | None]] = {tp: {None} for tp in MANY[:30]}

    def losses(self, who: int) -> None:
        self.transactions[who].lose = self.random.choices(["", "", "before", "after"], k=2)

    async def claim(self, who: int) -> None:
        some = [tp for tp in self.random.sample(MANY[:30], 12) if tp not in self.claims[who]]
        self.losses(who)
        outcomes = await claim(self.sessions[who], str(who), some)
        self.transactions[who].lose = []
        for tp, outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Ownership):
                self.claims[who][tp], self.last[tp] = outcome, who
                assert (outcome.committed.offset if outcome.committed else None) in self.possible[tp]
            elif isinstance(outcome, NotYet):
                assert outcome.owner == str(1 - who)
            else:
                assert isinstance(outcome, ConnectionLost)
                if await ownership.drop_owner(self.sessions[who], GROUP, tp, str(who)):
                    self.last[tp] = -1

    async def commit(self, who: int, offset: int, *, release: bool) -> None:
        mine = self.claims[who]
        some = self.random.sample(sorted(mine), min(len(mine), 12))
        self.losses(who)
        outcomes: Sequence[object]
        if release:
            outcomes = await together.release_all(self.sessions[who], [(mine[tp], (offset, 1)) for tp in some])
        else:
            outcomes = await together.commit_all(self.sessions[who], [(mine[tp], offset, 1) for tp in some])
        self.transactions[who].lose = []
        for tp, outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, ConnectionLost):
                self.possible[tp] = self.possible[tp] | {offset} if self.last[tp] == who else self.possible[tp]
            elif isinstance(outcome, OwnershipLost):
                assert self.last[tp] != who, outcome
                del mine[tp]
            else:
                assert self.last[tp] == who, "a former owner got through"
                self.possible[tp] = {offset}
                if release:
                    del mine[tp]
                else:
                    assert isinstance(outcome, Ownership)
                    mine[tp] = outcome

    async def expire(self, who: int) -> None:
        """Removes some owner nodes as the end of a session does. The former owner still believes in its claims."""
        for tp in self.random.sample(sorted(self.claims[who]), len(self.claims[who]) // 3):
            await ownership.drop_owner(self.sessions[1 - who], GROUP, tp, str(who))

    async def check(self) -> None:
        for tp, possible in self.possible.items():
            assert await committed(self.sessions[0], tp) in possible, tp


@pytest.mark.slow
def test_random_steps_of_two_consumers_with_lost_answers(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)

    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            game = Game([one, two], monkeypatch, random_)
            for step in range(80):
                who = random_.randrange(2)
                match random_.randrange(5):
                    case 0 | 1:
                        await game.claim(who)
                    case 2:
                        await game.commit(who, step, release=False)
                    case 3:
                        await game.commit(who, step, release=True)
                    case _:
                        await game.expire(who)
                await game.check()

    asyncio.run(scenario())
