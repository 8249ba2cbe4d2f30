"""SQL on the application's own database connection: one interface, and the kinds that are drivers' own connections.

The code that works with a database exists once, as coroutines on a Database. Coroutines on a blocking connection never
wait for a loop: `at_once` runs them without one, in the caller's thread. If a driver returns an awaitable where its
kind must not, that is an error: no statement is dropped silently.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metamq.errors import ConfigError

log = logging.getLogger("metamq.client")

_TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,62}\.)?[A-Za-z_][A-Za-z0-9_]{0,62}")

_PLACEHOLDERS: Mapping[str, Callable[[int], str]] = {
    "qmark": lambda number: "?",
    "format": lambda number: "%s",
    "named": lambda number: f":p{number}",
    "pyformat": lambda number: f"%(p{number})s",
}

POSTGRESQL, SQLITE, MYSQL = "postgresql", "sqlite", "mysql"
_DIALECTS = {
    "psycopg": POSTGRESQL, "psycopg2": POSTGRESQL, "pg8000": POSTGRESQL, "asyncpg": POSTGRESQL,
    "sqlite3": SQLITE, "aiosqlite": SQLITE,
    "pymysql": MYSQL, "MySQLdb": MYSQL, "mariadb": MYSQL, "mysql": MYSQL,
}  # fmt: skip
"""The dialect by the module of the connection's class, or of one of its base classes."""
_IDLE = 0
"""PostgreSQL's transaction status without a transaction, as in psycopg."""
_MYSQL_IN_TRANSACTION = 1
"""A bit of the status that PyMySQL shows; mysqlclient shows none."""


class Database(ABC):
    """A connection, with one interface for all kinds. Raises the driver's errors."""

    is_asyncio = True
    """True if its coroutines need a loop."""

    def __init__(self, connection: Any, paramstyle: str | None) -> None:
        self.connection = connection
        modules = (cls.__module__.partition(".")[0] for cls in type(connection).__mro__)
        self.dialect = next((_DIALECTS[module] for module in modules if module in _DIALECTS), "")
        """The dialect: `POSTGRESQL`, `SQLITE`, `MYSQL` with MariaDB, or "" for others."""
        self._paramstyle = paramstyle

    @abstractmethod
    async def rows(self, sql: str, values: Sequence[object] = ()) -> list[Sequence[Any]]:
        """Returns the rows of a query; "{}" in `sql` stands for a value."""

    @abstractmethod
    async def change(self, sql: str, values: Sequence[object] = ()) -> int:
        """Runs a statement. Returns the number of changed rows."""

    @abstractmethod
    async def commit(self) -> None:
        """Commits the transaction."""

    @abstractmethod
    async def rollback(self) -> None:
        """Rolls the transaction back."""

    async def close(self) -> None:
        """Closes the connection."""
        await settled(self.connection.close())

    @property
    def began(self) -> bool:
        """True during a transaction that begin() has begun."""
        return False

    @property
    def table_options(self) -> str:
        """The end of a CREATE TABLE. By default MySQL's names are equal in upper and lower case."""
        return " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if self.dialect == MYSQL else ""

    async def begin(self) -> None:  # noqa: B027 - most drivers begin with the first statement
        """Begins a transaction that commit() ends. Raises ConfigError in a transaction that commit() would not end."""

    async def flush(self) -> None:  # noqa: B027 - only ORMs keep changes back
        """Sends changes that the application has made, and that wait for the commit. Raises the errors of the rows."""

    async def driver(self) -> Any:
        """Returns the driver's own connection, which shows the state of the transaction."""
        return self.connection

    async def check_transactional(self) -> None:
        """Raises ConfigError if each statement would be committed by itself, whatever commit() does."""
        if await self._autocommit():
            raise ConfigError(
                "the connection is in autocommit mode: each statement would be committed by itself, whatever happens "
                "to the messages",
                hint="Open it without autocommit.",
            )

    async def check_in_transaction(self) -> None:
        """Raises ConfigError if the next statement would be committed by itself, as far as the driver shows that."""
        if not await self._autocommit() or self._is_in_transaction(await self.driver()):
            return
        raise ConfigError(
            "the connection is in autocommit mode: the offsets would be stored without the results",
            hint="Open it without autocommit, or commit the offsets inside of a `with connection.transaction()`.",
        )

    async def _autocommit(self) -> bool:
        known = await self.driver()
        if callable(getattr(known, "get_autocommit", None)):  # MySQL's modules
            return bool(known.get_autocommit())
        if self.dialect == SQLITE and _of_sqlite(known, "isolation_level") is None and not known.in_transaction:
            # Since Python 3.12, `autocommit=False` means that there are transactions in this case, too.
            return getattr(known, "autocommit", True) is not False
        return getattr(known, "autocommit", False) is True

    def _is_in_transaction(self, known: Any) -> bool:
        """Returns True during a transaction, and if the driver does not show that."""
        if self.dialect == SQLITE:
            return bool(_of_sqlite(known, "in_transaction"))
        if self.dialect == MYSQL:
            return bool(getattr(known, "server_status", 0) & _MYSQL_IN_TRANSACTION)
        if hasattr(known, "is_in_transaction"):  # asyncpg
            return bool(known.is_in_transaction())
        status = getattr(getattr(known, "info", None), "transaction_status", None)
        return status is None or int(status) != _IDLE

    def _prepared(self, sql: str, values: Sequence[object]) -> tuple[Any, ...]:
        """Returns the arguments of the cursor's execute()."""
        if not values:
            return (sql,)
        style = self._paramstyle or _paramstyle_of(self.connection)
        text = sql.format(*(_PLACEHOLDERS[style](number) for number in range(1, len(values) + 1)))
        if style in ("named", "pyformat"):
            return text, {f"p{number}": value for number, value in enumerate(values, start=1)}
        return text, tuple(values)


