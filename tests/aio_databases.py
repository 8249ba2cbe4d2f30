"""Databases of tests, by their drivers for asyncio: psycopg's AsyncConnection, asyncpg, aiosqlite."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import aiosqlite
import asyncpg
import psycopg.conninfo
import pytest

from tests.postgres import new_schema

ASYNCIO_DRIVERS = ["psycopg", "asyncpg", "aiosqlite"]


async def open_asyncpg(dsn: str, **options: str) -> Any:
    """`dsn`: a connection string of libpq, which asyncpg does not read."""
    named = psycopg.conninfo.conninfo_to_dict(dsn)
    return await asyncpg.connect(
        host=named["host"], user=named["user"], database=named["dbname"], server_settings=options
    )


class AioDatabase(NamedTuple):
    """A database of one test's own."""

    driver: str
    connect: Callable[[], Awaitable[Any]]
    """Opens a connection for asyncio."""
    connect_blocking: Callable[[], Any]

    @property
    def blob(self) -> str:
        """The type of bytes."""
        return "BLOB" if self.driver == "aiosqlite" else "BYTEA"

    def one(self, sql: str) -> list[Any]:
        """The first column of what a query gives, read by a blocking connection of its own."""
        with closing(self.connect_blocking()) as connection:
            return [row[0] for row in connection.execute(sql).fetchall()]

    def execute(self, sql: str) -> None:
        """Runs and commits a statement, by a blocking connection of its own."""
        with closing(self.connect_blocking()) as connection:
            connection.execute(sql)
            connection.commit()


def aio_database(driver: str, request: pytest.FixtureRequest, folder: Path) -> AioDatabase:
    """With psycopg and asyncpg in a schema of its own, in the server of the fixture `postgres`."""
    if driver == "aiosqlite":
        path = folder / "results.db"
        return AioDatabase(
            driver, lambda: aiosqlite.connect(path, timeout=60), lambda: sqlite3.connect(path, timeout=60)
        )
    server = request.getfixturevalue("postgres")
    schema = new_schema(server)
    options = f"-c search_path={schema}"
    opened: dict[str, Callable[[], Awaitable[Any]]] = {
        "psycopg": lambda: psycopg.AsyncConnection.connect(server, options=options),
        "asyncpg": lambda: open_asyncpg(server, search_path=schema),
    }
    return AioDatabase(driver, opened[driver], lambda: psycopg.connect(server, options=options))
