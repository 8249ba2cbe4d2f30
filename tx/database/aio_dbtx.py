"""dbtx for asyncio; see metamq.tx.database.dbtx."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from metamq.client.checks import wrong_type
from metamq.client.offsets.connections import AnyConnection, database_of
from metamq.client.producer.aio_producer import BaseProducer
from metamq.tx.database.dbtx import DatabaseBlock
from metamq.tx.database.outcomes import DEFAULT_TABLE, OutcomeTable

if TYPE_CHECKING:
    from metamq.client.typevars import T


class dbtx(DatabaseBlock):
    """A transaction over a database connection and any number of messages: both happen, or neither.

        async with dbtx(connection, producer) as tx:
            await connection.execute("INSERT INTO orders VALUES ($1)", "17")
            await tx.send("orders", b"17")

    connection:  of psycopg.AsyncConnection, asyncpg or aiosqlite, not in autocommit mode; or SQLAlchemy's AsyncSession
                 or AsyncConnection. With a blocking one, the loop waits for the database. An asyncpg connection must
                 not be in a transaction(): the block begins one, and a transaction() inside the block is a savepoint.
    producer:    a metamq.aio.Producer. Its own `send` would send outside the block, and is refused inside.

    See metamq.tx.dbtx for the rest. A cancelled block rolls back. If the commit itself is cancelled, the block asks the
    database for the outcome, and the messages follow it. Several tasks may send in one block.
    """

    def __init__(
        self,
        connection: AnyConnection,
        producer: BaseProducer[Any],
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        database = database_of(connection, paramstyle)
        if not isinstance(producer, BaseProducer):
            raise wrong_type("`producer`", "a metamq.aio.Producer", producer)
        super().__init__(database, producer, table, timeout_s)
        self._one_call = asyncio.Lock()

    async def _at_brokers(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def __aenter__(self) -> Self:
        """See metamq.tx.dbtx. Also raises ConfigError if an asyncpg connection is in a transaction()."""
        await self._enter()
        return self

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
    ) -> None:
        """Sends a message with the transaction. Raises the errors of Producer.send, and that of a broker that
        refuses it."""
        message = self._producer._message(value, key, headers, partition, timestamp)
        async with self._one_call:
            await self._working().send_many(topic, [message])

    async def send_many(
        self,
        topic: str,
        values: Iterable[bytes],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        partition: str | None = None,
    ) -> None:
        """Sends messages with the transaction; `keys`, if given, has one for each value. Raises the errors of
        send()."""
        messages = self._producer._messages(values, keys, partition)
        async with self._one_call:
            await self._working().send_many(topic, messages)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._one_call.acquire()  # another task may be sending in the block
        except asyncio.CancelledError as cancelled:
            await self._leave(cancelled)
            raise
        try:
            await self._leave(error)
        finally:
            self._one_call.release()


async def create_outcome_table(
    connection: AnyConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Creates the table in which this database decides about transactions, unless it exists, and commits."""
    database = database_of(connection, paramstyle)
    await database.begin()
    await OutcomeTable(table).create(database)
