"""Answers that are lost at the worst moment: nothing is stuck, nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from metamq.client.group.assignment import AssignedPartition
from metamq.client.group.holdings import Holdings
from metamq.client.group.rebalance_decisions import Phase, next_plan
from metamq.client.offsets.offsets import CommitRequest, CommittedOffset, ZooKeeperOffsets
from metamq.errors import MetamqError, OwnershipLost
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups.members import owned_partitions
from metamq.zk.groups.ownership import read_offset, reset_offset
from metamq.zk.groups.plans import Plan, PlanInputs, TopicInput
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

ID = "a" * 16
TP = TopicPartition("t", "0-0")


class LosesAnswers:
    """A real session, of which chosen requests are carried out while their answers never come."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lose: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def multi(self, operations: Sequence[Any]) -> Any:
        return await self._answer("multi", self._session.multi(operations))

    async def set(self, path: str, data: bytes, version: int) -> Any:
        return await self._answer("set", self._session.set(path, data, version))

    async def _answer(self, name: str, request: Awaitable[Any]) -> Any:
        answer = await request
        if name in self.lose:
            self.lose.discard(name)
            raise ConnectionLost("here", "the answer was lost")
        return answer


class Handler:
    """Takes what comes; gives `final` for what it is asked to give back."""

    def __init__(self) -> None:
        self.consuming: dict[TopicPartition, AssignedPartition] = {}
        self.final: tuple[int, int] = (1, 1)
        self.losses: list[TopicPartition] = []

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        self.consuming.update((assigned.tp, assigned) for assigned in partitions)

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        return {tp: self.final for tp in partitions if self.consuming.pop(tp)}

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            self.losses.append(tp)
            del self.consuming[tp]

    def failed(self, error: MetamqError) -> None:
        raise error


class Case:
    """The holdings of member "me" in a session that loses answers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.flaky: Any = LosesAnswers(session)
        self.handler = Handler()
        self.looks = asyncio.Event()
        self.errors: list[Exception] = []
        storage = ZooKeeperOffsets(self.flaky)
        self.holdings = Holdings(
            self.flaky, "etl", "me", storage, self.handler, changed=self.looks.set, failed=self.errors.append
        )

    async def follow(self, plan: Plan, until: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not until():
                self.looks.clear()
                await self.holdings.follow(plan)
                if not until():
                    await self.looks.wait()

    async def owners(self) -> dict[TopicPartition, str]:
        return await owned_partitions(self.session, "etl")

    async def committed(self) -> CommittedOffset | None:
        stored = await read_offset(self.session, "etl", TP)
        assert stored is not None
        return stored[0].committed


def plan_for(member: str) -> Plan:
    return next_plan(None, "range", PlanInputs({member: ("t",)}, {"t": TopicInput(ID, {0: 1})}))


def run(servers: str, scenario: Callable[[Case], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await Session.open(servers) as session:
            await scenario(Case(session))

    asyncio.run(main())


def test_a_claim_without_an_answer_is_claimed_again(servers: str) -> None:
    async def scenario(case: Case) -> None:
        case.flaky.lose = {"multi"}
        with pytest.raises(ConnectionLost):
            await case.holdings.follow(plan_for("me"))
        assert await case.owners() == {TP: "me"}
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        assert await case.owners() == {TP: "me"}

    run(servers, scenario)


def test_a_claim_without_an_answer_blocks_nobody_when_the_plan_changes(servers: str) -> None:
    async def scenario(case: Case) -> None:
        case.flaky.lose = {"multi"}
        with pytest.raises(ConnectionLost):
            await case.holdings.follow(plan_for("me"))
        assert await case.owners() == {TP: "me"}
        await case.holdings.follow(plan_for("other"))
        assert await case.owners() == {}
        assert not case.holdings

    run(servers, scenario)


def test_a_commit_without_an_answer_may_be_repeated(servers: str) -> None:
    async def scenario(case: Case) -> None:
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        claim = case.handler.consuming[TP].claim
        case.flaky.lose = {"set"}
        refused = await case.holdings.commit([CommitRequest(claim, 5, 1)])
        assert refused[TP].outcome == "unknown"
        assert await case.holdings.commit([CommitRequest(claim, 6, 1)]) == {}
        assert await case.committed() == CommittedOffset(6, 1, ID)
        assert case.handler.losses == []

    run(servers, scenario)


def test_a_release_without_an_answer_is_repeated(servers: str) -> None:
    async def scenario(case: Case) -> None:
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        case.handler.final = (9, 2)
        await case.follow(plan_for("other"), until=lambda: case.holdings.in_phase(Phase.RELEASING))
        case.flaky.lose = {"multi"}
        with pytest.raises(ConnectionLost):
            await case.holdings.follow(plan_for("other"))
        assert await case.owners() == {}
        await case.holdings.follow(plan_for("other"))
        assert not case.holdings
        assert await case.committed() == CommittedOffset(9, 2, ID)

    run(servers, scenario)


def test_an_owner_whose_offset_was_reset_does_not_block_the_next_one(servers: str) -> None:
    async def scenario(case: Case) -> None:
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        await reset_offset(case.session, "etl", TP, CommittedOffset(100, 1, ID))
        await case.follow(plan_for("other"), until=lambda: not case.holdings)
        assert await case.owners() == {}
        assert await case.committed() == CommittedOffset(100, 1, ID)

    run(servers, scenario)


def test_a_commit_that_is_refused_for_good_ends_the_assignment(servers: str) -> None:
    async def scenario(case: Case) -> None:
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        claim = case.handler.consuming[TP].claim
        await reset_offset(case.session, "etl", TP, CommittedOffset(100, 1, ID))
        refused = await case.holdings.commit([CommitRequest(claim, 5, 1)])
        assert isinstance(refused[TP], OwnershipLost)
        assert case.handler.losses == [TP]
        await case.follow(plan_for("me"), until=lambda: case.handler.consuming)
        assert case.handler.consuming[TP].committed == CommittedOffset(100, 1, ID)

    run(servers, scenario)
