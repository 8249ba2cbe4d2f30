"""A program for test_coordinator.py: transactions over two databases and the queue, killed at a named point.

The point "threads": many threads commit side by side, and say what is committed, until somebody kills them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

import metamq.tx.aio
from metamq import Producer, aio
from metamq.errors import RolledBack
from metamq.tx import Coordinator
from metamq.tx.database.coordinator_core import BaseCoordinator, Part
from metamq.tx.database.decision_log import DecisionLog

THREADS = 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """Before or behind the prepare of each resource, the decision, the commit of each."""
    when, what, name = point.split("-")
    if what == "decide":
        write, flush = DecisionLog.write, DecisionLog.flush

        def writing(self: DecisionLog, gtrid: str, names: tuple[str, ...]) -> None:
            if when == "behind":
                write(self, gtrid, names)
                flush(self, gtrid)
            die()

        DecisionLog.write = writing  # type: ignore[method-assign]
    elif what == "prepare":
        prepare = Part.prepare

        async def preparing(self: Part) -> bool:
            if self.name != name:
                return await prepare(self)
            if when == "behind":
                await prepare(self)
            die()
            return False

        Part.prepare = preparing  # type: ignore[method-assign]
    else:
        tell = BaseCoordinator._commit_parts

        async def telling(self: BaseCoordinator, gtrid: str, parts: list[Part]) -> None:
            at = [part.name for part in parts].index(name) + (when == "behind")
            for part in parts[:at]:
                await part.commit()
            die()
            await tell(self, gtrid, parts)

        BaseCoordinator._commit_parts = telling  # type: ignore[method-assign]


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


async def aio_main(zookeeper: str, dsn: str, folder: str, topic: str, body: str, point: str) -> None:
    """One transaction in asyncio."""
    async with aio.Producer[bytes](zookeeper) as producer:
        resources = {
            "a": lambda: psycopg.AsyncConnection.connect(f"{dsn} dbname=a"),
            "queue": producer,
            "b": lambda: psycopg.AsyncConnection.connect(f"{dsn} dbname=b"),
        }
        async with metamq.tx.aio.Coordinator(folder, resources) as made:
            if point != "-":
                die_at(point)
            async with made.begin() as tx:
                await aio_work(tx, topic, body)


async def aio_work(tx: Any, topic: str, body: str) -> None:
    """One transaction."""
    await (await tx["a"]).execute("INSERT INTO orders VALUES (%s)", (body,))
    queue = await tx["queue"]
    queue.send(topic, body.encode(), partition="0-0")
    queue.send(topic, body.encode(), partition="1-0")
    await (await tx["b"]).execute("INSERT INTO orders VALUES (%s)", (body,))


def main() -> None:
    zookeeper, dsn, folder, topic, body, point = sys.argv[1:]
    if point.startswith("aio "):
        asyncio.run(aio_main(zookeeper, dsn, folder, topic, body, point.removeprefix("aio ")))
        return
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
