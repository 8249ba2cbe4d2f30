"""An application ends, or is paused past every time-out, at each step of its transaction: rows and messages agree.

Two brokers, so that there is something between the one's commit and the other's. All applications of a scene are at
their steps at once; then it is recovered, by one Recoverer that all are strangers to.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metamq.tx import Recovered, Recoverer
from tests.parts import wait_until
from tests.tx.shop import Program, Shop, open_shop

pytestmark = pytest.mark.timeout(600)  # many processes at once
TRIES = 5
"""A transaction may take longer than brokers leave it, on a slow machine."""
TIMEOUT_S = 3.0
"""A broker rolls back what is not prepared after so long."""
INSERTED = "after the row of the decision"
ASKED, DECIDED = "before the commit in the database", "after the commit in the database"


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with open_shop(brokers=2) as opened:
        yield opened


DRIVERS = [
    "psycopg", "psycopg_async", pytest.param("asyncpg", marks=pytest.mark.long),
    "sqlalchemy", "sqlalchemy_asyncpg", "django",
]  # fmt: skip


@pytest.fixture(scope="module", params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """As application.py knows it."""
    name: str = request.param
    return name


def program(shop: Shop, folder: Path, **more: Any) -> Program:
    fixed = {"timeout_s": TIMEOUT_S, "transactions": 2, "rows": 2, "fails": 0, "batch_bytes": 1}
    return Program(folder, **shop.order(**fixed, **more))


@pytest.fixture(scope="module")
def steps(shop: Shop, driver: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The steps of the second transaction, in their order."""
    folder = tmp_path_factory.mktemp("steps")
    for tried in range(TRIES):
        one = program(shop, folder, name=f"steps-{tried}-{driver}", tells=True, driver=driver)
        assert one.wait() == 0
        if "done 1" in one.lines():
            break
    names = [line.split(maxsplit=2)[2] for line in one.lines() if line.startswith("step")]
    ends = {"before SEND", "after SEND", "before PREPARE", "after PREPARE", "before COMMIT", "after COMMIT"}
    assert {*ends, INSERTED, ASKED, DECIDED} <= {*names}
    return names


def at_every_step(
    shop: Shop, folder: Path, steps: list[str], driver: str, what: str, sent: signal.Signals
) -> list[Program]:
    """A program for each step, killed or stopped there. One whose time was over before that is begun anew."""

    def begun(number: int, tried: int) -> Program:
        return program(shop, folder, name=f"{what}-{number}-{tried}-{driver}", at=(number, sent), driver=driver)

    def has_come(one: Program) -> bool:
        return not one.running or one.is_stopped()

    programs = [begun(number, 0) for number in range(len(steps))]
    for number in range(len(steps)):
        for tried in range(1, TRIES):
            wait_until(partial(has_come, programs[number]), 240, "the step")
            if programs[number].running or programs[number].wait() == -signal.SIGKILL:
                break
            programs[number] = begun(number, tried)
    return programs


def recoverer(shop: Shop) -> Recoverer:
    return Recoverer(shop.connect, shop.cluster.zookeeper, grace_s=0)


def nothing_unprepared(shop: Shop) -> bool:
    return all(branch.state == "prepared" for branch in shop.branches())


@pytest.mark.slow
def test_killed_at_every_step(shop: Shop, steps: list[str], driver: str, tmp_path: Path) -> None:
    killed = at_every_step(shop, tmp_path, steps, driver, "killed", signal.SIGKILL)
    assert {one.wait() for one in killed} == {-signal.SIGKILL}
    wait_until(lambda: nothing_unprepared(shop), what="the time-out of what was not prepared")
    with recoverer(shop) as once, recoverer(shop) as again:
        done = once.run_once()
        assert done.committed >= 2, "those that died between decision and commit, at one broker or both"
        assert done.rolled_back >= 2
        assert done.left == 0
        assert again.run_once() == Recovered(0, 0, 0)
    shop.wait_settled()
    assert shop.differences() == []
    rows = shop.rows()
    for number, step in enumerate(steps):
        decided = number >= steps.index(DECIDED)
        assert (rows[f"{killed[number].name}-1-0".encode()] == 1) == decided, f"killed {step}: {killed[number].lines()}"


@pytest.mark.slow
def test_paused_past_every_time_out_at_every_step(shop: Shop, steps: list[str], driver: str, tmp_path: Path) -> None:
    paused = at_every_step(shop, tmp_path, steps, driver, "paused", signal.SIGSTOP)
    assert all(one.is_stopped() for one in paused)
    wait_until(lambda: nothing_unprepared(shop), what="the time-out of what was not prepared")
    with recoverer(shop) as once:
        done = once.run_once()
        # Who is paused between its insert and its commit has locked the row: only the database could end that.
        waiting = 2 * (steps.index(DECIDED) - steps.index(INSERTED))
        assert done.left == waiting > 0
        for one in paused:
            one.signal(signal.SIGCONT)
        assert {one.wait() for one in paused} == {0}
        once.run_once()
    shop.wait_settled()
    assert shop.differences() == []
    rows = shop.rows()
    for step, one in zip(steps, paused, strict=True):
        told = "done 1" in one.lines()
        assert told == (rows[f"{one.name}-1-0".encode()] == 1), f"paused {step}: what it was told is not so"
    refused = [line for one in paused for line in one.lines() if line.startswith("failed")]
    assert "failed UniqueViolation" in refused, "whoever wakes after it was decided about is refused by the database"
    assert "failed RolledBack" in refused
