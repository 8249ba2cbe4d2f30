"""What is in the tests' databases and topics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
import psycopg.rows

from metamq.errors import RolledBack
from metamq.testing import Cluster
from tests.parts import read_to_end

T = TypeVar("T")
Connect = Callable[[], Any]


def until_committed(transact: Callable[[], T]) -> T:
    """What it returns. Who stands still for longer than brokers leave a transaction over several of them to its client
    is told that it was rolled back, and begins anew, as applications do."""
    for _ in range(20):
        with contextlib.suppress(RolledBack):
            return transact()
    raise AssertionError("it is rolled back again and again")


def is_postgres(connection: Any) -> bool:
    return isinstance(connection, psycopg.Connection)


def giving_mappings(connect: Connect) -> Connect:
    """The same connections, as those have them who want their columns by name."""

    def opened() -> Any:
        connection = connect()
        connection.row_factory = (
            psycopg.rows.dict_row
            if is_postgres(connection)
            else lambda cursor, row: {column[0]: value for column, value in zip(cursor.description, row, strict=True)}
        )
        return connection

    return opened


def rows(database: Any) -> list[bytes]:
    found = sorted(bytes(body) for (body,) in database.execute("SELECT body FROM orders"))
    database.rollback()
    return found


def messages(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return sorted(message.value for message in read_to_end(consumer))


def decisions(database: Any) -> list[str]:
    found = database.execute("SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id'").fetchall()
    database.rollback()
    return sorted(outcome for (outcome,) in found)


def insert(database: Any, body: bytes) -> None:
    database.execute(f"INSERT INTO orders VALUES ({'%s' if is_postgres(database) else '?'})", (body,))
