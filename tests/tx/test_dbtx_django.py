"""dbtx on Django's connection: its block is an atomic(), and rows and messages happen both or neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionProxy

from metamq import Producer
from metamq.client.background import at_once
from metamq.errors import BranchMisuse, ConfigError
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table, dbtx
from tests.django_databases import django_database, on_postgres
from tests.mariadb import mysqlclient
from tests.postgres import new_schema
from tests.tx.databases import messages


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def alias(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that only this test has."""
    if request.param == "sqlite":
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "shop.db", "OPTIONS": {"timeout": 1}}
    elif request.param == "mysql":
        mysqlclient()
        mysql = request.getfixturevalue("mariadb")
        place = {"NAME": mysql.new_database(), "OPTIONS": {"unix_socket": mysql.socket}}
        database = {"ENGINE": "django.db.backends.mysql", "USER": "root", **place}
    else:
        server = request.getfixturevalue("postgres")
        database = on_postgres(server, new_schema(server))
    with django_database(**database) as made:
        for _ in range(2):  # may be repeated
            create_outcome_table(connections[made])
        kind = {"sqlite": "BLOB", "postgresql": "BYTEA", "mysql": "VARBINARY(100)"}[request.param]
        execute(made, f"CREATE TABLE orders (body {kind} PRIMARY KEY)")
        yield made


def execute(alias: str, sql: str, *values: object) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values or None)


def insert(alias: str, body: bytes) -> None:
    execute(alias, "INSERT INTO orders VALUES (%s)", body)


def read(alias: str, sql: str) -> list[Any]:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return [row[0] for row in cursor.fetchall()]


def rows(alias: str) -> list[bytes]:
    return sorted(map(bytes, read(alias, "SELECT body FROM orders")))


def decisions(alias: str) -> list[str]:
    return read(alias, "SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id'")


def test_both_happen(running: Cluster, topic: str, producer: Producer[bytes], alias: str) -> None:
    called: list[bool] = []
    connection: Any = ConnectionProxy(connections, alias)  # as django.db.connection is one
    with dbtx(connection, producer) as tx:
        insert(alias, b"0")
        with pytest.raises(KeyError), transaction.atomic(alias):  # noqa: PT012 - a savepoint
            insert(alias, b"taken back")
            raise KeyError
        tx.send(topic, b"0")
        transaction.on_commit(lambda: called.append(True), alias)
    assert called == [True]
    with dbtx(connections[alias], producer) as tx:
        insert(alias, b"1")
        tx.send(topic, b"1")
    assert not connections[alias].in_atomic_block
    assert rows(alias) == messages(running, topic) == [b"0", b"1"]


def test_neither_happens_when_the_block_fails(
    running: Cluster, topic: str, producer: Producer[bytes], alias: str
) -> None:
    insert(alias, b"0")
    with pytest.raises(KeyError), dbtx(connections[alias], producer) as tx:  # noqa: PT012
        insert(alias, b"1")
        tx.send(topic, b"1")
        raise KeyError
    with pytest.raises(IntegrityError), dbtx(connections[alias], producer) as tx:  # noqa: PT012
        tx.send(topic, b"twice")
        insert(alias, b"0")
    # Django rolls such a block back without an error.
    with pytest.raises(TransactionManagementError), dbtx(connections[alias], producer) as tx:  # noqa: PT012
        insert(alias, b"1")
        tx.send(topic, b"1")
        transaction.set_rollback(True, alias)
    assert rows(alias) == [b"0"]
    assert messages(running, topic) == []
    assert decisions(alias) == []


def test_a_callback_that_fails_behind_the_commit_takes_nothing_back(
    running: Cluster, topic: str, producer: Producer[bytes], alias: str
) -> None:
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError), dbtx(connections[alias], producer) as tx:  # noqa: PT012
        insert(alias, b"0")
        tx.send(topic, b"0")
        transaction.on_commit(fail, alias)
    assert rows(alias) == messages(running, topic) == [b"0"]


def test_what_does_not_fit_is_refused_with_the_next_step(producer: Producer[bytes], alias: str) -> None:
    connection = connections[alias]
    with transaction.atomic(alias):
        with pytest.raises(ConfigError, match=r"in transaction\.atomic\(\).*non_atomic_requests"):
            dbtx(connection, producer).__enter__()
        insert(alias, b"0")
    with pytest.raises(ConfigError, match="create_outcome_table"):
        dbtx(connection, producer, table="others").__enter__()
    assert not connection.in_atomic_block
    with dbtx(connection, producer), pytest.raises(BranchMisuse, match="nested"):
        dbtx(connection, producer).__enter__()
    with pytest.raises(TransactionManagementError), dbtx(connection, producer):
        connection.commit()
    connection.set_autocommit(False)
    with pytest.raises(ConfigError, match="autocommit is off"):
        dbtx(connection, producer).__enter__()
    connection.set_autocommit(True)
    with pytest.raises(ConfigError, match="of another thread"):
        dbtx(connection.copy(), producer)
    assert rows(alias) == [b"0"]


def test_a_recoverer_takes_the_connection(running: Cluster, topic: str, producer: Producer[bytes], alias: str) -> None:
    """After an application that died behind its decision, and one that died before."""
    for body in (b"decided", b"undecided"):
        tx = dbtx(connections[alias], producer).__enter__()
        insert(alias, body)
        tx.send(topic, body)
        assert tx._work is not None
        producer._background.run(tx._work.prepare())
        if body == b"decided":
            at_once(tx._outcomes.commit(tx._database, tx._work.gtrid, tx._mark))
            at_once(tx._database.commit())
        else:
            at_once(tx._database.rollback())
        tx._work = None
        producer._leave_block(tx)
    with Recoverer(lambda: connections[alias], running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 1, 0)
        assert recoverer.run_once() == Recovered(0, 0, 0)
    assert rows(alias) == messages(running, topic) == [b"decided"]
    assert sorted(decisions(alias)) == ["abort", "commit"]


def test_a_testcase_of_django_is_no_other_block(
    running: Cluster, topic: str, producer: Producer[bytes], alias: str
) -> None:
    """Which runs each test in an atomic() that it marks so, and rolls back: the messages stay."""
    of_testcase = transaction.atomic(alias)
    of_testcase._from_testcase = True
    with of_testcase:
        for body in (b"0", b"1"):
            with dbtx(connections[alias], producer) as tx:
                insert(alias, body)
                tx.send(topic, body)
        with pytest.raises(KeyError), dbtx(connections[alias], producer) as tx:  # noqa: PT012
            insert(alias, b"2")
            tx.send(topic, b"2")
            raise KeyError
        assert rows(alias) == [b"0", b"1"]
        transaction.set_rollback(True, alias)
    assert rows(alias) == []
    assert messages(running, topic) == [b"0", b"1"]


def test_a_migration_makes_the_table(alias: str) -> None:
    """In the migration's own atomic(), which may also be rolled back."""
    for fails in (True, False) if connections[alias].features.can_rollback_ddl else (False,):
        try:
            with connections[alias].schema_editor() as editor:
                create_outcome_table(editor.connection, "made_by_migration")
                if fails:
                    raise KeyError
        except KeyError:
            with pytest.raises(DatabaseError, match="made_by_migration"):
                read(alias, "SELECT outcome FROM made_by_migration")
    assert len(read(alias, "SELECT outcome FROM made_by_migration")) == 1
