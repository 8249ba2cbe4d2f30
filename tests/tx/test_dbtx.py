"""dbtx: rows and messages, both or neither, with sqlite3 and with PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from metamq import Producer, Topic
from metamq.client.background import at_once
from metamq.client.offsets.connections import database_of
from metamq.errors import BranchMisuse, ClosedError, ConfigError, MessageTooLarge, MetamqError, TopicNotFound, WrongType
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table, dbtx
from metamq.tx.database import recoverer as recoverers
from metamq.tx.database.outcomes import OutcomeTable
from tests.parts import read_to_end, wait_until
from tests.tx.databases import Connect, decisions, giving_mappings, insert, is_postgres, messages, rows

REFUSED = (sqlite3.IntegrityError, psycopg.IntegrityError)


def test_both_happen(running: Cluster, topic: str, producer: Producer[bytes], database: Any) -> None:
    for number in range(10):
        with dbtx(database, producer) as tx:
            insert(database, b"%d" % number)
            tx.send(topic, b"%d" % number, key=b"k", headers={"h": b"v"})
    assert rows(database) == messages(running, topic) == [b"%d" % number for number in range(10)]


def test_connections_whose_rows_are_mappings(
    running: Cluster, topic: str, producer: Producer[bytes], connect: Connect
) -> None:
    database = giving_mappings(connect)()
    create_outcome_table(database, "others")
    for number in range(3):
        with dbtx(database, producer, table="others") as tx:
            insert(database, b"%d" % number)
            if number:  # without messages the transaction is looked at all the same
                tx.send(topic, b"%d" % number)
    table = OutcomeTable("others")
    (gtrid, _) = sorted(at_once(table.older(database_of(database), 1 << 62, "commit")))
    assert at_once(table.decide(database_of(database), gtrid)) == "commit"
    with Recoverer(giving_mappings(connect), running.zookeeper, table="others") as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0)
    database.close()
    assert messages(running, topic) == [b"1", b"2"]


def test_neither_happens_when_the_block_fails(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
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


@dataclass
class Order:
    number: int


def test_a_typed_topic(running: Cluster, topic: str, producer: Producer[bytes], database: Any) -> None:
    typed = Topic(topic, Order)
    with dbtx(database, producer) as tx:
        tx.send(typed, Order(1))
        tx.send_many(typed, [Order(2), Order(3)])
    with pytest.raises(WrongType), dbtx(database, producer) as tx:
        tx.send(typed, b"{}")
    assert messages(running, topic) == [b'{"number":1}', b'{"number":2}', b'{"number":3}']


def test_a_database_that_refuses_takes_the_messages_with_it(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    database.execute("CREATE UNIQUE INDEX one ON orders (body)")
    database.commit()
    with dbtx(database, producer) as tx:
        insert(database, b"1")
        tx.send(topic, b"1")
    with pytest.raises(REFUSED), dbtx(database, producer) as tx:  # noqa: PT012
        tx.send(topic, b"twice")
        insert(database, b"1")
    assert rows(database) == messages(running, topic) == [b"1"]


def test_without_the_table_it_says_how_to_make_it(connect: Connect, producer: Producer[bytes]) -> None:
    other = connect()
    with pytest.raises(ConfigError, match="create_outcome_table"), dbtx(other, producer, table="others"):
        pass
    create_outcome_table(other, "others")  # on the same connection
    with dbtx(other, producer, table="others"):
        pass
    other.close()


def test_a_connection_without_transactions_is_refused(connect: Connect, producer: Producer[bytes]) -> None:
    database = connect()
    if is_postgres(database):
        database.autocommit = True
    else:
        database.isolation_level = None
    with pytest.raises(ConfigError, match="autocommit"), dbtx(database, producer):
        pass
    database.close()


def test_a_connection_for_asyncio_is_refused(postgres: str, producer: Producer[bytes]) -> None:
    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(postgres) as database:
            with pytest.raises(ConfigError, match="one for asyncio"):
                dbtx(database, producer).__enter__()  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_one_within_another_would_commit_half_of_it_and_is_refused(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    with dbtx(database, producer) as outer:
        insert(database, b"1")
        outer.send(topic, b"1")
        with pytest.raises(BranchMisuse, match=r"^dbtx: the connection is in a dbtx already"), dbtx(database, producer):
            pass
        with pytest.raises(BranchMisuse, match="cannot be nested"), outer:
            pass
    with dbtx(database, producer):
        pass
    assert rows(database) == messages(running, topic) == [b"1"]


def test_a_transaction_that_was_begun_by_hand_will_do(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    if not is_postgres(database):
        database.isolation_level = None
        database.execute("BEGIN IMMEDIATE")
    with dbtx(database, producer) as tx:
        insert(database, b"1")
        tx.send(topic, b"1")
    assert rows(database) == messages(running, topic) == [b"1"]


def test_an_error_of_the_database_that_was_swallowed_in_the_block(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    """PostgreSQL's transaction has failed with it: its driver would take the commit, and roll back."""

    def swallowed() -> None:
        with pytest.raises((psycopg.Error, sqlite3.Error)):
            database.execute("INSERT INTO nowhere VALUES (1)")

    if not is_postgres(database):
        with dbtx(database, producer) as tx:
            insert(database, b"1")
            tx.send(topic, b"1")
            swallowed()
        assert rows(database) == messages(running, topic) == [b"1"]
        return
    for with_messages in (True, False):
        with pytest.raises(psycopg.errors.InFailedSqlTransaction), dbtx(database, producer) as tx:  # noqa: PT012
            insert(database, b"1")
            if with_messages:
                tx.send(topic, b"1")
            swallowed()
    assert rows(database) == messages(running, topic) == []


