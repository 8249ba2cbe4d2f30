"""An application of the tests: rows in PostgreSQL and messages, by dbtx; or a recoverer. A process of its own.

    python application.py '{"dsn": ..., "zookeeper": ..., "topics": [...], "name": ..., ...}'

`at`: [number, signal]: at its n-th step, counted over the whole run, it sends itself that signal. `faults`: what is
seeded into it, for the checks to find. `dawdles`: it sleeps at some steps, so that more happens between them.
`driver`: instead of the blocking psycopg "sqlalchemy" or "django", or for asyncio "psycopg_async", "asyncpg" or
"sqlalchemy_asyncpg".
Writes a line for each transaction that was committed; its own steps are told with `tells`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import django
import django.db
import psycopg
import sqlalchemy
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import orm
from sqlalchemy.exc import DBAPIError

from metamq import Producer
from metamq.broker.process.parent import follow_parent
from metamq.client.net.branches import TxClient
from metamq.client.offsets.dbapi import Database
from metamq.client.offsets.django_connection import DjangoConnection
from metamq.errors import MetamqError
from metamq.tx import Recoverer, dbtx
from metamq.tx.app.work import GlobalTransaction
from metamq.tx.database.outcomes import ABORT, COMMIT, OutcomeTable
from metamq.wire.xa import Verb

DAWDLES, DAWDLE_S = 0.1, 0.03
FAILS = 0.1
"""So many transactions are given up by the application itself."""


class Steps:
    """Counts the steps of a run, and does at each what the test has ordered."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._at, self._signal = order.get("at") or (-1, 0)
        self._tells = order.get("tells", False)
        self._dawdles = order.get("dawdles", False)
        self._number = 0
        self.counting = False

    def __call__(self, name: str) -> None:
        if not self.counting:
            return
        if self._tells:
            print("step", self._number, name, flush=True)
        if self._number == self._at:
            os.kill(os.getpid(), self._signal)
            if self._tells:
                print("goes on", flush=True)
        elif self._dawdles and random.random() < DAWDLES:
            time.sleep(random.random() * DAWDLE_S)
        self._number += 1


def watched(steps: Steps, owner: type, method: str, name: str) -> None:
    """Before and after a method there is a step."""
    proper = getattr(owner, method)

    @functools.wraps(proper)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        steps(f"before {name}")
        result = await proper(*args, **kwargs)
        steps(f"after {name}")
        return result

    @functools.wraps(proper)
    def call(*args: Any, **kwargs: Any) -> Any:
        steps(f"before {name}")
        result = proper(*args, **kwargs)
        steps(f"after {name}")
        return result

    setattr(owner, method, awaited if inspect.iscoroutinefunction(proper) else call)


def requests_watched(steps: Steps) -> None:
    """The same for each request to a broker."""
    proper = TxClient.ask

    async def ask(self: TxClient, branch: Any, verbs: Any, *args: Any, **kwargs: Any) -> Any:
        name = Verb(verbs[-1]).name
        steps(f"before {name}")
        result = await proper(self, branch, verbs, *args, **kwargs)
        steps(f"after {name}")
        return result

    TxClient.ask = ask  # type: ignore[method-assign,assignment]


def messages_first() -> None:
    """Messages are committed before the database has decided."""
    proper = GlobalTransaction.prepare

    async def prepare(self: GlobalTransaction) -> None:
        await proper(self)
        await self.commit()

    GlobalTransaction.prepare = prepare  # type: ignore[method-assign]


def unprepared() -> None:
    """The database decides about messages that are not prepared."""

    async def nothing(self: GlobalTransaction) -> None:
        pass

    async def commit(self: GlobalTransaction) -> list[MetamqError]:
        try:
            await self.commit_one_phase()
        except MetamqError as error:
            return [error]
        return []

    GlobalTransaction.prepare = nothing  # type: ignore[method-assign]
    GlobalTransaction.commit = commit  # type: ignore[method-assign]


def no_fence() -> None:
    """A recoverer decides against what is not decided, and does not write it down."""

    async def decide(self: OutcomeTable, database: Database, gtrid: bytes) -> str:
        known = await self._read(database, gtrid.hex())
        await database.rollback()
        return known or ABORT

    OutcomeTable.decide = decide  # type: ignore[method-assign]


