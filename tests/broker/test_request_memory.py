"""The budget of running requests, by value."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.front_door.limits.request_memory import RequestMemory


class Asker:
    """A connection with one large frame. Its client has a name of its own, unless one is given."""

    def __init__(self, size: int, owner: str = "") -> None:
        self.size = size
        self.owner = owner or f"client {id(self)}"
        self.has = False

    def granted(self) -> None:
        assert not self.has
        self.has = True

    def ask(self, memory: RequestMemory) -> None:
        if memory.reserve(self.size, self):
            self.granted()

    def release(self, memory: RequestMemory) -> None:
        memory.release(self.size, self.owner)


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
    second.release(memory)
    assert (third.has, fourth.has) == (False, False), "nobody overtakes: the large would wait for ever"
    first.release(memory)
    assert (third.has, fourth.has) == (True, True)
    assert (memory.used_bytes, memory.waiting, memory.scarce) == (60, 0, False)


def test_who_leaves_the_line_holds_up_nobody() -> None:
    memory = RequestMemory(100)
    _first, large, small = asked(memory, 60, 90, 30)
    memory.withdraw(large)
    memory.withdraw(large)
    assert (large.has, small.has, memory.used_bytes) == (False, True, 90)


def test_small_frames_count_and_may_exceed_it() -> None:
    memory = RequestMemory(100)
    memory.take(130, "small")
    assert memory.scarce
    (large,) = asked(memory, 100)
    memory.release(129, "small")
    assert not large.has
    memory.release(1, "small")
    assert large.has


def test_an_owner_that_fills_its_share_delays_nobody_else() -> None:
    memory = RequestMemory(100)
    greedy = [Asker(30, "greedy") for _ in range(5)]
    for asker in greedy:
        asker.ask(memory)
    assert [asker.has for asker in greedy] == [True, False, False, False, False]
    assert not memory.scarce
    (other,) = asked(memory, 70)
    assert other.has
    greedy[0].release(memory)
    assert [asker.has for asker in greedy] == [True, True, False, False, False]


def test_owners_take_turns() -> None:
    memory = RequestMemory(100)
    holder, *_ = asked(memory, 100)
    greedy = [Asker(25, "greedy") for _ in range(4)]
    modest = Asker(25, "modest")
    for asker in (*greedy, modest):
        asker.ask(memory)
    assert memory.scarce
    holder.release(memory)
    assert [asker.has for asker in (*greedy, modest)] == [True, True, False, False, True]
    assert (memory.waiting, memory.scarce) == (2, False)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 5))
def test_everybody_gets_a_turn_and_nobody_too_much(seed: int, sizes: list[int], owners: int) -> None:
    chance = random.Random(seed)
    memory = RequestMemory(100)
    coming = deque(Asker(size, f"{chance.randrange(owners)}") for size in sizes)
    there: list[Asker] = []
    while coming or there:
        if coming and (not there or chance.random() < 0.5):
            asker = coming.popleft()
            asker.ask(memory)
            there.append(asker)
        else:
            asker = chance.choice(there)
            if asker.has:
                asker.release(memory)
                there.remove(asker)
            elif chance.random() < 0.1:
                memory.withdraw(asker)
                there.remove(asker)
        assert memory.used_bytes == sum(one.size for one in there if one.has) <= 100
        for owner in {one.owner for one in there}:
            held = [one.size for one in there if one.has and one.owner == owner]
            assert sum(held) <= 50 or max(held) > 50
            assert held or memory.scarce, "an owner that has nothing waits for the budget only"
        assert memory.waiting == sum(not one.has for one in there)
        assert not there or any(one.has for one in there), "whoever is in line waits for somebody who has memory"
    assert (memory.used_bytes, memory.scarce) == (0, False)
