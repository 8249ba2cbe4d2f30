"""The asyncio Producer that `metamq.aio` exports: metamq.client's Producer with transactions."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from metamq.client.producer import aio_producer
from metamq.client.producer.producer_core import FLUSH_TIMEOUT_S
from metamq.client.typevars import T
from metamq.tx.app.transactional import TransactionalProducer, TransactionBlock

if TYPE_CHECKING:
    from metamq.tx.app.transactions import RecoveredXid
    from metamq.wire.xa import Xid


class Producer(TransactionalProducer[T], aio_producer.BaseProducer[T]):
    __doc__ = aio_producer.BaseProducer.__doc__

    def _owner(self) -> asyncio.Task[Any] | None:
        try:
            return asyncio.current_task()
        except RuntimeError:  # outside of a loop
            return None

    async def drain(self) -> None:
        """Waits until the buffer, or that of this task's transaction, is below half of its limit. Cancel-safe."""
        self._check_usable()
        one = self._transactions.of(self._owner())
        if one is not None:
            await one.outbox.until_half()
        await self._core.drain()

    def transaction(self, *, timeout_s: float = 0.0) -> AbstractAsyncContextManager[Xid]:
        """Returns a block for messages of this task. Readers see all of them after the block, or none if it raises.

            async with producer.transaction():
                producer.send("orders", b"17")
                producer.send("stock", b"-1")

        See metamq.Producer.transaction. The block has this task's messages, not those of tasks that it starts.
        """
        return _Block(self, timeout_s)

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    async def tpc_begin(self, xid: Xid | str, *, timeout_s: float = 0.0) -> None:
        """Begins a transaction of this task; see metamq.Producer.tpc_begin."""
        self._check_usable()
        self._begin(self._xid_of(xid), timeout_s, is_tpc=True)

    async def tpc_prepare(self) -> bool:
        """See metamq.Producer.tpc_prepare."""
        return await self._to_prepare()

    async def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """See metamq.Producer.tpc_commit."""
        await self._to_commit(xid)

    async def tpc_rollback(self, xid: Xid | str | None = None) -> None:
        """See metamq.Producer.tpc_rollback."""
        await self._to_roll_back(xid)

    async def tpc_recover(self) -> list[RecoveredXid]:
        """See metamq.Producer.tpc_recover."""
        return await self._to_recover()

    async def close(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes; further calls do nothing. Rolls back open transactions; prepared ones stay prepared.

        Raises the errors of `flush`.
        """
        if self._opened and not self._closed and "_known_transactions" in self.__dict__:
            await self._end_all()
        await super().close(timeout)


class _Block(TransactionBlock):
    _way = "async with"

    async def __aenter__(self) -> Xid:
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        producer, one = self._producer, self._one
        producer._leave(one)
        if error is not None:
            await asyncio.shield(producer._roll_back_now(one))
            return
        await producer._transactions.commit(one)
