"""The asyncio Coordinator; see metamq.tx.database.coordinator_core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from metamq.errors import ClosedError, MetamqError
from metamq.tx.database.coordinator_core import RECOVER_EVERY_S, BaseCoordinator, BaseTransaction, Settled
from metamq.tx.database.decision_log import DecisionLog


class AsyncioTpcConnection(Protocol):
    """The used methods of a resource: those of PEP 249's two-phase commit, as coroutines."""

    def xid(self, format_id: int, gtrid: str, bqual: str, /) -> Any: ...
    async def tpc_begin(self, xid: Any, /) -> None: ...
    async def tpc_prepare(self) -> Any: ...
    async def tpc_commit(self, xid: Any = None, /) -> None: ...
    async def tpc_rollback(self, xid: Any = None, /) -> None: ...
    async def tpc_recover(self) -> Any: ...


class CoordinatedTransaction(BaseTransaction):
    """One transaction: `await tx["name"]` gives a resource's connection, which takes part from then on."""

    cancelled: asyncio.CancelledError | None = None
    """The cancellation that came while the decision was written."""

    def __init__(self, coordinator: Coordinator, gtrid: str) -> None:
        super().__init__(coordinator, gtrid)
        self._joining = asyncio.Lock()

    def __getitem__(self, name: str) -> Awaitable[Any]:
        return self._one_by_one(name)

    async def _one_by_one(self, name: str) -> Any:
        async with self._joining:
            return await self._joined(name)


class Coordinator(BaseCoordinator):
    """Transactions over several resources, for one process. For one loop; a transaction is one task's.

    resources:  by name: a function that opens a connection with PEP 249's tpc_* methods, as psycopg's AsyncConnection
                has them, which is closed after each transaction; or a metamq.aio.Producer.

        resources = {"orders": lambda: AsyncConnection.connect(dsn), "queue": producer}
        async with Coordinator("/var/lib/shop/decisions", resources) as coordinator:
            async with coordinator.begin() as tx:
                orders, queue = await tx["orders"], await tx["queue"]
                await orders.execute("INSERT ...")
                queue.send("orders", b"17")

    See metamq.tx.Coordinator for the rest. A block that is cancelled rolls back. After the decision a cancellation
    changes nothing: recovery commits at the resources that the block has not reached.
    """

    _is_asyncio = True
    _other_worker = (
        "the block is in another task; the messages of this one would not be part of it. "
        "asyncio.gather and wait_for start tasks: await in the block itself, for a time-out in asyncio.timeout()"
    )

    def __init__(
        self,
        folder: str | Path,
        resources: Mapping[str, Callable[[], Awaitable[AsyncioTpcConnection]] | AsyncioTpcConnection],
        *,
        recover_every_s: float = RECOVER_EVERY_S,
    ) -> None:
        super().__init__(resources, recover_every_s)
        self._folder = Path(folder)
        self._is_opened = False
        self._recovering = asyncio.Lock()
        self._flushing = asyncio.Lock()
        self._writing = asyncio.Lock()
        """Held during each write to the log, and while a thread makes it short. So no write blocks the loop."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Opens the log, and ends the transactions that former processes left; `async with` does it. Raises ConfigError
        while another process uses the folder, and CorruptData if the log is damaged."""
        super()._check_open()
        opening = asyncio.get_running_loop().run_in_executor(None, DecisionLog, self._folder)
        try:
            self._log = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise
        self._is_opened = True
        try:
            await self.recover()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._keep_recovering(), name="metamq-coordinator")
        return self

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[CoordinatedTransaction]:
        """Commits at the end of the block; rolls back if the block raises, or is cancelled. See
        metamq.tx.Coordinator.begin for the errors."""
        gtrid = self._new_gtrid()
        tx = CoordinatedTransaction(self, gtrid)
        self._running.add(gtrid)
        try:
            yield tx
        except BaseException as error:
            await self._end(tx, error)
            raise
        await self._end(tx, None)
        if tx.cancelled is not None:
            raise tx.cancelled

    def _worker(self) -> object:
        return asyncio.current_task()

    async def _write_decision(self, tx: BaseTransaction, names: tuple[str, ...]) -> None:
        """Waits also if the task is cancelled: the outcome must be known."""
        assert isinstance(tx, CoordinatedTransaction)
        deciding = asyncio.ensure_future(self._decide_in_log(tx.gtrid, names))
        while not deciding.done():
            try:
                await asyncio.wait([deciding])
            except asyncio.CancelledError as cancelled:
                tx.cancelled = cancelled
        deciding.result()

    async def _decide_in_log(self, gtrid: str, names: tuple[str, ...]) -> None:
        async with self._writing:
            self._log.write(gtrid, names)
        async with self._flushing:
            if not self._log.is_flushed(gtrid):  # no other task has flushed it in the meantime
                await asyncio.to_thread(self._log.flush, gtrid)

    async def _record_end(self, gtrid: str) -> None:
        async with self._writing:
            is_long = self._log.ended(gtrid)
        if is_long:
            await asyncio.shield(self._compact())

    async def _compact(self) -> None:
        async with self._writing:
            await asyncio.to_thread(self._log.compact)

    async def recover(self) -> Settled:
        """Ends prepared transactions that no task works on, as the log says. May be called at any time. An error of a
        resource is logged, not raised: `left` has the resource's name. Cancel-safe."""
        self._check_open()
        async with self._recovering:
            return await self._recover()

    async def _keep_recovering(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if self._unfinished.is_set():
                try:
                    await self.recover()
                except MetamqError as error:
                    self._will_recover_again(error)

    def _check_open(self) -> None:
        super()._check_open()
        if not self._is_opened:
            raise ClosedError("Coordinator", "it was never opened", hint="Use `async with`.")

    async def close(self) -> None:
        """Ends recovery and releases the folder. A second call does nothing, or continues one that was cancelled. The
        caller closes the resources."""
        self._closed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        async with self._recovering:  # of another task: it ends at its next step
            if self._is_opened:
                await asyncio.to_thread(self._log.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _close_late(opening: asyncio.Future[DecisionLog]) -> None:
    """Releases the folder if it is opened after the cancellation of open()."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
