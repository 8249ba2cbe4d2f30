"""One of the demo's consumers, as a process of its own: it can be killed.

The results and offsets of a batch go into one sqlite3 database in one transaction. So every flight counts once,
whichever process is killed, at any time. The `flights` table's primary key would refuse a second copy.

    python -m metamq.cli.demo.worker ZOOKEEPER DATABASE NAME        ends with its standard input
"""

from __future__ import annotations

import json
import logging
import sqlite3
import sys

from metamq import Consumer, DatabaseOffsets, TopicPartition
from metamq.broker.process.parent import follow_parent
from metamq.errors import OwnershipLost

GROUP = "delays"
TOPIC = "flights"
SESSION_TIMEOUT_MS = 2000
BUSY_TIMEOUT_S = 30.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS flights (id INTEGER PRIMARY KEY, carrier TEXT NOT NULL, dep_delay INTEGER, counted_by TEXT);
"""


def connect(path: str) -> sqlite3.Connection:
    """Returns a connection without implicit transactions."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def work(zookeeper: str, path: str, name: str) -> None:
    """Counts flights until the process ends."""

    def say(what: str, partitions: list[TopicPartition]) -> None:
        print(what, *sorted(tp.partition for tp in partitions), flush=True)

    connection = connect(path)
    with Consumer(
        zookeeper,
        topics=[TOPIC],
        group=GROUP,
        consumer_id=name,
        auto_commit=False,
        offsets=DatabaseOffsets(lambda: connect(path)),
        session_timeout_ms=SESSION_TIMEOUT_MS,
        on_assigned=lambda partitions: say("assigned", partitions),
        on_revoked=lambda partitions: say("revoked", partitions),
    ) as consumer:
        for batch in consumer.batches():
            rows = [(row["id"], row["carrier"], row["dep_delay"], name) for row in map(json.loads, batch.values)]
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany("INSERT INTO flights VALUES (?, ?, ?, ?)", rows)
                consumer.commit(batch, connection=connection)
            except OwnershipLost:
                connection.execute("ROLLBACK")  # the new owner counts these flights
            else:
                connection.execute("COMMIT")


if __name__ == "__main__":
    logging.getLogger("metamq").setLevel(logging.ERROR)  # the demo itself reports that the master was killed
    follow_parent(sys.stdin.fileno())
    work(*sys.argv[1:4])
