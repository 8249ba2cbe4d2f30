"""What application.py does with a driver for asyncio: psycopg's AsyncConnection, or asyncpg."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import asyncpg
import psycopg.conninfo

from metamq import aio
from metamq.errors import MetamqError
from metamq.tx.aio import dbtx


async def transact_aio(
    connection: Any, producer: aio.Producer[bytes], order: dict[str, Any], name: str, fails: float
) -> None:
    """One transaction, on a connection for asyncio; its messages are sent by tasks."""
    placeholder = "$1" if isinstance(connection, asyncpg.Connection) else "%s"
    async with dbtx(connection, producer, timeout_s=order["timeout_s"]) as tx:
        for number in range(order.get("rows") or random.randint(1, 4)):
            body = f"{name}-{number}".encode()
            values = [body] if placeholder == "$1" else [(body,)]
            await connection.execute(f"INSERT INTO orders VALUES ({placeholder})", *values)
            await asyncio.gather(*(tx.send(topic, body) for topic in order["topics"]))
        if random.random() < order.get("fails", fails):
            raise InterruptedError


async def connected(order: dict[str, Any]) -> Any:
    """A connection for asyncio."""
    if order["driver"] == "psycopg_async":
        return await psycopg.AsyncConnection.connect(order["dsn"])
    named = psycopg.conninfo.conninfo_to_dict(order["dsn"])
    return await asyncpg.connect(host=named["host"], user=named["user"], database=named["dbname"])


async def _work(order: dict[str, Any], steps: Any, fails: float) -> None:
    """Transactions, one after the other."""
    connection: Any = None
    count = 0
    settings: dict[str, Any] = {name: order[name] for name in ("batch_bytes",) if name in order}
    async with aio.Producer[bytes](order["zookeeper"], **settings) as producer:
        while count != order.get("transactions"):
            steps.counting = count > 0
            try:
                if connection is None or (
                    connection.closed if hasattr(connection, "closed") else connection.is_closed()
                ):
                    connection = await connected(order)
                await transact_aio(connection, producer, order, f"{order['name']}-{count}", fails)
            except InterruptedError:
                pass
            except (psycopg.Error, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, MetamqError) as error:
                print("failed", type(error).__name__.removesuffix("Error"), flush=True)
                await asyncio.sleep(0.02)
            else:
                print("done", count, flush=True)
            count += 1
    assert connection is not None
    await connection.close()


def work_aio(order: dict[str, Any], steps: Any, fails: float) -> None:
    """As application.work()."""
    asyncio.run(_work(order, steps, fails))
