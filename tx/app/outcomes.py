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
import time
from contextlib import closing

from metamq.client.dbapi import Connection, check_paramstyle, check_table, execute
from metamq.errors import ConfigError

ID_ROW = "@id"
COMMIT, ABORT = "commit", "abort"
DEFAULT_TABLE = "metamq_outcomes"


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
        try:
            identity = self._read(connection, ID_ROW)
        except Exception as error:
            raise self._missing() from error
        if identity is None:
            raise self._missing()
        return f"db:{identity}:".encode()

    def _missing(self) -> ConfigError:
        return ConfigError(
            f"the database has no table {self.name}",
            hint="Make it once: `metamq.tx.create_outcome_table(connection)`.",
        )

    def commit(self, connection: Connection, gtrid: bytes) -> None:
        """Writes the decision into the connection's transaction."""
        self._insert(connection, gtrid.hex(), COMMIT)

    def decide(self, connection: Connection, gtrid: bytes) -> str | None:
        """The outcome: `abort` from now on unless it was decided. None: it cannot be told at present. Commits."""
        key = gtrid.hex()
        known = self._read(connection, key)
        if known is None:
            try:
                self._insert(connection, key, ABORT)
                connection.commit()
            except Exception:  # the key is there by now, or the database is busy
                connection.rollback()
            known = self._read(connection, key)
        connection.rollback()
        return known

    def forget(self, connection: Connection, before_us: int, outcome: str, still_needed: set[bytes]) -> int:
        """Removes rows that were written before; returns how many. Commits."""
        with closing(
            execute(
                connection, f"SELECT gtrid FROM {self.name} WHERE outcome = {{}} AND at < {{}}", (outcome, before_us),
                self._paramstyle,
            )
        ) as cursor:  # fmt: skip
            keys = [row[0] for row in cursor.fetchall()]
        going = [key for key in keys if key != ID_ROW and bytes.fromhex(key) not in still_needed]
        for key in going:
            execute(connection, f"DELETE FROM {self.name} WHERE gtrid = {{}}", (key,), self._paramstyle).close()
        connection.commit()
        return len(going)

    def _read(self, connection: Connection, key: str) -> str | None:
        sql = f"SELECT outcome FROM {self.name} WHERE gtrid = {{}}"
        with closing(execute(connection, sql, (key,), self._paramstyle)) as cursor:
            row = cursor.fetchone()
        return row[0] if row is not None else None

    def _insert(self, connection: Connection, key: str, outcome: str) -> None:
        sql = f"INSERT INTO {self.name} (gtrid, outcome, at) VALUES ({{}}, {{}}, {{}})"
        execute(connection, sql, (key, outcome, time.time_ns() // 1000), self._paramstyle).close()
