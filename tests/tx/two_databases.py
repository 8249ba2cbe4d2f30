"""Two databases of one PostgreSQL server, for tests of the Coordinator, and all that its transactions leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from tests.postgres import Postgres

if TYPE_CHECKING:
    from tests.tx.conftest import Shop


class Databases:
    """Two in one server."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.dsn = server.dsn.replace(" dbname=postgres", "")
        for name in "ab":
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")
            with self.connect(name) as connection:
                connection.execute("CREATE TABLE orders (body TEXT PRIMARY KEY)")

    def connect(self, name: str) -> psycopg.Connection[Any]:
        return psycopg.connect(f"{self.dsn} dbname={name}")

    def rows(self, name: str) -> list[str]:
        with self.connect(name) as connection:
            return [row[0] for row in connection.execute("SELECT body FROM orders ORDER BY body")]

    def prepared(self) -> int:
        with self.connect("a") as connection:
            (count,) = connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() or (0,)
            return int(count)

    def empty(self) -> None:
        """Deletes the rows."""
        for name in "ab":
            with self.connect(name) as connection:
                connection.execute("DELETE FROM orders")


def holds(shop: Shop, databases: Databases, topic: str, bodies: list[str]) -> None:
    """Each at both databases once, and twice in the queue; nothing is prepared anywhere."""
    assert databases.rows("a") == databases.rows("b") == bodies
    assert shop.seen(topic) == sorted([body.encode() for body in bodies] * 2)
    assert databases.prepared() == 0
    shop.until_ended()
