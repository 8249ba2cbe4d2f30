"""dbtx: rows and messages, both or neither. The database's own commit decides.

    with dbtx(connection, producer) as tx:       on leaving:
        connection.execute("insert ...")         1  prepare the messages at their brokers
        tx.send("orders", b"...")                2  insert the row `commit`, in the application's transaction
                                                 3  connection.commit()      the decision
                                                 4  commit the messages

An error before 3 rolls both back. After 3 the messages are certain to be committed: if 4 fails, a Recoverer repeats it.
If 3 itself fails, only the database knows the outcome. dbtx asks the database at once. If that fails, a Recoverer asks
later, and until then the messages stay prepared. An interrupt or a cancellation counts as an error.

The steps are written once, in `DatabaseBlock`. Its APIs are `dbtx` here and in metamq.tx.database.aio_dbtx.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from metamq.client import telemetry
from metamq.client.background import at_once
from metamq.client.checks import wrong_type
from metamq.client.delayed import delayed
from metamq.client.offsets.connections import BlockingConnection, blocking_database_of
from metamq.client.producer.producer import BaseProducer
from metamq.client.schemas.topic import Topic
from metamq.errors import BranchMisuse, ConfigError, ForkedError, MetamqError, RolledBack
from metamq.tx.app.staging import Staging
from metamq.tx.app.transactional import TransactionalProducer
from metamq.tx.app.transactions import routes_of
from metamq.tx.app.work import GlobalTransaction
from metamq.tx.database.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable, TransactionEnded
from metamq.wire.xa import XACode

if TYPE_CHECKING:
    from metamq.client.offsets.dbapi import Database
    from metamq.client.producer import aio_producer
    from metamq.client.typevars import T

log = logging.getLogger("metamq.tx")

ROLLBACK_S_MIN = 0.5
"""Seconds for the brokers' answers to a rollback, after the producer's time limit."""
_ENDED = "the connection was committed or rolled back in the block"
_ENDED_HINT = (
    "Rows that this committed are in the database: check them. Only the block may commit or roll back: no commit() or "
    "rollback() of the connection in it, no `with connection:`, and with sqlite3 no executescript()."
)
IDLE_TIMEOUT = "25P03"
"""PostgreSQL's error idle_in_transaction_session_timeout."""
_IDLE = (
    "PostgreSQL ended the connection: its transaction was idle for longer than idle_in_transaction_session_timeout. "
    "No row and no message is committed"
)
_IDLE_HINT = "Do slow work before the block, or raise that limit. Then repeat the block with a new connection."
_ASYNCIO_HINT = (
    "Use a blocking one here; or `async with metamq.tx.aio.dbtx(connection, producer)` with a metamq.aio.Producer."
)