def prepared_is_committed() -> None:
    """A recoverer takes for committed whatever is prepared."""

    async def decide(self: OutcomeTable, database: Database, gtrid: bytes) -> str:
        return COMMIT

    OutcomeTable.decide = decide  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (messages_first, unprepared, no_fence, prepared_is_committed)
}


INSERT = "INSERT INTO orders VALUES (%s)"


def insert_in_django(connection: Any, body: bytes) -> None:
    """As Django's ORM does it, by a cursor."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT, (body,))


INSERTS: dict[str, Callable[[Any, bytes], object]] = {
    "sqlalchemy": lambda session, body: session.execute(sqlalchemy.text(INSERT % ":body"), {"body": body}),
    "django": insert_in_django,
}


def connected(order: dict[str, Any]) -> Any:
    """A connection, of the kind that is ordered."""
    driver = order.get("driver")
    if driver == "sqlalchemy":
        return orm.Session(
            sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(order["dsn"]))
        )
    if driver == "django":
        named = conninfo_to_dict(order["dsn"])
        place = {"HOST": named["host"], "USER": named["user"], "NAME": named["dbname"]}
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}})
        django.setup()
        return django.db.connection
    return psycopg.connect(order["dsn"])


def transact(connection: Any, producer: Producer[bytes], order: dict[str, Any], name: str) -> None:
    """One transaction: rows, and a message for each."""
    insert = INSERTS.get(order.get("driver", ""), lambda connection, body: connection.execute(INSERT % "%s", (body,)))
    with dbtx(connection, producer, timeout_s=order["timeout_s"]) as tx:
        for number in range(order.get("rows") or random.randint(1, 4)):
            body = f"{name}-{number}".encode()
            insert(connection, body)
            for topic in order["topics"]:
                tx.send(topic, body)
        if random.random() < order.get("fails", FAILS):
            raise InterruptedError


def work(order: dict[str, Any], steps: Steps) -> None:
    """Transactions, one after the other; whatever fails is given up, and the next one begun."""
    logging.disable(logging.CRITICAL)
    random.seed(order.get("seed"))
    watched(steps, OutcomeTable, "commit", "the row of the decision")
    for owner in (*Database.__subclasses__(), DjangoConnection):
        watched(steps, owner, "commit", "the commit in the database")
    requests_watched(steps)
    if order.get("driver", "").endswith(("_async", "asyncpg")):
        from application_aio import work_aio

        work_aio(order, steps, FAILS)
        return
    connection: Any = None
    count = 0
    settings: dict[str, Any] = {name: order[name] for name in ("batch_bytes",) if name in order}
    with Producer[bytes](order["zookeeper"], **settings) as producer:
        while count != order.get("transactions"):
            steps.counting = count > 0  # the first one connects
            try:
                if connection is None or getattr(connection, "closed", False):
                    connection = connected(order)
                transact(connection, producer, order, f"{order['name']}-{count}")
            except InterruptedError:
                pass
            except (psycopg.Error, DBAPIError, django.db.Error, MetamqError) as error:
                drivers = error.__cause__ if isinstance(error, DBAPIError | django.db.Error) else error
                print("failed", type(drivers).__name__, flush=True)
                time.sleep(0.02)
            else:
                print("done", count, flush=True)
            count += 1


def recover(order: dict[str, Any]) -> None:
    """A recoverer, until it is killed."""
    logging.disable(logging.CRITICAL)
    with Recoverer(
        lambda: psycopg.connect(order["dsn"]), order["zookeeper"], grace_s=order["grace_s"]
    ) as recoverer:  # fmt: skip
        recoverer.run(every_s=order["every_s"])


if __name__ == "__main__":
    orders = json.loads(sys.argv[1])
    follow_parent(sys.stdin.fileno())
    for fault in orders.get("faults", ()):
        FAULTS[fault]()
    with suppress(KeyboardInterrupt):
        if orders.get("recovers"):
            recover(orders)
        else:
            work(orders, Steps(orders))
