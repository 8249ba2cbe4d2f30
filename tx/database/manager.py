"""A data manager for the `transaction` package (Zope, Pyramid): messages that go with the transaction, or not at all.

    call of the package   effect
    tpc_begin, commit     inserts the row `commit`, on the database's connection, in its transaction
    tpc_vote              prepares the messages; an error here fails the transaction
    (the database commits: zope.sqlalchemy's manager does so in its own tpc_vote, and sorts last: the decision)
    tpc_finish            commits the messages; never raises: a Recoverer does the failed steps
    tpc_abort             asks the database for the outcome, since the package also calls it after the decision

The package has no log and no recovery. If a later manager fails, it calls tpc_abort of all managers, even of those
whose transaction is committed. So the outcome table decides here, as it does for dbtx.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.client.background import at_once
from metamq.client.net.branches import ANSWER_S
from metamq.client.offsets.connections import BlockingConnection, blocking_database_of
from metamq.errors import BranchMisuse, ConfigError, MetamqError
from metamq.tx.app.outbox import Outbox
from metamq.tx.app.staging import Staging
from metamq.tx.app.transactions import routes_of
from metamq.tx.app.work import GlobalTransaction
from metamq.tx.database.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable
from metamq.wire.xa import XACode

if TYPE_CHECKING:
    from metamq.client.offsets.dbapi import Database
    from metamq.client.producer.producer import BaseProducer
    from metamq.client.typevars import T

log = logging.getLogger("metamq.tx")


class DataManager:
    """The result of join_transaction(): `send` sends with the transaction. `transaction` calls the other methods."""

    def __init__(
        self,
        producer: BaseProducer[Any],
        connection: Callable[[], BlockingConnection],
        manager: Any,
        connect: Callable[[], BlockingConnection] | None,
        outcomes: OutcomeTable,
        paramstyle: str | None,
        timeout_s: float,
    ) -> None:
        self.transaction_manager = manager
        self._producer = producer
        self._get_connection = connection
        self._connect = connect
        self._outcomes = outcomes
        self._paramstyle = paramstyle
        core = producer._core
        gtrid = at_once(outcomes.identity(self._database())) + secrets.token_bytes(16)
        staging = Staging(routes_of(core))
        self._work = GlobalTransaction(core.cluster, staging, gtrid, branch_timeout_s=timeout_s, answer_s=ANSWER_S)
        self._outbox = Outbox(core, core.loop, self._work, core.options)
        self._prepared = False

    def _database(self) -> Database:
        return self._blocking(self._get_connection())

    def _blocking(self, connection: BlockingConnection) -> Database:
        return blocking_database_of(connection, self._paramstyle, "The `transaction` package needs a blocking one.")

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
        """Sends a message with the transaction. Raises the errors of Producer.send, and the error that failed
        the transaction."""
        message = self._producer._message(value, key, headers, partition, timestamp)
        self._producer._check_usable()
        if self._outbox.is_full:
            self._run(self._outbox.until_half())
        self._outbox.add(topic, message)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it in the producer's loop. Raises if the producer is unusable. In a fork's child no loop runs."""
        try:
            self._producer._check_usable()
        except BaseException:
            work.close()
            raise
        return self._producer._background.run(work)

    def sortKey(self) -> str:
        """Sorts before the managers of databases, whose keys begin with a tilde: they commit last."""
        return f"metamq:{self._work.gtrid.hex()}"

    def savepoint(self) -> Savepoint:
        """Returns a savepoint. Later messages wait in memory, up to `buffer_bytes`: it can take them back."""
        return Savepoint(self._outbox, self._outbox.savepoint())

    def tpc_begin(self, transaction: Any) -> None:
        """Does nothing."""

    def commit(self, transaction: Any) -> None:
        """Writes the decision into the database's transaction."""
        if self._outbox.is_used:
            at_once(self._outcomes.commit(self._database(), self._work.gtrid))

    def tpc_vote(self, transaction: Any) -> None:
        """Prepares the messages. Raises the error if that fails."""
        if self._outbox.is_used:
            self._run(self._vote())
            self._prepared = True

    async def _vote(self) -> None:
        await self._outbox.settle()
        self._outbox.closed = True
        await self._work.prepare()

    def tpc_finish(self, transaction: Any) -> None:
        """Commits the messages. Never raises: the database has decided."""
        self._end(self._work.commit, None)

    def abort(self, transaction: Any) -> None:
        """Calls tpc_abort(). The package also calls this after a failed commit, when the database has committed."""
        self.tpc_abort(transaction)

    def tpc_abort(self, transaction: Any) -> None:
        """Rolls back, or commits if the database has committed: after a vote only the database knows. Never raises."""
        if not self._prepared:
            self._roll_back()
            return
        outcome = None
        if self._connect is not None:
            try:
                with contextlib.closing(self._connect()) as connection:
                    outcome = at_once(self._outcomes.decide(self._blocking(connection), self._work.gtrid))
            except Exception as error:
                log.warning("the database does not answer with its decision: %s", error)
        if outcome == COMMIT:
            self.tpc_finish(transaction)
        elif outcome == ABORT:
            self._roll_back()
        else:
            log.info("transaction %s waits for a recoverer, which asks the database", self._work.name)

    def _roll_back(self) -> None:
        try:
            self._run(self._outbox.give_up())
        except Exception as error:  # its producer is closed: brokers roll back its branches
            log.info("the unsent messages of %s are dropped: %s", self._work.name, error)
        reason = BranchMisuse(self._work.name, XACode.PROTO, "its transaction was aborted")
        self._end(self._work.rollback, reason)

    def _end(self, end: Callable[[], Any], error: MetamqError | None) -> None:
        try:
            failures = self._run(end())
            self._producer._background.call_soon(self._outbox.end, error)
        except Exception as raised:
            failures = [raised]
        for failure in failures:
            log.warning("a branch of %s waits for a recoverer: %s", self._work.name, failure)


class Savepoint(NamedTuple):
    """A place among the messages of a DataManager."""

    outbox: Outbox
    sent: int

    def rollback(self) -> None:
        """Takes back the messages sent after the savepoint."""
        self.outbox.take_back(self.sent)


def join_transaction(
    producer: BaseProducer[Any],
    connection: BlockingConnection | Callable[[], BlockingConnection],
    manager: Any = None,
    *,
    connect: Callable[[], BlockingConnection] | None = None,
    table: str = DEFAULT_TABLE,
    paramstyle: str | None = None,
    timeout_s: float = 0.0,
) -> DataManager:
    """Adds messages to the current transaction of the `transaction` package.

        mq = join_transaction(producer, connection)
        mq.send("orders", b"17")

    connection:  the DB-API connection whose transaction is committed with this one, or a function that returns it: with
                 zope.sqlalchemy `lambda: session.connection().connection`. The database has the outcome table, see
                 `metamq.tx.create_outcome_table`.
    manager:     the transaction manager; None: `transaction.manager`.
    connect:     opens another connection to that database. With it an abort asks the database at once for its
                 decision. Without it, messages that were voted on wait for a Recoverer.

    A Recoverer must run in some process in any case. Raises ConfigError if the table or the package is missing.
    """
    if manager is None:
        try:
            import transaction
        except ImportError:
            raise ConfigError("the package `transaction` is not installed", hint="pip install transaction") from None
        manager = transaction.manager
    producer._check_usable()
    # callable() is true for an sqlite3.Connection.
    get: Any = (lambda: connection) if hasattr(connection, "commit") else connection
    made = DataManager(producer, get, manager, connect, OutcomeTable(table), paramstyle, timeout_s)
    manager.get().join(made)
    return made
