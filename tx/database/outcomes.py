"""The table in which a database decides about transactions: a row `commit`, in the application's own transaction.

    gtrid VARCHAR(128) primary key    the global transaction, in hexadecimal; "@id" names the table itself
    outcome VARCHAR(16)               "commit" or "abort"
    at BIGINT                         when the row was written, microseconds since 1970

The application inserts `commit` as the last statement of its transaction: the database's own commit is the decision. A
recoverer that finds a prepared branch inserts `abort`. The later of the two inserts violates the key. So a slow
application fails, and no transaction gets two decisions. A recoverer waits while an application's insert is not
committed yet.

Every gtrid begins with the table's id. So a recoverer changes only transactions of its own database.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection
from typing import Any

from metamq.client.offsets.dbapi import MYSQL, POSTGRESQL, SQLITE, Database, check_table
from metamq.errors import ConfigError

ID_ROW = "@id"
COMMIT, ABORT = "commit", "abort"
DEFAULT_TABLE = "metamq_outcomes"

_LOCK_WAIT = "SET LOCAL lock_timeout = '1s'"
"""Limits a wait: an application that pauses between its insert and its commit delays only its own branch."""
_SURE = (
    "INSERT INTO {table} (gtrid, outcome, at) SELECT {{}}, {{}}, {{}} FROM set_config('synchronous_commit', "
    "CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, "
    "true)"
)
"""Turns synchronous commit on, as the messages follow this commit: it must be on the disk before it is answered."""
_BEGAN = "(extract(epoch FROM transaction_timestamp()) * 1000000)::bigint"
"""The same value throughout a transaction of PostgreSQL, and another value in the next."""
_SAVEPOINT = "metamq_dbtx"
"""A savepoint of SQLite and MySQL: it ends with its transaction."""


_WITH_SAVEPOINT = (SQLITE, MYSQL)
_NO_SAVEPOINT = "no such savepoint", f"SAVEPOINT {_SAVEPOINT} does not exist"
"""The errors of SQLite and MySQL for a savepoint whose transaction has ended."""


class TransactionEnded(Exception):
    """The connection's transaction is not the one that began with the block."""


