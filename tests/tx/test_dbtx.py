"""dbtx: rows and messages, both or neither, whatever ends in between. sqlite3; the Recoverer asks it afterwards."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq import Producer
from metamq.errors import BranchMisuse, ConfigError, MessageTooLarge
from metamq.testing import Cluster, cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table, dbtx

Connect = Callable[[], sqlite3.Connection]


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


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    def opened() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "application.db", timeout=1)

    connection = opened()
    create_outcome_table(connection)
    create_outcome_table(connection)  # may be repeated
    connection.execute("CREATE TABLE orders (body BLOB)")
    connection.commit()
    connection.close()
    return opened


@pytest.fixture
def database(connect: Connect) -> Iterator[sqlite3.Connection]:
    connection = connect()
    yield connection
    connection.close()


def rows(database: sqlite3.Connection) -> list[bytes]:
    return sorted(body for (body,) in database.execute("SELECT body FROM orders"))


def messages(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return sorted(message.value for message in consumer)


def insert(database: sqlite3.Connection, body: bytes) -> None:
    database.execute("INSERT INTO orders VALUES (?)", (body,))


def test_both_happen(running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection) -> None:
    for number in range(10):
        with dbtx(database, producer) as tx:
            insert(database, b"%d" % number)
            tx.send(topic, b"%d" % number, key=b"k", headers={"h": b"v"})
    assert rows(database) == messages(running, topic) == [b"%d" % number for number in range(10)]


def test_neither_happens_when_the_block_fails(
    running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection
) -> None:
    with pytest.raises(KeyError), dbtx(database, producer) as tx:  # noqa: PT012
        insert(database, b"1")
        tx.send(topic, b"1")
        raise KeyError
    with pytest.raises(MessageTooLarge), dbtx(database, producer) as tx:  # noqa: PT012
        insert(database, b"2")
        tx.send(topic, bytes(3 * 1024 * 1024))
    assert rows(database) == messages(running, topic) == []
    with pytest.raises(BranchMisuse):
        tx.send(topic, b"late")


def test_a_database_that_refuses_takes_the_messages_with_it(
    running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection
) -> None:
    database.execute("CREATE UNIQUE INDEX one ON orders (body)")
    database.commit()
    with dbtx(database, producer) as tx:
        insert(database, b"1")
        tx.send(topic, b"1")
    with pytest.raises(sqlite3.IntegrityError), dbtx(database, producer) as tx:  # noqa: PT012
        tx.send(topic, b"twice")
        insert(database, b"1")
    assert rows(database) == messages(running, topic) == [b"1"]


def test_without_the_table_it_says_how_to_make_it(producer: Producer[bytes], tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    with pytest.raises(ConfigError, match="create_outcome_table"), dbtx(other, producer):
        pass
    other.close()


def leave(database: sqlite3.Connection, producer: Producer[bytes], topic: str, body: bytes, *, decided: bool) -> None:
    """An application that dies after the messages are prepared: before, or after, the database has decided."""
    tx = dbtx(database, producer)
    tx.__enter__()
    insert(database, body)
    tx.send(topic, body)
    work = tx._work
    assert work is not None
    producer._background.run(work.prepare())
    if decided:
        tx._outcomes.commit(database, work.gtrid)
        database.commit()
    else:
        database.rollback()


def test_a_recoverer_finishes_what_was_left_as_the_database_has_decided(
    running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection, connect: Connect
) -> None:
    leave(database, producer, topic, b"decided", decided=True)
    leave(database, producer, topic, b"undecided", decided=False)
    assert messages(running, topic) == []
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 1, 0)
        assert recoverer.run_once() == Recovered(0, 0, 0)
    assert rows(database) == messages(running, topic) == [b"decided"]


def test_a_young_branch_and_another_databases_are_left_alone(
    running: Cluster,
    topic: str,
    producer: Producer[bytes],
    database: sqlite3.Connection,
    connect: Connect,
    tmp_path: Path,
) -> None:
    leave(database, producer, topic, b"mine", decided=True)
    with Recoverer(connect, running.zookeeper, grace_s=60) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 1)

    def another() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "another.db")

    other = another()
    create_outcome_table(other)
    other.close()
    with Recoverer(another, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0)
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once().committed == 1
    assert messages(running, topic) == [b"mine"]


def test_a_slow_application_is_refused_by_its_database_once_it_was_decided_about(
    running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection, connect: Connect
) -> None:
    tx = dbtx(database, producer)
    tx.__enter__()
    tx.send(topic, b"slow")
    work = tx._work
    assert work is not None
    producer._background.run(work.prepare())
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once().rolled_back == 1
    with pytest.raises(sqlite3.IntegrityError):
        tx._outcomes.commit(database, work.gtrid)
    database.rollback()
    assert messages(running, topic) == []


def test_while_a_broker_is_down_nothing_is_forgotten(
    running: Cluster, topic: str, producer: Producer[bytes], database: sqlite3.Connection, connect: Connect
) -> None:
    leave(database, producer, topic, b"decided", decided=True)
    database.execute("UPDATE metamq_outcomes SET at = 0")
    database.commit()
    running.broker.stop()
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0, (0,))
        running.broker.start()
        assert recoverer.run_once().committed == 1
        recoverer.run_once()
    left = database.execute("SELECT count(*) FROM metamq_outcomes WHERE outcome = 'commit'").fetchone()
    assert left == (0,)
    assert rows(database) == messages(running, topic) == [b"decided"]
