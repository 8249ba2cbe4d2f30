"""dbtx with SQLAlchemy: a Session's objects and messages, both or neither, in the Session's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import transaction
from sqlalchemy import orm
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

import metamq.tx.aio
from metamq import Producer, aio
from metamq.errors import BranchMisuse, ConfigError
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table, dbtx, join_transaction
from tests.sqlalchemy_databases import url
from tests.tx.databases import messages
from tests.tx.test_dbtx_aio import cancelled_at


class Base(orm.DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """An order; none is there twice."""

    __tablename__ = "orders"
    body: orm.Mapped[bytes] = orm.mapped_column(primary_key=True)


@pytest.fixture(params=["sqlite", "postgresql+psycopg"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sqlalchemy.Engine]:
    where, arguments = url(request.param, request, tmp_path)
    made = sqlalchemy.create_engine(where, connect_args=arguments)
    Base.metadata.create_all(made)
    with orm.Session(made) as session:
        for _ in range(2):  # may be repeated
            create_outcome_table(session)
    yield made
    made.dispose()


def rows(engine: sqlalchemy.Engine) -> list[bytes]:
    with orm.Session(engine) as session:
        return sorted(session.scalars(sqlalchemy.select(Order.body)))


def decisions(engine: sqlalchemy.Engine) -> int:
    with engine.connect() as connection:
        count = connection.scalar(sqlalchemy.text("SELECT count(*) FROM metamq_outcomes WHERE gtrid <> '@id'"))
    return int(count)


def test_both_happen(running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine) -> None:
    with orm.Session(engine) as session:
        for number in range(3):
            with dbtx(session, producer) as tx:
                session.add(Order(body=b"%d" % number))  # and flushed by the block
                tx.send(topic, b"%d" % number)
        session.scalars(sqlalchemy.select(Order)).all()  # the Session is in a transaction: the block ends it
        with dbtx(session, producer) as tx:
            session.add(Order(body=b"3"))
            with session.begin_nested() as savepoint:
                session.add(Order(body=b"taken back"))
                savepoint.rollback()
            tx.send(topic, b"3")
    scoped = orm.scoped_session(orm.sessionmaker(engine))
    with dbtx(scoped, producer) as tx:
        scoped.add(Order(body=b"4"))
        tx.send(topic, b"4")
    scoped.remove()
    with engine.connect() as connection, dbtx(connection, producer) as tx:
        connection.execute(sqlalchemy.insert(Order).values(body=b"5"))
        tx.send(topic, b"5")
    assert rows(engine) == messages(running, topic) == [b"%d" % number for number in range(6)]


def test_neither_happens_when_the_block_or_the_flush_fails(
    running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine
) -> None:
    with orm.Session(engine) as session:
        session.add(Order(body=b"0"))
        session.commit()
        with pytest.raises(KeyError), dbtx(session, producer) as tx:  # noqa: PT012
            session.add(Order(body=b"1"))
            tx.send(topic, b"1")
            session.flush()
            raise KeyError
        session.autoflush = False
        with pytest.raises(IntegrityError), dbtx(session, producer) as tx:  # noqa: PT012
            session.add(Order(body=b"0"))
            tx.send(topic, b"0")
    assert rows(engine) == [b"0"]
    assert messages(running, topic) == []
    assert decisions(engine) == 0, "the flush comes before the messages are prepared"


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_a_session_that_is_ended_in_the_block_is_noticed(
    running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine, how: str
) -> None:
    with orm.Session(engine) as session:
        with (  # noqa: PT012
            pytest.raises(BranchMisuse, match="was committed or rolled back in the block"),
            dbtx(session, producer) as tx,
        ):
            session.add(Order(body=b"0"))
            tx.send(topic, b"0")
            getattr(session, how)()
            session.add(Order(body=b"1"))
        with dbtx(session, producer) as tx:
            session.add(Order(body=b"2"))
            tx.send(topic, b"2")
    assert rows(engine) == [b"0"] * (how == "commit") + [b"2"]
    assert messages(running, topic) == [b"2"]


def test_what_does_not_fit_is_refused_with_the_next_step(producer: Producer[bytes], engine: sqlalchemy.Engine) -> None:
    with orm.Session(engine) as session:
        with pytest.raises(ConfigError, match="create_outcome_table"), dbtx(session, producer, table="others"):
            pass
        with dbtx(session, producer), pytest.raises(BranchMisuse, match="nested"), dbtx(session, producer):
            pass
    at_once = engine.execution_options(isolation_level="AUTOCOMMIT")
    with orm.Session(at_once) as session, pytest.raises(ConfigError, match="autocommit"), dbtx(session, producer):
        pass
    with orm.Session() as session, pytest.raises(ConfigError, match=r"Session\(engine\)"):
        dbtx(session, producer)
    asynchronous: Any = AsyncSession(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(ConfigError, match=r"one for asyncio.*metamq\.tx\.aio\.dbtx"):
        dbtx(asynchronous, producer)


def test_a_recoverer_takes_a_session_or_a_connection(
    running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine
) -> None:
    """After an application that died behind its decision, and one that died before."""
    with orm.Session(engine) as session:
        for body in (b"decided", b"undecided"):
            tx = dbtx(session, producer).__enter__()
            session.add(Order(body=body))
            tx.send(topic, body)
            assert tx._work is not None
            producer._background.run(tx._work.prepare())
            if body == b"decided":
                metamq.client.background.at_once(tx._outcomes.commit(tx._database, tx._work.gtrid, tx._mark))
                session.commit()
            session.rollback()
            tx._work = None
            producer._leave_block(tx)
    with Recoverer(lambda: orm.Session(engine), running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(1, 1, 0)
    with Recoverer(engine.connect, running.zookeeper, grace_s=0) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0)
    assert rows(engine) == messages(running, topic) == [b"decided"]


def test_the_data_manager_takes_a_session(
    running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine
) -> None:
    import zope.sqlalchemy

    manager: Any = transaction.TransactionManager()
    with orm.Session(engine) as session:
        zope.sqlalchemy.register(session, transaction_manager=manager)
        with manager:
            session.add(Order(body=b"0"))
            join_transaction(producer, session, manager).send(topic, b"0")
    assert rows(engine) == messages(running, topic) == [b"0"]


def test_a_transaction_of_the_application_around_the_block_is_refused(
    running: Cluster, topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine
) -> None:
    refused = pytest.raises(ConfigError, match=r"in a `with \.\.\.\.begin\(\)`.*Leave out the outer")
    with orm.Session(engine) as session:
        for around in (session.begin, session.begin_nested):
            with refused, around():
                session.add(Order(body=b"before"))
                dbtx(session, producer).__enter__()
        with refused, engine.begin() as connection:
            dbtx(connection, producer).__enter__()
        with session.begin_nested():
            session.add(Order(body=b"0"))
        with dbtx(session, producer) as tx:  # a savepoint that has ended is no obstacle
            tx.send(topic, b"0")
    assert rows(engine) == messages(running, topic) == [b"0"]


def test_blocks_of_one_connection_cannot_be_nested_by_two_objects(
    topic: str, producer: Producer[bytes], engine: sqlalchemy.Engine
) -> None:
    with orm.Session(engine) as session, dbtx(session, producer):  # noqa: SIM117
        with pytest.raises(BranchMisuse, match="in a dbtx already"):
            dbtx(session.connection(), producer).__enter__()


# -- asyncio ----------------------------------------------------------------------------------------------------------


Made = Callable[[], AsyncEngine]


@pytest.fixture(params=["sqlite+aiosqlite", "postgresql+psycopg", "postgresql+asyncpg"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """Makes an engine, of which each loop needs its own."""
    where, arguments = url(request.param, request, tmp_path)

    def make() -> AsyncEngine:
        return create_async_engine(where, connect_args=arguments, poolclass=NullPool)

    async def prepare() -> None:
        engine = make()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine) as session:
            await metamq.tx.aio.create_outcome_table(session)

    asyncio.run(prepare())
    return make


@asynccontextmanager
async def opened(running: Cluster, made: Made) -> AsyncIterator[tuple[AsyncSession, aio.Producer[bytes]]]:
    async with aio.Producer[bytes](running.zookeeper) as producer, AsyncSession(made()) as session:
        yield session, producer


def rows_of(made: Made) -> list[bytes]:
    async def read() -> list[bytes]:
        async with AsyncSession(made()) as session:
            return sorted(await session.scalars(sqlalchemy.select(Order.body)))

    return asyncio.run(read())


def test_asyncio_both_happen_or_neither(running: Cluster, topic: str, made: Made) -> None:
    async def scenario() -> None:
        async with opened(running, made) as (session, producer):
            for number in range(3):
                async with metamq.tx.aio.dbtx(session, producer) as tx:
                    session.add(Order(body=b"%d" % number))
                    await tx.send(topic, b"%d" % number)
            with pytest.raises(KeyError):  # noqa: PT012
                async with metamq.tx.aio.dbtx(session, producer) as tx:
                    session.add(Order(body=b"failed"))
                    await session.flush()
                    await tx.send(topic, b"failed")
                    raise KeyError
            with pytest.raises(IntegrityError):  # noqa: PT012
                async with metamq.tx.aio.dbtx(session, producer) as tx:
                    session.add(Order(body=b"0"))
                    await tx.send(topic, b"twice")
            with pytest.raises(BranchMisuse, match="was committed or rolled back in the block"):  # noqa: PT012
                async with metamq.tx.aio.dbtx(session, producer) as tx:
                    session.add(Order(body=b"3"))
                    await tx.send(topic, b"late")
                    await session.commit()
            async with made().connect() as connection, metamq.tx.aio.dbtx(connection, producer) as tx:
                await connection.execute(sqlalchemy.insert(Order).values(body=b"4"))
                await tx.send(topic, b"4")
            with pytest.raises(ConfigError, match="Leave out the outer"):
                async with session.begin():
                    await metamq.tx.aio.dbtx(session, producer).__aenter__()
            at_once = made().execution_options(isolation_level="AUTOCOMMIT")
            async with AsyncSession(at_once) as other:
                with pytest.raises(ConfigError, match="autocommit"):
                    await metamq.tx.aio.dbtx(other, producer).__aenter__()

    asyncio.run(scenario())
    assert rows_of(made) == [b"%d" % number for number in range(5)]
    assert messages(running, topic) == [b"0", b"1", b"2", b"4"]


@pytest.mark.parametrize("step", ["prepare", "decision", "commit"])
def test_asyncio_a_block_that_is_cancelled_as_it_ends(
    running: Cluster, topic: str, made: Made, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(running, made) as (session, producer):
            for behind in (False, True):
                tx = metamq.tx.aio.dbtx(session, producer)

                async def transact(tx: metamq.tx.aio.dbtx = tx, body: bytes = b"%d" % behind) -> None:
                    async with tx:
                        session.add(Order(body=body))
                        await tx.send(topic, body)

                with monkeypatch.context() as patch:
                    cancelled_at(step, behind, tx, patch)
                    with pytest.raises(asyncio.CancelledError):
                        await asyncio.create_task(transact())
                async with metamq.tx.aio.dbtx(session, producer) as tx:  # the Session can be used again
                    session.add(Order(body=b"next-%d" % behind))
                    await tx.send(topic, b"next-%d" % behind)

    asyncio.run(scenario())

    async def connect() -> AsyncConnection:
        return await made().connect()

    with Recoverer(connect, running.zookeeper, grace_s=0) as recoverer:
        recoverer.run_once()
    assert rows_of(made) == messages(running, topic)
    assert {b"next-0", b"next-1"} <= set(rows_of(made))
