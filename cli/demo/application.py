"""The demo's application with a database, as a process of its own, so that it can be killed.

Each transaction inserts some flights into sqlite3 and sends them: both or neither. The database itself has the next
flights. So an application that starts after a kill continues after the last committed flight.

    python -m metamq.cli.demo.application ZOOKEEPER DATABASE FLIGHTS_PER_TRANSACTION
                                                        ends when all flights are sent, or with its standard input
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import sys

from metamq import Producer
from metamq.broker.process.parent import follow_parent
from metamq.errors import MetamqError
from metamq.tx import dbtx

TOPIC = "booked"
BUSY_TIMEOUT_S = 30.0

SCHEMA = """
CREATE TABLE planned (id INTEGER PRIMARY KEY, flight BLOB NOT NULL);
CREATE TABLE booked (id INTEGER PRIMARY KEY, flight BLOB NOT NULL);
"""
NEXT = "SELECT id, flight FROM planned WHERE id > (SELECT coalesce(max(id), 0) FROM booked) ORDER BY id LIMIT ?"


def connect(path: str) -> sqlite3.Connection:
    """Returns a connection with implicit transactions: an INSERT begins one. A commit is on the disk."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def work(zookeeper: str, path: str, number: int) -> None:
    """Books flights until none is left."""
    with contextlib.closing(connect(path)) as connection, Producer[bytes](zookeeper) as producer:
        while flights := connection.execute(NEXT, (number,)).fetchall():
            with contextlib.suppress(MetamqError, sqlite3.Error), dbtx(connection, producer) as tx:
                connection.executemany("INSERT INTO booked VALUES (?, ?)", flights)
                tx.send_many(TOPIC, [flight for _id, flight in flights])


if __name__ == "__main__":
    logging.getLogger("metamq").setLevel(logging.ERROR)
    follow_parent(sys.stdin.fileno())
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