class OutcomeTable:
    """The SQL of the table, for connections of any kind. Raises the database's errors. A method ends the transaction
    only if its docstring says so."""

    def __init__(self, table: str = DEFAULT_TABLE) -> None:
        self.name = check_table(table)

    async def create(self, database: Database) -> None:
        """Creates the table unless it exists, and gives it its id. Commits."""
        await database.change(
            f"CREATE TABLE IF NOT EXISTS {self.name} ("
            "gtrid VARCHAR(128) NOT NULL PRIMARY KEY, outcome VARCHAR(16) NOT NULL, at BIGINT NOT NULL)"
            f"{database.table_options}"
        )
        await database.commit()
        if await self._read(database, ID_ROW) is None:
            try:
                await self._insert(database, ID_ROW, secrets.token_hex(8))
                await database.commit()
            except Exception:  # another process has inserted the id
                await database.rollback()
        else:
            await database.rollback()  # leaves no transaction open

    async def identity(self, database: Database) -> bytes:
        """Returns the prefix of this database's gtrids. Raises ConfigError if there is no table."""
        return (await self._identity(database, "outcome"))[0]

    async def begin(self, database: Database) -> tuple[bytes, int]:
        """Marks the connection's transaction, so that its end is noticed; begins one if there is none. Returns the
        identity, and the mark for check() and commit(). Works for SQLite, MySQL and PostgreSQL; others do not
        notice the end. Raises the errors of identity()."""
        await database.begin()
        if database.dialect == POSTGRESQL:
            identity, began = await self._identity(database, f"outcome, {_BEGAN}")
            return identity, int(began)
        identity, _outcome = await self._identity(database, "outcome")
        if database.dialect == SQLITE:
            driver = await database.driver()
            if not driver.in_transaction:  # without BEGIN the release of a savepoint would commit
                await database.change(f"BEGIN {driver.isolation_level or ''}")
        if database.dialect in _WITH_SAVEPOINT:
            await database.change(f"SAVEPOINT {_SAVEPOINT}")
        return identity, 0

    async def _identity(self, database: Database, columns: str) -> tuple[bytes, Any]:
        """Returns the identity, and the value of the last column."""
        try:
            row = await self._row(database, ID_ROW, columns)
        except Exception as error:
            if _is_about_the_table(error):
                raise self._missing() from error
            raise
        if row is None:
            raise self._missing()
        return f"db:{row[0]}:".encode(), row[-1]

    def _missing(self) -> ConfigError:
        return ConfigError(
            f"the database has no table {self.name}", hint="Make it once: `metamq.tx.create_outcome_table(connection)`."
        )

    async def check(self, database: Database, mark: int) -> None:
        """Raises TransactionEnded if the marked transaction has ended. Raises the database's error if the transaction
        has failed, and could not be committed. After check() or commit(), a transaction of SQLite or MySQL has no
        mark."""
        if database.dialect in _WITH_SAVEPOINT:
            await _release(database)
        elif database.dialect == POSTGRESQL:
            ((began,),) = await database.rows(f"SELECT {_BEGAN}")
            if began != mark:
                raise TransactionEnded
        else:
            await self._read(database, ID_ROW)

    async def commit(self, database: Database, gtrid: bytes, mark: int | None = None) -> None:
        """Writes the decision into the connection's transaction. Raises TransactionEnded if the marked transaction has
        ended."""
        if database.dialect != POSTGRESQL:
            if mark is not None and database.dialect in _WITH_SAVEPOINT:
                await _release(database)
            await self._insert(database, gtrid.hex(), COMMIT)
            return
        sql, values = _SURE.format(table=self.name), (gtrid.hex(), COMMIT, time.time_ns() // 1000)
        if mark is None:
            await database.change(sql, values)
        elif not await database.change(f"{sql} WHERE {_BEGAN} = {{}}", (*values, mark)):
            raise TransactionEnded

    async def decide(self, database: Database, gtrid: bytes) -> str | None:
        """Returns the outcome. Decides `abort` if there was none. None: the outcome is unknown now. Commits."""
        key = gtrid.hex()
        known = await self._committed(database, key)
        if known is None:
            try:
                if database.dialect == POSTGRESQL:
                    await database.change(_LOCK_WAIT)
                elif database.dialect == MYSQL:  # fails at once while another transaction has inserted the key
                    await self._row(database, key, "outcome", "FOR UPDATE NOWAIT")
                await self._insert(database, key, ABORT)
                await database.commit()
            except Exception:  # the key is there now, or another process is inserting it, or the database is busy
                await database.rollback()
            known = await self._committed(database, key)
        await database.rollback()
        return known

    async def older(self, database: Database, before_us: int, outcome: str) -> list[bytes]:
        """Returns the gtrids with this outcome that were decided before that time. Ends the transaction."""
        sql = f"SELECT gtrid FROM {self.name} WHERE outcome = {{}} AND at < {{}}"
        keys = [key for (key,) in await database.rows(sql, (outcome, before_us))]
        await database.rollback()
        return [bytes.fromhex(key) for key in keys if key != ID_ROW]

    async def forget(self, database: Database, gtrids: Collection[bytes]) -> None:
        """Removes decisions. Commits."""
        for gtrid in gtrids:
            await database.change(f"DELETE FROM {self.name} WHERE gtrid = {{}}", (gtrid.hex(),))
        await database.commit()

    async def _committed(self, database: Database, key: str) -> str | None:
        """Returns an outcome that is committed: at READ UNCOMMITTED, MySQL also reads others, unless it locks them."""
        return await self._read(database, key, "FOR UPDATE SKIP LOCKED" if database.dialect == MYSQL else "")

    async def _read(self, database: Database, key: str, lock: str = "") -> str | None:
        row = await self._row(database, key, "outcome", lock)
        return row[0] if row is not None else None

    async def _row(self, database: Database, key: str, columns: str, lock: str = "") -> Any:
        found = await database.rows(f"SELECT {columns} FROM {self.name} WHERE gtrid = {{}} {lock}", (key,))
        return found[0] if found else None

    async def _insert(self, database: Database, key: str, outcome: str) -> None:
        sql = f"INSERT INTO {self.name} (gtrid, outcome, at) VALUES ({{}}, {{}}, {{}})"
        await database.change(sql, (key, outcome, time.time_ns() // 1000))


async def _release(database: Database) -> None:
    try:
        await database.change(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except Exception as error:  # each driver has its own
        if any(says in str(error) for says in _NO_SAVEPOINT):
            raise TransactionEnded from None
        raise


def _is_about_the_table(error: Exception) -> bool:
    """True if the error says that the table is missing. PEP 249 modules raise their own ProgrammingError; SQLite's and
    asyncpg do not."""
    if "no such table" in str(error):
        return True
    return not isinstance(error, sqlite3.Error) and any(
        cls.__name__ in ("ProgrammingError", "UndefinedTableError") for cls in type(error).__mro__
    )
