"""Two replicas, crashes of either, promotions, retention on either: what was promised stays, each commit comes once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from metamq.broker.partition import Done
from metamq.broker.transactions import commits, upkeep
from metamq.broker.transactions.journal import JournalStore, Written
from metamq.errors import MetamqError
from tests.tx.crash_history import Violation
from tests.tx.sim_disk import modelled_disk
from tests.tx.two_replicas import Pair, random_life

STEPS = 120


def lives(chance: random.Random, seconds: float, most: int) -> int:
    """Returns how many lives were lived. Raises Violation."""
    until, number = time.monotonic() + seconds, 0
    while number < most and time.monotonic() < until:
        number += 1
        with modelled_disk() as own:
            pair = Pair(own, chance)
            try:
                random_life(pair, STEPS)
            except Violation as violation:
                raise Violation(f"{violation}; after {pair.what}") from violation
    return number


@pytest.mark.parametrize("seconds", [8, pytest.param(300, marks=pytest.mark.long)])
def test_two_replicas_whatever_happens_to_them(seconds: float, report_figures: Callable[[str], None]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    count = lives(random.Random(seed), seconds, 1_000_000)
    report_figures(f"{count:,} lives of two replicas, {STEPS} steps each, seed {seed}")


def marks_that_do_not_wait_for_the_slave(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: upkeep.Upkeep, partition: upkeep.Partition) -> None:
        await self._flusher.settle(partition)

    patch.setattr(upkeep.Upkeep, "_settle", settle)


def answers_that_do_not_wait_for_the_slave(patch: pytest.MonkeyPatch) -> None:
    def when_stored(self: JournalStore, written: Written, done: Done) -> None:
        if self.partition.when_stored(written.end_offset, done):
            done(None)

    patch.setattr(JournalStore, "when_durable", when_stored)


def a_promoted_slave_that_does_not_look_into_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits.Commits, "redo", lambda self, state: iter(()))


def a_promoted_slave_that_redoes_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits, "_ids_from", lambda log, position: iter(()))


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    marks_that_do_not_wait_for_the_slave,
    answers_that_do_not_wait_for_the_slave,
    a_promoted_slave_that_does_not_look_into_the_journal,
    a_promoted_slave_that_redoes_blindly,
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_two_replicas_find(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    fault(monkeypatch)
    with pytest.raises((Violation, MetamqError)) as found:
        lives(random.Random(seed), 100, 20_000)
    print(found.value)
