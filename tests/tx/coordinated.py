"""A program for test_coordinator.py: transactions over two databases and the queue, killed at a named point.

The point "threads": many threads commit side by side, and say what is committed, until somebody kills them all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from metamq import Producer
from metamq.errors import RolledBack
from metamq.tx import Coordinator
from metamq.tx.database import coordinator
from metamq.tx.database.decision_log import DecisionLog

THREADS = 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """Before or behind the prepare of each resource, the decision, the commit of each."""
    when, what, name = point.split("-")
    if what == "decide":
        decide = DecisionLog.commit

        def deciding(self: DecisionLog, *arguments: Any) -> None:
            if when == "before":
                die()
            decide(self, *arguments)
            die()

        DecisionLog.commit = deciding  # type: ignore[method-assign]
    elif what == "prepare":
        prepare = coordinator._Part.prepare

        def preparing(self: Any) -> bool:
            if self.name != name:
                return prepare(self)
            if when == "behind":
                prepare(self)
            die()
            return False

        coordinator._Part.prepare = preparing  # type: ignore[method-assign]
    else:
        tell = Coordinator._commit_parts

        def telling(self: Coordinator, gtrid: str, parts: list[Any]) -> None:
            at = [part.name for part in parts].index(name) + (when == "behind")
            for part in parts[:at]:
                part.connection.tpc_commit()
            die()
            tell(self, gtrid, parts)

        Coordinator._commit_parts = telling  # type: ignore[method-assign]


def commit_until_killed(made: Coordinator, topic: str, name: str) -> None:
    """The transactions of one thread."""
    for number in itertools.count():
        body = f"{name}-{number}"
        with contextlib.suppress(RolledBack):  # a slow machine: the brokers' time-out
            with made.begin() as tx:
                work(tx, topic, body)
            sys.stdout.write(f"{body}\n")  # in one write, beside those of other threads
            sys.stdout.flush()


def work(tx: Any, topic: str, body: str) -> None:
    """One transaction."""
    tx["a"].execute("INSERT INTO orders VALUES (%s)", (body,))
    tx["queue"].send(topic, body.encode(), partition="0-0")
    tx["queue"].send(topic, body.encode(), partition="1-0")
    tx["b"].execute("INSERT INTO orders VALUES (%s)", (body,))


def main() -> None:
    zookeeper, dsn, folder, topic, body, point = sys.argv[1:]
    with Producer(zookeeper) as producer:
        resources = {
            "a": lambda: psycopg.connect(f"{dsn} dbname=a"),
            "queue": producer,
            "b": lambda: psycopg.connect(f"{dsn} dbname=b"),
        }
        with Coordinator(folder, resources) as made:
            if point == "threads":
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(lambda number: commit_until_killed(made, topic, f"{body}-{number}"), range(THREADS)))
            if point != "-":
                die_at(point)
            with made.begin() as tx:
                work(tx, topic, body)


if __name__ == "__main__":
    main()
