"""What is in the tests' databases and topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from metamq.testing import Cluster

Connect = Callable[[], Any]


def is_postgres(connection: Any) -> bool:
    return isinstance(connection, psycopg.Connection)


def rows(database: Any) -> list[bytes]:
    found = sorted(bytes(body) for (body,) in database.execute("SELECT body FROM orders"))
    database.rollback()
    return found


def messages(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return sorted(message.value for message in consumer)


def decisions(database: Any) -> list[str]:
    found = database.execute("SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id'").fetchall()
    database.rollback()
    return sorted(outcome for (outcome,) in found)


def insert(database: Any, body: bytes) -> None:
    database.execute(f"INSERT INTO orders VALUES ({'%s' if is_postgres(database) else '?'})", (body,))
