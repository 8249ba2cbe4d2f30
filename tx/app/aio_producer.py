"""The asyncio Producer that `metamq.aio` exports: metamq.client's Producer with transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from metamq.client.producer import aio_producer
from metamq.client.producer.producer import FLUSH_TIMEOUT_S
from metamq.client.typevars import T
from metamq.tx.app.transactional import EnterOnce, TransactionalProducer, current_task
from metamq.tx.app.transactions import OpenTransaction, RecoveredXid, misuse, warn_of_unreached
from metamq.wire.xa import Verb, Xid

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import Delivery, ManyDelivery
    from metamq.client.producer.producer_api import Key

log = logging.getLogger("metamq.tx")


class Producer(TransactionalProducer[T], aio_producer.BaseProducer[T]):
    __doc__ = aio_producer.BaseProducer.__doc__

    def _owner(self) -> asyncio.Task[Any] | None:
        return current_task()

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
        return one.outbox.add(topic, self._message(value, key, headers, partition, timestamp))

    def _send_many_in(self, topic: str, values: Sequence[T], keys: Sequence[Key] | None) -> ManyDelivery | None:
        self._check_outside_blocks()
        one = self._transactions.of(self._owner())
        if one is None:
            return None
        self._check_usable()
        return one.outbox.add_many(topic, self._messages(values, keys))

    async def drain(self) -> None:
        """Waits until the buffer, or that of this task's transaction, is below half of its limit. Cancel-safe."""
        self._check_usable()
        one = self._transactions.of(self._owner())
        if one is not None:
            await one.outbox.until_half()
        await self._core.drain()

    def transaction(self, *, timeout_s: float = 0.0) -> _Block:
        """Returns a block for messages of this task. Readers see all of them after the block, or none if it raises.

            async with producer.transaction():
                producer.send("orders", b"17")
                producer.send("stock", b"-1")

        See metamq.Producer.transaction. Messages of other tasks are not part of it, also of tasks that this one starts.
        """
        return _Block(self, timeout_s)

    async def _roll_back(self, one: OpenTransaction) -> None:
        warn_of_unreached(one, await self._transactions.rollback(one))

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    async def tpc_begin(self, xid: Xid | str, *, timeout_s: float = 0.0) -> None:
        """See metamq.Producer.tpc_begin; the transaction is the task's."""
        self._check_usable()
        self._begin(self._xid_of(xid), timeout_s, is_tpc=True)

    async def tpc_prepare(self) -> bool:
        """See metamq.Producer.tpc_prepare."""
        return await self._transactions.prepare(self._to_prepare())

    async def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """See metamq.Producer.tpc_commit."""
        if xid is not None:
            await self._transactions.finish(self._outside("tpc_commit()", xid), Verb.COMMIT)
            return
        one = self._inside("tpc_commit()")
        if one.prepared is None:
            self._leave(one)
        await self._transactions.commit(one)
        self._leave(one)

    async def tpc_rollback(self, xid: Xid | str | None = None) -> None:
        """See metamq.Producer.tpc_rollback."""
        if xid is not None:
            await self._transactions.finish(self._outside("tpc_rollback()", xid), Verb.ROLLBACK)
            return
        one = self._inside("tpc_rollback()")
        await self._transactions.tpc_rollback(one)
        self._leave(one)

    async def tpc_recover(self) -> list[RecoveredXid]:
        """See metamq.Producer.tpc_recover."""
        self._check_usable()
        if self._transactions.of(self._owner()) is not None:
            raise misuse("(any)", "tpc_recover() is not allowed in a transaction: end it first")
        return await self._transactions.recover()

    async def close(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes; further calls do nothing. Open transactions are rolled back, prepared ones stay.

        Raises as `flush` does.
        """
        if self._opened and not self._closed and "_known_transactions" in self.__dict__:
            for one in self._leave_all():
                try:
                    if self._ends_with_the_producer(one):
                        await self._roll_back(one)
                except Exception as error:  # the other transactions must be closed, too
                    log.warning("transaction %s is rolled back by its brokers after its time: %s", one.xid, error)
        await super().close(timeout)


class _Block(EnterOnce):
    """The result of transaction()."""

    _way = "async with"

    def __init__(self, producer: Producer[Any], timeout_s: float) -> None:
        self._producer = producer
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Xid:
        producer = self._producer
        xid = self._entering(producer._new_xid())
        producer._check_usable()
        self._one = producer._begin(xid, self._timeout_s, is_tpc=False)
        return xid

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        producer, one = self._producer, self._one
        producer._leave(one)
        if error is not None:
            await asyncio.shield(producer._roll_back(one))
            return
        await producer._transactions.commit(one)
