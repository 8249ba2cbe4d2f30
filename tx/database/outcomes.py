"""The table in which a database decides about transactions: a row `commit`, in the application's own transaction.

    gtrid VARCHAR(128) primary key    the global transaction, in hexadecimal; "@id" names the table itself
    outcome VARCHAR(16)               "commit" or "abort"
    at BIGINT                         when the row was written, microseconds since 1970

The application inserts `commit` as the last statement of its transaction: the database's own commit is the decision. A
recoverer that finds a prepared branch inserts `abort`: who comes second violates the key. So a slow application fails
rather than be decided about twice, and a recoverer waits for an application whose insert is not committed yet.

Every gtrid begins with the table's id, so that the recoverer of one database leaves alone what another one decides.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection
from typing import Any

from metamq.client.offsets.dbapi import POSTGRESQL, SQLITE, Database, check_table
from metamq.errors import ConfigError

ID_ROW = "@id"
COMMIT, ABORT = "commit", "abort"
DEFAULT_TABLE = "metamq_outcomes"

_LOCK_WAIT = "SET LOCAL lock_timeout = '1s'"
"""An application that is paused between its insert and its commit holds up no other branch than its own."""
_SURE = (
    "INSERT INTO {table} (gtrid, outcome, at) SELECT {{}}, {{}}, {{}} FROM set_config('synchronous_commit', "
    "CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, "
    "true)"
)
"""Where a commit may be answered before it is on the disk, this one is not: the messages follow it."""
_BEGAN = "(extract(epoch FROM transaction_timestamp()) * 1000000)::bigint"
"""The same throughout a transaction of PostgreSQL, and another one in the next."""
_SAVEPOINT = "metamq_dbtx"
"""In sqlite3's: it is gone once that transaction is."""


class TransactionEnded(Exception):
    """The connection's transaction is not the one that began with the block."""


class OutcomeTable:
    """The SQL of it, for connections of any kind. Raises what the database raises; ends no transaction unless it says
    so."""

    def __init__(self, table: str = DEFAULT_TABLE) -> None:
        self.name = check_table(table)

    async def create(self, database: Database) -> None:
        """Makes the table unless it is there, and gives it its id. Commits."""
        await database.change(
            f"CREATE TABLE IF NOT EXISTS {self.name} ("
            "gtrid VARCHAR(128) NOT NULL PRIMARY KEY, outcome VARCHAR(16) NOT NULL, at BIGINT NOT NULL)"
        )
        await database.commit()
        if await self._read(database, ID_ROW) is None:
            try:
                await self._insert(database, ID_ROW, secrets.token_hex(8))
                await database.commit()
            except Exception:  # somebody else was faster
                await database.rollback()
        else:
            await database.rollback()  # no transaction stays open

    async def identity(self, database: Database) -> bytes:
        """What the gtrids of this database begin with. Raises ConfigError when there is no table."""
        return (await self._identity(database, "outcome"))[0]

    async def begin(self, database: Database) -> tuple[bytes, int]:
        """Marks the transaction that is under way, or begins one, so that its end is noticed. Returns the identity, and
        the mark, which check() and commit() take. Of other databases than SQLite and PostgreSQL nothing is noticed.
        Raises as identity()."""
        await database.begin()
        if database.dialect == POSTGRESQL:
            identity, began = await self._identity(database, f"outcome, {_BEGAN}")
            return identity, int(began)
        identity, _outcome = await self._identity(database, "outcome")
        if database.dialect == SQLITE:
            if not database.connection.in_transaction:  # the release of a savepoint alone would commit
                await database.change(f"BEGIN {database.connection.isolation_level or ''}")
            await database.change(f"SAVEPOINT {_SAVEPOINT}")
        return identity, 0

    async def _identity(self, database: Database, columns: str) -> tuple[bytes, Any]:
        """And what is in the last of the columns."""
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
            f"the database has no table {self.name}",
            hint="Make it once: `metamq.tx.create_outcome_table(connection)`.",
        )

    async def check(self, database: Database, mark: int) -> None:
        """Raises TransactionEnded; and what the database raises where the transaction has failed, and could not be
        committed. Once it was called, or commit(), SQLite's is not marked any more."""
        if database.dialect == SQLITE:
            await _release(database)
        elif database.dialect == POSTGRESQL:
            ((began,),) = await database.rows(f"SELECT {_BEGAN}")
            if began != mark:
                raise TransactionEnded
        else:
            await self._read(database, ID_ROW)

    async def commit(self, database: Database, gtrid: bytes, mark: int | None = None) -> None:
        """Writes the decision into the connection's transaction. Raises TransactionEnded where that is not the one with
        the mark."""
        if database.dialect != POSTGRESQL:
            if mark is not None and database.dialect == SQLITE:
                await _release(database)
            await self._insert(database, gtrid.hex(), COMMIT)
            return
        sql, values = _SURE.format(table=self.name), (gtrid.hex(), COMMIT, time.time_ns() // 1000)
        if mark is None:
            await database.change(sql, values)
        elif not await database.change(f"{sql} WHERE {_BEGAN} = {{}}", (*values, mark)):
            raise TransactionEnded

    async def decide(self, database: Database, gtrid: bytes) -> str | None:
        """The outcome: `abort` from now on unless it was decided. None: it cannot be told at present. Commits."""
        key = gtrid.hex()
        known = await self._read(database, key)
        if known is None:
            try:
                if database.dialect == POSTGRESQL:
                    await database.change(_LOCK_WAIT)
                await self._insert(database, key, ABORT)
                await database.commit()
            except Exception:  # the key is there by now, or is about to be, or the database is busy
                await database.rollback()
            known = await self._read(database, key)
        await database.rollback()
        return known

    async def older(self, database: Database, before_us: int, outcome: str) -> list[bytes]:
        """The gtrids that were decided so before that time. Ends the transaction."""
        sql = f"SELECT gtrid FROM {self.name} WHERE outcome = {{}} AND at < {{}}"
        keys = [key for (key,) in await database.rows(sql, (outcome, before_us))]
        await database.rollback()
        return [bytes.fromhex(key) for key in keys if key != ID_ROW]

    async def forget(self, database: Database, gtrids: Collection[bytes]) -> None:
        """Removes decisions. Commits."""
        for gtrid in gtrids:
            await database.change(f"DELETE FROM {self.name} WHERE gtrid = {{}}", (gtrid.hex(),))
        await database.commit()

    async def _read(self, database: Database, key: str) -> str | None:
        row = await self._row(database, key, "outcome")
        return row[0] if row is not None else None

    async def _row(self, database: Database, key: str, columns: str) -> Any:
        found = await database.rows(f"SELECT {columns} FROM {self.name} WHERE gtrid = {{}}", (key,))
        return found[0] if found else None

    async def _insert(self, database: Database, key: str, outcome: str) -> None:
        sql = f"INSERT INTO {self.name} (gtrid, outcome, at) VALUES ({{}}, {{}}, {{}})"
        await database.change(sql, (key, outcome, time.time_ns() // 1000))


async def _release(database: Database) -> None:
    try:
        await database.change(f"RELEASE {_SAVEPOINT}")
    except sqlite3.OperationalError as error:
        if "no such savepoint" in str(error):
            raise TransactionEnded from None
        raise


def _is_about_the_table(error: Exception) -> bool:
    """PEP 249 has a table that is not there as a ProgrammingError of the module's own; but not sqlite3, and asyncpg
    does not follow it."""
    if isinstance(error, sqlite3.Error):
        return "no such table" in str(error)
    return any(cls.__name__ in ("ProgrammingError", "UndefinedTableError") for cls in type(error).__mro__)
