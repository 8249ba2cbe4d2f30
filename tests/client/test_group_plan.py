"""One plan per group, and never one made from older things than the plan that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from metamq.client.group_plan import GroupPlan
from metamq.zk.members import Member, join
from metamq.zk.session import Session
from metamq.zk.topics import TopicConfig, TopicStore


class HearsNothingOfMembers:
    """A real session, in which the news of members that come and go never arrives."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        return await self._session.children(path)


async def join_as(session: Session, name: str) -> None:
    await join(session, "etl", Member(name, ("t",), "range", "here", 1, 0, 0, 0, "0", 10_000), left=lambda: None)


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
