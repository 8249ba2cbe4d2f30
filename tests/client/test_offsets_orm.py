"""Offsets in the transaction of SQLAlchemy's sessions, and of Django's atomic()."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sqlalchemy
from django.db import connections, transaction
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from metamq import DatabaseOffsets, aio
from metamq.errors import ConfigError, OwnershipLost
from tests.database_offsets import aio_offsets_in, offsets_in
from tests.django_databases import django_database, on_postgres
from tests.postgres import new_schema
from tests.sqlalchemy_databases import url

if TYPE_CHECKING:
    from tests.client.conftest import Shop

STORE, SEEN = "INSERT INTO seen VALUES ({})", "SELECT value FROM seen ORDER BY value"


class Blocking(NamedTuple):
    """A database, as an application works with it."""

    connect: Callable[[], Any]
    """For the consumer's own operations."""
    connection: Any
    transaction: Callable[[], AbstractContextManager[Any]]
    execute: Callable[[str], Any]
    read: Callable[[str], list[int]]
    without_transaction: Any
    """A connection whose statements are committed one by one."""


def on_sqlalchemy(where: sqlalchemy.URL, arguments: dict[str, Any]) -> Iterator[Blocking]:
    engine = sqlalchemy.create_engine(where, connect_args=arguments)
    autocommit = orm.Session(engine.execution_options(isolation_level="AUTOCOMMIT"))
    with orm.Session(engine) as session:

        def read(sql: str) -> list[int]:
            with engine.connect() as connection:
                return list(connection.scalars(sqlalchemy.text(sql)))

        yield Blocking(
            lambda: orm.Session(engine),
            session,
            session.begin,
            lambda sql: session.execute(sqlalchemy.text(sql)),
            read,
            autocommit,
        )
    autocommit.close()
    engine.dispose()


def on_django(database: dict[str, Any]) -> Iterator[Blocking]:
    with django_database(**database) as alias:

        def execute(sql: str) -> list[int]:
            with connections[alias].cursor() as cursor:
                cursor.execute(sql)
                return [row[0] for row in cursor.fetchall()] if cursor.description else []

        yield Blocking(
            lambda: connections[alias],  # a connection of the thread that asks
            connections[alias],
            lambda: transaction.atomic(alias),
            execute,
            execute,
            connections[alias],
        )


@pytest.fixture(params=["sqlalchemy-sqlite", "sqlalchemy-postgresql+psycopg", "django-sqlite", "django-postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blocking]:
    library, driver = request.param.split("-", 1)
    if library == "sqlalchemy":
        made = on_sqlalchemy(*url(driver, request, tmp_path))
    elif driver == "sqlite":
        made = on_django({"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "shop.db"})
    else:
        server = request.getfixturevalue("postgres")
        made = on_django(on_postgres(server, new_schema(server)))
    with contextmanager(lambda: made)() as opened:
        offsets_in(opened.connect)
        with opened.transaction():
            opened.execute("CREATE TABLE seen (value INTEGER)")
        yield opened


def test_results_and_offsets_are_stored_together(shop: Shop, group: str, database: Blocking) -> None:
    topic = shop.topic()
    for start in range(2):  # a second consumer continues where the first one ended
        shop.numbers(topic, 3, 3 * start)
        offsets = DatabaseOffsets(database.connect)
        with shop.consumer(topic, group, offsets=offsets, auto_commit=False, idle_timeout_s=0.5) as consumer:
            for message in consumer:
                with pytest.raises(KeyError), database.transaction():  # noqa: PT012
                    database.execute(STORE.format(int(message.value)))
                    consumer.commit(message, connection=database.connection)
                    raise KeyError
                with database.transaction():
                    database.execute(STORE.format(int(message.value)))
                    consumer.commit(message, connection=database.connection)
    assert database.read(SEEN) == list(range(6))
    assert database.read("SELECT next_offset FROM metamq_offsets") == [6]


def test_messages_that_are_counted_already_are_refused(shop: Shop, group: str, database: Blocking) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    offsets = DatabaseOffsets(database.connect)
    with shop.consumer(topic, group, offsets=offsets, auto_commit=False, idle_timeout_s=60) as consumer:
        message = next(iter(consumer))
        with database.transaction():
            consumer.commit(message, connection=database.connection)
        with pytest.raises(OwnershipLost, match="counted"), database.transaction():
            consumer.commit(message, connection=database.connection)


def test_a_connection_in_no_transaction_is_refused(shop: Shop, group: str, database: Blocking) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1)
    offsets = DatabaseOffsets(database.connect)
    with shop.consumer(topic, group, offsets=offsets, auto_commit=False, idle_timeout_s=60) as consumer:
        message = next(iter(consumer))
        with pytest.raises(ConfigError, match="the offsets would be stored without the results"):
            consumer.commit(message, connection=database.without_transaction)
    assert database.read("SELECT next_offset FROM metamq_offsets") == [-1]


@pytest.mark.parametrize("driver", ["sqlite+aiosqlite", "postgresql+psycopg", "postgresql+asyncpg"])
def test_an_async_session(shop: Shop, group: str, driver: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    where, arguments = url(driver, request, tmp_path)
    topic = shop.topic()
    shop.numbers(topic, 3)

    async def scenario() -> list[int]:
        engine = create_async_engine(where, connect_args=arguments, poolclass=NullPool)
        offsets = await aio_offsets_in(engine.connect)
        async with (
            AsyncSession(engine) as session,
            aio.Consumer(
                shop.cluster.zookeeper,
                topics=topic,
                group=group,
                offsets=offsets,
                auto_commit=False,
                idle_timeout_s=0.5,
            ) as consumer,
        ):
            await session.execute(sqlalchemy.text("CREATE TABLE seen (value INTEGER)"))
            await session.commit()
            async for message in consumer:
                for fails in (True, False):
                    await session.execute(sqlalchemy.text(STORE.format(int(message.value))))
                    await consumer.commit(message, connection=session)
                    await (session.rollback() if fails else session.commit())
            at_once = engine.execution_options(isolation_level="AUTOCOMMIT")
            async with AsyncSession(at_once) as other:
                with pytest.raises(ConfigError, match="autocommit"):
                    await consumer.commit(message, connection=other)
            return list(await session.scalars(sqlalchemy.text(SEEN)))

    assert asyncio.run(scenario()) == [0, 1, 2]
