"""The demo's second part: an application books flights in transactions over a database and a topic, and is killed.

Each transaction inserts some flights into sqlite3 and sends them: both or neither. The application is a process of its
own. It dies by kill -9, twenty times, at a random moment. The database itself has the next flights, so an application
that starts after a kill continues after the last committed flight. A Recoverer finishes the transactions that a kill
leaves between the two, as the database has decided. In the end both have the same flights, each once.

    python -m metamq.cli.demo.transactions ZOOKEEPER DATABASE FLIGHTS_PER_TRANSACTION
                        the application; ends when all flights are sent, or with its standard input
"""

from __future__ import annotations

import contextlib
import logging
import random
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq import Producer
from metamq.broker.process.parent import follow_parent
from metamq.cli.demo.flights import encode
from metamq.cli.demo.helpers import Application, Say
from metamq.errors import MetamqError
from metamq.tx import Recoverer, create_outcome_table, dbtx
from metamq.words import count

if TYPE_CHECKING:
    from metamq.testing import Cluster

TOPIC = "booked"
PARTITIONS = 4
FLIGHTS_MAX = 30_000
"""The most flights of the sample: more transactions would only take longer."""
TRANSACTIONS = 600
KILLS = 20
MOMENT_S = 0.05
"""Seconds within which a kill comes, after a new application has committed a transaction."""
GRACE_S, EVERY_S = 0.5, 0.2
LIMIT_S = 180.0
IDLE_S = 20.0
POLL_S = 0.01
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


def book(zookeeper: str, path: str, number: int) -> None:
    """The application: books flights until none is left, `number` in each transaction."""
    with contextlib.closing(connect(path)) as connection, Producer[bytes](zookeeper) as producer:
        while flights := connection.execute(NEXT, (number,)).fetchall():
            with contextlib.suppress(MetamqError, sqlite3.Error), dbtx(connection, producer) as tx:
                connection.executemany("INSERT INTO booked VALUES (?, ?)", flights)
                tx.send_many(TOPIC, [flight for _id, flight in flights])


class TransactionStory:
    """One run. `check` is called during waits; an exception that it raises ends the wait."""

    def __init__(self, running: Cluster, folder: Path, say: Say, check: Callable[[], None]) -> None:
        self._running = running
        self._path = str(folder / "bookings.sqlite3")
        self._say = say
        self._finished: Counter[str] = Counter()
        self._stop = threading.Event()
        self._application = Application("the application", "metamq.cli.demo.transactions", check)

    def run(self, rows: list[dict[str, Any]]) -> bool:
        """Returns True if the database and the topic have the same flights. Raises MetamqError."""
        sample = rows[:: -(-len(rows) // FLIGHTS_MAX)]
        each = max(1, len(sample) // TRANSACTIONS)
        self._running.create_topic(TOPIC, partitions=PARTITIONS, replication="sync")
        self._plan(sample)
        self._say(
            f"now transactions: {len(sample):,} of the flights, {each} in each, into a sqlite3 file and topic {TOPIC!r}"
        )
        began = time.monotonic()
        with Recoverer(lambda: connect(self._path), self._running.zookeeper, grace_s=GRACE_S) as recoverer:
            recovering = threading.Thread(target=self._recover, args=(recoverer,))
            recovering.start()
            try:
                self._book(len(sample), each)
            finally:
                self._application.kill()
                self._stop.set()
                recovering.join()
            self._say(f"all {len(sample):,} are booked in {time.monotonic() - began:.1f} s, including the kills")
            self._until(lambda: self._look(recoverer), "the end of the transactions in doubt")
        self._say(
            f"recovery has finished {count(self._finished.total(), 'transaction')} that a kill had cut off between "
            f"database and broker: {self._finished['committed']} committed, {self._finished['rolled back']} rolled back"
        )
        return self._compare(len(sample))

    def _plan(self, sample: list[dict[str, Any]]) -> None:
        with contextlib.closing(connect(self._path)) as connection:
            connection.executescript(SCHEMA)
            connection.executemany("INSERT INTO planned VALUES (?, ?)", [(row["id"], encode(row)) for row in sample])
            connection.commit()
            create_outcome_table(connection)

    def _recover(self, recoverer: Recoverer) -> None:
        while not self._stop.wait(EVERY_S):
            self._look(recoverer)

    def _look(self, recoverer: Recoverer) -> bool:
        """Finishes transactions in doubt; returns True if none is left."""
        try:
            done = recoverer.run_once()
        except MetamqError:  # it looks again soon
            return False
        self._finished.update({"committed": done.committed, "rolled back": done.rolled_back})
        return not done.left and not done.problems

    def _book(self, total: int, each: int) -> None:
        """Starts an application, and another one after each kill, until all flights are booked."""
        with contextlib.closing(connect(self._path)) as connection:
            for number in range(1, KILLS + 2):
                at_least = max(total * number // (KILLS + 1), _booked(connection) + 1)
                self._application.start(self._running.zookeeper, self._path, str(each))
                self._until(partial(_has_booked, connection, min(at_least, total)), "a booking")
                if number <= KILLS:
                    time.sleep(random.random() * MOMENT_S)
                    self._application.kill()
                    self._say(
                        f"[bold red]kill -9 the application[/bold red], {number} of {KILLS}: "
                        f"{_booked(connection):,} flights are booked"
                    )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self._application.until(condition, what, limit_s=LIMIT_S, poll_s=POLL_S)

    def _compare(self, total: int) -> bool:
        with contextlib.closing(connect(self._path)) as connection:
            rows = Counter(flight for (flight,) in connection.execute("SELECT flight FROM booked"))
        with self._running.admin() as admin:
            number = admin.describe_topic(TOPIC).messages or 0
        messages: Counter[bytes] = Counter()
        with self._running.consumer(topics=[TOPIC], idle_timeout_s=IDLE_S) as consumer:
            for batch in consumer.batches():
                messages.update(batch.values)
                if messages.total() >= number:
                    break
        if rows == messages and rows.total() == total:
            self._say(f"[bold green]equal[/bold green]: {total:,} rows and {total:,} messages, each flight once")
            return True
        self._say(
            f"[bold red]DIFFERENT[/bold red]: {total:,} flights, {rows.total():,} rows, {messages.total():,} messages; "
            f"{count((rows - messages).total(), 'row')} without its message, "
            f"{count((messages - rows).total(), 'message')} without its row"
        )
        return False


def _booked(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM booked").fetchone()
    return int(number)


def _has_booked(connection: sqlite3.Connection, at_least: int) -> bool:
    return _booked(connection) >= at_least


if __name__ == "__main__":
    logging.getLogger("metamq").setLevel(logging.ERROR)
    follow_parent(sys.stdin.fileno())
    book(sys.argv[1], sys.argv[2], int(sys.argv[3]))
