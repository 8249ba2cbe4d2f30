"""dbtx for asyncio, with psycopg's AsyncConnection, asyncpg and aiosqlite: rows and messages, both or neither."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

from metamq import Topic, aio
from metamq.client.offsets.connections import database_of
from metamq.errors import BranchMisuse, ConfigError, MessageTooLarge, WrongType
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer
from metamq.tx.aio import create_outcome_table, dbtx
from metamq.tx.app.work import GlobalTransaction
from tests.aio_databases import ASYNCIO_DRIVERS, AioDatabase, aio_database
from tests.tx.databases import messages

REFUSED = (sqlite3.IntegrityError, psycopg.IntegrityError, asyncpg.IntegrityConstraintViolationError)


@pytest.fixture(params=ASYNCIO_DRIVERS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> AioDatabase:
    made = aio_database(request.param, request, tmp_path)

    async def prepare() -> None:
        connection = await made.connect()
        for _ in range(2):  # may be repeated, and leaves no transaction open
            await create_outcome_table(connection)
        await connection.close()

    asyncio.run(prepare())
    made.execute(f"CREATE TABLE orders (body {made.blob} UNIQUE)")
    return made


@asynccontextmanager
async def opened(running: Cluster, database: AioDatabase) -> AsyncIterator[tuple[Any, aio.Producer[bytes]]]:
    """A connection and a producer."""
    async with aio.Producer[bytes](running.zookeeper) as producer:
        connection = await database.connect()
        try:
            yield connection, producer
        finally:
            await connection.close()


async def insert(connection: Any, text: str) -> None:
    blob = f"x'{text.encode().hex()}'" if type(connection).__module__.startswith("aiosqlite") else f"'{text}'::bytea"
    await connection.execute(f"INSERT INTO orders VALUES ({blob})")


@dataclass
class Order:
    number: int


def rows(database: AioDatabase) -> list[bytes]:
    return sorted(map(bytes, database.one("SELECT body FROM orders")))


def decisions(database: AioDatabase) -> list[str]:
    return sorted(database.one("SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id'"))


def test_both_happen(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            for number in range(5):
                async with dbtx(connection, producer) as tx:
                    await insert(connection, f"{number}")
                    await tx.send(topic, b"%d" % number, key=b"k", headers={"h": b"v"})
            async with dbtx(connection, producer) as tx:
                await insert(connection, "many")
                # Tasks of the block may send side by side.
                await asyncio.gather(*(tx.send_many(topic, [b"a", b"b"], keys=["a", None]) for _ in range(10)))

    asyncio.run(scenario())
    assert rows(database) == [*(b"%d" % number for number in range(5)), b"many"]
    assert messages(running, topic) == [*(b"%d" % number for number in range(5)), *[b"a"] * 10, *[b"b"] * 10]


@pytest.mark.parametrize("is_task", [False, True])
def test_a_send_that_is_not_awaited_takes_the_rows_back(
    running: Cluster, topic: str, database: AioDatabase, is_task: bool
) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            with pytest.raises(BranchMisuse, match="was not awaited"):  # noqa: PT012
                async with dbtx(connection, producer) as tx:
                    await insert(connection, "1")
                    sending = tx.send(topic, b"1")
                    left = [asyncio.create_task(sending)] if is_task else []
            with contextlib.suppress(BranchMisuse):
                await asyncio.gather(*left)
            sending.close()  # else the garbage collector warns, in another test

    asyncio.run(scenario())
    assert (rows(database), messages(running, topic)) == ([], [])


def test_a_typed_topic(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            async with dbtx(connection, producer) as tx:
                await tx.send(Topic(topic, Order), Order(1))
                await tx.send_many(Topic(topic, Order), [Order(2), Order(3)])
            with pytest.raises(WrongType):
                async with dbtx(connection, producer) as tx:
                    await tx.send(Topic(topic, Order), b"{}")

    asyncio.run(scenario())
    assert messages(running, topic) == [b'{"number":1}', b'{"number":2}', b'{"number":3}']


def test_neither_happens_when_the_block_fails(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            with pytest.raises(KeyError):  # noqa: PT012
                async with dbtx(connection, producer) as tx:
                    await insert(connection, "1")
                    await tx.send(topic, b"1")
                    raise KeyError
            with pytest.raises(MessageTooLarge):  # noqa: PT012
                async with dbtx(connection, producer) as tx:
                    await insert(connection, "2")
                    await tx.send(topic, bytes(3 * 1024 * 1024))
            async with dbtx(connection, producer) as tx:
                await insert(connection, "3")
            with pytest.raises(REFUSED):  # noqa: PT012
                async with dbtx(connection, producer) as tx:
                    await tx.send(topic, b"twice")
                    await insert(connection, "3")
            with pytest.raises(BranchMisuse, match="the block has ended"):
                await tx.send(topic, b"late")

    asyncio.run(scenario())
    assert rows(database) == [b"3"]
    assert messages(running, topic) == []
    assert decisions(database) == []


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
def test_a_transaction_that_is_ended_in_the_block_is_noticed(
    running: Cluster, topic: str, database: AioDatabase, how: str
) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            with pytest.raises(BranchMisuse, match="was committed or rolled back in the block"):  # noqa: PT012
                async with dbtx(connection, producer) as tx:
                    await insert(connection, "before")
                    await tx.send(topic, b"1")
                    await connection.execute(how)
            async with dbtx(connection, producer) as tx:
                await insert(connection, "next")
                await tx.send(topic, b"next")

    asyncio.run(scenario())
    assert rows(database) == [b"before"] * (how == "COMMIT") + [b"next"]
    assert messages(running, topic) == [b"next"]


def test_savepoints_in_the_block_are_the_applications(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer), dbtx(connection, producer) as tx:
            await insert(connection, "1")
            if database.driver == "aiosqlite":
                await connection.execute("SAVEPOINT own")
                await insert(connection, "2")
                await connection.execute("ROLLBACK TO SAVEPOINT own")
            else:
                with pytest.raises(KeyError):  # noqa: PT012
                    async with connection.transaction():
                        await insert(connection, "2")
                        raise KeyError
            await tx.send(topic, b"1")

    asyncio.run(scenario())
    assert rows(database) == messages(running, topic) == [b"1"]


def test_what_does_not_fit_is_refused_with_the_next_step(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            with pytest.raises(ConfigError, match="create_outcome_table"):
                await dbtx(connection, producer, table="others").__aenter__()
            await create_outcome_table(connection, "others")  # on the same connection
            async with dbtx(connection, producer, table="others"):
                with pytest.raises(BranchMisuse, match="cannot be nested"):
                    await dbtx(connection, producer).__aenter__()
                with pytest.raises(BranchMisuse, match=r"in a dbtx block.*tx\.send"):
                    producer.send(topic, b"past")
                with pytest.raises(BranchMisuse, match="in a dbtx block"):
                    producer.send_many(topic, [b"past"])
                with pytest.raises(BranchMisuse, match="in a dbtx block"):
                    await producer.transaction().__aenter__()
            await producer.send(topic, b"after")
            blocking: Any = running.producer()
            with pytest.raises(WrongType, match=r"`producer` must be a metamq\.aio\.Producer"):
                dbtx(connection, blocking)
            blocking.close()
            if database.driver == "asyncpg":
                async with connection.transaction():
                    with pytest.raises(ConfigError, match=r"in a transaction\(\)"):
                        await dbtx(connection, producer).__aenter__()
                    assert connection.is_in_transaction(), "it is the application's, and goes on"
            if database.driver == "psycopg":
                await connection.set_autocommit(True)
                with pytest.raises(ConfigError, match="autocommit"):
                    await dbtx(connection, producer).__aenter__()

    asyncio.run(scenario())
    assert messages(running, topic) == [b"after"]


def test_a_blocking_connection_will_do(running: Cluster, topic: str, database: AioDatabase) -> None:
    async def scenario() -> None:
        connection = database.connect_blocking()
        async with aio.Producer[bytes](running.zookeeper) as producer:
            for fails in (False, True):
                with pytest.raises(KeyError) if fails else nullcontext():
                    async with dbtx(connection, producer) as tx:
                        connection.execute("DELETE FROM orders")
                        await tx.send(topic, b"%d" % fails)
                        if fails:
                            raise KeyError
        connection.close()

    asyncio.run(scenario())
    assert messages(running, topic) == [b"0"]


STEPS = ["prepare", "decision", "commit", "tell"]


@pytest.mark.parametrize("step", STEPS)
def test_a_block_that_is_cancelled_as_it_ends_does_both_or_neither(
    running: Cluster, topic: str, database: AioDatabase, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a time-out, say, at each of its steps, before and behind what is done there."""

    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            for behind in (False, True):
                body = f"{step}-{behind}"
                tx = dbtx(connection, producer)

                async def transact(tx: dbtx = tx, body: str = body) -> None:
                    async with tx:
                        await insert(connection, body)
                        await tx.send(topic, body.encode())

                with monkeypatch.context() as patch:
                    cancelled_at(step, behind, tx, patch)
                    with pytest.raises(asyncio.CancelledError):
                        await asyncio.create_task(transact())
                # The connection goes on.
                async with dbtx(connection, producer) as tx:
                    await insert(connection, f"{body}-next")
                    await tx.send(topic, f"{body}-next".encode())

    asyncio.run(scenario())

    async def connect() -> Any:
        return await database.connect()

    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        recoverer.run_once()
    assert rows(database) == messages(running, topic)
    assert f"{step}-True-next".encode() in rows(database)
    if step in ("prepare", "decision"):
        assert len(rows(database)) == 2, "what was cancelled before the commit has not happened"
    if step == "tell":
        assert len(rows(database)) == 4, "what was cancelled behind the commit has"