class DbApi(Database):
    """A connection with the methods of PEP 249."""

    @abstractmethod
    async def _result(self, returned: Any) -> Any:
        """Returns the result of a call, from its return value."""

    async def rows(self, sql: str, values: Sequence[object] = ()) -> list[Sequence[Any]]:
        cursor = await self._executed(sql, values)
        try:
            return [columns_of(row) for row in await self._result(cursor.fetchall())]
        finally:
            await self._result(cursor.close())

    async def change(self, sql: str, values: Sequence[object] = ()) -> int:
        cursor = await self._executed(sql, values)
        changed: int = cursor.rowcount
        await self._result(cursor.close())
        return changed

    async def _executed(self, sql: str, values: Sequence[object]) -> Any:
        cursor = await self._result(self.connection.cursor())
        try:
            await self._result(cursor.execute(*self._prepared(sql, values)))
        except BaseException:
            await self._result(cursor.close())
            raise
        return cursor

    async def commit(self) -> None:
        await self._result(self.connection.commit())

    async def rollback(self) -> None:
        await self._result(self.connection.rollback())


class Blocking(DbApi):
    """A blocking connection."""

    is_asyncio = False

    async def _result(self, returned: Any) -> Any:
        """Raises ConfigError for an awaitable: then nothing was done."""
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            kind = type(self.connection)
            raise ConfigError(
                f"{kind.__module__}.{kind.__qualname__} looks like a blocking connection, but returned an awaitable",
                hint="Pass the driver's own connection, without a wrapper.",
            )
        return returned


class Asyncio(DbApi):
    """A connection for asyncio whose methods are those of PEP 249, as coroutines."""

    async def _result(self, returned: Any) -> Any:
        return await settled(returned)


