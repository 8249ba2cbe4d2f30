"""A broker reads only the topics that have changed, and misses no change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from metamq.broker.process.topic_reader import TopicReader
from metamq.errors import CorruptData
from metamq.zk.cluster.topics import TopicConfig, TopicStore, Watcher
from metamq.zk.session.session import Session

NAMES = ["bids", "flights", "rides"]


class Spy(TopicStore):
    """The real store, which notes what is read."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.asked: list[str] = []
        self.before_answer: Callable[[str], Awaitable[None]] | None = None

    async def get_or_none(self, topic: str, watch: Watcher | None = None) -> TopicConfig | None:
        self.asked.append(topic)
        found = await super().get_or_none(topic, watch)
        if self.before_answer is not None:
            await self.before_answer(topic)
        return found

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return sorted(asked)


class Desk:
    """A reader, and another client, which changes topics."""

    def __init__(self, session: Session, other: Session) -> None:
        self.session, self.other = session, TopicStore(other)
        self.changed = asyncio.Event()
        self.store = Spy(session)
        self.reader = TopicReader(session, self.store, self.changed.set)

    async def read_after_change(self) -> dict[str, object]:
        """What is read once the reader has noticed a change."""
        await asyncio.wait_for(self.changed.wait(), 30)
        self.changed.clear()
        await self.session.connected()
        return {topic: getattr(one, "retention_bytes", one) for topic, one in (await self.reader.read())[0].items()}

    async def read_until(self, expected: dict[str, object]) -> None:
        """Reads after each change, until the result is as expected."""
        while await self.read_after_change() != expected:
            pass


async def run(servers: str, scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async with await Session.open(servers, timeout_ms=4000) as session, await Session.open(servers) as other:
        desk = Desk(session, other)
        for name in NAMES:
            await desk.other.create(TopicConfig(name, {0: 1}, retention_bytes=1))
        found, listing = await desk.reader.read()
        assert (list(found), listing.names, desk.store.taken()) == (NAMES, NAMES, NAMES)
        await scenario(desk)


def test_only_what_changed_is_read_again(servers: str) -> None:
    async def scenario(desk: Desk) -> None:
        assert list((await desk.reader.read())[0]) == NAMES
        assert desk.store.taken() == []
        await desk.other.alter("flights", lambda config: replace(config, retention_bytes=2))
        await desk.read_until({"bids": 1, "flights": 2, "rides": 1})
        assert set(desk.store.taken()) == {"flights"}
        await desk.other.create(TopicConfig("walks", {0: 1}, retention_bytes=3))
        await desk.other.delete("rides")
        await desk.read_until({"bids": 1, "flights": 2, "walks": 3})
        await desk.other.create(TopicConfig("rides", {0: 1}, retention_bytes=4))
        await desk.read_until({"bids": 1, "flights": 2, "rides": 4, "walks": 3})
        assert set(desk.store.taken()) <= {"rides", "walks"}

    asyncio.run(run(servers, scenario))


def test_a_change_while_it_is_read_is_not_missed(servers: str) -> None:
    """The watch is called before the answer is kept: then the answer is not kept."""

    async def scenario(desk: Desk) -> None:
        async def alter_again(topic: str) -> None:
            desk.store.before_answer = None
            desk.changed.clear()
            await desk.other.alter(topic, lambda config: replace(config, retention_bytes=3))
            await asyncio.wait_for(desk.changed.wait(), 30)

        await desk.other.alter("flights", lambda config: replace(config, retention_bytes=2))
        await asyncio.wait_for(desk.changed.wait(), 30)
        desk.store.before_answer = alter_again
        assert (await desk.read_after_change())["flights"] == 2
        await desk.read_until({"bids": 1, "flights": 3, "rides": 1})

    asyncio.run(run(servers, scenario))


def test_an_unusable_topic_is_kept_until_it_changes(servers: str) -> None:
    async def scenario(desk: Desk) -> None:
        path = desk.session.paths.topic_config("flights")
        await desk.session.set(path, b"not JSON", -1)
        await desk.read_after_change()
        for _ in range(2):
            assert isinstance((await desk.reader.read())[0]["flights"], CorruptData)
        assert desk.store.taken() == ["flights"]
        await desk.other.delete("flights")
        await desk.read_until({"bids": 1, "rides": 1})

    asyncio.run(run(servers, scenario))


def test_after_a_lost_connection_all_are_read(servers: str) -> None:
    """Its watches are gone with it."""

    async def scenario(desk: Desk) -> None:
        desk.session._channel.link.drop()
        expected = {"bids": 1, "flights": 2, "rides": 1}
        await desk.other.alter("flights", lambda config: replace(config, retention_bytes=2))
        await desk.read_until(dict(expected))
        assert set(desk.store.taken()) == set(NAMES)

    asyncio.run(run(servers, scenario))
