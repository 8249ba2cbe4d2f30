"""The decisions about a worker that has ended, and the pauses before its next start."""

from __future__ import annotations

import itertools

import pytest

from metamq.broker.workers.decisions import (
    PAUSE_MAX_S,
    STEADY_S,
    Reaction,
    after_end,
    ends_in_series,
    pause_s,
)

FLAGS = ("stopping", "restarting", "refused", "has_served")


@pytest.mark.parametrize("values", list(itertools.product((False, True), repeat=len(FLAGS))))
def test_every_end_has_one_reaction(values: tuple[bool, ...]) -> None:
    flags = dict(zip(FLAGS, values, strict=True))
    reaction = after_end(**flags)
    if flags["stopping"]:
        assert reaction is Reaction.ENDED, "a command that stops starts nothing"
    elif flags["refused"] and not flags["has_served"]:
        assert reaction is Reaction.FAIL
    else:
        assert reaction is (Reaction.AT_ONCE if flags["restarting"] else Reaction.LATER)


def test_the_pause_doubles_up_to_a_minute_and_begins_again() -> None:
    ends, pauses = 0, []
    for _ in range(9):
        ends = ends_in_series(ends, served_s=0.0)
        pauses.append(pause_s(ends))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pause_s(10_000) == PAUSE_MAX_S
    assert ends_in_series(9, STEADY_S - 1) == 10
    assert ends_in_series(9, STEADY_S) == 1
