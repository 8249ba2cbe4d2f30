"""A watched value is read when it may have changed, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from metamq.client.group.group_plan import Watched


class Node:
    """A value with ZooKeeper's one-time watches."""

    def __init__(self) -> None:
        self.value = 0
        self.reads = 0
        self.watches: list[Callable[[], None]] = []
        self.is_away = False

    async def read(self, watch: Callable[[], None] | None) -> int:
        self.reads += 1
        if self.is_away:
            raise ConnectionError
        if watch is not None:
            self.watches.append(watch)
        value = self.value
        await asyncio.sleep(0)
        return value

    def change(self) -> None:
        self.value += 1
        watches, self.watches = self.watches, []
        for watch in watches:
            watch()


def test_it_is_read_again_after_a_change_only() -> None:
    async def scenario() -> None:
        node = Node()
        changes: list[int] = []
        watched = Watched(node.read, lambda: changes.append(node.value))
        assert [await watched.get(), await watched.get()] == [0, 0]
        assert node.reads == 1
        node.change()
        assert changes == [1]
        assert [await watched.get(), await watched.get()] == [1, 1]
        assert node.reads == 2

    asyncio.run(scenario())


def test_forgotten_it_is_read_again_without_a_second_watch() -> None:
    async def scenario() -> None:
        node = Node()
        changes: list[int] = []
        watched = Watched(node.read, lambda: changes.append(node.value))
        for _ in range(3):
            await watched.get()
            watched.forget()
        assert (node.reads, len(node.watches)) == (3, 1)
        node.change()
        assert changes == [1]

    asyncio.run(scenario())


def test_a_change_during_the_read_is_not_missed() -> None:
    async def scenario() -> None:
        node = Node()
        watched = Watched(node.read, lambda: None)
        reading = asyncio.create_task(watched.get())
        await asyncio.sleep(0)
        node.change()
        assert await reading == 0
        assert await watched.get() == 1

    asyncio.run(scenario())


def test_after_a_read_that_failed_it_is_read_and_watched_again() -> None:
    async def scenario() -> None:
        node = Node()
        watched = Watched(node.read, lambda: None)
        for expected_watches in (1, 1):
            node.is_away = True
            with pytest.raises(ConnectionError):
                await watched.get()
            node.is_away = False
            assert await watched.get() == 0
            # The second time, the watch of the first still stands.
            assert len(node.watches) == expected_watches
            watched.forget()

    asyncio.run(scenario())
