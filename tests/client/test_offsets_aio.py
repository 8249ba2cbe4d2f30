"""Offsets in the transaction of an asyncio connection: psycopg's AsyncConnection, asyncpg, aiosqlite."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiosqlite
import pytest

from metamq import DatabaseOffsets, Message, TopicPartition, aio, create_offsets_table
from metamq.errors import ConfigError, OwnershipLost, WrongType
from tests.aio_databases import ASYNCIO_DRIVERS, AioDatabase, aio_database
from tests.database_offsets import aio_offsets_in, offsets_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.client.conftest import Shop


@pytest.fixture(params=ASYNCIO_DRIVERS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> AioDatabase:
    """With the table `seen`, which refuses nothing: doubles would show."""
    made = aio_database(request.param, request, tmp_path)
    asyncio.run(aio_offsets_in(made.connect))
    made.execute("CREATE TABLE seen (value INTEGER)")
    return made


@asynccontextmanager
async def consuming(shop: Shop, topic: str, group: str, database: AioDatabase, **settings: Any) -> AsyncIterator[Any]:
    settings = {"offsets": DatabaseOffsets(database.connect), "auto_commit": False, "idle_timeout_s": 0.5, **settings}
    async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, **settings) as consumer:
        yield consumer


@asynccontextmanager
async def transaction(connection: Any, database: AioDatabase) -> AsyncIterator[None]:
    """As an application works in one with this driver."""
    if database.driver != "aiosqlite":
        async with connection.transaction():
            yield
        return
    try:
        yield
    except BaseException:
        await connection.rollback()
        raise
    await connection.commit()


async def store(connection: Any, message: Message[Any]) -> None:
    await connection.execute(f"INSERT INTO seen VALUES ({int(message.value)})")


def seen(database: AioDatabase) -> list[int]:
    return database.one("SELECT value FROM seen ORDER BY value")


def stored_offsets(database: AioDatabase) -> list[int]:
    return database.one("SELECT next_offset FROM metamq_offsets")


async def until_seen(shop: Shop, topic: str, group: str, database: AioDatabase, count: int) -> None:
    """Reads as an application does, from where its group is, until so many are there."""
    connection = await database.connect()
    try:
        async with asyncio.timeout(60):
            while len(seen(database)) < count:
                async with consuming(shop, topic, group, database) as consumer:
                    async for message in consumer:
                        async with transaction(connection, database):
                            await store(connection, message)
                            await consumer.commit(message, connection=connection)
    finally:
        await connection.close()


@pytest.mark.slow
def test_each_message_counts_once_over_restarts(shop: Shop, group: str, database: AioDatabase) -> None:
    """Offsets were stored nowhere once, without an error: each start did every message again."""
    topic = shop.topic()

    async def scenario() -> None:
        for start in range(3):
            shop.numbers(topic, 5, 5 * start)
            await until_seen(shop, topic, group, database, 5 * (start + 1))

    asyncio.run(scenario())
    assert seen(database) == list(range(15))
    assert stored_offsets(database) == [15]


@pytest.mark.slow
def test_results_and_offsets_are_rolled_back_together(shop: Shop, group: str, database: AioDatabase) -> None:
    topic = shop.topic()
    shop.numbers(topic, 2)

    async def scenario() -> None:
        connection = await database.connect()
        async with consuming(shop, topic, group, database, idle_timeout_s=60) as consumer:
            messages = aiter(consumer)
            message = await anext(messages)
            with pytest.raises(KeyError):  # noqa: PT012
                async with transaction(connection, database):
                    await store(connection, message)
                    await consumer.commit(message, connection=connection)
                    raise KeyError
            assert seen(database) == []
            assert stored_offsets(database) == [-1]
            async with transaction(connection, database):
                await store(connection, message)
                await consumer.commit(message, connection=connection)
            with pytest.raises(OwnershipLost, match="counted up to offset 1 already"):  # noqa: PT012
                async with transaction(connection, database):
                    await store(connection, message)
                    await consumer.commit(message, connection=connection)
            await messages.aclose()
        await connection.close()
        await until_seen(shop, topic, group, database, 2)

    asyncio.run(scenario())
    assert seen(database) == [0, 1]


def test_a_connection_that_commits_each_statement_by_itself_is_refused(
    shop: Shop, group: str, database: AioDatabase, tmp_path: Path
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)

    async def scenario() -> None:
        if database.driver == "aiosqlite":
            connection: Any = await aiosqlite.connect(tmp_path / "results.db", isolation_level=None)
        else:
            connection = await database.connect()
        if database.driver == "psycopg":
            await connection.set_autocommit(True)
        async with consuming(shop, topic, group, database, idle_timeout_s=60) as consumer:
            messages = aiter(consumer)
            message = await anext(messages)
            with pytest.raises(ConfigError, match="stored without the results"):
                await consumer.commit(message, connection=connection)
            assert stored_offsets(database) == [-1]
            if database.driver == "aiosqlite":
                await connection.execute("BEGIN")
            async with transaction(connection, database):
                await consumer.commit(message, connection=connection)
            assert stored_offsets(database) == [1]
            await messages.aclose()
        await connection.close()

    asyncio.run(scenario())


def test_the_blocking_consumer_refuses_it_and_says_what_takes_it(shop: Shop, group: str, database: AioDatabase) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    offsets = DatabaseOffsets(database.connect)  # may be asynchronous here, too

    async def opened() -> Any:
        return await database.connect()

    with shop.consumer(topic, group, auto_commit=False, offsets=offsets) as consumer:
        message = next(iter(consumer))
        loop = asyncio.new_event_loop()
        connection = loop.run_until_complete(opened())
        with pytest.raises(ConfigError, match=r"one for asyncio.*metamq\.aio\.Consumer"):
            consumer.commit(message, connection=connection)
        loop.run_until_complete(connection.close())
        loop.close()
        with pytest.raises(ConfigError, match=r"connection=None\) gives no connection"):
            consumer.commit(message, connection=None)
        assert stored_offsets(database) == [-1]
        consumer.commit(message)
    assert stored_offsets(database) == [1]


def test_the_blocking_table_maker_refuses_it_and_says_what_takes_it(database: AioDatabase) -> None:
    async def scenario() -> None:
        connection = await database.connect()
        try:
            with pytest.raises(ConfigError, match=r"is one for asyncio.*`await metamq\.aio\.create_offsets_table"):
                create_offsets_table(connection)
            for name in ("offsets_of_shop", "offsets_of_shop"):  # the second time it is there
                await aio.create_offsets_table(connection, name)
            with pytest.raises(ConfigError, match="is not a table name"):
                await aio.create_offsets_table(connection, "1; DROP")
        finally:
            await connection.close()

    asyncio.run(scenario())
    assert database.one("SELECT count(*) FROM offsets_of_shop") == [0]


def test_what_gives_an_awaitable_unasked_is_refused(shop: Shop, group: str, tmp_path: Path) -> None:
    """A wrapper may hide what it wraps: its statements would go nowhere."""
    topic = shop.topic()
    shop.numbers(topic, 1)

    class Cursor:
        async def execute(self, *_: Any) -> None:
            raise AssertionError

        def close(self) -> None:
            pass

    class Wrapper:
        def cursor(self) -> Cursor:
            return Cursor()

        def commit(self) -> None:
            pass

        rollback = commit

    async def scenario() -> None:
        offsets = offsets_in(lambda: sqlite3.connect(tmp_path / "blocking.db"), paramstyle="qmark")
        closed = await aiosqlite.connect(tmp_path / "closed.db")
        await closed.close()
        async with aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, auto_commit=False, offsets=offsets
        ) as consumer:
            async for message in consumer:
                with pytest.raises(
                    ConfigError, match=r"Wrapper looks like a blocking connection, but returned an awaitable"
                ):
                    await consumer.commit(message, connection=cast("Any", Wrapper()))
                for connection in (aiosqlite.connect(tmp_path / "never.db"), closed):
                    with pytest.raises(ConfigError, match="the connection is closed, or was not awaited"):
                        await consumer.commit(message, connection=connection)
                with pytest.raises(ConfigError, match=r"connection=None\) gives no connection"):
                    await consumer.commit(message, connection=None)
                with pytest.raises(WrongType, match="`connection` must be a connection of a DB-API driver"):
                    await consumer.commit(message, connection=cast("Any", object()))
                break

    asyncio.run(scenario())


WORKER = """
    import asyncio, contextlib, random, sys
    from metamq import DatabaseOffsets, aio
    from metamq.errors import ConnectError, OwnershipLost

    servers, driver, place, topic, group, seed = sys.argv[1:]
    chance = random.Random(int(seed))

    async def connect():
        if driver == "aiosqlite":
            import aiosqlite
            return await aiosqlite.connect(place, timeout=100)
        dsn, schema = place.split("|")
        import psycopg
        if driver == "psycopg":
            return await psycopg.AsyncConnection.connect(dsn, options=f"-c search_path={schema}")
        import asyncpg
        named = psycopg.conninfo.conninfo_to_dict(dsn)
        return await asyncpg.connect(
            host=named["host"], user=named["user"], database=named["dbname"], server_settings={"search_path": schema}
        )

    class Again(Exception):
        pass

    async def count(database, consumer, message):
        await database.execute(f"INSERT INTO seen VALUES ({int(message.value)})")
        await consumer.commit(message, connection=database)
        if chance.random() < 0.1:
            raise Again

    async def handle(database, consumer, message):
        try:
            if driver != "aiosqlite":
                async with database.transaction():
                    await count(database, consumer, message)
                return
            try:
                await count(database, consumer, message)
            except BaseException:
                await database.rollback()
                raise
            await database.commit()
        except OwnershipLost:
            pass
        except Again:
            with contextlib.suppress(OwnershipLost):  # its next owner reads the message again
                await consumer.seek((message.topic, message.partition), message.offset)

    async def main():
        database = await connect()
        while True:
            try:
                consumer = await aio.Consumer(
                    servers, topics=topic, group=group, auto_commit=False, offsets=DatabaseOffsets(connect),
                    session_timeout_ms=1000,
                ).open()
                break
            except ConnectError:  # so short a session may end before it has joined
                pass
        async for message in consumer:
            await handle(database, consumer, message)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_each_message_counts_once_through_kills_freezes_and_rollbacks(
    shop: Shop, group: str, database: AioDatabase, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    topic = shop.topic(4)
    workers: list[subprocess.Popen[bytes]] = []
    place = str(tmp_path / "results.db")
    if database.driver != "aiosqlite":
        [schema] = database.one("SELECT current_schema()")
        place = f"{request.getfixturevalue('postgres')}|{schema}"

    def send(numbers: range) -> None:
        for index in range(4):
            shop.send(topic, [b"%d" % number for number in numbers if number % 4 == index], f"0-{index}")

    def start() -> None:
        command = [sys.executable, "-c", textwrap.dedent(WORKER), shop.cluster.zookeeper, database.driver, place]
        workers.append(subprocess.Popen([*command, topic, group, str(chance.randrange(2**32))]))

    def counted(least: int) -> None:
        shop.until(lambda: len(seen(database)) >= least, 60)

    def members() -> set[int]:
        return {member.pid for member in shop.admin.describe_group(group).members}

    send(range(300))
    try:
        for _ in range(3):
            start()
        for number in range(1, 4):
            counted(number * 60 + chance.randrange(30))
            victim = workers.pop(0)
            victim.kill()
            victim.wait()
            start()
        # Frozen, perhaps in its transaction, until another one has its partitions; then it goes on.
        counted(250)
        workers[0].send_signal(signal.SIGSTOP)
        shop.until(lambda: workers[0].pid not in members())
        workers[0].send_signal(signal.SIGCONT)
        send(range(300, 400))
        counted(400)
        shop.until(lambda: sum(stored_offsets(database)) == 400)
        assert all(worker.poll() is None for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert seen(database) == list(range(400))


@pytest.mark.parametrize("counted_before", [False, True])
def test_a_seek_of_another_task_beside_a_commit_goes_where_it_said(
    shop: Shop, group: str, database: AioDatabase, monkeypatch: pytest.MonkeyPatch, counted_before: bool
) -> None:
    """The commit is of messages from before the seek. It was taken for one behind that, and forgot or undid it."""
    topic = shop.topic()
    shop.numbers(topic, 6)
    update = DatabaseOffsets._update_in

    async def scenario() -> None:
        async with (
            AsyncExitStack() as closing,
            consuming(shop, topic, group, database, idle_timeout_s=60) as consumer,
        ):
            connection = await database.connect()
            closing.push_async_callback(connection.close)
            messages = aiter(consumer)
            for _ in range(3):
                last = await anext(messages)
            tp = TopicPartition(topic, last.partition)
            async with transaction(connection, database):
                await consumer.commit({tp: 2}, connection=connection)
            if counted_before:  # as after a commit whose answer was lost
                database.execute("UPDATE metamq_offsets SET next_offset = 4")

            async def update_and_seek(self: DatabaseOffsets, *args: Any) -> bool:
                monkeypatch.setattr(DatabaseOffsets, "_update_in", update)
                is_written = await update(self, *args)
                await consumer.seek(tp, 0)
                return is_written

            monkeypatch.setattr(DatabaseOffsets, "_update_in", update_and_seek)
            refused = pytest.raises(OwnershipLost, match="counted up to offset 4") if counted_before else nullcontext()
            with refused:
                async with transaction(connection, database):
                    await consumer.commit(last, connection=connection)
            assert stored_offsets(database) == [4 if counted_before else 3]
            again = await anext(messages)
            assert again.value == b"0"
            if not counted_before:
                async with transaction(connection, database):
                    await consumer.commit(again, connection=connection)
                assert stored_offsets(database) == [1], "the application went back, and means to count again"
            await messages.aclose()

    asyncio.run(scenario())
