"""dbtx: rows and messages, both or neither. The database's own commit decides.

    with dbtx(connection, producer) as tx:       on leaving:
        connection.execute("insert ...")         1  prepare the messages at their brokers
        tx.send("orders", b"...")                2  insert the row `commit`, in the application's transaction
                                                 3  connection.commit()      the decision
                                                 4  commit the messages

What goes wrong before 3 rolls both back. After 3 the messages are as good as sent: what 4 could not tell the brokers, a
Recoverer does. When 3 itself fails only the database knows: it is asked on the spot, and where it cannot be, by a
recoverer; until then the messages stay prepared. To be interrupted, or cancelled, is to fail.

The steps are written once, in `DatabaseBlock`; its faces are `dbtx` here and in metamq.tx.database.aio_dbtx.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from metamq.client.checks import wrong_type
from metamq.client.net.branches import ANSWER_S
from metamq.client.offsets.dbapi import Database, DatabaseConnection, at_once, blocking_database_of
from metamq.client.producer import aio_producer
from metamq.client.producer.producer import BaseProducer
from metamq.client.producer.producer_face import as_bytes, checked_headers, key_bytes, timestamp_us
from metamq.client.typevars import T
from metamq.errors import BranchMisuse, ConfigError, ForkedError, MetamqError
from metamq.tx.app.staging import AnyMessage, StagedMessage, Staging
from metamq.tx.app.transactional import TransactionalFace
from metamq.tx.app.transactions import routes_of
from metamq.tx.app.work import GlobalTransaction
from metamq.tx.database.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable, TransactionEnded
from metamq.wire.xa import XACode

log = logging.getLogger("metamq.tx")

_ENDED = "the connection was committed or rolled back in the block"
_ENDED_HINT = (
    "Rows that were committed so are there: see to them. Leave both to the block: no commit() or rollback() of the "
    "connection in it, no `with connection:`, and with sqlite3 no executescript()."
)
_ASYNCIO_HINT = (
    "Take a blocking one here; or `async with metamq.tx.aio.dbtx(connection, producer)` with a metamq.aio.Producer."
)


class DatabaseBlock(ABC):
    """The transaction of one block. A face enters and leaves it, and says how a producer's coroutine is run."""

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
        self._mark = 0

    @abstractmethod
    async def _at_brokers(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it in the producer's loop."""

    @property
    def is_active(self) -> bool:
        """Whether the block is entered, and not left."""
        return self._work is not None

    async def _enter(self) -> None:
        producer, database = self._producer, self._database
        producer._check_usable()
        database.check_transactional()
        other = _last.get(id(database.connection))
        if other is not None and other._work is not None:
            raise BranchMisuse("(none)", XACode.PROTO, "the connection is in a dbtx already: they are not nested")
        try:
            identity, self._mark = await self._outcomes.begin(database)
        except BaseException as error:
            if database.began or isinstance(error, ConfigError):  # so that the table can be made on this connection
                await database.rollback()
            raise
        _last[id(database.connection)] = self
        self._work = GlobalTransaction(
            producer._core.cluster, Staging(routes_of(producer._core)), identity + secrets.token_bytes(16),
            branch_timeout_s=self._timeout_s, answer_s=ANSWER_S,
        )  # fmt: skip
        if isinstance(producer, TransactionalFace):
            producer._enter_block(self)

    def _working(self) -> GlobalTransaction:
        if self._work is None:
            raise BranchMisuse("(none)", XACode.PROTO, "the block has ended")
        self._producer._check_usable()
        return self._work

    def _message(
        self,
        value: bytes,
        key: bytes | str | None,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> AnyMessage:
        return StagedMessage(
            self._encoded(value), key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
        )

    def _messages(self, values: Iterable[bytes], keys: Sequence[bytes | str | None] | None) -> list[AnyMessage]:
        encoded = [self._encoded(value) for value in values]
        if keys is None:
            return [*encoded]
        checked = [key_bytes(key) for key in keys]
        if len(checked) != len(encoded):
            problem = f"{len(checked):,} keys for {len(encoded):,} values"
            raise ConfigError(problem, hint="Give one key for each value.")
        return [StagedMessage(value, key) for value, key in zip(encoded, checked, strict=True)]

    def _encoded(self, value: bytes) -> bytes:
        encoded: Any = value if self._producer._encode is None else self._producer._encode(value)
        return as_bytes(encoded, "value")

    async def _leave(self, error: BaseException | None) -> None:
        forked = self._producer._core.accumulator.closed_by
        if isinstance(forked, ForkedError):  # a child leaves its parent's block, whose connection it has, too
            if error is None:
                raise forked.with_traceback(None)
            return
        work, self._work = self._work, None
        assert work is not None
        if isinstance(self._producer, TransactionalFace):
            self._producer._leave_block(self)
        if error is not None:
            try:
                await self._warn_if_ended()
            finally:  # also when that is cancelled: the connection may go on
                await self._roll_back(work)
            return
        try:
            if work.is_empty:
                await self._outcomes.check(self._database, self._mark)
            else:
                await self._at_brokers(work.prepare())
                await self._outcomes.commit(self._database, work.gtrid, self._mark)
        except TransactionEnded:
            await self._roll_back(work)
            problem = f"{_ENDED}: no message is sent"
            raise BranchMisuse(work.name, XACode.PROTO, problem, hint=_ENDED_HINT) from None
        except BaseException:
            await self._roll_back(work)
            raise
        try:
            await self._database.commit()  # the decision
        except BaseException:
            await self._find_out(work)
            raise
        if not work.is_empty:
            await self._tell(work)

    async def _warn_if_ended(self) -> None:
        """The block raises, and what it had committed before stays."""
        try:
            await self._outcomes.check(self._database, self._mark)
        except TransactionEnded:
            log.warning("%s, which then failed: what was committed so stays. %s", _ENDED, _ENDED_HINT)
        except Exception as error:  # PostgreSQL takes no more statements in a transaction that has failed
            log.debug("whether the connection was committed in the block cannot be told: %s", error)

    async def _roll_back(self, work: GlobalTransaction) -> None:
        """Rolls back both; what fails is no worse than that this process had died."""
        try:
            await self._database.rollback()
        except Exception as error:  # it is gone, and its transaction with it
            log.warning("the database's transaction could not be rolled back: %s", error)
        try:
            failures = await self._at_brokers(work.rollback())
        except MetamqError as error:
            failures = [error]
        for failure in failures:
            log.warning("a branch could not be rolled back: it is, after its time, or by a recoverer: %s", failure)

    async def _find_out(self, work: GlobalTransaction) -> None:
        """The commit has raised: the messages follow what the database has made of it, if it can be asked."""
        try:
            await self._database.rollback()  # a commit that may be repeated leaves the transaction open
            outcome = None if work.is_empty else await self._outcomes.decide(self._database, work.gtrid)
        except Exception as error:
            log.warning("only a recoverer can tell what became of a commit: %s", error)
            return
        if outcome == COMMIT:
            await self._tell(work)
        elif outcome == ABORT:
            await self._roll_back(work)

    async def _tell(self, work: GlobalTransaction) -> None:
        """The database has decided: what fails from here on is not the block's, whose caller would do it again."""
        failures: Sequence[Exception]
        try:
            failures = await self._at_brokers(work.commit())
        except Exception as error:
            failures = [error]
        for failure in failures:
            log.warning("messages that are decided to be committed wait for a recoverer: %s", failure)


_last: WeakValueDictionary[int, DatabaseBlock] = WeakValueDictionary()
"""Of each connection, by its id. One within another would commit half of that."""


class dbtx(DatabaseBlock):
    """A transaction over a DB-API connection and any number of messages: both happen, or neither.

    connection:  a DB-API (PEP 249) connection that is not in autocommit mode; sqlite3 and psycopg 3 are tested. Its
                 transaction is committed, or rolled back, on leaving the block: do neither inside. With sqlite3 it also
                 begins with the block.
    producer:    a blocking Producer; its settings hold for the messages, too. Its own `send` would send past the block,
                 and is refused inside.
    table:       the outcome table, made once with `create_outcome_table(connection)`.
    timeout_s:   a broker rolls back what is not prepared after so long; 0 is the broker's own (30 s).

    Leaving raises what the database raises; RolledBack, ConnectError and so on when the messages could not be prepared:
    then nothing has happened; BranchMisuse where the connection was committed or rolled back in the block: no message
    is sent, but what was committed so is. Only where the connection is lost during the commit nobody can tell yet.
    A Recoverer has to run somewhere, for what is left by processes that die in between.
    """

    def __init__(
        self,
        connection: DatabaseConnection,
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
        """Begins. Raises ConfigError without the table, or with autocommit; BranchMisuse within another dbtx of the
        connection; and what the database raises."""
        at_once(self._enter())
        return self

    def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
    ) -> None:
        """Sends a message with the transaction. Raises as Producer.send, and what a broker refuses the branch with."""
        work = self._working()
        message = self._message(value, key, headers, partition, timestamp)
        self._background.run(work.send(topic, message))

    def send_many(
        self, topic: str, values: Iterable[bytes], *, keys: Sequence[bytes | str | None] | None = None
    ) -> None:
        """Sends messages with the transaction; `keys`, if given, one for each. Raises as send()."""
        work = self._working()
        self._background.run(work.send_many(topic, self._messages(values, keys)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        at_once(self._leave(error))


def create_outcome_table(
    connection: DatabaseConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Makes the table in which this database decides about transactions, unless it is there. Commits."""
    hint = "`await metamq.tx.aio.create_outcome_table(connection)` takes it."
    at_once(OutcomeTable(table).create(blocking_database_of(connection, paramstyle, hint)))
