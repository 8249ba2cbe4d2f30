"""What application.py does with asyncio: by psycopg's AsyncConnection, asyncpg, or SQLAlchemy's AsyncSession."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import asyncpg
import psycopg.conninfo
import sqlalchemy
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from metamq import aio
from metamq.errors import MetamqError
from metamq.tx.aio import dbtx


async def transact_aio(
    connection: Any, producer: aio.Producer[bytes], order: dict[str, Any], name: str, fails: float
) -> None:
    """One transaction, on a connection for asyncio; its messages are sent by tasks."""
    async with dbtx(connection, producer, timeout_s=order["timeout_s"]) as tx:
        for number in range(order.get("rows") or random.randint(1, 4)):
            body = f"{name}-{number}".encode()
            await insert(connection, body)
            await asyncio.gather(*(tx.send(topic, body) for topic in order["topics"]))
        if random.random() < order.get("fails", fails):
            raise InterruptedError


async def insert(connection: Any, body: bytes) -> None:
    """A row."""
    sql = "INSERT INTO orders VALUES (%s)"
    if isinstance(connection, AsyncSession):
        await connection.execute(sqlalchemy.text(sql % ":body"), {"body": body})
    elif isinstance(connection, asyncpg.Connection):
        await connection.execute(sql % "$1", body)
    else:
        await connection.execute(sql, (body,))


def is_closed(connection: Any) -> bool:
    """Whether it is of no more use. A Session takes another connection then."""
    if isinstance(connection, AsyncSession):
        return False
    return bool(connection.closed if hasattr(connection, "closed") else connection.is_closed())


async def connected(order: dict[str, Any]) -> Any:
    """A connection for asyncio."""
    if order["driver"] == "psycopg_async":
        return await psycopg.AsyncConnection.connect(order["dsn"])
    named = psycopg.conninfo.conninfo_to_dict(order["dsn"])
    if order["driver"] == "asyncpg":
        return await asyncpg.connect(host=named["host"], user=named["user"], database=named["dbname"])
    place = {"username": named["user"], "database": named["dbname"], "query": {"host": named["host"]}}
    return AsyncSession(create_async_engine(sqlalchemy.URL.create("postgresql+asyncpg", **place)))


async def _work(order: dict[str, Any], steps: Any, fails: float) -> None:
    """Transactions, one after the other."""
    connection: Any = None
    count = 0
    settings: dict[str, Any] = {name: order[name] for name in ("batch_bytes",) if name in order}
    async with aio.Producer[bytes](order["zookeeper"], **settings) as producer:
        while count != order.get("transactions"):
            steps.counting = count > 0
            try:
                if connection is None or is_closed(connection):
                    connection = await connected(order)
                await transact_aio(connection, producer, order, f"{order['name']}-{count}", fails)
            except InterruptedError:
                pass
            except (
                DBAPIError,
                psycopg.Error,
                asyncpg.PostgresError,
                asyncpg.InterfaceError,
                OSError,
                MetamqError,
            ) as error:
                drivers = getattr(error.orig, "__cause__", None) if isinstance(error, DBAPIError) else error
                print("failed", type(drivers).__name__.removesuffix("Error"), flush=True)
                await asyncio.sleep(0.02)
            else:
                print("done", count, flush=True)
            count += 1
    assert connection is not None
    await connection.close()


def work_aio(order: dict[str, Any], steps: Any, fails: float) -> None:
    """As application.work()."""
    asyncio.run(_work(order, steps, fails))
