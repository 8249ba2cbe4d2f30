"""The budget of requests under way, by value."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.front_door.limits.request_memory import RequestMemory


class Asker:
    """A connection with one large frame."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.has = False

    def granted(self) -> None:
        assert not self.has
        self.has = True

    def ask(self, memory: RequestMemory) -> None:
        if memory.reserve(self.size, cast(Any, self)):
            self.granted()


def asked(memory: RequestMemory, *sizes: int) -> list[Asker]:
    askers = [Asker(size) for size in sizes]
    for asker in askers:
        asker.ask(memory)
    return askers


def test_what_fits_is_granted_at_once_and_the_rest_in_its_order() -> None:
    memory = RequestMemory(100)
    first, second, third, fourth = asked(memory, 60, 40, 50, 10)
    assert [first.has, second.has, third.has, fourth.has] == [True, True, False, False]
    assert (memory.used_bytes, memory.waiting, memory.scarce) == (100, 2, True)
    memory.release(40)
    assert (third.has, fourth.has) == (False, False), "nobody overtakes: the large would wait for ever"
    memory.release(60)
    assert (third.has, fourth.has) == (True, True)
    assert (memory.used_bytes, memory.waiting, memory.scarce) == (60, 0, False)


def test_who_leaves_the_line_holds_up_nobody() -> None:
    memory = RequestMemory(100)
    _first, large, small = asked(memory, 60, 90, 30)
    memory.withdraw(cast(Any, large))
    memory.withdraw(cast(Any, large))
    assert (large.has, small.has, memory.used_bytes) == (False, True, 90)


def test_small_frames_count_and_may_exceed_it() -> None:
    memory = RequestMemory(100)
    memory.take(130)
    assert memory.scarce
    (large,) = asked(memory, 100)
    memory.release(129)
    assert not large.has
    memory.release(1)
    assert large.has


@given(st.integers(0, 2**32), st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_everybody_gets_a_turn_and_nobody_too_much(seed: int, sizes: list[int]) -> None:
    chance = random.Random(seed)
    memory = RequestMemory(100)
    coming = deque(Asker(size) for size in sizes)
    there: list[Asker] = []
    while coming or there:
        if coming and (not there or chance.random() < 0.5):
            asker = coming.popleft()
            asker.ask(memory)
            there.append(asker)
        else:
            asker = chance.choice(there)
            if asker.has:
                memory.release(asker.size)
                there.remove(asker)
            elif chance.random() < 0.1:
                memory.withdraw(cast(Any, asker))
                there.remove(asker)
        assert memory.used_bytes == sum(one.size for one in there if one.has) <= 100
        assert memory.waiting == sum(not one.has for one in there)
        assert not there or any(one.has for one in there), "whoever is in line waits for somebody who has memory"
    assert (memory.used_bytes, memory.scarce) == (0, False)
