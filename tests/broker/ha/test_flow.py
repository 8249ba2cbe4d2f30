"""Flow control: never more than the limit, a tenth of a second's worth and one frame; never less than it could be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.broker.ha.flow import BURST_S, LATE_S, PAUSE_S_MAX, CopyPace, FlowMonitor
from tests.examples import examples

SLACK = 1.000001
"""Floating point."""


@settings(deadline=None, max_examples=examples(200))
@given(
    st.integers(1, 10_000_000),
    st.lists(st.tuples(st.integers(1, 2_000_000), st.floats(0, 5)), min_size=1, max_size=25),
)
def test_no_stretch_of_time_has_more_than_the_limit_allows(limit: int, frames: list[tuple[int, float]]) -> None:
    """Frames of any size, sent as soon as may be, or after idling for a while."""
    now = 1000.0
    flow = FlowMonitor(limit, now)
    sent = []
    for size, idle_s in frames:
        now += idle_s
        now += flow.pause_s(now)
        flow.sent(size, now)
        sent.append((now, size))
    largest = max(size for size, _idle_s in frames)
    for first, last in combinations(range(len(sent)), 2):
        total = sum(size for _at, size in sent[first : last + 1])
        elapsed = sent[last][0] - sent[first][0]
        assert total <= (limit * (elapsed + BURST_S) + largest) * SLACK


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1000, 10_000_000), st.lists(st.integers(1, 500_000), min_size=1, max_size=50))
def test_a_link_that_always_has_something_to_send_uses_the_limit(limit: int, sizes: list[int]) -> None:
    now = start = 1000.0
    flow = FlowMonitor(limit, now)
    for size in sizes:
        now += flow.pause_s(now)
        flow.sent(size, now)
    now += flow.pause_s(now)
    assert sum(sizes) * SLACK >= limit * (now - start)


def test_idle_time_is_worth_a_tenth_of_a_second_at_most() -> None:
    flow = FlowMonitor(1000, 0.0)
    assert flow.pause_s(3600.0) == 0
    flow.sent(100, 3600.0)
    assert flow.pause_s(3600.0) == 0  # the balance is 0
    flow.sent(100, 3600.0)
    assert flow.pause_s(3600.0) == pytest.approx(0.1)
    assert flow.pause_s(3600.06) == pytest.approx(0.04)
    assert flow.pause_s(3600.1) == pytest.approx(0)


def test_a_frame_larger_than_all_the_bucket_holds_goes_and_is_paid_for_afterwards() -> None:
    flow = FlowMonitor(1000, 0.0)
    assert flow.pause_s(0.0) == 0
    flow.sent(10_100, 0.0)
    assert flow.pause_s(0.0) == pytest.approx(10)
    assert flow.pause_s(10.0) == pytest.approx(0)


def test_without_a_limit_nothing_waits_and_bytes_are_counted_all_the_same() -> None:
    flow = FlowMonitor(0, 0.0)
    for _ in range(10):
        assert flow.pause_s(0.0) == 0
        flow.sent(1 << 30, 0.0)
    assert flow.bytes_s(1.0) == 10 << 30


def test_the_rate_is_that_of_the_last_whole_second() -> None:
    flow = FlowMonitor(0, 10.0)
    assert flow.bytes_s(10.5) == 0
    flow.sent(300, 10.2)
    flow.sent(500, 10.9)
    assert flow.bytes_s(10.99) == 0
    assert flow.bytes_s(11.0) == 800
    flow.sent(50, 11.5)
    assert flow.bytes_s(11.9) == 800
    assert flow.bytes_s(12.3) == 50
    assert flow.bytes_s(13.1) == 0
    flow.sent(7, 20.5)
    assert flow.bytes_s(20.9) == 0
    assert flow.bytes_s(21.2) == 7
    assert flow.bytes_s(99.0) == 0


def test_copies_pause_for_as_long_as_the_loop_is_late_and_then_go_on() -> None:
    pace = CopyPace()
    pace.sent(1.0)
    assert pace.wait_s(1.0) == 0, "as fast as it can while nothing is late"
    pace.turned(2 * LATE_S)
    pace.sent(1.0)
    assert pace.wait_s(1.0) == pytest.approx(2 * LATE_S)
    assert pace.wait_s(2.0) == 0
    for _ in range(20):
        pace.turned(2 * LATE_S)
    assert pace.pause_s == PAUSE_S_MAX, "it never stops"
    for _ in range(20):
        pace.turned(LATE_S / 2)
    assert pace.pause_s == 0
