"""The rule of the levels: none is early, none is held up for long, and moves are few."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.delays.holds import ALONE_S, FIRST_S, LONGEST_S, Holds
from metamq.broker.delays.levels import LEVELS, UNIT_US, left_after_us, level_of, ready_us, wait_us

LEFT_US = st.integers(0, 400 * 86_400 * 1_000_000)


def test_levels() -> None:
    seconds = [0, 0.19, 0.2, 0.39, 0.4, 30, 3600, 86_400, 30 * 86_400, 366 * 86_400]
    assert [level_of(int(left * 1e6)) for left in seconds] == [0, 0, 1, 1, 2, 8, 15, 19, LEVELS - 1, LEVELS - 1]
    assert wait_us(LEVELS - 1) / 86_400e6 > 19


@given(LEFT_US, LEFT_US, LEFT_US)
def test_a_message_leaves_by_its_schedule_and_no_later_than_it_is_due(left_us: int, due_us: int, put_us: int) -> None:
    level = level_of(left_us)
    after_us = left_after_us(level, left_us)
    assert after_us == (left_us - wait_us(level) if level else 0)
    assert ready_us(level, put_us, due_us, after_us) <= due_us - after_us
    if put_us >= due_us - left_us:  # the clocks agree
        assert ready_us(level, put_us, due_us, after_us) == due_us - after_us


@given(LEFT_US, st.lists(st.integers(0, 10_000_000)))
def test_the_way_through_the_levels_is_the_same_for_one_that_is_late(delay_us: int, late_us: list[int]) -> None:
    """Moved on time it is due at the end of its way, after at most one move per level, plus those at the last."""
    ways = list[list[int]]()
    for delays in (itertools.repeat(0), itertools.chain(late_us, itertools.repeat(0))):
        way, left_us, now_us = list[int](), delay_us, next(delays)
        while left_us:
            way.append(level_of(left_us))
            left_us = left_after_us(way[-1], left_us)
            now_us = max(now_us, ready_us(way[-1], now_us, delay_us, left_us)) + next(delays)
        ways.append(way)
        assert now_us >= delay_us
        assert now_us == delay_us or sum(late_us)
        assert len(way) <= LEVELS + delay_us // wait_us(LEVELS - 1)
    assert ways[0] == ways[1]


@given(st.lists(st.tuples(st.integers(0, 5 * UNIT_US), LEFT_US, LEFT_US), min_size=1), st.integers(0, LEVELS - 1))
def test_a_level_holds_up_what_is_behind_for_a_limited_time(puts: list[tuple[int, int, int]], level: int) -> None:
    """Whatever a client or a clock put there: the next one leaves within 2 W after it was put, or when it is due."""
    put_us = leaves_us = latest_us = 0
    for pause_us, due_in_us, left_us in puts:
        put_us += pause_us
        leaves_us = max(leaves_us, ready_us(level, put_us, put_us + due_in_us, left_us))
        latest_us = max(latest_us, put_us + wait_us(max(level, 1) + 1))
        assert leaves_us <= latest_us


def test_one_held_topic_is_tried_at_a_time_and_the_pause_grows() -> None:
    holds = Holds()
    assert holds.pause_s("a", 0) == 0
    holds.failed({"a", "b"}, 0)
    assert (holds.pause_s("a", 0), holds.pause_s("b", 0)) == (FIRST_S, FIRST_S)
    holds.try_next(0.5, "abc")
    assert holds.pause_s("a", 0.5) == holds.pause_s("b", 0.5) == FIRST_S
    now_s = FIRST_S
    holds.try_next(now_s, "c")
    assert holds.pause_s("c", now_s) == 0, "none is tried that has no message"
    holds.try_next(now_s, "abc")
    assert holds.pause_s("c", now_s) == ALONE_S
    (tried,) = [topic for topic in "ab" if not holds.pause_s(topic, now_s)]
    holds.worked({tried})
    (held,) = {"a", "b"} - {tried}
    assert (holds.pause_s(tried, now_s), holds.pause_s(held, now_s)) == (0, FIRST_S)
    for _ in range(10):
        holds.failed({held}, now_s)
    assert holds.pause_s(held, now_s) == LONGEST_S
