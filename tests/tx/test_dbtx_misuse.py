"""What does not fit a block of dbtx is noticed there: the connection's commit inside, and what is sent past it."""

from __future__ import annotations

import contextlib
import gc
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from metamq import Producer
from metamq.errors import BranchMisuse, ConfigError, DeliveryTimeout, RolledBack, Timeout
from metamq.testing import Cluster
from metamq.tx import Xid, create_outcome_table, dbtx
from tests.parts import wait_until
from tests.tx.databases import decisions, insert, is_postgres, messages, rows


def _ended_early(database: Any, how: str) -> None:
    if how == "commit":
        database.commit()
    elif how == "rollback":
        database.rollback()
    elif how == "with connection":
        with database if not is_postgres(database) else contextlib.nullcontext():
            insert(database, b"in with")
        database.commit()  # psycopg's `with connection` closes it, too
    else:
        database.execute(how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["commit", "rollback", "with connection", "COMMIT", "ROLLBACK"])
@pytest.mark.parametrize(
    ("before", "after", "sends"), [(True, True, True), (True, False, True), (False, False, True), (True, True, False)]
)
def test_a_transaction_that_is_ended_in_the_block_is_noticed_before_anything_is_decided(
    running: Cluster,
    topic: str,
    producer: Producer[bytes],
    database: Any,
    how: str,
    before: bool,
    after: bool,
    sends: bool,
) -> None:
    told = pytest.raises(BranchMisuse, match="was committed or rolled back in the block")
    with told as raised, dbtx(database, producer) as tx:
        if before:
            insert(database, b"before")
        if sends:
            tx.send(topic, b"1")
        _ended_early(database, how)
        if after:
            insert(database, b"after")
    assert "with connection" in str(raised.value), "the next step is named"
    assert Xid.parse(raised.value.xid).gtrid.startswith(b"db:"), "the form that `metamq tx` takes"
    kept = [b"before"] * (before and "rollback" not in how.lower()) + [b"in with"] * (how == "with connection")
    assert rows(database) == kept, "what it committed itself, and nothing else"
    assert messages(running, topic) == []
    assert decisions(database) == []
    with dbtx(database, producer) as tx:
        insert(database, b"next")
        tx.send(topic, b"next")
    assert messages(running, topic) == [b"next"]


def test_an_early_end_is_told_also_when_the_block_fails_later(
    producer: Producer[bytes], database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "metamq.tx"):
        with pytest.raises(KeyError), dbtx(database, producer):  # noqa: PT012
            insert(database, b"1")
            raise KeyError
        assert caplog.records == []
        with pytest.raises(KeyError), dbtx(database, producer):  # noqa: PT012
            insert(database, b"2")
            database.commit()
            raise KeyError
    assert "was committed or rolled back in the block" in caplog.text
    assert rows(database) == [b"2"]


def test_what_is_sent_past_the_block_by_its_thread_is_refused(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    """It would go out at once, whatever becomes of the rows; other threads go on."""
    errors: list[BaseException | None] = []
    taken_before = producer.send

    def elsewhere() -> None:
        errors.append(producer.send(topic, b"another thread's").exception(60))

    with dbtx(database, producer) as tx:
        for wrong in (
            lambda: producer.send(topic, b"past"),
            lambda: taken_before(topic, b"past"),
            lambda: producer.send_many(topic, [b"past"]),
            lambda: producer.transaction().__enter__(),
            lambda: producer.tpc_begin(producer.xid(1, "past")),
        ):
            with pytest.raises(BranchMisuse, match="in a dbtx block") as raised:
                wrong()
            assert "tx.send" in str(raised.value)
        tx.send(topic, b"1")
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    producer.send(topic, b"after").result(60)
    assert not producer._has_transactions, "nothing is in the way of sends any more"
    assert errors == [None]
    assert messages(running, topic) == [b"1", b"after", b"another thread's"]
    with pytest.raises(KeyError), dbtx(database, producer):
        raise KeyError
    with pytest.raises(ConfigError, match="create_outcome_table"), dbtx(database, producer, table="nowhere"):
        pass
    producer.send(topic, b"again").result(60)


def test_a_block_that_was_never_left_is_in_nobodys_way(topic: str, producer: Producer[bytes], database: Any) -> None:
    tx = dbtx(database, producer)
    tx.__enter__()
    del tx
    database.rollback()
    gc.collect()
    producer.send(topic, b"after").result(60)


def test_savepoints_in_the_block_are_the_applications(
    running: Cluster, topic: str, producer: Producer[bytes], database: Any
) -> None:
    with dbtx(database, producer) as tx:
        insert(database, b"1")
        database.execute("SAVEPOINT own")
        insert(database, b"2")
        database.execute("ROLLBACK TO SAVEPOINT own")
        database.execute("RELEASE SAVEPOINT own")
        if is_postgres(database):
            database.execute("SET TIME ZONE 'Asia/Tokyo'")
            with database.transaction():
                insert(database, b"3")
        tx.send(topic, b"1")
    assert rows(database)[0] == b"1"
    assert messages(running, topic) == [b"1"]


@pytest.mark.parametrize("isolation_level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_the_transaction_of_sqlite3_begins_with_the_block_as_its_isolation_level_says(
    running: Cluster, topic: str, producer: Producer[bytes], tmp_path: Path, isolation_level: Any
) -> None:
    database = sqlite3.connect(tmp_path / "own.db", isolation_level=isolation_level)
    other = sqlite3.connect(tmp_path / "own.db", timeout=0)
    create_outcome_table(database)
    with dbtx(database, producer) as tx:
        tx.send(topic, b"1")
        if isolation_level in ("", "DEFERRED"):
            with other:
                other.execute("CREATE TABLE others (id)")
        else:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("CREATE TABLE others (id)")
    assert messages(running, topic) == [b"1"]
    database.close()
    other.close()


def test_a_block_that_was_idle_for_too_long_says_what_ended_it(
    running: Cluster, topic: str, producer: Producer[bytes], postgres: str
) -> None:
    with psycopg.connect(postgres) as database, psycopg.connect(postgres, autocommit=True) as watcher:
        create_outcome_table(database, "idle")
        database.execute("SET idle_in_transaction_session_timeout = '100ms'")
        database.commit()
        alive = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        told = pytest.raises(RolledBack, match="idle for longer than idle_in_transaction_session_timeout")
        with told as raised, dbtx(database, producer, table="idle") as tx:
            tx.send(topic, b"1")
            wait_until(lambda: not watcher.execute(alive, (database.info.backend_pid,)).fetchall())
        assert "new connection" in str(raised.value)
    assert messages(running, topic) == []


def test_a_limit_is_shown_as_it_was_given() -> None:
    assert "longer than 10 s" in str(Timeout("the call", 9.99998))
    assert "within 0.05 s" in str(DeliveryTimeout("it", 0.05))