def test_rows_without_messages_are_committed_and_the_other_way(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    with dbtx(database, producer):
        insert(database, b"row")
    with dbtx(database, producer) as tx:
        tx.send(topic, b"message")
    assert rows(database) == [b"row"]
    assert messages(running, topic) == [b"message"]


def test_many_at_once(running: Cluster, topic: str, producer: Producer[bytes], database: Any) -> None:
    values = [b"%05d" % number for number in range(30_000)]
    with dbtx(database, producer) as tx:
        tx.send_many(topic, values[:20_000])
        tx.send_many(topic, values[20_000:], keys=["a", b"b"] * 5000)
        with pytest.raises(ConfigError, match="got 1 key for 2 values"):
            tx.send_many(topic, [b"1", b"2"], keys=["a"])
        with pytest.raises(TopicNotFound):
            tx.send_many("nowhere", [b"1"])
    assert messages(running, topic) == values


def test_small_transactions_use_all_partitions(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    for _ in range(40):
        with dbtx(database, producer) as tx:
            tx.send(topic, b"1")
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        assert len({message.partition for message in read_to_end(consumer)}) == 3


def test_a_commit_that_the_database_refuses(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    """PostgreSQL looks at a deferred constraint only then; sqlite3 waits for who reads, and may be asked again."""
    reader = connect()
    if is_postgres(database):
        database.execute("CREATE TABLE ids (id INT UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        database.commit()
    else:
        database.execute("PRAGMA busy_timeout = 10")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM orders").fetchall()
    with pytest.raises((psycopg.IntegrityError, sqlite3.OperationalError)), dbtx(database, producer) as tx:  # noqa: PT012
        insert(database, b"1")
        if is_postgres(database):
            database.execute("INSERT INTO ids VALUES (1), (1)")
        tx.send(topic, b"1")
    reader.close()
    asked_on_the_spot = is_postgres(database)
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, int(not asked_on_the_spot), 0)
    assert rows(database) == messages(running, topic) == []


def test_the_decision_is_on_the_disk_where_commits_need_not_be(postgres: str, producer: Producer[bytes]) -> None:
    def setting() -> str:
        (value,) = database.execute("SHOW synchronous_commit").fetchone()  # type: ignore[misc]
        return str(value)

    table = OutcomeTable(f"o_{uuid.uuid4().hex}")

    class Own(psycopg.Connection[Any]):
        """As applications derive them."""

    with Own.connect(postgres, options="-c synchronous_commit=off") as database:
        at_once(table.create(database_of(database)))
        at_once(table.commit(database_of(database), b"1"))
        assert setting() == "on"
        database.rollback()
        assert setting() == "off"
        database.execute("SET synchronous_commit = remote_apply")
        at_once(table.commit(database_of(database), b"1"))
        assert setting() == "remote_apply"


def test_behind_the_databases_commit_nothing_is_raised(
    running: Cluster, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is lost, and another thread closes the producer while it makes a new one."""

    class Database(sqlite3.Connection):
        losing = False

        def commit(self) -> None:
            super().commit()
            if self.losing:
                running.broker.freeze()
                connections = producer._core.cluster.connections
                for connection in connections._open.values():
                    producer._background.call_soon(connection.abort)
                closing.start()

    def close() -> None:
        wait_until(lambda: bool(producer._core.cluster.connections._opening))
        producer.close()

    producer, closing = running.producer(), threading.Thread(target=close)
    connect = functools.partial(sqlite3.connect, tmp_path / "lost.db", factory=Database)
    database = connect()
    create_outcome_table(database)
    database.execute("CREATE TABLE orders (body BLOB)")
    try:
        with caplog.at_level(logging.WARNING, "metamq.tx"), dbtx(database, producer) as tx:
            insert(database, b"1")
            tx.send(topic, b"1")
            database.losing = True
    finally:
        closing.join()
        running.broker.thaw()
    assert "wait for a recoverer" in caplog.text
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 0, 0)
    assert rows(database) == messages(running, topic) == [b"1"]
    database.close()


def test_a_call_that_was_waiting_when_its_producer_was_closed_may_have_been_done(producer: Producer[bytes]) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ClosedError) as raised:
        producer._background.run(cancelled())
    assert raised.value.outcome == "unknown"


def leave(database: Any, producer: Producer[bytes], topic: str, body: bytes, *, decided: bool) -> None:
    """An application that dies after the messages are prepared: before, or after, the database has decided."""
    tx = dbtx(database, producer)
    tx.__enter__()
    insert(database, body)
    tx.send(topic, body)
    work = tx._work
    assert work is not None
    producer._background.run(work.prepare())
    if decided:
        at_once(tx._outcomes.commit(database_of(database), work.gtrid))
        database.commit()
    else:
        database.rollback()


def test_a_recoverer_finishes_what_was_left_as_the_database_has_decided(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    leave(database, producer, topic, b"decided", decided=True)
    leave(database, producer, topic, b"undecided", decided=False)
    assert messages(running, topic) == []
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 1, 0)
        assert recoverer.run_once() == Recovered(0, 0, 0)
    assert rows(database) == messages(running, topic) == [b"decided"]


def test_a_new_recoverer_knows_the_age_of_a_branch_as_in_a_cron_job(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    leave(database, producer, topic, b"decided", decided=True)
    leave(database, producer, topic, b"undecided", decided=False)

    def one_pass() -> Recovered:
        with Recoverer(connect, running.zookeeper, grace_s=1) as recoverer:
            return recoverer.run_once()

    wait_until(lambda: one_pass() == Recovered(0, 0, 0), what="the end of both branches")
    assert messages(running, topic) == [b"decided"]


def test_a_young_branch_and_another_databases_are_left_alone(
    running: Cluster,
    topic: str,
    producer: Producer[bytes],
    database: Any,
    connect: Connect,
) -> None:
    leave(database, producer, topic, b"mine", decided=True)
    with Recoverer(connect, running.zookeeper, grace_s=60) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 1)
    create_outcome_table(database, "others")
    with Recoverer(connect, running.zookeeper, table="others", grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0)
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once().committed == 1
    assert messages(running, topic) == [b"mine"]


def test_a_slow_application_is_refused_by_its_database_once_it_was_decided_about(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    tx = dbtx(database, producer)
    tx.__enter__()
    tx.send(topic, b"slow")
    work = tx._work
    assert work is not None
    producer._background.run(work.prepare())
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once().rolled_back == 1
    with pytest.raises(REFUSED):
        at_once(tx._outcomes.commit(database_of(database), work.gtrid))
    database.rollback()
    assert messages(running, topic) == []


def test_while_a_broker_is_down_nothing_is_forgotten(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    leave(database, producer, topic, b"decided", decided=True)
    database.execute("UPDATE metamq_outcomes SET at = 0")
    database.commit()
    running.broker.stop()
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        done = recoverer.run_once()
        assert done[:3] == (0, 0, 0)
        assert [(one.broker_id, one.xids) for one in done.problems] == [(0, ())]
        assert str(done.problems[0]).startswith("broker 0 does not list its prepared branches: no connection to ")
        running.broker.start()
        wait_until(lambda: recoverer.run_once().committed == 1, what="the broker asked again")
        recoverer.run_once()
    assert decisions(database) == []
    assert rows(database) == messages(running, topic) == [b"decided"]


def test_a_broker_that_is_silent_at_a_rollback_is_a_problem_with_all_its_branches(
    running: Cluster, topic: str, producer: Producer[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recoverers, "ANSWER_S", 0.2)

    class Database(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            running.broker.freeze()

    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        create_outcome_table(database)
        database.execute("CREATE TABLE orders (body BLOB)")
        for body in (b"1", b"2"):
            leave(database, producer, topic, body, decided=False)
    connect = functools.partial(sqlite3.connect, tmp_path / "shop.db", factory=Database)
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        try:
            done = recoverer.run_once()
        finally:
            running.broker.thaw()
        assert done[:3] == (0, 0, 0)
        (problem,) = done.problems
        assert (problem.broker_id, len(problem.xids)) == (0, 2)
        assert str(problem).startswith(f"2 branches at broker 0, such as {problem.xids[0]}: no answer from broker 0")
        assert "`metamq doctor`" in problem.hint


@pytest.mark.slow
def test_an_application_that_is_about_to_commit_holds_up_its_own_branch_alone(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    """Nobody can tell what becomes of that one before it has ended; the others are finished meanwhile."""
    slow = connect()
    tx = dbtx(slow, producer)
    tx.__enter__()
    tx.send(topic, b"slow")
    work = tx._work
    assert work is not None
    producer._background.run(work.prepare())
    leave(database, producer, topic, b"undecided", decided=False)
    at_once(tx._outcomes.commit(database_of(slow), work.gtrid))
    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        if is_postgres(database):
            assert recoverer.run_once() == Recovered(0, 1, 1)
        else:  # the whole file is locked
            assert recoverer.run_once() == Recovered(0, 0, 2)
        slow.commit()
        assert recoverer.run_once().committed == 1
    slow.close()
    assert messages(running, topic) == [b"slow"]


def test_an_old_decision_whose_branch_is_prepared_is_kept(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any, connect: Connect
) -> None:
    for decided in (True, False):
        leave(database, producer, topic, b"1", decided=decided)
    with Recoverer(connect, running.zookeeper, grace_s=60) as recoverer:
        database.execute("UPDATE metamq_outcomes SET at = 0")
        database.commit()
        recoverer.run_once()
        assert decisions(database) == ["commit"]
        recoverer._grace_s = 0
        recoverer.run_once()
        assert decisions(database) == ["abort", "commit"], "young ones are kept"
        database.execute("UPDATE metamq_outcomes SET at = 0")
        database.commit()
        recoverer.run_once()
        assert decisions(database) == []


def test_a_database_that_goes_away_ends_no_recoverer(
    running: Cluster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def failing() -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("no way there")
        connection = connect()
        if asked == 2:
            connection.close()
        if asked == 4:
            recoverer._stop.set()
        return connection

    with Recoverer(failing, running.zookeeper, grace_s=0) as recoverer, caplog.at_level(logging.WARNING, "metamq.tx"):
        with pytest.raises(MetamqError, match="no connection to the database: OSError: no way there"):
            recoverer.run_once()
        with pytest.raises(MetamqError, match="the database does not answer"):
            recoverer.run_once()
        asked = 0
        recoverer.run(every_s=0.01)
    assert asked == 4
    assert len([record for record in caplog.records if "tried again" in record.message]) == 2


def test_what_is_no_connection_no_producer_and_no_function_is_named(producer: Producer[bytes]) -> None:
    connection: Any = sqlite3.connect(":memory:")
    swapped: Any = producer
    path: Any = "shop.db"
    for wrong, words in (
        (lambda: dbtx(swapped, connection), "`connection` must be a connection of a DB-API driver"),
        (lambda: dbtx(connection, connection), "`producer` must be a blocking metamq.Producer"),
        (lambda: Recoverer(path), "`connect` must be a function"),
    ):
        with pytest.raises(WrongType, match=words):
            wrong()
    connection.close()
