"""One plan per group, and never one made from older things than the plan that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


def test_members_that_look_at_once_agree_on_one_plan(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            names = [f"c{index}" for index in range(5)]
            for name in names:
                await join_as(session, name)
            views = [GroupPlan(session, "etl", name, "range", lambda: None) for name in names]
            plans = await asyncio.gather(*(view.agree(session.generation) for view in views))
            assert [plan.generation for plan in plans] == [1] * 5
            assert set(plans[0].inputs.members) == set(names)

    asyncio.run(scenario())


def test_a_plan_is_not_replaced_for_an_older_view(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            deaf: Any = HearsNothingOfMembers(session)
            news = asyncio.Event()
            behind = GroupPlan(deaf, "etl", "one", "range", news.set)
            ahead = GroupPlan(session, "etl", "two", "range", lambda: None)
            await join_as(session, "one")
            first = await behind.agree(session.generation)
            assert set(first.inputs.members) == {"one"}
            await join_as(session, "two")
            newest = await ahead.agree(session.generation)
            assert set(newest.inputs.members) == {"one", "two"}
            # It hears of the new plan, but still remembers the members of before.
            async with asyncio.timeout(60):
                while (plan := await behind.agree(session.generation)) == first:
                    await news.wait()  # there may be news of its own plan first
                    news.clear()
            assert plan == newest

    asyncio.run(scenario())


@pytest.mark.parametrize("newer", [b"metamq-plan-3\nwhatever", b"metamq-plan-999999999\n"])
def test_a_plan_of_a_newer_metamq_stands_and_is_named(servers: str, newer: bytes) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            await session.create(session.paths.plan("etl"), newer, makepath=True)
            await join_as(session, "one")
            view = GroupPlan(session, "etl", "one", "range", lambda: None)
            for look in (view.check, lambda: view.agree(session.generation)):
                with pytest.raises(ConfigError, match=r"has format \d+, of a newer metamq.*Upgrade this program"):
                    await look()
            assert (await session.get(session.paths.plan("etl"))).data == newer
            # Damage of what this one does know is replaced.
            await session.set(session.paths.plan("etl"), b"metamq-plan-2\ndamaged", 0)
            view = GroupPlan(session, "etl", "one", "range", lambda: None)
            assert set((await view.agree(session.generation)).inputs.members) == {"one"}

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
            views = {name: GroupPlan(session, "etl", name, "range", lambda: None) for name in ("one", "two", "new")}

            async def look(name: str) -> Plan:
                views[name].forget()
                return await views[name].agree(session.generation)

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
