"""Coordinator: two databases and the queue, all or nothing, wherever its process dies."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from metamq import Producer
from metamq.client.background import at_once
from metamq.errors import BranchMisuse, ClosedError, ConfigError, OutcomeUnknown, RolledBack, StorageError, WrongType
from metamq.tx import Coordinator, Settled
from tests.parts import wait_until
from tests.tx.databases import until_committed
from tests.tx.two_databases import Databases, holds

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

PROGRAM = Path(__file__).with_name("coordinated.py")
POINTS = [
    "before-prepare-a", "behind-prepare-a", "behind-prepare-queue", "behind-prepare-b", "before-decide-",
    "behind-decide-", "before-commit-a", "behind-commit-a", "behind-commit-queue", "behind-commit-b",
]  # fmt: skip
DECIDED = POINTS[5:]


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper) as made:
        yield made


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


Resources = Callable[[], dict[str, Any]]


@pytest.fixture
def resources(databases: Databases, producer: Producer[bytes]) -> Resources:
    return lambda: {
        "a": lambda: databases.connect("a"),
        "queue": producer,
        "b": lambda: databases.connect("b"),
    }


def work(tx: Any, topic: str, body: str) -> None:
    tx["a"].execute("INSERT INTO orders VALUES (%s)", (body,))
    tx["queue"].send(topic, body.encode(), partition="0-0")
    tx["queue"].send(topic, body.encode(), partition="1-0")
    tx["b"].execute("INSERT INTO orders VALUES (%s)", (body,))


def test_all_of_it_happens(shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path) -> None:
    with Coordinator(tmp_path, resources()) as coordinator:
        for number in range(5):
            with coordinator.begin() as tx:
                work(tx, topic, str(number))
        assert coordinator.recover() == Settled(0, 0)
    holds(shop, databases, topic, list("01234"))


def test_nothing_of_it_happens(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    with Coordinator(tmp_path, resources()) as coordinator:
        with pytest.raises(KeyError), coordinator.begin() as tx:  # noqa: PT012
            work(tx, topic, "1")
            raise KeyError
        with coordinator.begin() as tx:
            work(tx, topic, "2")
        with pytest.raises(psycopg.errors.UniqueViolation), coordinator.begin() as tx:
            work(tx, topic, "2")
        # psycopg prepares a transaction that has failed as if it had not
        with pytest.raises(RolledBack, match="has failed before"), coordinator.begin() as tx:  # noqa: PT012
            work(tx, topic, "3")
            with pytest.raises(psycopg.Error):
                tx["b"].execute("SELECT 1 / 0")
        with pytest.raises(RolledBack, match="has failed before"), coordinator.begin() as tx:  # noqa: PT012
            alone = tx["b"]
            with pytest.raises(psycopg.Error):
                alone.execute("SELECT 1 / 0")
        # what cannot be prepared
        with pytest.raises(psycopg.errors.FeatureNotSupported), coordinator.begin() as tx:  # noqa: PT012
            work(tx, topic, "4")
            tx["b"].execute("CREATE TEMP TABLE t (x INT)")
        with pytest.raises(RolledBack), coordinator.begin() as tx:  # noqa: PT012
            work(tx, topic, "5")
            tx["queue"]._transactions.of(threading.current_thread()).work._staging.taken[0] += 1  # one is lost
    holds(shop, databases, topic, ["2"])


def test_one_resource_alone_and_one_without_messages(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    with Coordinator(tmp_path, resources()) as coordinator:

        def messages_alone() -> None:
            with coordinator.begin() as tx:
                tx["queue"].send(topic, b"1", partition="0-0")
                tx["queue"].send(topic, b"1", partition="1-0")

        until_committed(messages_alone)
        with coordinator.begin() as tx:
            tx["a"].execute("INSERT INTO orders VALUES ('1')")
        with coordinator.begin() as tx:
            tx["b"].execute("INSERT INTO orders VALUES ('1')")
            assert tx["queue"] is not None  # takes part, without messages
        with coordinator.begin():
            pass
        log = (tmp_path / "decisions").stat().st_size
        with coordinator.begin() as tx:
            work(tx, topic, "2")
        assert (tmp_path / "decisions").stat().st_size > log
    holds(shop, databases, topic, ["1", "2"])


@pytest.mark.slow
@pytest.mark.parametrize("api", ["", "aio "], ids=["threads", "asyncio"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path, point: str, api: str
) -> None:
    command = [sys.executable, PROGRAM, shop.cluster.zookeeper, databases.dsn, tmp_path, topic, "1", api + point]
    done = subprocess.run(command, env=os.environ, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Coordinator(tmp_path, resources()) as coordinator:
        assert coordinator.recover() == Settled(0, 0)  # it was all done when it was opened
        wait_until(
            lambda: not databases.prepared() and all(one[1] != "prepared" for one in shop.open_branches()),
            60, "nothing in doubt",
        )  # fmt: skip
        holds(shop, databases, topic, ["1"] if point in DECIDED else [])


def test_without_its_log_what_was_decided_would_be_rolled_back(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    """The seeded fault: the test above would notice."""
    command = [sys.executable, PROGRAM, shop.cluster.zookeeper, databases.dsn, tmp_path, topic, "1", "behind-commit-a"]
    subprocess.run(command, env=os.environ, timeout=120)
    data = (tmp_path / "decisions").read_bytes()
    (tmp_path / "decisions").write_bytes(data[: 8 + int.from_bytes(data[:4], "little")])
    with Coordinator(tmp_path, resources()):
        pass
    assert (databases.rows("a"), databases.rows("b"), shop.seen(topic)) == (["1"], [], [])


@pytest.mark.slow
def test_a_resource_that_is_down_is_told_later(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    down = shop.cluster.brokers[1]
    with Coordinator(tmp_path, resources(), recover_every_s=0.2) as coordinator:
        original = coordinator._commit_parts

        async def tell_while_it_is_down(gtrid: str, parts: list[Any]) -> None:
            down.kill()
            databases.server.crash()
            await original(gtrid, parts)

        coordinator._commit_parts = tell_while_it_is_down  # type: ignore[method-assign]
        with coordinator.begin() as tx:
            work(tx, topic, "1")
        coordinator._commit_parts = original  # type: ignore[method-assign]
        assert len(coordinator._log.open) == 1
        databases.server.start()
        assert "queue" in coordinator.recover().left
        down.start()
        wait_until(lambda: not coordinator._log.open, 60, "all told")
        with coordinator.begin() as tx:
            work(tx, topic, "2")
    holds(shop, databases, topic, ["1", "2"])


def test_work_that_is_under_way_is_left_alone(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    with Coordinator(tmp_path, resources()) as coordinator, coordinator.begin() as tx:
        work(tx, topic, "1")
        for part in tx._parts.values():
            assert at_once(part.prepare())

            async def prepared() -> bool:
                return True

            part.prepare = prepared  # type: ignore[method-assign]
        thread = threading.Thread(target=coordinator.recover)
        thread.start()
        thread.join()
    holds(shop, databases, topic, ["1"])


@pytest.mark.slow
def test_another_coordinators_work_is_left_alone(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    command = [sys.executable, PROGRAM, shop.cluster.zookeeper, databases.dsn, tmp_path / "1", topic, "1"]
    subprocess.run([*command, "behind-decide-"], env=os.environ, timeout=120)
    with Coordinator(tmp_path / "2", resources()) as other:
        assert other.recover() == Settled(0, 0)
    assert databases.prepared() == 2
    with Coordinator(tmp_path / "1", resources()):
        holds(shop, databases, topic, ["1"])


def test_a_decision_that_could_not_be_written_is_found_out_by_the_next(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    """Whether it is on the disk, this process cannot tell: it neither commits nor rolls back."""
    with Coordinator(tmp_path, resources()) as coordinator:

        def fails(_file: int) -> None:
            raise OSError(5, "Input/output error")

        coordinator._log._fsync = fails
        with pytest.raises(OutcomeUnknown, match="Begin again"), coordinator.begin() as tx:
            work(tx, topic, "1")
        with pytest.raises(StorageError):
            coordinator.recover()
        assert databases.prepared() == 2
    with Coordinator(tmp_path, resources()):
        holds(shop, databases, topic, ["1"])


def test_misuse(resources: Resources, topic: str, tmp_path: Path) -> None:
    with pytest.raises(WrongType):
        Coordinator(tmp_path / "x", {"a": object()})  # type: ignore[dict-item]
    with pytest.raises(ConfigError):
        Coordinator(tmp_path / "x", {"é": lambda: None})  # type: ignore[dict-item,return-value]
    with Coordinator(tmp_path, resources()) as coordinator:
        with pytest.raises(ConfigError, match="in use"):
            Coordinator(tmp_path, resources())
        with pytest.raises(ConfigError, match="no resource 'c'"), coordinator.begin() as tx:
            tx["c"]
        with coordinator.begin() as tx:
            pass
        with pytest.raises(BranchMisuse):
            tx["a"]
    coordinator.close()
    with pytest.raises(ClosedError), coordinator.begin():
        pass


def test_another_thread_cannot_bring_in_the_queue(resources: Resources, tmp_path: Path) -> None:
    with Coordinator(tmp_path, resources()) as coordinator, coordinator.begin() as tx, ThreadPoolExecutor(1) as pool:
        with pytest.raises(BranchMisuse, match="another thread"):
            pool.submit(lambda: tx["queue"]).result()
        assert pool.submit(lambda: tx["a"]).result() is tx["a"]


def test_what_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    wrong: Any = [lambda: None]
    with pytest.raises(WrongType, match="`resources` must be a mapping"):
        Coordinator(tmp_path / "none", wrong)
    connect: Any = lambda: sqlite3.connect(":memory:")  # noqa: E731
    coordinator = Coordinator(tmp_path / "decisions", {"orders": connect})
    with pytest.raises(ConfigError, match=r"resource 'orders' has no tpc_begin\(\)"), coordinator.begin() as tx:
        tx["orders"]
    coordinator.close()


@pytest.mark.slow
def test_killed_while_many_threads_commit(
    shop: Shop, databases: Databases, resources: Resources, topic: str, tmp_path: Path
) -> None:
    """With decisions of many threads in one flush: each is at every resource or at none, and none that was answered
    is lost."""
    answered: set[str] = set()
    for kill in range(5):
        arguments = [shop.cluster.zookeeper, databases.dsn, str(tmp_path / "log"), topic, str(kill), "threads"]
        program = subprocess.Popen([sys.executable, PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        for _ in range(10 + 7 * kill):
            answered.add(program.stdout.readline().strip())
        program.kill()
        answered |= {line.strip() for line in program.stdout if line.endswith("\n")}
        program.wait()
        program.stdout.close()
        assert "" not in answered, "the program has ended by itself"
        with Coordinator(tmp_path / "log", resources()) as coordinator:
            wait_until(lambda: coordinator.recover().left == (), what="the end of what was prepared")
    rows = databases.rows("a")
    assert answered <= set(rows)
    holds(shop, databases, topic, rows)
