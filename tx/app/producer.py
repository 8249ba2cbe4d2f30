"""The blocking Producer that `metamq` exports: metamq.client's Producer with transactions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from metamq.client.producer import producer
from metamq.client.typevars import T
from metamq.errors import ForkedError
from metamq.tx.app.transactional import EnterOnce, TransactionalProducer
from metamq.tx.app.transactions import OpenTransaction, RecoveredXid, misuse, warn_of_unreached
from metamq.wire.xa import Verb, Xid

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import Delivery, ManyDelivery
    from metamq.client.producer.producer_api import Key

log = logging.getLogger("metamq.tx")


class Producer(TransactionalProducer[T], producer.BaseProducer[T]):
    __doc__ = producer.BaseProducer.__doc__

    def _owner(self) -> threading.Thread:
        return threading.current_thread()

    def _send_in(
        self,
        topic: str,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> Delivery | None:
        self._check_outside_blocks()
        one = self._transactions.of(self._owner())
        if one is None:
            return None
        self._check_usable()
        message = self._message(value, key, headers, partition, timestamp)
        self._wait_for_capacity(one)
        return one.outbox.add(topic, message)

    def _send_many_in(self, topic: str, values: Sequence[T], keys: Sequence[Key] | None) -> ManyDelivery | None:
        self._check_outside_blocks()
        one = self._transactions.of(self._owner())
        if one is None:
            return None
        self._check_usable()
        messages = self._messages(values, keys)
        self._wait_for_capacity(one)
        return one.outbox.add_many(topic, messages)

    def _wait_for_capacity(self, one: OpenTransaction) -> None:
        if one.outbox.is_full and self._core.wait_s != 0:
            self._background.run(one.outbox.until_half())

    def transaction(self, *, timeout_s: float = 0.0) -> _Block:
        """Returns a block for messages of this thread. Readers see all of them after the block, or none if it raises.

            with producer.transaction():
                producer.send("orders", b"17")
                producer.send("stock", b"-1")

        A transaction spans any number of topics, partitions and brokers. Messages of other threads are not part of it.
        Leaving the block waits until the transaction is committed and durable, for any settings of the topics.
        `timeout_s`: brokers roll back a transaction that is not committed this long after the block has begun; 0 is
        their own limit (30 s, after the first batch). `with` gives the transaction's id, as in logs and `metamq tx
        list`.

        Leaving raises RolledBack, ConnectError and so on: then readers never see any of it. OutcomeUnknown: readers see
        all of it, or nothing, and the brokers find out which. Transactions cannot be nested: BranchMisuse.
        """
        return _Block(self, timeout_s)

    def _roll_back(self, one: OpenTransaction) -> None:
        if isinstance(self._core.accumulator.closed_by, ForkedError):  # a child that leaves its parent's block
            return
        warn_of_unreached(one, self._background.run(self._transactions.rollback(one)))

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def tpc_begin(self, xid: Xid | str, *, timeout_s: float = 0.0) -> None:
        """Adds what this thread sends to the transaction `xid`, from now until tpc_commit() or tpc_rollback().

        Raises BranchMisuse in a transaction, ConfigError for an invalid id.
        """
        self._check_usable()
        self._begin(self._xid_of(xid), timeout_s, is_tpc=True)

    def tpc_prepare(self) -> bool:
        """Prepares: the transaction can be committed, whatever happens. False: nothing was sent, so do not commit.

        Raises BranchMisuse outside of a transaction, and the second time; RolledBack and so on if it cannot be
        prepared. After an error or an interrupt only tpc_rollback() is allowed.
        """
        return self._background.run(self._transactions.prepare(self._to_prepare()))

    def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """Commits the transaction; without tpc_prepare() before, in one phase. `xid`: an id from tpc_recover().

        Raises BranchMisuse without an id outside of a transaction, and with an id inside; BranchNotKnown if no broker
        knows the id. OutcomeUnknown, ConnectError: call it again. After an error in one phase the transaction is over.
        """
        if xid is not None:
            self._background.run(self._transactions.finish(self._outside("tpc_commit()", xid), Verb.COMMIT))
            return
        one = self._inside("tpc_commit()")
        if one.prepared is None:
            self._leave(one)
        self._background.run(self._transactions.commit(one))
        self._leave(one)

    def tpc_rollback(self, xid: Xid | str | None = None) -> None:
        """Rolls the transaction back; `xid`: an id from tpc_recover(). Raises as tpc_commit().

        If a broker does not answer after a tpc_prepare(), this raises: call it again, since that broker may have
        prepared it. Without a tpc_prepare() it logs a warning: the broker rolls it back after its time-out.
        """
        if xid is not None:
            self._background.run(self._transactions.finish(self._outside("tpc_rollback()", xid), Verb.ROLLBACK))
            return
        one = self._inside("tpc_rollback()")
        self._background.run(self._transactions.tpc_rollback(one))
        self._leave(one)

    def tpc_recover(self) -> list[RecoveredXid]:
        """Returns the transactions that are prepared at the brokers, for tpc_commit(xid) and tpc_rollback(xid).

        Returns those of all clients, or raises ConnectError. Raises BranchMisuse in a transaction.
        """
        self._check_usable()
        if self._transactions.of(self._owner()) is not None:
            raise misuse("(any)", "tpc_recover() is not allowed in a transaction: end it first")
        return self._background.run(self._transactions.recover())

    def close(self, timeout: float | None = producer.FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes; further calls do nothing. Open transactions are rolled back, prepared ones stay.

        Raises as `flush` does.
        """
        if not self._closed and "_known_transactions" in self.__dict__:
            for one in self._leave_all():
                try:
                    if self._ends_with_the_producer(one):
                        self._roll_back(one)
                except Exception as error:  # the other transactions must be closed, too
                    log.warning("transaction %s is rolled back by its brokers after its time: %s", one.xid, error)
        super().close(timeout)


class _Block(EnterOnce):
    """The result of transaction()."""

    _way = "with"

    def __init__(self, producer: Producer[Any], timeout_s: float) -> None:
        self._producer = producer
        self._timeout_s = timeout_s

    def __enter__(self) -> Xid:
        producer = self._producer
        xid = self._entering(producer._new_xid())
        producer._check_usable()
        self._one = producer._begin(xid, self._timeout_s, is_tpc=False)
        return xid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        producer, one = self._producer, self._one
        producer._leave(one)
        if error is not None:
            producer._roll_back(one)
            return
        producer._check_usable()
        producer._background.run(producer._transactions.commit(one))
