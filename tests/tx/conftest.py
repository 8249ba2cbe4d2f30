"""Clusters, databases and readers for tests of transactions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from metamq import Producer
from metamq.client.net.branches import BranchDescription
from metamq.testing import Cluster
from metamq.tx import XAResource, create_outcome_table
from tests.one_zookeeper import cluster
from tests.parts import read_to_end, until_answered, wait_until
from tests.postgres import new_schema, running_postgres
from tests.tx.databases import Connect, is_postgres
from tests.tx.two_databases import Databases


class Shop:
    """A cluster of two brokers, and what is seen of it."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self._watchers: dict[int, XAResource] = {}

    def topic(self) -> str:
        """A new one, with two partitions at each broker."""
        name = f"orders-{time.monotonic_ns()}"
        self.cluster.create_topic(name, partitions=4)
        return name

    def seen(self, topic: str) -> list[bytes]:
        """All that a new reader finds, sorted."""
        with self.cluster.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
            return sorted(message.value for message in read_to_end(consumer))

    def branches(self, broker_id: int) -> list[BranchDescription]:
        """All that are open at a broker, in whatever state."""
        if broker_id not in self._watchers:
            self._watchers[broker_id] = XAResource(broker_id, self.cluster.zookeeper)
        watcher = self._watchers[broker_id]
        client, run = watcher._core._client, watcher._background.run
        return until_answered(lambda: run(client.branches(broker_id, all_of_them=True)))

    def open_branches(self) -> list[tuple[int, str]]:
        """(broker id, state) of all."""
        return [(broker_id, one.state) for broker_id in (0, 1) for one in self.branches(broker_id)]

    def at_work(self) -> bool:
        """Whether there is a branch that was not given up, and is not prepared."""
        return any(state in ("active", "idle") for _broker, state in self.open_branches())

    def until_ended(self, limit_s: float = 60.0) -> None:
        """Waits until no branch is open at any broker, but those of which only the reason is kept."""
        wait_until(lambda: all(one[1] == "rollback-only" for one in self.open_branches()), limit_s, "no branch open")

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with cluster(brokers=2, branch_grace_ms=700) as running:
        made = Shop(running)
        yield made
        made.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def topic(running: Cluster) -> str:
    name = f"orders-{time.monotonic_ns()}"
    running.create_topic(name, partitions=3)
    return name


@pytest.fixture
def producer(running: Cluster) -> Iterator[Producer[bytes]]:
    with running.producer() as made:
        yield made


@pytest.fixture(params=["sqlite3", "psycopg"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Connects to a database that only this test has."""
    if request.param == "sqlite3":
        opened: Connect = lambda: sqlite3.connect(tmp_path / "application.db", timeout=1)  # noqa: E731
    else:
        server = request.getfixturevalue("postgres")
        schema = new_schema(server)
        opened = lambda: psycopg.connect(server, options=f"-c search_path={schema}")  # noqa: E731
    connection = opened()
    create_outcome_table(connection)
    create_outcome_table(connection)  # may be repeated
    connection.execute(f"CREATE TABLE orders (body {'BYTEA' if is_postgres(connection) else 'BLOB'})")
    connection.commit()
    connection.close()
    return opened


@pytest.fixture
def database(connect: Connect) -> Iterator[Any]:
    connection = connect()
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def database_pair() -> Iterator[Databases]:
    """Two databases that take part in two-phase commits."""
    with running_postgres("-c max_prepared_transactions=20") as server:
        yield Databases(server)


@pytest.fixture
def databases(database_pair: Databases) -> Databases:
    """The two databases, empty."""
    database_pair.empty()
    return database_pair
