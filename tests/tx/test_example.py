"""examples/orders_postgresql.py, as a user runs it: with a PostgreSQL, a broker and a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import wait_until
from tests.postgres import running_postgres

pytestmark = pytest.mark.timeout(600)  # a dozen processes, one after the other
PROGRAM = Path(__file__).parents[2] / "examples" / "orders_postgresql.py"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with running_postgres() as server:
        yield server.dsn


@pytest.fixture(scope="module")
def start(running: Cluster, database: str) -> Start:
    """Starts the program with these arguments."""

    def started(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", PROGRAM, "--database", database, *map(str, arguments)]
        environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    return started


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def ask(database: str, sql: str) -> list[Any]:
    with psycopg.connect(database) as connection:
        return connection.execute(sql).fetchall()  # type: ignore[arg-type]


def decided(database: str) -> list[Any]:
    return ask(database, "SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id' AND outcome <> 'commit'")


@pytest.mark.slow
def test_the_example(start: Start, database: str) -> None:
    assert outcome(start("setup")) == (0, "", "")
    assert outcome(start("setup")) == (0, "", ""), "may be repeated"
    assert outcome(start("order", "tea", 3)) == (0, "order 1\n", "")
    assert outcome(start("order", "milk", 1)) == (1, "", "LookupError: there is no milk\n")
    status, _, err = outcome(start("order", "coffee", 51))
    assert (status, err.split(":")[0]) == (1, "CheckViolation")
    assert ask(database, "SELECT product, quantity FROM orders") == [("tea", 3)]

    # An application that dies between its messages and its decision: it waits for a lock there.
    with psycopg.connect(database) as lock:
        lock.execute("LOCK TABLE metamq_outcomes IN SHARE MODE")
        killed = start("order", "coffee", 1)
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: ask(database, waits) == [(1,)], 60, "the insert of the decision")
        killed.send_signal(signal.SIGKILL)
        assert outcome(killed)[0] == -signal.SIGKILL
    left = outcome(start("recover", "--once"))
    assert left == (0, "0 committed, 0 rolled back, 1 left\n", ""), "it is young"
    recoverer = start("recover", "--grace", 0)  # until it is told to stop
    wait_until(lambda: decided(database) == [("abort",)], 60, "the decision against it")
    recoverer.send_signal(signal.SIGINT)
    assert outcome(recoverer) == (130, "", "")
    status, said, _ = outcome(start("recover", "--once", "--grace", 0))
    assert (status, said[-7:]) == (0, "0 left\n")

    shipped = outcome(start("ship", "--idle", 0.5))
    while shipped == (0, "", ""):  # a broker that is slow answers later than that
        shipped = outcome(start("ship", "--idle", 0.5))
    assert shipped == (0, "shipped 3 x tea, order 1\n", "")
    assert outcome(start("ship", "--idle", 0.5)) == (0, "", ""), "once"
    assert ask(database, "SELECT product, quantity FROM stock ORDER BY product") == [("coffee", 50), ("tea", 97)]