def cancelled_at(step: str, behind: bool, tx: dbtx, patch: pytest.MonkeyPatch) -> None:
    """Cancels the task at a step of leaving the block, once."""
    owner, name = {
        "check": (tx._outcomes, "check"),
        "rollback": (tx._database, "rollback"),
        "prepare": (GlobalTransaction, "prepare"),
        "decision": (tx._outcomes, "commit"),
        "commit": (tx._database, "commit"),
        "tell": (GlobalTransaction, "commit"),
    }[step]
    proper, done = getattr(owner, name), False

    async def cancelling(*args: Any) -> Any:
        nonlocal done
        if done:
            return await proper(*args)
        done = True
        task = asyncio.current_task()
        assert task is not None
        if not behind:
            task.cancel()
        result = await proper(*args)
        if behind:
            task.cancel()
            await asyncio.sleep(0)
        return result

    patch.setattr(owner, name, cancelling)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", ["check", "rollback"])
def test_a_block_that_fails_and_is_cancelled_as_it_ends_rolls_back(
    running: Cluster, topic: str, database: AioDatabase, step: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            tx = dbtx(connection, producer)

            async def transact() -> None:
                async with tx:
                    await insert(connection, "failed")
                    await tx.send(topic, b"failed")
                    raise KeyError

            with monkeypatch.context() as patch:
                cancelled_at(step, behind, tx, patch)
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(transact())
            async with dbtx(connection, producer) as tx:
                await insert(connection, "next")
                await tx.send(topic, b"next")

    asyncio.run(scenario())
    assert rows(database) == messages(running, topic) == [b"next"]


def test_a_recoverer_takes_a_connection_for_asyncio(running: Cluster, topic: str, database: AioDatabase) -> None:
    """What an application left that died between the decision and the messages, or before."""

    async def scenario() -> None:
        async with opened(running, database) as (connection, producer):
            for decided in (True, False):
                tx = await dbtx(connection, producer).__aenter__()
                await insert(connection, f"{decided}")
                await tx.send(topic, f"{decided}".encode())
                work = tx._work
                assert work is not None
                await work.prepare()
                if decided:
                    await tx._outcomes.commit(tx._database, work.gtrid, tx._mark)
                    await tx._database.commit()
                else:
                    await tx._database.rollback()
                tx._work = None

    asyncio.run(scenario())
    assert messages(running, topic) == []
    with Recoverer(database.connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 1, 0)
        assert recoverer.run_once() == Recovered(0, 0, 0)
    assert rows(database) == messages(running, topic) == [b"True"]


@pytest.mark.parametrize("database", ["asyncpg"], indirect=True)
def test_a_cancelled_begin_leaves_no_transaction_open(database: AioDatabase) -> None:
    """At whatever moment: the connection is the application's, which works with it afterwards."""

    async def scenario() -> None:
        begun = 0
        for turns in range(30):
            connection = await database.connect()
            try:
                task = asyncio.ensure_future(database_of(connection).begin())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    begun += 1
                    continue
                async with connection.transaction():
                    await connection.execute(f"INSERT INTO orders VALUES ('{turns}'::bytea)")
                assert not connection.is_in_transaction()
            finally:
                await connection.close()
        assert len(rows(database)) == 30 - begun > 2

    asyncio.run(scenario())
