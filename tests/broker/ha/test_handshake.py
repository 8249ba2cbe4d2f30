"""The handshake: each case has its outcome, and its reason in words. Histories at random are in test_histories.py."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest

from metamq.broker.ha.handshake import LogPosition, Side, SyncDecision, SyncVerdict, begin_where_needed, decide

BYTES = 10
"""Of one message, in these logs."""

Epochs = dict[int, int]
"""Epoch -> the offset at which it begins."""


def side(
    epochs: Epochs, end: int, *, start: int = 0, stable: int | None = None, generation: int = 1, topic_id: str = "id"
) -> Side:
    return Side(
        topic_id,
        LogPosition(start, start * BYTES),
        LogPosition(end, end * BYTES),
        end if stable is None else stable,
        [(epoch, offset, offset * BYTES) for epoch, offset in epochs.items()],
        generation,
    )


class Case(NamedTuple):
    """`stable` of the slave is where the two agree, unless a case says otherwise: what a master ever told it."""

    name: str
    master: Side | None
    slave: Side
    decision: SyncDecision
    offset: int
    reason: str
    level: int = logging.DEBUG


FROM, RESET, WAIT, REFUSE = SyncDecision
INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR

CASES = [
    Case(
        "equal", side({1: 0, 4: 50}, 100), side({1: 0, 4: 50}, 100), FROM, 100, "at offset 100, where the master ends"
    ),
    Case("both empty", side({}, 0), side({}, 0), FROM, 0, "at offset 0, where the master ends"),
    Case("slave empty", side({1: 0}, 100), side({}, 0), FROM, 0, "at offset 0, 100 messages behind"),
    Case("shorter", side({1: 0, 4: 50}, 100), side({1: 0}, 30), FROM, 30, "at offset 30, 70 messages behind"),
    Case("shorter by one", side({1: 0}, 31), side({1: 0}, 30), FROM, 30, "1 message behind the master"),
    Case("shorter, ends where an epoch begins", side({1: 0, 4: 50}, 100), side({1: 0}, 50), FROM, 50, "50 messages"),
    Case(
        "longer",
        side({1: 0}, 100),
        side({1: 0}, 120, stable=100),
        FROM,
        100,
        "cut from offset 120 to 100, where the master ends, too: 20 messages that it lacks",
        WARNING,
    ),
    Case(
        "diverged: the old master wrote on, the new one too",
        side({1: 0, 3: 100}, 150),
        side({1: 0}, 130, stable=100),
        FROM,
        100,
        "cut from offset 130 to 100, 50 messages behind the master: 30 messages that it lacks",
        WARNING,
    ),
    Case(
        "diverged: each has an epoch that the other lacks",
        side({1: 0, 4: 100}, 150),
        side({1: 0, 3: 90}, 200, stable=90),
        FROM,
        90,
        "cut from offset 200 to 90",
        WARNING,
    ),
    Case(
        "diverged at the same place, three masters in a row",
        side({1: 0, 5: 100}, 150),
        side({1: 0, 2: 100, 3: 110}, 150, stable=100),
        FROM,
        100,
        "cut from offset 150 to 100",
        WARNING,
    ),
    Case(
        "a master that restarted without its tail (S1-2)",
        side({5: 0, 6: 90}, 100),
        side({5: 0}, 100, stable=90),
        FROM,
        90,
        "cut from offset 100 to 90",
        WARNING,
    ),
    Case(
        "empty epochs in the lists, as of a master that wrote nothing",
        side({1: 0, 2: 100, 3: 100}, 150),
        side({1: 0, 2: 100}, 100),
        FROM,
        100,
        "at offset 100, 50 messages behind",
    ),
    Case(
        "an empty epoch, and the former master wrote on (2.10-1)",
        side({1: 0, 2: 100, 3: 100}, 200),
        side({1: 0, 2: 100}, 200, stable=100),
        FROM,
        100,
        "cut from offset 200 to 100",
        WARNING,
    ),
    Case("master empty", side({}, 0), side({1: 0}, 20, stable=0), FROM, 0, "cut from offset 20 to 0", WARNING),
    Case("ends where the master begins", side({1: 50}, 90, start=50), side({1: 0}, 50), FROM, 50, "40 messages behind"),
    Case("begins later than the master", side({1: 0}, 90), side({1: 30}, 60, start=30), FROM, 60, "30 messages behind"),
    Case(
        "retention took the beginning of an epoch from one of them",
        side({4: 60, 5: 80}, 100, start=60),
        side({3: 0, 4: 20}, 90, stable=80),
        FROM,
        80,
        "cut from offset 90 to 80",
        WARNING,
    ),
    Case(
        "retention took everything from the master, which knows its last epoch",
        side({4: 100}, 100, start=100),
        side({3: 0, 4: 20}, 100),
        FROM,
        100,
        "at offset 100, where the master ends",
    ),
    Case(
        "retention took everything from the slave",
        side({4: 0}, 150),
        side({4: 100}, 100, start=100),
        FROM,
        100,
        "50 messages behind",
    ),
    Case(
        "both without a message, at the same place",
        side({}, 100, start=100),
        side({}, 100, start=100),
        FROM,
        100,
        "where the master ends",
    ),
    Case(
        "ends before the master begins",
        side({1: 50}, 90, start=50),
        side({1: 0}, 40),
        RESET,
        50,
        "is copied from offset 50, where the master begins: it ends before that, at 40",
        WARNING,
    ),
    Case(
        "empty, and the master begins later",
        side({3: 50}, 90, start=50),
        side({}, 0),
        RESET,
        50,
        "is copied from offset 50, where the master begins: it is empty",
    ),
    Case(
        "empty somewhere in the middle, and knows no epoch",
        side({3: 0}, 90),
        side({}, 70, start=70),
        FROM,
        70,
        "20 messages behind",
    ),
    Case(
        "the same, since when a loss was accepted",
        side({3: 0}, 90, generation=2),
        side({}, 70, start=70),
        RESET,
        0,
        "is copied from offset 0, where the master begins: it is empty",
    ),
    Case(
        "nothing in common",
        side({7: 50, 9: 60}, 90, start=50),
        side({3: 0, 5: 40}, 80, stable=50),
        RESET,
        50,
        "they have nothing in common, epochs 3 to 5 here and 7 to 9 there",
        WARNING,
    ),
    Case(
        "nothing in common, but a beginning",
        side({7: 50}, 90, start=50),
        side({3: 50}, 80, start=50, stable=50),
        FROM,
        50,
        "cut from offset 80 to 50",
        WARNING,
    ),
    Case(
        "a longer log of other epochs on an emptied master",
        side({}, 100, start=100),
        side({3: 0}, 120, stable=100),
        RESET,
        100,
        "epochs 3 to 3 here and none there",
        WARNING,
    ),
    Case(
        "retention left what nobody ever saw",
        side({2: 0}, 90),
        side({3: 50}, 60, start=50, stable=50),
        FROM,
        50,
        "cut from offset 60 to 50, 40 messages behind the master",
        WARNING,
    ),
    Case(
        "parted behind where the master begins",
        side({2: 30, 4: 40}, 90, start=60),
        side({2: 0, 3: 20}, 80, stable=20),
        RESET,
        60,
        "equal to the master up to offset 20 only",
        WARNING,
    ),
    Case(
        "the master ends before the slave begins, and its loss was accepted",
        side({5: 0}, 80, generation=2),
        side({5: 100}, 130, start=100),
        RESET,
        0,
        "equal to the master up to offset 80 only, and begins after that, at 100; 50 messages that readers had seen",
        WARNING,
    ),
    Case(
        "two masters used one epoch: nothing is believed of it",
        side({1: 0, 2: 40}, 90),
        side({1: 0, 2: 50}, 90, stable=40),
        FROM,
        40,
        "cut from offset 90 to 40",
        WARNING,
    ),
    Case("the topic is not known there", None, side({1: 0}, 10), WAIT, 0, "no such partition yet, or no longer"),
    Case(
        "created again",
        side({}, 0, topic_id="new"),
        side({1: 0}, 10, topic_id="old"),
        WAIT,
        0,
        "created again: its id is old here and new at the master",
    ),
    Case(
        "readers saw what the master lacks",
        side({1: 0}, 100, generation=3),
        side({1: 0}, 120, stable=110, generation=3),
        REFUSE,
        120,
        "seen it up to offset 110, the master lacks the last 10 messages of that, from 100 on, and no operator",
        ERROR,
    ),
    Case(
        "readers saw what the master lacks, and its loss was accepted",
        side({1: 0, 2: 100}, 105, generation=4),
        side({1: 0}, 120, stable=101, generation=3),
        FROM,
        100,
        "20 messages that it lacks; 1 message that readers had seen is given up (generation 4)",
        WARNING,
    ),
    Case(
        "a generation older than the slave's accepts nothing",
        side({1: 0}, 100, generation=2),
        side({1: 0}, 120, stable=110, generation=3),
        REFUSE,
        120,
        "since generation 3",
        ERROR,
    ),
    Case(
        "readers saw what another history has above the master's start",
        side({9: 50}, 90, start=50),
        side({3: 0}, 80, stable=60),
        REFUSE,
        80,
        "lacks the last 10 messages of that, from 50 on",
        ERROR,
    ),
    Case(
        "the same, accepted",
        side({9: 50}, 90, start=50, generation=2),
        side({3: 0}, 80, stable=60),
        RESET,
        50,
        "nothing in common, epochs 3 to 3 here and 9 to 9 there; 10 messages that readers had seen are given up",
        WARNING,
    ),
    Case(
        "emptied by retention, and the master lacks what was there",
        side({3: 0}, 90),
        side({4: 120}, 120, start=120),
        REFUSE,
        120,
        "lacks the last 30 messages of that, from 90 on",
        ERROR,
    ),
    Case(
        "a new disk in place of a lost one",
        side({3: 0}, 90),
        side({}, 0, generation=0),
        FROM,
        0,
        "90 messages behind",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    verdict = decide(case.master, case.slave)
    assert (verdict.decision, verdict.offset) == (case.decision, case.offset)
    assert verdict.position == case.offset * BYTES
    assert case.reason in verdict.reason
    assert verdict.level == case.level


def test_every_decision_has_a_case() -> None:
    assert {case.decision for case in CASES} == set(SyncDecision)


def test_offsets_and_positions_that_contradict_each_other_are_not_believed() -> None:
    master = Side("id", LogPosition(0, 0), LogPosition(100, 900), 100, [(1, 0, 0)], 1)
    slave = Side("id", LogPosition(0, 0), LogPosition(90, 1000), 0, [(1, 0, 0)], 1)
    assert decide(master, slave)[:3] == (SyncDecision.FROM, 0, 0)


def test_rocketmqs_samples_of_the_consistent_point() -> None:
    """EpochFileCacheTest: 450, 600, none, 700."""
    master = {1: 0, 2: 300, 3: 450}
    assert decide(side(master, 700), side({1: 0, 2: 300}, 450)).offset == 450
    assert decide(side(master, 700), side(master, 600)).offset == 600
    assert (
        decide(side({5: 10, 6: 310}, 700, start=10), side({1: 0, 2: 300}, 700, stable=0)).decision is SyncDecision.RESET
    )
    assert decide(side(master, 700), side({**master, 4: 700}, 800, stable=700)).offset == 700


@pytest.mark.parametrize(("needed", "begins_anew"), [(1 << 63, False), (50, False), (49, True)])
def test_a_slave_that_lacks_what_its_masters_log_needs_begins_anew(needed: int, begins_anew: bool) -> None:
    slave = Side("t", LogPosition(50, 500), LogPosition(80, 800), 80, [(1, 50, 500)], 0)
    goes_on = SyncVerdict(SyncDecision.FROM, 80, 800, "", logging.DEBUG)
    found = begin_where_needed(needed, slave, goes_on, LogPosition(10, 100))
    assert found[:3] == ((SyncDecision.RESET, 10, 100) if begins_anew else goes_on[:3])
