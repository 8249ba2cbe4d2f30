"""A MariaDB of the tests' own, where its server is installed: no wheel has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.parts import wait_until

PROGRAMS = "/usr/sbin:/usr/bin"
"""Where Debian's package mariadb-server-core has them."""
AS_USER = ["--user=root"] if os.geteuid() == 0 else []


class MariaDb:
    """A server that listens on a Unix socket only."""

    def __init__(self, server: str, folder: Path) -> None:
        self.socket = str(folder / "socket")
        with (folder / "log").open("wb") as log:
            fixed = ["--no-defaults", f"--datadir={folder / 'data'}", *AS_USER]
            install = (
                shutil.which("mariadb-install-db", path=os.environ["PATH"] + ":" + PROGRAMS) or "mariadb-install-db"
            )
            subprocess.run([install, *fixed, "--skip-test-db"], stdout=log, stderr=log, check=True)
            # Durable settings are for the crash of a machine.
            options = ["--skip-networking", f"--socket={self.socket}", "--innodb-flush-log-at-trx-commit=0"]
            command = [server, *fixed, *options, f"--pid-file={folder / 'pid'}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it takes connections."""

        def answers() -> bool:
            log = (Path(self.socket).parent / "log").read_text()
            assert self._process.poll() is None, log
            return "ready for connections" in log

        wait_until(answers, 60, "an answer of MariaDB")

    def stop(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()

    def new_database(self) -> str:
        """Makes a database; returns its name."""
        name = f"test_{uuid.uuid4().hex}"
        connection = pymysql.connect(unix_socket=self.socket, user="root")
        with connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return name


@contextmanager
def running_mariadb() -> Iterator[MariaDb]:
    """Starts a server; it is gone at the end."""
    server = shutil.which("mariadbd", path=os.environ["PATH"] + ":" + PROGRAMS)
    if server is None:
        pytest.skip("there is no mariadbd on PATH (Debian: apt-get install mariadb-server-core mariadb-client-core)")
    folder = Path(tempfile.mkdtemp(prefix="metamq-mariadb-"))
    try:
        made = MariaDb(server, folder)
        try:
            made.wait()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_execute(base: Any) -> Any:
    """A driver's class of connections, with the shortcut that sqlite3's and psycopg's have."""

    class Connection(base):  # type: ignore[misc]
        def execute(self, sql: str, values: Any = None) -> Any:
            """Runs a statement by a cursor of its own."""
            cursor = self.cursor()
            cursor.execute(sql.replace("?", "%s"), values)
            return cursor

    return Connection


def connect_pymysql(server: MariaDb, database: str) -> Any:
    """A connection that is not in autocommit mode."""
    return with_execute(pymysql.Connection)(unix_socket=server.socket, user="root", database=database)


def mysqlclient() -> Any:
    """Returns mysqlclient's module of connections. Skips the test where it is not installed."""
    return pytest.importorskip("MySQLdb.connections", reason="mysqlclient has no wheel: pip install mysqlclient")


def connect_mysqlclient(server: MariaDb, database: str) -> Any:
    """The same by mysqlclient."""
    return with_execute(mysqlclient().Connection)(unix_socket=server.socket, user="root", database=database)


DRIVERS = {"pymysql": connect_pymysql, "mysqlclient": connect_mysqlclient}
