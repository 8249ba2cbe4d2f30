"""dbtx for asyncio; see metamq.tx.database.dbtx."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from metamq.client.checks import wrong_type
from metamq.client.delayed import delayed
from metamq.client.offsets.connections import AnyConnection, database_of
from metamq.client.producer.aio_producer import BaseProducer
from metamq.errors import BranchMisuse
from metamq.tx.database.dbtx import DatabaseBlock, encoded
from metamq.tx.database.outcomes import DEFAULT_TABLE, OutcomeTable
from metamq.wire.xa import XACode

if TYPE_CHECKING:
    from metamq.client.schemas.topic import Topic
    from metamq.client.typevars import T


_FORGOTTEN = "a send() of the block was not awaited: rows and messages are rolled back"


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
        self._sends_left = 0
        """Calls of send() that have not ended: the end of the block refuses to commit without their messages."""

    async def _at_brokers(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def __aenter__(self) -> Self:
        """See metamq.tx.dbtx. Also raises ConfigError if an asyncpg connection is in a transaction()."""
        await self._enter()
        self._sends_left = 0
        return self

    def send(
        self,
        topic: str | Topic[Any],
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Sends a message with the transaction when it is awaited: bytes, or what a Topic encodes. Raises the errors of
        Producer.send, and that of a broker that refuses it."""
        topic, (value,) = encoded(topic, [value])
        topic, headers, partition = delayed(topic, headers, partition, timestamp, delay_s, deliver_at)
        return self._sending(topic, [self._producer._message(value, key, headers, partition, timestamp)])

    def send_many(
        self,
        topic: str | Topic[Any],
        values: Iterable[Any],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        partition: str | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Sends messages with the transaction when it is awaited; `keys`, if given, has one for each value. Raises the
        errors of send()."""
        topic, values = encoded(topic, values)
        topic, headers, partition = delayed(topic, None, partition, None, delay_s, deliver_at)
        return self._sending(topic, self._producer._messages(values, keys, partition, headers))

    def _sending(self, topic: str, messages: Any) -> Coroutine[Any, Any, None]:
        self._sends_left += 1

        async def send() -> None:
            try:
                async with self._one_call:
                    await self._working().send_many(topic, messages)
            finally:
                self._sends_left -= 1

        return send()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._one_call.acquire()  # another task may be sending in the block
        except asyncio.CancelledError as cancelled:
            await self._leave(cancelled)
            raise
        forgotten = None
        if error is None and self._sends_left:
            forgotten = error = BranchMisuse("dbtx", XACode.PROTO, _FORGOTTEN, hint="Write `await tx.send(...)`.")
        try:
            await self._leave(error)
        finally:
            self._one_call.release()
        if forgotten is not None:
            raise forgotten


async def create_outcome_table(
    connection: AnyConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Creates the table in which this database decides about transactions, unless it exists, and commits."""
    database = database_of(connection, paramstyle)
    await database.begin()
    await OutcomeTable(table).create(database)
