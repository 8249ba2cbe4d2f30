"""Coordinator: one transaction over several databases and the queue; see metamq.tx.database.coordinator_core."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from metamq.client.background import at_once
from metamq.errors import MetamqError
from metamq.tx.database.coordinator_core import RECOVER_EVERY_S, BaseCoordinator, BaseTransaction, Settled
from metamq.tx.database.decision_log import DecisionLog

log = logging.getLogger("metamq.tx")

CLOSE_S = 10.0


class TpcConnection(Protocol):
    """The used methods of a resource: PEP 249's optional two-phase commit."""

    def xid(self, format_id: int, gtrid: str, bqual: str, /) -> Any: ...
    def tpc_begin(self, xid: Any, /) -> None: ...
    def tpc_prepare(self) -> Any: ...
    def tpc_commit(self, xid: Any = None, /) -> None: ...
    def tpc_rollback(self, xid: Any = None, /) -> None: ...
    def tpc_recover(self) -> Any: ...


class CoordinatedTransaction(BaseTransaction):
    """One transaction: `tx["name"]` gives a resource's connection, which takes part from then on."""

    def __getitem__(self, name: str) -> Any:
        return at_once(self._joined(name))


class Coordinator(BaseCoordinator):
    """Transactions over several resources, for one process. Thread-safe; a transaction is one thread's.

    folder:     holds the decision log, for this process alone. Use a disk that is not lost: without the log the outcome
                of prepared transactions is lost. Keep the folder as long as the resources.
    resources:  by name: a function that opens a connection with PEP 249's tpc_* methods, as psycopg's, which is closed
                after each transaction; or a blocking metamq.Producer.

        with Coordinator("/var/lib/shop/decisions", {"orders": connect, "queue": producer}) as coordinator:
            with coordinator.begin() as tx:
                tx["orders"].execute("INSERT ...")
                tx["queue"].send("orders", b"17")

    The constructor ends the transactions that former processes left. A thread then repeats that every
    `recover_every_s` seconds while something is left. Raises ConfigError while another process uses the folder, and
    CorruptData if the log is damaged.
    """

    _is_asyncio = False
    _other_worker = "the block is in another thread; the messages of this one would not be part of it"

    def __init__(
        self,
        folder: str | Path,
        resources: Mapping[str, Callable[[], TpcConnection] | TpcConnection],
        *,
        recover_every_s: float = RECOVER_EVERY_S,
    ) -> None:
        super().__init__(resources, recover_every_s)
        self._recovering = threading.Lock()
        self._log = DecisionLog(Path(folder))
        self.recover()
        self._thread = threading.Thread(target=self._keep_recovering, name="metamq-coordinator", daemon=True)
        self._thread.start()

    def _worker(self) -> object:
        return threading.current_thread()

    async def _write_decision(self, tx: BaseTransaction, names: tuple[str, ...]) -> None:
        self._log.commit(tx.gtrid, names)

    async def _record_end(self, gtrid: str) -> None:
        if self._log.ended(gtrid):
            self._log.compact()

    @contextlib.contextmanager
    def begin(self) -> Iterator[CoordinatedTransaction]:
        """Commits at the end of the block; rolls back if the block raises.

        Entering raises StorageError after the log has failed: begin again with a new Coordinator on the same folder.
        Leaving raises the error of a resource that could not prepare: then nothing is committed at any resource.
        OutcomeUnknown: recovery later commits all of it, or nothing. If a resource does not answer after the decision,
        that is logged, and recovery commits there later.
        """
        gtrid = self._new_gtrid()
        tx = CoordinatedTransaction(self, gtrid)
        self._running.add(gtrid)
        try:
            yield tx
        except BaseException as error:
            at_once(self._end(tx, error))
            raise
        at_once(self._end(tx, None))

    def recover(self) -> Settled:
        """Ends prepared transactions that no thread works on, as the log says. May be called at any time. An error of
        a resource is logged, not raised: `left` has the resource's name."""
        self._check_open()
        with self._recovering:
            try:
                return at_once(self._recover())
            finally:
                if self._closed.is_set():  # close() did not wait for this recovery
                    self._log.close()

    def _keep_recovering(self) -> None:
        while not self._closed.wait(self._every_s):
            if self._unfinished.is_set():
                try:
                    self.recover()
                except MetamqError as error:
                    self._will_recover_again(error)

    def close(self) -> None:
        """Ends recovery and releases the folder; a second call does nothing. The caller closes the resources.

        If a resource does not answer a running recovery, the folder stays in use until it answers.
        """
        if not self._closed.is_set():
            self._closed.set()
            if not self._recovering.acquire(timeout=CLOSE_S):
                log.warning("a resource does not answer: the folder of the decision log is in use until it does")
                return
            try:
                self._log.close()
            finally:
                self._recovering.release()
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
