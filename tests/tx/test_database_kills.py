"""Application, broker, database and recoverers are killed and paused at random: rows and messages agree in the end."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.client.net.first_contact import SESSION_TIMEOUT_MS
from tests.parts import wait_until
from tests.tx.kill_loop import EVERY_S, GRACE_S, TIMEOUT_S, WEIGHTS, KillLoop
from tests.tx.shop import Program, Shop, open_shop

SEED = "METAMQ_SEED"
EACH_AT_LEAST_ONCE = list(WEIGHTS)


@pytest.fixture
def shop() -> Iterator[Shop]:
    with open_shop() as opened:
        yield opened


@pytest.fixture
def seed() -> int:
    found = int(os.environ.get(SEED, secrets.randbits(32)))
    print(f"{SEED}={found}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(20, marks=pytest.mark.timeout(1200)),
        pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_scenario_24_rows_are_messages_whoever_dies(
    shop: Shop, seed: int, tmp_path: Path, rounds: int, report_figures: Callable[[str], None]
) -> None:
    began = time.monotonic()
    loop = KillLoop(shop, tmp_path, seed)
    try:
        for what in EACH_AT_LEAST_ONCE:
            loop.run(1, [what])
        loop.run(rounds - len(EACH_AT_LEAST_ONCE))
        differences = loop.finish()
    finally:
        loop.close()
    rows = shop.rows().total()
    assert differences == []
    assert rows > rounds
    report_figures(
        f"{rounds} rounds in {time.monotonic() - began:.0f} s, seed {seed}: {loop.figures()}; {rows} rows, "
        "as many messages, nothing in doubt"
    )


@pytest.mark.long
def test_a_pause_that_zookeepers_session_does_not_outlive(shop: Shop, tmp_path: Path) -> None:
    """The application and the recoverer wake up as strangers to ZooKeeper, and go on."""
    one = Program(tmp_path, **shop.order(name="application", timeout_s=TIMEOUT_S, dawdles=True))
    other = Program(tmp_path, **shop.order(name="recoverer", recovers=True, grace_s=GRACE_S, every_s=EVERY_S))
    try:
        wait_until(lambda: one.done() > 3, 60, "the application at work")
        for program in (one, other):
            program.signal(signal.SIGSTOP)
        time.sleep(SESSION_TIMEOUT_MS / 1000 * 1.4)
        before = one.done()
        for program in (one, other):
            program.signal(signal.SIGCONT)
        wait_until(lambda: one.done() > before + 5, 60, "the application at work again")
        one.kill()
        shop.wait_settled()
        assert other.running
    finally:
        for program in (one, other):
            if program.running:
                program.kill()
    assert shop.differences() == []


FAULTS = {
    "messages_first": ["application killed"],
    "unprepared": ["application killed"],
    "no_fence": ["application paused"],
    "prepared_is_committed": ["application killed"],
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.timeout(900)
def test_a_seeded_fault_is_found(shop: Shop, seed: int, tmp_path: Path, fault: str) -> None:
    loop = KillLoop(shop, tmp_path, seed, [fault])
    try:
        for _ in range(10):
            loop.run(6, FAULTS[fault])
            if loop.finish():
                return
    finally:
        loop.close()
    pytest.fail(f"{loop.figures()}: and nothing was found")
