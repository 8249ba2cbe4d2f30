"""The blocking Producer that `metamq` exports: metamq.client's Producer with transactions."""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from metamq.client.producer import producer
from metamq.client.producer.producer_core import FLUSH_TIMEOUT_S
from metamq.client.typevars import T
from metamq.errors import ClosedError, ForkedError
from metamq.tx.app.transactional import TransactionalProducer, TransactionBlock

if TYPE_CHECKING:
    from metamq.tx.app.transactions import OpenTransaction, RecoveredXid
    from metamq.wire.xa import Xid


class Producer(TransactionalProducer[T], producer.BaseProducer[T]):
    __doc__ = producer.BaseProducer.__doc__

    def _owner(self) -> threading.Thread:
        return threading.current_thread()

    def _wait_for_capacity(self, one: OpenTransaction) -> None:
        if one.outbox.is_full and self._core.wait_s != 0:
            self._background.run(one.outbox.until_half())

    def transaction(self, *, timeout_s: float = 0.0) -> AbstractContextManager[Xid]:
        """Returns a block for messages of this thread. Readers see all of them after the block, or none if it raises.

            with producer.transaction():
                producer.send("orders", b"17")
                producer.send("stock", b"-1")

        A transaction spans any number of topics, partitions and brokers. Messages of other threads are not part of it.
        Leaving the block waits until the transaction is committed and durable, whatever the settings of the topics are.
        `timeout_s`: brokers roll back a transaction that is not committed this long after the block has begun; 0 is
        their own limit (30 s, after the first batch). `with` gives the transaction's id, as in logs and `metamq tx
        list`.

        Leaving raises RolledBack, ConnectError and so on: then readers never see any of the messages. It raises
        OutcomeUnknown if readers see all of them or none, and the brokers find out which. A transaction inside another
        one raises BranchMisuse.
        """
        return _Block(self, timeout_s)

    @property
    def _is_forked(self) -> bool:
        """True in a fork's child, which may leave its parent's block or close its parent's producer."""
        return isinstance(self._core.accumulator.closed_by, ForkedError)

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def tpc_begin(self, xid: Xid | str, *, timeout_s: float = 0.0) -> None:
        """Adds this thread's messages to the transaction `xid`, from now until tpc_commit() or tpc_rollback().

        Raises BranchMisuse in a transaction, ConfigError for an invalid id.
        """
        self._check_usable()
        self._begin(self._xid_of(xid), timeout_s, is_tpc=True)

    def tpc_prepare(self) -> bool:
        """Prepares the transaction: then it survives a crash. Returns False if nothing was sent: then do not commit.

        Raises BranchMisuse outside of a transaction, and the second time; RolledBack and so on if it cannot be
        prepared. After an error or an interrupt only tpc_rollback() is allowed.
        """
        return self._background.run(self._to_prepare())

    def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """Commits the transaction, in one phase if it is not prepared. `xid`: an id from tpc_recover().

        Raises BranchMisuse without an id outside of a transaction, and with an id inside; BranchNotKnown if no broker
        knows the id. OutcomeUnknown, ConnectError: call it again. After an error in one phase the transaction is over.
        """
        self._background.run(self._to_commit(xid))

    def tpc_rollback(self, xid: Xid | str | None = None) -> None:
        """Rolls the transaction back; `xid`: an id from tpc_recover(). Raises the errors of tpc_commit().

        If a broker does not answer after a tpc_prepare(), this raises: call it again, since that broker may have
        prepared it. Without a tpc_prepare() it logs a warning: the broker rolls it back after its time-out.
        """
        self._background.run(self._to_roll_back(xid))

    def tpc_recover(self) -> list[RecoveredXid]:
        """Returns the transactions that are prepared at the brokers, for tpc_commit(xid) and tpc_rollback(xid).

        Returns those of all clients, or raises ConnectError. Raises BranchMisuse in a transaction.
        """
        return self._background.run(self._to_recover())

    def close(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes; further calls do nothing. Rolls back open transactions; prepared ones stay prepared.

        Raises the errors of `flush`.
        """
        if not self._closed and "_known_transactions" in self.__dict__ and not self._is_forked:
            with contextlib.suppress(ClosedError):  # another thread has closed the producer meanwhile
                self._background.run(self._end_all())
        super().close(timeout)


class _Block(TransactionBlock):
    _way = "with"
    _producer: Producer[Any]

    def __enter__(self) -> Xid:
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        producer, one = self._producer, self._one
        producer._leave(one)
        if error is None:
            producer._check_usable()
            producer._background.run(producer._transactions.commit(one))
        elif not producer._is_forked:
            producer._background.run(producer._roll_back_now(one))
