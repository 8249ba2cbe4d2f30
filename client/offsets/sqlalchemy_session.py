"""SQL in the transaction of SQLAlchemy's Session or Connection, and of theirs for asyncio.

Statements are SQLAlchemy's text(): then each of its drivers works, and its log and its events show them. A Session
begins its transaction with the first statement, whoever executes it: so the application's statements and these are in
one. The Session itself commits: it flushes its objects, and calls its hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from metamq.client.offsets.dbapi import MYSQL, Database, settled
from metamq.errors import ConfigError


class SqlAlchemy(Database):
    """A Session, AsyncSession, Connection or AsyncConnection. A scoped_session stands for its present Session."""

    def __init__(self, given: Any) -> None:
        session = given() if hasattr(given, "registry") else given
        super().__init__(session, None)
        self.is_asyncio = inspect.iscoroutinefunction(session.commit)
        name: str = _bind(session).dialect.name
        self.dialect = MYSQL if name == "mariadb" else name

    async def rows(self, sql: str, values: Sequence[object] = ()) -> list[Sequence[Any]]:
        return [tuple(row) for row in await self._executed(sql, values)]

    async def change(self, sql: str, values: Sequence[object] = ()) -> int:
        changed: int = (await self._executed(sql, values)).rowcount
        return changed

    async def _executed(self, sql: str, values: Sequence[object]) -> Any:
        from sqlalchemy import text

        named = {f"p{number}": value for number, value in enumerate(values, start=1)}
        statement = text(sql.format(*(f":{name}" for name in named)) if values else sql)
        return await settled(self.connection.execute(statement.execution_options(preserve_rowcount=True), named))

    async def begin(self) -> None:
        given = self.connection
        own = getattr(given, "sync_session", None) or getattr(given, "sync_connection", None) or given
        if getattr(own, "_trans_context_manager", None) is not None:
            kind = type(own).__name__
            raise ConfigError(
                f"the {kind} is in a `with ....begin()`, which lasts longer than the transaction of this block",
                hint=f"Leave out the outer `begin()`: the block begins and commits the {kind}'s transaction.",
            )
        bind = _bind(self.connection)
        if _is_session(self.connection) and hasattr(bind, "in_transaction") and bind.in_transaction():
            raise ConfigError(
                "the Session is bound to a connection that is in a transaction, which may end later than the Session's",
                hint="Bind the Session to an engine.",
            )

    async def flush(self) -> None:
        if hasattr(self.connection, "flush"):
            await settled(self.connection.flush())

    async def commit(self) -> None:
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        await settled(self.connection.rollback())

    async def driver(self) -> Any:
        return (await self._pooled()).driver_connection

    async def _autocommit(self) -> bool:
        adapter = (await self._pooled()).dbapi_connection  # asyncpg's connection does not know it, but this one does
        return getattr(adapter, "autocommit", False) is True or await super()._autocommit()

    async def _pooled(self) -> Any:
        """Returns the driver's connection as the pool wraps it. A Session takes it when its transaction begins."""
        if _is_session(self.connection):
            connection = await settled(self.connection.connection())
        else:
            connection = self.connection
        return getattr(connection, "sync_connection", connection).connection


def _is_session(given: Any) -> bool:
    return hasattr(given, "get_bind")


def _bind(given: Any) -> Any:
    """Returns the engine or connection of the statements. Raises ConfigError if only the mapped classes have some."""
    from sqlalchemy.exc import UnboundExecutionError

    try:
        return given.get_bind() if _is_session(given) else given
    except UnboundExecutionError as error:
        raise ConfigError(
            "the Session has no engine for statements without a mapped class",
            hint="Make it with Session(engine): its rows, and what metamq writes, must be in one database.",
        ) from error
