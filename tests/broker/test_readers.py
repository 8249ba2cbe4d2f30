"""Thousands of readers that one message wakes: each is woken once, and other work comes between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from metamq.broker.data.readers import AT_ONCE, Reader, Readers
from metamq.broker.front_door.limits.turns import TURN_S, Turns

COUNT = 3 * AT_ONCE + 1


class Woken(Reader):
    """A reader that notes its end, and then does what the test wants."""

    def __init__(self, log: list[int], number: int) -> None:
        self.log, self.number = log, number
        self.then: Callable[[], object] = lambda: None

    def data_ready(self, added_bytes: int) -> None:
        self.log.append(self.number)
        self.then()


def many(count: int = COUNT) -> tuple[Readers, list[Woken], list[int]]:
    woken: list[int] = []
    readers = Readers()
    made = [Woken(woken, number) for number in range(count)]
    for one in made:
        readers.add(one)
    return readers, made, woken


def test_they_are_woken_in_turns_and_each_of_them_once() -> None:
    async def scenario() -> None:
        readers, _made, woken = many()
        readers.wake(1)
        assert len(woken) == AT_ONCE
        readers.wake(1)
        assert len(woken) == AT_ONCE, "those that are being woken are not woken twice"
        turns = 0
        while readers:
            await asyncio.sleep(0)
            turns += 1
        assert sorted(woken) == list(range(COUNT))
        assert turns >= 3

    asyncio.run(scenario())


def test_a_reader_that_leaves_is_not_woken_and_one_that_comes_waits() -> None:
    async def scenario() -> None:
        readers, made, woken = many()
        for one in made:
            one.then = lambda: readers.discard(left)
        left = made[-1]
        came = Woken(woken, COUNT)
        readers.discard(made[0])
        readers.wake(1)
        readers.discard(made[1])
        readers.add(came)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(readers) == 1
        assert COUNT not in woken
        assert len(set(woken)) == len(woken) <= COUNT - 1
        readers.wake(1)
        assert woken[-1] == COUNT

    asyncio.run(scenario())


def test_readers_that_wait_again_at_once_are_not_woken_without_end() -> None:
    async def scenario() -> None:
        readers, made, woken = many()
        for one in made:
            one.then = partial(readers.add, one)
        readers.wake(1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sorted(woken) == list(range(COUNT))
        assert len(readers) == COUNT

    asyncio.run(scenario())


def test_a_closed_partition_wakes_all_at_once() -> None:
    async def scenario() -> None:
        readers, _made, woken = many()
        readers.wake(1)
        readers.wake_now()
        assert sorted(woken) == list(range(COUNT))
        await asyncio.sleep(0)
        assert len(woken) == COUNT

    asyncio.run(scenario())


def test_long_work_is_spread_and_an_error_stops_none() -> None:
    async def scenario() -> None:
        turns, done, between = Turns(), list[int](), list[int]()
        loop = asyncio.get_running_loop()

        def work(number: int) -> None:
            until = loop.time() + TURN_S
            while loop.time() < until:
                pass
            done.append(number)
            if number == 2:
                raise ZeroDivisionError

        loop.set_exception_handler(lambda _loop, _context: None)
        for number in range(5):
            turns.add(partial(work, number))
        while len(done) < 5:
            between.append(len(done))
            await asyncio.sleep(0)
        assert done == list(range(5))
        assert set(between) == set(range(5)), "others have a turn after each"

    asyncio.run(scenario())
