"""The data manager for the `transaction` package: messages follow the database, whichever step fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transaction

from metamq import Producer
from metamq.errors import BufferFull, ConfigError, TopicNotFound
from metamq.tx import Recovered, Recoverer, create_outcome_table, join_transaction

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

STEPS = ["tpc_begin", "commit", "tpc_vote", "tpc_finish"]


class Rows:
    """A database's data manager as zope.sqlalchemy has it: commits in its vote, and sorts last."""

    transaction_manager = None

    def __init__(self, database: sqlite3.Connection, key: str = "~rows") -> None:
        self.database = database
        self.key = key
        self.fails = ""

    def sortKey(self) -> str:
        return self.key

    def __getattr__(self, name: str) -> Any:
        if name not in (*STEPS, "tpc_abort", "abort"):
            raise AttributeError(name)

        def step(_transaction: Any) -> None:
            if name == self.fails:
                raise KeyError(name)
            if self.key != "~rows":
                return
            if name == "tpc_vote":
                self.database.commit()
            elif name in ("tpc_abort", "abort"):
                self.database.rollback()

        return step

    def savepoint(self) -> Any:
        return self

    def rollback(self) -> None:
        """Nothing: these tests look at messages."""


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper, buffer_bytes=100_000) as made:
        yield made


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


Connect = Callable[[], sqlite3.Connection]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    def opened() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "app.db", timeout=1, check_same_thread=False)

    database = opened()
    create_outcome_table(database)
    database.execute("CREATE TABLE orders (body BLOB)")
    database.commit()
    database.close()
    return opened


@pytest.fixture
def database(connect: Connect) -> Iterator[sqlite3.Connection]:
    made = connect()
    yield made
    made.close()


@pytest.fixture
def manager() -> Iterator[Any]:
    made = transaction.TransactionManager()
    yield made
    made.abort()


def rows(connect: Connect) -> list[bytes]:
    database = connect()
    found = [body for (body,) in database.execute("SELECT body FROM orders")]
    database.close()
    return sorted(found)


def test_rows_and_messages_happen_together(
    shop: Shop, topic: str, producer: Producer[bytes], database: sqlite3.Connection, connect: Connect, manager: Any
) -> None:
    for body in (b"1", b"2"):
        with manager:
            manager.get().join(Rows(database))
            mq = join_transaction(producer, lambda: database, manager)
            database.execute("INSERT INTO orders VALUES (?)", (body,))
            mq.send(topic, body, partition="0-0")
            mq.send(topic, body, partition="1-0")
    with pytest.raises(KeyError), manager:  # noqa: PT012
        manager.get().join(Rows(database))
        mq = join_transaction(producer, database, manager)
        database.execute("INSERT INTO orders VALUES (?)", (b"3",))
        mq.send(topic, b"3")
        raise KeyError
    with manager:  # nothing is sent, nothing is decided
        manager.get().join(Rows(database))
        join_transaction(producer, database, manager)
        database.execute("INSERT INTO orders VALUES (?)", (b"4",))
    assert rows(connect) == [b"1", b"2", b"4"]
    assert shop.seen(topic) == [b"1", b"1", b"2", b"2"]
    shop.until_ended()


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("key", ["a", "~a", "~z"])
@pytest.mark.parametrize("step", STEPS)
def test_another_manager_fails(
    shop: Shop, topic: str, producer: Producer[bytes], connect: Connect, manager: Any, step: str, key: str, asks: bool
) -> None:
    """Before or after ours and the database's, at each step. Both happen, or neither, at the latest by a recoverer."""
    database = connect()
    another = Rows(database, key)
    another.fails = step
    with pytest.raises(KeyError), manager:  # noqa: PT012
        manager.get().join(Rows(database))
        manager.get().join(another)
        mq = join_transaction(producer, database, manager, connect=connect if asks else None)
        database.execute("INSERT INTO orders VALUES (?)", (b"1",))
        mq.send(topic, b"1")
    manager.abort()
    database.close()
    if asks:
        shop.until_ended()
    with Recoverer(connect, shop.cluster.zookeeper, grace_s=0) as recoverer:
        done = recoverer.run_once()
        assert done.left == 0
        assert not asks or done == Recovered(0, 0, 0)
    shop.until_ended()
    assert shop.seen(topic) == rows(connect)
    committed = step == "tpc_finish" or (step == "tpc_vote" and key == "~z")
    assert rows(connect) == ([b"1"] if committed else [])


def test_savepoints(
    shop: Shop, topic: str, producer: Producer[bytes], database: sqlite3.Connection, manager: Any
) -> None:
    with manager:
        manager.get().join(Rows(database))
        mq = join_transaction(producer, database, manager)
        mq.send(topic, b"1")
        first = transaction_savepoint(manager)
        mq.send(topic, b"2")
        second = transaction_savepoint(manager)
        mq.send(topic, b"3")
        second.rollback()
        mq.send(topic, b"4")
        first.rollback()
        mq.send(topic, b"5")
        with pytest.raises(BufferFull):  # noqa: PT012
            for _ in range(200):
                mq.send(topic, bytes(1000))
        first.rollback()
        mq.send(topic, b"6")
    assert shop.seen(topic) == [b"1", b"6"]


def transaction_savepoint(manager: Any) -> Any:
    return manager.get().savepoint()


def test_a_message_that_cannot_be_sent_fails_the_transaction(
    shop: Shop, topic: str, producer: Producer[bytes], connect: Connect, manager: Any
) -> None:
    database = connect()
    with pytest.raises(TopicNotFound), manager:  # noqa: PT012
        manager.get().join(Rows(database))
        mq = join_transaction(producer, database, manager)
        database.execute("INSERT INTO orders VALUES (?)", (b"1",))
        mq.send(topic, b"1")
        mq.send("nowhere", b"1")
    manager.abort()
    database.close()
    assert rows(connect) == shop.seen(topic) == []
    with pytest.raises(TopicNotFound):
        mq.send(topic, b"late")
    shop.until_ended()


def test_what_is_missing_is_said(producer: Producer[bytes], tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    with pytest.raises(ConfigError, match="create_outcome_table"):
        join_transaction(producer, other)
    other.close()