class DatabaseBlock(ABC):
    """The transaction of one block. A subclass enters and leaves it, and runs the producer's coroutines."""

    def __init__(
        self,
        database: Database,
        producer: BaseProducer[Any] | aio_producer.BaseProducer[Any],
        table: str,
        timeout_s: float,
    ) -> None:
        self._database = database
        self._producer = producer
        self._outcomes = OutcomeTable(table)
        self._timeout_s = timeout_s
        self._work: GlobalTransaction | None = None
        self._staging: Staging
        self._mark = 0
        self._driver: object = None
        """The driver's connection. Several objects of SQLAlchemy may share one."""

    @abstractmethod
    async def _at_brokers(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine in the producer's loop."""

    @property
    def is_active(self) -> bool:
        """True from entering the block until leaving it."""
        return self._work is not None

    async def _enter(self) -> None:
        producer, database = self._producer, self._database
        producer._check_usable()
        await database.check_transactional()
        self._driver = await database.driver()
        other = _last.get(id(self._driver))
        if other is not None and other._work is not None:
            raise BranchMisuse("dbtx", XACode.PROTO, "the connection is in a dbtx already, and they cannot be nested")
        try:
            identity, self._mark = await self._outcomes.begin(database)
        except BaseException as error:
            if database.began or isinstance(error, ConfigError):  # this connection must be able to create the table
                await database.rollback()
            raise
        _last[id(self._driver)] = self
        core = producer._core
        self._staging = Staging(routes_of(core))
        self._answer_s = min(core.options.request_timeout_s, core.options.delivery_timeout_s)
        self._work = GlobalTransaction(
            core.cluster, self._staging, identity + secrets.token_bytes(16), branch_timeout_s=self._timeout_s,
            answer_s=self._answer_s, note_answer=core.note_answer,
        )  # fmt: skip
        core.blocks.begin(self._staging)
        if isinstance(producer, TransactionalProducer):
            producer._enter_block(self)

    def _working(self) -> GlobalTransaction:
        if self._work is None:
            raise BranchMisuse("dbtx", XACode.PROTO, "the block has ended")
        self._producer._check_usable()
        return self._work

    async def _leave(self, error: BaseException | None) -> None:
        forked = self._producer._core.accumulator.closed_by
        if isinstance(forked, ForkedError):  # a fork's child leaves the block of its parent, which has the connection
            if error is None:
                raise forked.with_traceback(None)
            return
        work, self._work = self._work, None
        assert work is not None
        self._deadline_s = time.monotonic() + self._producer._core.options.delivery_timeout_s
        if isinstance(self._producer, TransactionalProducer):
            self._producer._leave_block(self)
        if error is not None:
            self._count(error)
            try:
                await self._warn_if_ended()
            finally:  # also if that is cancelled: the application may use the connection again
                await self._roll_back(work)
            return
        messages = {topic: number for topic, (number, _size) in self._staging.by_topic().items()}
        try:
            with telemetry.operation("dbtx", messages):
                await self._commit(work)
        except BaseException as failure:
            self._count(failure)
            raise
        self._count(None)

    def _count(self, error: BaseException | None) -> None:
        self._producer._core.blocks.end(self._staging, error)

    async def _commit(self, work: GlobalTransaction) -> None:
        try:
            await self._database.flush()
            if work.is_empty:
                await self._outcomes.check(self._database, self._mark)
            else:
                await self._at_brokers(self._prepare(work))
                await self._outcomes.commit(self._database, work.gtrid, self._mark)
        except TransactionEnded:
            await self._roll_back(work)
            problem = f"{_ENDED}: no message is sent"
            raise BranchMisuse(work.name, XACode.PROTO, problem, hint=_ENDED_HINT) from None
        except BaseException as error:
            await self._roll_back(work)
            if IDLE_TIMEOUT in (getattr(one, "sqlstate", None) for one in (error, getattr(error, "orig", None))):
                raise RolledBack(work.name, XACode.RBTIMEOUT, _IDLE, hint=_IDLE_HINT) from error
            raise
        try:
            await self._database.commit()  # the decision
        except BaseException:
            await self._find_out(work)
            raise
        if not work.is_empty:
            await self._commit_messages(work)

    async def _prepare(self, work: GlobalTransaction) -> None:
        """Prepares the messages within the producer's `delivery_timeout_s`, connections included."""
        limit_s = self._producer._core.options.delivery_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await work.prepare()
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"its messages were not prepared within the producer's delivery_timeout_s, {limit_s:g} s"
            raise RolledBack(work.name, XACode.RBTIMEOUT, reason) from None

    async def _warn_if_ended(self) -> None:
        """Warns if the connection was committed in the block: the block raises, and those rows stay."""
        try:
            await self._outcomes.check(self._database, self._mark)
        except TransactionEnded:
            log.warning("%s, which then failed: the committed rows stay. %s", _ENDED, _ENDED_HINT)
        except Exception as error:  # PostgreSQL takes no more statements in a transaction that has failed
            log.debug("unknown if the connection was committed in the block: %s", error)

    async def _roll_back(self, work: GlobalTransaction) -> None:
        """Rolls back rows and messages. An error here has the same effect as a crash of this process."""
        try:
            await self._database.rollback()
        except Exception as error:  # the connection is gone, and its transaction with it
            log.warning("the database's transaction could not be rolled back: %s", error)
        try:
            left_s = min(self._deadline_s - time.monotonic(), self._answer_s)
            failures = await self._at_brokers(work.rollback(max(left_s, ROLLBACK_S_MIN)))
        except MetamqError as error:
            failures = [error]
        for failure in failures:
            log.warning("a branch could not be rolled back now; its time-out or a recoverer does it: %s", failure)

    async def _find_out(self, work: GlobalTransaction) -> None:
        """Asks the database for the outcome after its commit has raised; the messages follow the outcome."""
        try:
            await self._database.rollback()  # a commit that can be repeated leaves the transaction open
            outcome = None if work.is_empty else await self._outcomes.decide(self._database, work.gtrid)
        except Exception as error:
            log.warning("the outcome of a commit is unknown until a recoverer asks the database: %s", error)
            return
        if outcome == COMMIT:
            self._count(None)
            await self._commit_messages(work)
        elif outcome == ABORT:
            await self._roll_back(work)

    async def _commit_messages(self, work: GlobalTransaction) -> None:
        """Commits the messages after the database's decision. Errors are logged: if the block raised, the caller would
        do the work again."""
        failures: Sequence[Exception]
        try:
            failures = await self._at_brokers(work.commit())
        except Exception as error:
            failures = [error]
        for failure in failures:
            log.warning("messages that must be committed wait for a recoverer: %s", failure)


_last: WeakValueDictionary[int, DatabaseBlock] = WeakValueDictionary()
"""The last block of each connection, by the connection's id. A nested block would commit half of the outer one."""


class dbtx(DatabaseBlock):
    """A transaction over a database connection and any number of messages: both happen, or neither.

    connection:  a DB-API (PEP 249) connection that is not in autocommit mode, or SQLAlchemy's Session or Connection, or
                 Django's connection. Leaving the block commits its transaction, or rolls it back: do neither inside.
                 With sqlite3 the transaction also begins with the block. With Django the block is an atomic(), and is
                 refused inside of another one.
    producer:    a blocking Producer; its settings also apply to these messages. A broker's answer is awaited for
                 `request_timeout_s`, and the preparation takes `delivery_timeout_s` at most. Its own `send` would send
                 outside the block, and is refused inside.
    table:       the outcome table, made once with `create_outcome_table(connection)`.
    timeout_s:   seconds after which a broker rolls back unprepared messages; 0 is the broker's own limit (30 s).

    Leaving raises the database's errors. If the messages cannot be prepared it raises RolledBack, ConnectError and so
    on: then nothing is committed. If the connection was committed or rolled back in the block, it raises BranchMisuse:
    no message is sent, but committed rows stay. The outcome is unknown only if the connection is lost during
    the commit. A Recoverer must run in some process: it ends the transactions of crashed processes.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        producer: BaseProducer[Any],
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        database = blocking_database_of(connection, paramstyle, _ASYNCIO_HINT)
        if not isinstance(producer, BaseProducer):
            raise wrong_type("`producer`", "a blocking metamq.Producer", producer)
        super().__init__(database, producer, table, timeout_s)
        self._background = producer._background

    async def _at_brokers(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)

    def __enter__(self) -> Self:
        """Begins the block. Raises ConfigError if the table is missing, or with autocommit; BranchMisuse if the
        connection is in another dbtx; and the database's errors."""
        at_once(self._enter())
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
    ) -> None:
        """Sends a message with the transaction: bytes, or what a Topic encodes. Raises the errors of Producer.send, and
        that of a broker that refuses it."""
        work = self._working()
        topic, (value,) = encoded(topic, [value])
        topic, headers, partition = delayed(topic, headers, partition, timestamp, delay_s, deliver_at)
        message = self._producer._message(value, key, headers, partition, timestamp)
        self._background.run(work.send_many(topic, [message]))

    def send_many(
        self,
        topic: str | Topic[Any],
        values: Iterable[Any],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        partition: str | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> None:
        """Sends messages with the transaction; `keys`, if given, has one for each value. Raises the errors of
        send()."""
        work = self._working()
        topic, values = encoded(topic, values)
        topic, headers, partition = delayed(topic, None, partition, None, delay_s, deliver_at)
        self._background.run(work.send_many(topic, self._producer._messages(values, keys, partition, headers)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        at_once(self._leave(error))


def encoded(topic: str | Topic[Any], values: Iterable[Any]) -> tuple[str, Iterable[Any]]:
    """Returns a topic's name, and the values as they are stored. Raises WrongType for a value of another type."""
    return (topic.name, topic.encode_many(list(values))) if isinstance(topic, Topic) else (topic, values)


def create_outcome_table(
    connection: BlockingConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Creates the table in which this database decides about transactions, unless it exists, and commits."""
    hint = "`await metamq.tx.aio.create_outcome_table(connection)` takes it."
    at_once(OutcomeTable(table).create(blocking_database_of(connection, paramstyle, hint)))
