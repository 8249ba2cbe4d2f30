"""dbtx: rows and messages, both or neither. The database's own commit decides.

    with dbtx(connection, producer) as tx:       on leaving:
        connection.execute("insert ...")         1  prepare the messages at their brokers
        tx.send("orders", b"...")                2  insert the row `commit`, in the application's transaction
                                                 3  connection.commit()      the decision
                                                 4  commit the messages

What goes wrong before 3 rolls both back. After 3 the messages are as good as sent: what 4 could not tell the brokers, a
Recoverer does. When 3 itself fails only the database knows: it is asked on the spot, and where it cannot be, by a
recoverer; until then the messages stay prepared.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from metamq.client.branches import ANSWER_S
from metamq.client.checks import wrong_type
from metamq.client.dbapi import Connection, check_connection
from metamq.client.producer import Producer
from metamq.client.producer_face import as_bytes, checked_headers, key_bytes, timestamp_us
from metamq.errors import BranchMisuse, ConfigError, ForkedError, MetamqError
from metamq.tx.app.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable, TransactionEnded, check_transactional
from metamq.tx.app.staging import AnyMessage, Message, Staging
from metamq.tx.app.transactional import TransactionalFace
from metamq.tx.app.transactions import routes_of
from metamq.tx.app.work import Work
from metamq.wire.xa import XACode

log = logging.getLogger("metamq.tx")

_ENDED = "the connection was committed or rolled back in the block"
_ENDED_HINT = (
    "Rows that were committed so are there: see to them. Leave both to the block: no commit() or rollback() of the "
    "connection in it, no `with connection:`, and with sqlite3 no executescript()."
)


class dbtx:
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
        connection: Connection,
        producer: Producer[Any],
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        check_connection(connection)
        if not isinstance(producer, Producer):
            raise wrong_type("`producer`", "a blocking metamq.Producer", producer)
        self._connection = connection
        self._producer = producer
        self._outcomes = OutcomeTable(table, paramstyle)
        self._timeout_s = timeout_s
        self._work: Work | None = None
        self._mark = 0

    def __enter__(self) -> Self:
        """Begins. Raises ConfigError without the table, or with autocommit; BranchMisuse within another dbtx of the
        connection; and what the database raises."""
        producer = self._producer
        producer._check_usable()
        check_transactional(self._connection)
        other = _last.get(id(self._connection))
        if other is not None and other._work is not None:
            raise BranchMisuse("(none)", XACode.PROTO, "the connection is in a dbtx already: they are not nested")
        try:
            identity, self._mark = self._outcomes.begin(self._connection)
        except ConfigError:
            self._connection.rollback()  # so that the table can be made on this connection
            raise
        _last[id(self._connection)] = self
        self._work = Work(
            producer._core.cluster, Staging(routes_of(producer._core)), identity + secrets.token_bytes(16),
            branch_timeout_s=self._timeout_s, answer_s=ANSWER_S,
        )  # fmt: skip
        if isinstance(producer, TransactionalFace):
            producer._enter_block(self)
        return self

    @property
    def is_active(self) -> bool:
        """Whether the block is entered, and not left."""
        return self._work is not None

    def _working(self) -> Work:
        if self._work is None:
            raise BranchMisuse("(none)", XACode.PROTO, "the block has ended")
        self._producer._check_usable()
        return self._work

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
        message = Message(
            self._encoded(value), key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
        )
        self._producer._background.run(work.send(topic, message))

    def send_many(
        self, topic: str, values: Iterable[bytes], *, keys: Sequence[bytes | str | None] | None = None
    ) -> None:
        """Sends messages with the transaction; `keys`, if given, one for each. Raises as send()."""
        work = self._working()
        encoded = [self._encoded(value) for value in values]
        messages: list[AnyMessage] = [*encoded]
        if keys is not None:
            checked = [key_bytes(key) for key in keys]
            if len(checked) != len(encoded):
                problem = f"{len(checked):,} keys for {len(encoded):,} values"
                raise ConfigError(problem, hint="Give one key for each value.")
            messages = [Message(value, key) for value, key in zip(encoded, checked, strict=True)]
        self._producer._background.run(work.send_many(topic, messages))

    def _encoded(self, value: bytes) -> bytes:
        encoded: Any = value if self._producer._encode is None else self._producer._encode(value)
        return as_bytes(encoded, "value")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            self._warn_if_ended()
            self._roll_back(work)
            return
        try:
            if work.is_empty:
                self._outcomes.check(self._connection, self._mark)
            else:
                self._producer._background.run(work.prepare())
                self._outcomes.commit(self._connection, work.gtrid, self._mark)
        except TransactionEnded:
            self._roll_back(work)
            problem = f"{_ENDED}: no message is sent"
            raise BranchMisuse(work.name, XACode.PROTO, problem, hint=_ENDED_HINT) from None
        except BaseException:
            self._roll_back(work)
            raise
        try:
            self._connection.commit()  # the decision
        except BaseException:
            self._find_out(work)
            raise
        if not work.is_empty:
            self._tell(work)

    def _warn_if_ended(self) -> None:
        """The block raises, and what it had committed before stays."""
        try:
            self._outcomes.check(self._connection, self._mark)
        except TransactionEnded:
            log.warning("%s, which then failed: what was committed so stays. %s", _ENDED, _ENDED_HINT)
        except Exception as error:  # PostgreSQL takes no more statements in a transaction that has failed
            log.debug("whether the connection was committed in the block cannot be told: %s", error)

    def _roll_back(self, work: Work) -> None:
        """Rolls back both; what fails is no worse than that this process had died."""
        try:
            self._connection.rollback()
        except Exception as error:  # it is gone, and its transaction with it
            log.warning("the database's transaction could not be rolled back: %s", error)
        try:
            failures = self._producer._background.run(work.rollback())
        except MetamqError as error:
            failures = [error]
        for failure in failures:
            log.warning("a branch could not be rolled back: it is, after its time, or by a recoverer: %s", failure)

    def _find_out(self, work: Work) -> None:
        """The commit has raised: the messages follow what the database has made of it, if it can be asked."""
        try:
            self._connection.rollback()  # a commit that may be repeated leaves the transaction open
            outcome = None if work.is_empty else self._outcomes.decide(self._connection, work.gtrid)
        except Exception as error:
            log.warning("only a recoverer can tell what became of a commit: %s", error)
            return
        if outcome == COMMIT:
            self._tell(work)
        elif outcome == ABORT:
            self._roll_back(work)

    def _tell(self, work: Work) -> None:
        """The database has decided: what fails from here on is not the block's, whose caller would do it again."""
        failures: Sequence[Exception]
        try:
            failures = self._producer._background.run(work.commit())
        except Exception as error:
            failures = [error]
        for failure in failures:
            log.warning("messages that are decided to be committed wait for a recoverer: %s", failure)


_last: WeakValueDictionary[int, dbtx] = WeakValueDictionary()
"""Of each connection, by its id. One within another would commit half of that."""


def create_outcome_table(connection: Connection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None) -> None:
    """Makes the table in which this database decides about transactions, unless it is there. Commits."""
    OutcomeTable(table, paramstyle).create(connection)
