"""The connections that an application may give, and their recognition.

    connection                                                  recognized by                    parameters
    blocking, PEP 249: sqlite3, psycopg, PyMySQL                cursor, commit, rollback         its module's paramstyle
    asyncio: psycopg.AsyncConnection, aiosqlite.Connection      the same; commit is a coroutine  its module's paramstyle
    asyncio: asyncpg.Connection, also from a pool               transaction, is_in_transaction   $1, $2
    SQLAlchemy: Session, Connection, and theirs for asyncio     the package of its class         SQLAlchemy's text()
    Django: django.db.connection, connections["default"]        the package of its class         %s

Only `database_of` recognizes the kind. SQLAlchemy and Django are imported only for objects of theirs.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from metamq.client.checks import wrong_type
from metamq.client.offsets.dbapi import Asyncio, Asyncpg, Blocking, Database, check_paramstyle
from metamq.client.offsets.django_connection import DjangoConnection
from metamq.client.offsets.sqlalchemy_session import SqlAlchemy
from metamq.errors import ConfigError


class DatabaseConnection(Protocol):
    """The methods of a blocking DB-API connection that metamq uses."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class AsyncioConnection(Protocol):
    """The methods that metamq uses of an asyncio DB-API connection: psycopg.AsyncConnection, aiosqlite.Connection."""

    def cursor(self) -> Any: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def close(self) -> None: ...


class AsyncpgConnection(Protocol):
    """The methods of an asyncpg connection that metamq uses."""

    def transaction(self) -> Any: ...
    def is_in_transaction(self) -> bool: ...
    def execute(self, query: str, *args: Any) -> Any: ...
    def fetch(self, query: str, *args: Any) -> Any: ...


class SqlAlchemyConnection(Protocol):
    """The methods that metamq uses of SQLAlchemy's Session, and of its Connection."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class SqlAlchemyAsyncioConnection(Protocol):
    """The same methods of AsyncSession, and of AsyncConnection."""

    async def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def close(self) -> None: ...


BlockingConnection = DatabaseConnection | SqlAlchemyConnection
AnyConnection = BlockingConnection | AsyncioConnection | AsyncpgConnection | SqlAlchemyAsyncioConnection
NOT_GIVEN: Any = object()
"""The default of a connection argument. None may be a mistake of the caller."""


def database_of(connection: object, paramstyle: str | None = None) -> Database:
    """Returns the Database of a connection. `paramstyle`: None takes that of the connection's module.

    Raises WrongType if it is not a connection, ConfigError for an unknown paramstyle.
    """
    if paramstyle is not None:
        check_paramstyle(paramstyle)
    connection = getattr(connection, "driver_connection", None) or connection  # of SQLAlchemy's pool
    packages = {cls.__module__.partition(".")[0] for cls in type(connection).__mro__}
    if "sqlalchemy" in packages and hasattr(connection, "execute") and hasattr(connection, "commit"):
        return SqlAlchemy(connection)
    if "django" in packages and hasattr(connection, "alias"):
        return DjangoConnection(connection)
    if all(hasattr(connection, name) for name in ("cursor", "commit", "rollback")):
        waits = inspect.iscoroutinefunction(getattr(connection, "commit", None))
        return Asyncio(connection, paramstyle) if waits else Blocking(connection, paramstyle)
    if all(hasattr(connection, name) for name in ("transaction", "is_in_transaction", "fetch", "execute")):
        return Asyncpg(connection, paramstyle)
    raise wrong_type(
        "`connection`", "a connection of a DB-API driver, asyncpg, aiosqlite, SQLAlchemy or Django", connection
    )


def blocking_database_of(connection: object, paramstyle: str | None, hint: str) -> Database:
    """Returns the Database of a blocking connection. Raises ConfigError, with the hint, for an asyncio connection."""
    database = database_of(connection, paramstyle)
    if database.is_asyncio:
        kind = type(connection)
        raise ConfigError(f"the connection is one for asyncio, of {kind.__module__}.{kind.__qualname__}", hint=hint)
    return database
