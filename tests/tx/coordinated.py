"""A program for test_coordinator.py: transactions over two databases and the queue, killed at a named point."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psycopg

from metamq import Producer
from metamq.tx import Coordinator
from metamq.tx.database import coordinator
from metamq.tx.database.decision_log import DecisionLog


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


def main() -> None:
    zookeeper, dsn, folder, topic, body, point = sys.argv[1:]
    with Producer(zookeeper) as producer:
        resources = {
            "a": lambda: psycopg.connect(f"{dsn} dbname=a"),
            "queue": producer,
            "b": lambda: psycopg.connect(f"{dsn} dbname=b"),
        }
        with Coordinator(folder, resources) as made:
            if point != "-":
                die_at(point)
            with made.begin() as tx:
                tx["a"].execute("INSERT INTO orders VALUES (%s)", (body,))
                tx["queue"].send(topic, body.encode(), partition="0-0")
                tx["queue"].send(topic, body.encode(), partition="1-0")
                tx["b"].execute("INSERT INTO orders VALUES (%s)", (body,))


if __name__ == "__main__":
    main()
