"""One plan per group, and never one made from older things than the plan that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from metamq.client.group.group_plan import GroupPlan
from metamq.errors import ConfigError
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.documents import warn_once
from metamq.zk.groups import plans
from metamq.zk.groups.members import Member, join, leave
from metamq.zk.groups.plans import Plan, PlanTooLarge
from metamq.zk.session.session import Session


class HearsNothingOfMembers:
    """A real session, in which the news of members that come and go never arrives."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        return await self._session.children(path)


async def join_as(session: Session, name: str, topics: tuple[str, ...] = ("t",)) -> None:
    await join(session, "etl", Member(name, topics, "range", "here", 1, 0, 0, 0, "0", 10_000), left=lambda: None)


async def agreed(view: GroupPlan, session: Session, generation: int = 0) -> Plan:
    """The plan once it is final, and of this generation at least: before, it is the turn of others, or the news of a
    change has not arrived."""
    while True:
        plan, is_final = await view.agree(session.generation)
        if is_final and plan is not None and plan.generation >= generation:
            return plan
        await asyncio.sleep(0.02)


def test_members_that_look_at_once_agree_on_one_plan(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            names = [f"c{index}" for index in range(5)]
            for name in names:
                await join_as(session, name)
            views = [GroupPlan(session, "etl", name, ["t"], "range", lambda: None) for name in names]
            plans = await asyncio.gather(*(agreed(view, session) for view in views))
            assert [plan.generation for plan in plans] == [1] * 5
            assert set(plans[0].inputs.members) == set(names)

    asyncio.run(scenario())


def test_a_plan_is_not_replaced_for_an_older_view(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            deaf: Any = HearsNothingOfMembers(session)
            news = asyncio.Event()
            behind = GroupPlan(deaf, "etl", "one", ["t"], "range", news.set)
            ahead = GroupPlan(session, "etl", "two", ["t"], "range", lambda: None)
            await join_as(session, "one")
            first = await agreed(behind, session)
            assert set(first.inputs.members) == {"one"}
            await join_as(session, "two")
            newest = await agreed(ahead, session)
            assert set(newest.inputs.members) == {"one", "two"}
            # It hears of the new plan, but still remembers the members of before.
            async with asyncio.timeout(60):
                while (plan := await agreed(behind, session)) == first:
                    await news.wait()  # there may be news of its own plan first
                    news.clear()
            assert plan == newest

    asyncio.run(scenario())


class CountsMembers:
    """A real session that counts reads of members' nodes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def get_or_none(self, path: str, watch: Callable[[], None] | None = None) -> Any:
        self.count += "/ids/" in path
        return await self._session.get_or_none(path, watch=watch)

    async def nodes(self, paths: Sequence[str]) -> Any:
        self.count += sum("/ids/" in path for path in paths)
        return await self._session.nodes(paths)


def test_a_change_costs_as_many_reads_as_there_are_members(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metamq.client.group.group_plan.TURN_S", 60.0)  # a slow machine gives no second turn

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            counts: Any = CountsMembers(session)
            names = [f"c{index:02}" for index in range(12)]
            views = [GroupPlan(counts, "etl", name, ["t"], "range", lambda: None) for name in names]
            for name in names[:11]:
                await join_as(session, name)
            await asyncio.gather(*(agreed(view, session) for view in views[:11]))
            before = counts.count
            await join_as(session, names[11])
            plans = await asyncio.gather(*(agreed(view, session, 2) for view in views))
            assert {plan.generation for plan in plans} == {2}
            assert counts.count - before == 12, "the first member read them, and the others followed"
            before = counts.count
            await TopicStore(session).alter("t", lambda config: replace(config, partitions={0: 9}))
            plans = await asyncio.gather(*(agreed(view, session, 3) for view in views))
            assert [len(plan.assignment) for plan in plans] == [9] * 12
            assert counts.count - before == 12
            # The first two members are frozen: the third one's turn comes, and the others follow it.
            monkeypatch.setattr("metamq.client.group.group_plan.TURN_S", 0.05)
            await leave(session, "etl", names[11])
            plans = await asyncio.gather(*(agreed(view, session, 4) for view in views[2:11]))
            assert {frozenset(plan.inputs.members) for plan in plans} == {frozenset(names[:11])}
            assert {plan.generation for plan in plans} == {4}

    asyncio.run(scenario())


@pytest.mark.parametrize("newer", [b"metamq-plan-3\nwhatever", b"metamq-plan-999999999\n"])
def test_a_plan_of_a_newer_metamq_stands_and_is_named(servers: str, newer: bytes) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            await session.create(session.paths.plan("etl"), newer, makepath=True)
            await join_as(session, "one")
            view = GroupPlan(session, "etl", "one", ["t"], "range", lambda: None)
            for look in (view.check, lambda: view.agree(session.generation)):
                with pytest.raises(ConfigError, match=r"has format \d+, of a newer metamq.*Upgrade this program"):
                    await look()
            assert (await session.get(session.paths.plan("etl"))).data == newer
            # Damage of what this one does know is replaced.
            await session.set(session.paths.plan("etl"), b"metamq-plan-2\ndamaged", 0)
            view = GroupPlan(session, "etl", "one", ["t"], "range", lambda: None)
            assert set((await agreed(view, session)).inputs.members) == {"one"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_member_that_a_plan_has_no_room_for_takes_nothing_from_the_others(
    servers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What they have stays theirs, and what a member that is gone had goes to those that the plan knows."""
    warn_once.cache_clear()
    monkeypatch.setattr(plans, "PLAN_BYTES_MAX", 1_000)
    many = tuple(f"topic-{number}" for number in range(100))

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            for topic in ("t", *many):
                await TopicStore(session).create(TopicConfig(topic, {0: 4}))
            views = {
                name: GroupPlan(session, "etl", name, topics, "range", lambda: None)
                for name, topics in {"one": ["t"], "two": ["t"], "new": many}.items()
            }

            async def look(name: str) -> Plan:
                views[name].forget()
                return await agreed(views[name], session)

            await join_as(session, "one")
            await join_as(session, "two")
            first = await look("one")
            await join_as(session, "new", many)
            for _ in range(2):
                assert await look("one") == await look("two") == first
                with pytest.raises(PlanTooLarge, match=r"fewer topics or partitions, or shorter names, or split it"):
                    await look("new")
            await TopicStore(session).alter("t", lambda config: replace(config, partitions={0: 9}))
            assert await look("two") == first
            await leave(session, "etl", "one")
            with pytest.raises(PlanTooLarge):
                await look("new")
            after = await look("two")
            assert set(after.assignment.values()) == {"two"}
            assert after.assignment.keys() == first.assignment.keys()
            await leave(session, "etl", "new")
            last = await look("two")
            assert len(last.assignment) == 9, "with room there is a plan for all"

    asyncio.run(scenario())
    assert "group etl continues without the additions to it: the plan of group 'etl' takes" in caplog.text
