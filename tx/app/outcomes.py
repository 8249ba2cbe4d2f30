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

import inspect
import secrets
import sqlite3
import time
from collections.abc import Collection
from contextlib import closing
from typing import Any

from metamq.client.dbapi import Connection, check_paramstyle, check_table, columns_of, execute
from metamq.errors import ConfigError

ID_ROW = "@id"
COMMIT, ABORT = "commit", "abort"
DEFAULT_TABLE = "metamq_outcomes"

_POSTGRESQL = frozenset({"psycopg", "psycopg2", "pg8000"})
"""Modules whose connections are to PostgreSQL."""
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
    """The SQL of it. Raises what the database raises; ends no transaction unless it says so."""

    def __init__(self, table: str = DEFAULT_TABLE, paramstyle: str | None = None) -> None:
        self.name = check_table(table)
        self._paramstyle = check_paramstyle(paramstyle) if paramstyle is not None else None

    def create(self, connection: Connection) -> None:
        """Makes the table unless it is there, and gives it its id. Commits."""
        execute(
            connection,
            f"CREATE TABLE IF NOT EXISTS {self.name} ("
            "gtrid VARCHAR(128) NOT NULL PRIMARY KEY, outcome VARCHAR(16) NOT NULL, at BIGINT NOT NULL)",
        ).close()
        connection.commit()
        if self._read(connection, ID_ROW) is None:
            try:
                self._insert(connection, ID_ROW, secrets.token_hex(8))
                connection.commit()
            except Exception:  # somebody else was faster
                connection.rollback()

    def identity(self, connection: Connection) -> bytes:
        """What the gtrids of this database begin with. Raises ConfigError when there is no table."""
        return self._identity(connection, "outcome")[0]

    def begin(self, connection: Connection) -> tuple[bytes, int]:
        """Marks the transaction that is under way, or begins one, so that its end is noticed. Returns the identity, and
        the mark, which check() and commit() take. Of other databases than sqlite3 and PostgreSQL nothing is noticed.
        Raises as identity()."""
        if _is_postgresql(connection):
            identity, began = self._identity(connection, f"outcome, {_BEGAN}")
            return identity, int(began)
        identity, _outcome = self._identity(connection, "outcome")
        if isinstance(connection, sqlite3.Connection):
            if not connection.in_transaction:  # the release of a savepoint alone would commit
                connection.execute(f"BEGIN {connection.isolation_level or ''}")
            connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        return identity, 0

    def _identity(self, connection: Connection, columns: str) -> tuple[bytes, Any]:
        """And what is in the last of the columns."""
        try:
            row = self._row(connection, ID_ROW, columns)
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

    def check(self, connection: Connection, mark: int) -> None:
        """Raises TransactionEnded; and what the database raises where the transaction has failed, and could not be
        committed. Once it was called, or commit(), sqlite3's is not marked any more."""
        if isinstance(connection, sqlite3.Connection):
            _release(connection)
        elif _is_postgresql(connection):
            with closing(execute(connection, f"SELECT {_BEGAN}")) as cursor:
                if columns_of(cursor.fetchone())[0] != mark:
                    raise TransactionEnded
        else:
            self._read(connection, ID_ROW)

    def commit(self, connection: Connection, gtrid: bytes, mark: int | None = None) -> None:
        """Writes the decision into the connection's transaction. Raises TransactionEnded where that is not the one with
        the mark."""
        if not _is_postgresql(connection):
            if mark is not None and isinstance(connection, sqlite3.Connection):
                _release(connection)
            self._insert(connection, gtrid.hex(), COMMIT)
            return
        sql, values = _SURE.format(table=self.name), (gtrid.hex(), COMMIT, time.time_ns() // 1000)
        if mark is None:
            execute(connection, sql, values, self._paramstyle).close()
            return
        with closing(execute(connection, f"{sql} WHERE {_BEGAN} = {{}}", (*values, mark), self._paramstyle)) as cursor:
            if cursor.rowcount == 0:
                raise TransactionEnded

    def decide(self, connection: Connection, gtrid: bytes) -> str | None:
        """The outcome: `abort` from now on unless it was decided. None: it cannot be told at present. Commits."""
        key = gtrid.hex()
        known = self._read(connection, key)
        if known is None:
            try:
                if _is_postgresql(connection):
                    execute(connection, _LOCK_WAIT).close()
                self._insert(connection, key, ABORT)
                connection.commit()
            except Exception:  # the key is there by now, or is about to be, or the database is busy
                connection.rollback()
            known = self._read(connection, key)
        connection.rollback()
        return known

    def older(self, connection: Connection, before_us: int, outcome: str) -> list[bytes]:
        """The gtrids that were decided so before that time. Ends the transaction."""
        sql = f"SELECT gtrid FROM {self.name} WHERE outcome = {{}} AND at < {{}}"
        with closing(execute(connection, sql, (outcome, before_us), self._paramstyle)) as cursor:
            keys = [columns_of(row)[0] for row in cursor.fetchall()]
        connection.rollback()
        return [bytes.fromhex(key) for key in keys if key != ID_ROW]

    def forget(self, connection: Connection, gtrids: Collection[bytes]) -> None:
        """Removes decisions. Commits."""
        for gtrid in gtrids:
            sql = f"DELETE FROM {self.name} WHERE gtrid = {{}}"
            execute(connection, sql, (gtrid.hex(),), self._paramstyle).close()
        connection.commit()

    def _read(self, connection: Connection, key: str) -> str | None:
        row = self._row(connection, key, "outcome")
        return row[0] if row is not None else None

    def _row(self, connection: Connection, key: str, columns: str) -> Any:
        sql = f"SELECT {columns} FROM {self.name} WHERE gtrid = {{}}"
        with closing(execute(connection, sql, (key,), self._paramstyle)) as cursor:
            row = cursor.fetchone()
            return None if row is None else columns_of(row)

    def _insert(self, connection: Connection, key: str, outcome: str) -> None:
        sql = f"INSERT INTO {self.name} (gtrid, outcome, at) VALUES ({{}}, {{}}, {{}})"
        execute(connection, sql, (key, outcome, time.time_ns() // 1000), self._paramstyle).close()


def _release(connection: sqlite3.Connection) -> None:
    try:
        connection.execute(f"RELEASE {_SAVEPOINT}")
    except sqlite3.OperationalError as error:
        if "no such savepoint" in str(error):
            raise TransactionEnded from None
        raise


def _is_about_the_table(error: Exception) -> bool:
    """PEP 249 has a table that is not there as a ProgrammingError of the module's own; but not sqlite3."""
    if isinstance(error, sqlite3.Error):
        return "no such table" in str(error)
    return any(cls.__name__ == "ProgrammingError" for cls in type(error).__mro__)


def check_transactional(connection: Connection) -> None:
    """Raises ConfigError where each statement would be committed by itself, or commit() would have to be awaited."""
    known: Any = connection
    if inspect.iscoroutinefunction(getattr(known, "commit", None)):
        raise ConfigError("the connection is one for asyncio", hint="Take a blocking one, in a thread of its own.")
    autocommit = getattr(known, "autocommit", False) is True
    if callable(getattr(known, "get_autocommit", None)):  # MySQL's modules
        autocommit = bool(known.get_autocommit())
    if isinstance(known, sqlite3.Connection) and known.isolation_level is None and not known.in_transaction:
        # Since Python 3.12 `autocommit` may say that there are transactions all the same.
        autocommit = getattr(known, "autocommit", True) is not False
    if autocommit:
        raise ConfigError(
            "the connection is in autocommit mode: each statement would be committed by itself, whatever becomes of "
            "the messages",
            hint="Open it without autocommit.",
        )


def _is_postgresql(connection: Connection) -> bool:
    return any(cls.__module__.partition(".")[0] in _POSTGRESQL for cls in type(connection).__mro__)