class Asyncpg(Database):
    """An asyncpg connection, which commits statements outside of a transaction(). The first statement begins one."""

    _own: Any = None
    """The transaction that was begun here."""
    _is_ours = False
    """True from the begin of a transaction here until an answered commit or rollback. Others are the application's."""

    async def rows(self, sql: str, values: Sequence[object] = ()) -> list[Sequence[Any]]:
        await self._begun()
        return [tuple(row) for row in await self.connection.fetch(_numbered(sql, values), *values)]

    async def change(self, sql: str, values: Sequence[object] = ()) -> int:
        await self._begun()
        status: str = await self.connection.execute(_numbered(sql, values), *values)
        changed = status.rpartition(" ")[2]  # "UPDATE 1", "INSERT 0 1", "CREATE TABLE"
        return int(changed) if changed.isdecimal() else 0

    async def _begun(self) -> None:
        if self._own is None and not self.connection.is_in_transaction():
            own = self.connection.transaction()
            starting = asyncio.ensure_future(own.start())
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:  # the server may still execute BEGIN: end that transaction
                try:
                    await starting
                    await own.rollback()
                except Exception as error:  # the connection is lost, and the transaction with it
                    log.info("a cancelled BEGIN was not rolled back: %r", error)
                raise
            self._own, self._is_ours = own, True

    @property
    def began(self) -> bool:
        return self._own is not None

    async def begin(self) -> None:
        if self.connection.is_in_transaction():
            raise ConfigError(
                "the connection is in a transaction(), which would be committed later than the block",
                hint="Leave it out: the block begins and commits the transaction itself.",
            )
        await self._begun()

    async def _autocommit(self) -> bool:
        return False  # begin() begins

    async def check_in_transaction(self) -> None:
        if not self.connection.is_in_transaction():
            raise ConfigError(
                "the connection is in no transaction: the offsets would be stored without the results",
                hint="Work and commit the offsets in one `async with connection.transaction()`.",
            )

    async def commit(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await own.commit()
            self._is_ours = False

    async def rollback(self) -> None:
        own, self._own = self._own, None
        try:
            if own is not None:
                await own.rollback()
        finally:  # the rollback, or the commit before it, may have been interrupted
            if self._is_ours and self.connection.is_in_transaction():
                await self.connection.execute("ROLLBACK")
        self._is_ours = False


async def settled(result: Any) -> Any:
    """Returns the result of a call that may have returned an awaitable."""
    return await result if inspect.isawaitable(result) else result


def _of_sqlite(connection: Any, name: str) -> Any:
    """Returns an attribute. Raises ConfigError if aiosqlite has no connection."""
    try:
        return getattr(connection, name)
    except ValueError as error:
        raise ConfigError(
            "the connection is closed, or was not awaited",
            hint="Give an open one: `connection = await aiosqlite.connect(...)`.",
        ) from error


def _numbered(sql: str, values: Sequence[object]) -> str:
    return sql.format(*(f"${number}" for number in range(1, len(values) + 1))) if values else sql


def check_table(table: str) -> str:
    """Returns `table`, "name" or "schema.name". Raises ConfigError."""
    if not isinstance(table, str) or not _TABLE.fullmatch(table):
        raise ConfigError(f"{table!r} is not a table name", hint='Use letters, digits and "_", as in "metamq_offsets".')
    return table


def columns_of(row: Any) -> Sequence[Any]:
    """Returns the columns of a row in order, also if the connection returns mappings."""
    return tuple(row.values()) if isinstance(row, Mapping) else row


def _paramstyle_of(connection: object) -> str:
    """Returns the paramstyle of the module of the connection's class, or of a package above it."""
    for cls in type(connection).__mro__:  # an application may have a class of its own
        name = cls.__module__
        while name:
            paramstyle = getattr(sys.modules.get(name), "paramstyle", None)
            if isinstance(paramstyle, str):
                return check_paramstyle(paramstyle)
            name = name.rpartition(".")[0]
    raise ConfigError(
        f"the module of {type(connection).__qualname__} does not declare its paramstyle", hint="Pass paramstyle=...."
    )


def check_paramstyle(paramstyle: str) -> str:
    """Returns `paramstyle`. Raises ConfigError if it is unknown."""
    if paramstyle not in _PLACEHOLDERS:
        raise ConfigError(
            f"paramstyle {paramstyle!r} is unknown",
            hint=f"metamq supports these of PEP 249: {', '.join(_PLACEHOLDERS)}.",
        )
    return paramstyle
