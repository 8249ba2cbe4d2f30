"""dbtx on MySQL's drivers, with a MariaDB: rows and messages, both or neither."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import orm

from metamq import Producer
from metamq.client.background import at_once
from metamq.client.offsets.connections import database_of
from metamq.errors import BranchMisuse, ConfigError
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table, dbtx
from tests.mariadb import DRIVERS, MariaDb
from tests.tx.databases import Connect, messages

pytestmark = pytest.mark.slow


@pytest.fixture(params=DRIVERS)
def connect(request: pytest.FixtureRequest, mariadb: MariaDb) -> Connect:
    """Connects to a database that only this test has."""
    return partial(DRIVERS[request.param], mariadb, prepared(mariadb))


def prepared(mariadb: MariaDb) -> str:
    """A new database with its tables."""
    name = mariadb.new_database()
    connection = DRIVERS["pymysql"](mariadb, name)
    for _ in range(2):  # may be repeated
        create_outcome_table(connection)
    connection.execute("CREATE TABLE orders (body VARBINARY(100) PRIMARY KEY)")
    connection.close()
    return name


@pytest.fixture
def database(connect: Connect) -> Iterator[Any]:
    connection = connect()
    yield connection
    connection.close()


def insert(database: Any, body: bytes) -> None:
    database.execute("INSERT INTO orders VALUES (%s)", (body,))


def rows(connect: Connect) -> list[bytes]:
    """What a connection of its own finds."""
    connection = connect()
    found = sorted(bytes(body) for (body,) in connection.execute("SELECT body FROM orders").fetchall())
    connection.close()
    return found


def test_both_happen_or_neither(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    for number in range(3):
        with dbtx(database, producer) as tx:
            insert(database, b"%d" % number)
            tx.send(topic, b"%d" % number)
    with pytest.raises(KeyError), dbtx(database, producer) as tx:  # noqa: PT012
        insert(database, b"failed")
        tx.send(topic, b"failed")
        raise KeyError
    with pytest.raises(type(database).IntegrityError), dbtx(database, producer) as tx:  # noqa: PT012
        tx.send(topic, b"twice")
        insert(database, b"0")
    assert rows(connect) == messages(running, topic) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "CREATE TABLE others (one INT)"])
def test_a_transaction_that_is_ended_in_the_block_is_noticed(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect, how: str
) -> None:
    """MySQL commits before it creates a table."""
    with pytest.raises(BranchMisuse, match="was committed or rolled back in the block"), dbtx(database, producer) as tx:  # noqa: PT012
        insert(database, b"before")
        tx.send(topic, b"1")
        database.execute(how)
        insert(database, b"behind")
    with pytest.raises(BranchMisuse, match="was committed"), dbtx(database, producer):
        database.execute(how.replace("others", "more"))
    assert rows(connect) == [b"before"] * (how != "ROLLBACK")
    assert messages(running, topic) == []


def test_what_does_not_fit_is_refused(producer: Producer[bytes], database: Any) -> None:
    with pytest.raises(ConfigError, match="create_outcome_table"):
        dbtx(database, producer, table="nowhere").__enter__()
    database.autocommit(True)
    with pytest.raises(ConfigError, match="autocommit"):
        dbtx(database, producer).__enter__()


def left_prepared(database: Any, producer: Producer[bytes], topic: str, body: bytes) -> dbtx:
    """As an application leaves it that dies before its decision."""
    tx = dbtx(database, producer).__enter__()
    insert(database, body)
    tx.send(topic, body)
    assert tx._work is not None
    producer._background.run(tx._work.prepare())
    producer._leave_block(tx)
    return tx


def decide(tx: dbtx) -> None:
    work, tx._work = tx._work, None
    assert work is not None
    at_once(tx._outcomes.commit(tx._database, work.gtrid, tx._mark))


def test_a_recoverer_waits_for_nobody_and_fences_who_is_late(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    """One application has decided and not committed yet. The other has not decided: it is decided against."""
    late = connect()
    decided, undecided = (
        left_prepared(connection, producer, topic, body)
        for connection, body in ((database, b"decided"), (late, b"late"))
    )
    decide(decided)
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 1, 1)
        with pytest.raises(type(late).IntegrityError):
            decide(undecided)
        late.rollback()
        database.commit()
        assert recoverer.run_once() == Recovered(1, 0, 0)
    late.close()
    assert rows(connect) == messages(running, topic) == [b"decided"]


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ"])
def test_a_recoverer_believes_no_decision_before_its_commit(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect, level: str
) -> None:
    """The application dies after its decision, and before the commit."""

    def at_this_level() -> Any:
        connection = connect()
        connection.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        connection.commit()
        return connection

    decide(left_prepared(database, producer, topic, b"not committed"))
    with Recoverer(at_this_level, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 1)
        database.rollback()
        assert recoverer.run_once() == Recovered(0, 1, 0)
    assert rows(connect) == messages(running, topic) == []


def test_names_that_differ_in_their_case_are_two(database: Any) -> None:
    found = database_of(database)
    create_outcome_table(database, "of_names")
    for key in ("a", "A"):
        at_once(found.change("INSERT INTO of_names VALUES ({}, 'commit', 0)", (key,)))


def test_sqlalchemy(running: Cluster, topic: str, producer: Producer[bytes], mariadb: MariaDb) -> None:
    name = prepared(mariadb)
    engine = sqlalchemy.create_engine(f"mysql+pymysql://root@/{name}?unix_socket={mariadb.socket}")
    text = sqlalchemy.text("INSERT INTO orders VALUES (:body)")
    with orm.Session(engine) as session:
        with dbtx(session, producer) as tx:
            session.execute(text, {"body": b"1"})
            tx.send(topic, b"1")
        with pytest.raises(BranchMisuse, match="was committed"), dbtx(session, producer) as tx:  # noqa: PT012
            tx.send(topic, b"2")
            session.commit()
    engine.dispose()
    assert rows(partial(DRIVERS["pymysql"], mariadb, name)) == messages(running, topic) == [b"1"]
