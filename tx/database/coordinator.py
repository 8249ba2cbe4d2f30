"""Coordinator: one transaction over several databases and the queue, by two-phase commit with a log of its own.

    1  every resource prepares               if one fails, all roll back
    2  the decision goes into the log        durable; without this record the transaction is never committed
    3  every resource commits                recover() repeats this for each resource that does not answer now

A resource has the tpc_* methods of PEP 249: psycopg's connections, a Producer of metamq. A transaction with one
resource has one phase and no record. If a process crashes, the next Coordinator with the same folder ends its prepared
transactions by the log; no other process can. A Coordinator changes only ids that begin with its log's identity.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from metamq.client.checks import check_seconds, wrong_type
from metamq.errors import BranchMisuse, ClosedError, ConfigError, MetamqError, OutcomeUnknown, RolledBack
from metamq.tx.app.transactional import TransactionalProducer
from metamq.tx.database.decision_log import DecisionLog, LogEnded
from metamq.wire.xa import FORMAT_ID, XACode, Xid

log = logging.getLogger("metamq.tx")

INTRANS = 2
"""libpq's status of a transaction that can be prepared. tpc_prepare() of a failed one returns without an error."""
RECOVER_EVERY_S = 5.0
CLOSE_S = 10.0


class TpcConnection(Protocol):
    """The used methods of a resource: PEP 249's optional two-phase commit."""

    def xid(self, format_id: int, gtrid: str, bqual: str, /) -> Any: ...
    def tpc_begin(self, xid: Any, /) -> None: ...
    def tpc_prepare(self) -> Any: ...
    def tpc_commit(self, xid: Any = None, /) -> None: ...
    def tpc_rollback(self, xid: Any = None, /) -> None: ...
    def tpc_recover(self) -> Any: ...


class Settled(NamedTuple):
    """The result of one recover()."""

    committed: int
    rolled_back: int
    left: tuple[str, ...] = ()
    """Resources that did not answer, or did not end a transaction. Recovery tries them again."""


@dataclass(eq=False)
class _Part:
    """A resource in a transaction."""

    name: str
    connection: Any
    _: KW_ONLY
    is_own: bool
    """True if the connection was opened for this transaction; it is closed with the transaction."""
    xid: Any
    prepared: bool = False
    ended: bool = False
    """True if the resource has ended its part: it is committed or rolled back."""

    @property
    def has_failed(self) -> bool:
        """True if psycopg's transaction has failed: then it would only look prepared, or roll back without an error."""
        status = getattr(getattr(self.connection, "info", None), "transaction_status", None)
        return status is not None and int(status) != INTRANS

    def prepare(self) -> bool:
        """Prepares the part. Returns False if there is nothing to commit."""
        if self.has_failed:
            raise RolledBack(self.xid, XACode.RBROLLBACK, f"the transaction of {self.name!r} has failed before")
        self.prepared = self.connection.tpc_prepare() is not False
        return self.prepared

    def close(self) -> None:
        """Closes the connection if it was opened for this transaction."""
        if self.is_own:
            try:
                self.connection.close()
            except Exception as error:  # the part is over, even if the connection does not close
                log.info("a connection of resource %r does not close: %s", self.name, error)


class CoordinatedTransaction:
    """One transaction: `tx["name"]` gives a resource's connection, which takes part from then on."""

    def __init__(self, coordinator: Coordinator, gtrid: str) -> None:
        self.gtrid = gtrid
        self._coordinator = coordinator
        self._parts: dict[str, _Part] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parts:
            self._parts[name] = self._coordinator._begin_part(self.gtrid, name)
        return self._parts[name].connection


class Coordinator:
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

    def __init__(
        self,
        folder: str | Path,
        resources: Mapping[str, Callable[[], TpcConnection] | TpcConnection],
        *,
        recover_every_s: float = RECOVER_EVERY_S,
    ) -> None:
        check_seconds("recover_every_s", recover_every_s, optional=False)
        if not isinstance(resources, Mapping):
            raise wrong_type("`resources`", "a mapping of names to functions and Producers", resources)
        for name, resource in resources.items():
            if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isascii():
                raise ConfigError(f"the resource name {name!r} is not 1 to 64 ASCII characters")
            if not callable(resource) and not hasattr(resource, "tpc_begin"):
                raise wrong_type(f"resource {name!r}", "a function that opens a connection, or a Producer", resource)
        self._resources = dict(resources)
        self._running: set[str] = set()
        """The gtrids of transactions that a thread works on."""
        self._undecided: set[str] = set()
        """The gtrids that may or may not be in the log. The next process that opens the log finds out."""
        self._recovering = threading.Lock()
        self._unfinished = threading.Event()
        """Set if a transaction that no thread works on may be prepared."""
        self._closed = threading.Event()
        self._every_s = recover_every_s
        self._log = DecisionLog(Path(folder))
        self._unfinished.set()
        self.recover()
        self._thread = threading.Thread(target=self._keep_recovering, name="metamq-coordinator", daemon=True)
        self._thread.start()

    # -- transactions -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def begin(self) -> Iterator[CoordinatedTransaction]:
        """Commits at the end of the block; rolls back if the block raises.

        Entering raises StorageError after the log has failed: begin again with a new Coordinator on the same folder.
        Leaving raises the error of a resource that could not prepare: then nothing is committed at any resource.
        OutcomeUnknown: recovery later commits all of it, or nothing. If a resource does not answer after the decision,
        that is logged, and recovery commits there later.
        """
        self._check_open()
        self._log.check()
        gtrid = f"co-{self._log.identity}-{secrets.token_hex(12)}"
        tx = CoordinatedTransaction(self, gtrid)
        self._running.add(gtrid)
        try:
            try:
                yield tx
            except BaseException:
                self._roll_back(tx)
                raise
            self._commit(tx)
        except BaseException:
            self._unfinished.set()
            raise
        finally:
            for part in tx._parts.values():
                self._abandon(part)
                part.close()
            self._running.discard(gtrid)

    def _begin_part(self, gtrid: str, name: str) -> _Part:
        resource = self._resources.get(name)
        if resource is None:
            raise ConfigError(f"there is no resource {name!r}", hint=f"There are: {', '.join(self._resources)}.")
        if gtrid not in self._running:
            raise BranchMisuse(_named(gtrid), XACode.PROTO, "the block has ended")
        connection, is_own = self._connection(name)
        xid = connection.xid(FORMAT_ID, gtrid, name)
        part = _Part(name, connection, is_own=is_own, xid=xid)
        try:
            connection.tpc_begin(xid)
        except BaseException:
            part.close()
            raise
        return part

    def _connection(self, name: str) -> tuple[Any, bool]:
        """Returns the connection, and True if it is opened for this transaction. Raises ConfigError for one without
        two phases."""
        resource: Any = self._resources[name]
        if hasattr(resource, "tpc_begin"):
            return resource, False
        connection = resource()
        if not hasattr(connection, "tpc_begin"):
            problem = f"a {type(connection).__name__} of resource {name!r} has no tpc_begin(): it cannot be prepared"
            raise ConfigError(problem, hint="With a single database, dbtx needs none.")
        return connection, True

    def _commit(self, tx: CoordinatedTransaction) -> None:
        parts = list(tx._parts.values())
        if len(parts) == 1:
            self._commit_alone(tx, parts[0])
            return
        try:
            self._log.check()
            prepared = [part for part in parts if part.prepare()]
        except BaseException:
            self._roll_back(tx)
            raise
        if prepared:
            self._decide(tx, tuple(part.name for part in prepared))
        self._commit_parts(tx.gtrid, parts)

    def _decide(self, tx: CoordinatedTransaction, names: tuple[str, ...]) -> None:
        try:
            self._log.commit(tx.gtrid, names)
        except LogEnded:  # by another transaction's decision, or close(): the log has nothing of this one
            self._roll_back(tx)
            raise
        except BaseException as error:
            # The decision may be on the disk, or not: this process does not touch the transaction again.
            self._undecided.add(tx.gtrid)
            if not isinstance(error, MetamqError):
                raise
            raise OutcomeUnknown(
                _named(tx.gtrid), XACode.RMFAIL, f"the decision could not be written to the log: {error.problem}",
                hint="Begin again with a new Coordinator on the same folder: it reads the log, and ends it.",
            ) from error  # fmt: skip

    def _commit_alone(self, tx: CoordinatedTransaction, part: _Part) -> None:
        """Commits with one resource, which decides."""
        if part.has_failed:
            self._roll_back(tx)
            raise RolledBack(_named(tx.gtrid), XACode.RBROLLBACK, f"the transaction of {part.name!r} has failed before")
        part.connection.tpc_commit()
        part.ended = True

    def _commit_parts(self, gtrid: str, parts: list[_Part]) -> None:
        done = True
        for part in parts:
            try:
                part.connection.tpc_commit()
                part.ended = True
            except Exception as error:
                done = False
                log.warning("transaction %s is decided; %r commits it later: %s", _named(gtrid), part.name, error)
        if not done:
            self._unfinished.set()
            return
        try:
            self._log.ended(gtrid)
        except Exception as error:  # the next process that opens the log commits again
            log.warning(
                "transaction %s is committed everywhere, but its log could not record that: %s", _named(gtrid), error
            )
            self._unfinished.set()

    def _roll_back(self, tx: CoordinatedTransaction) -> None:
        for part in tx._parts.values():
            try:
                part.connection.tpc_rollback()
                part.ended = True
            except Exception as error:
                log.info("transaction %s: %r is rolled back later: %s", _named(tx.gtrid), part.name, error)
                self._unfinished.set()

    def _abandon(self, part: _Part) -> None:
        """Frees a Producer from a transaction that did not end, as after Ctrl-C. A connection is closed with the
        block instead."""
        if not part.ended and isinstance(part.connection, TransactionalProducer):
            part.connection._abandon()

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> Settled:
        """Ends prepared transactions that no thread works on, as the log says. May be called at any time. An error of
        a resource is logged, not raised: `left` has the resource's name."""
        self._check_open()
        with self._recovering:
            try:
                return self._recover()
            finally:
                if self._closed.is_set():  # close() did not wait for this recovery
                    self._log.close()

    def _recover(self) -> Settled:
        self._log.check()
        self._unfinished.clear()
        # Read before the resources are asked: they may not show later decisions yet.
        busy = self._running | self._undecided
        decided = {gtrid: names for gtrid, names in list(self._log.open.items()) if gtrid not in busy}
        committed = rolled_back = 0
        clean: set[str] = set()
        for name in self._resources:
            self._check_open()
            try:
                commits, rollbacks = self._recover_at(name)
            except Exception as error:
                log.warning("resource %r cannot be recovered now: %s", name, error)
                continue
            clean.add(name)
            committed += commits
            rolled_back += rollbacks
        for gtrid, names in decided.items():
            if clean.issuperset(names):
                self._log.ended(gtrid)
        left = tuple(name for name in self._resources if name not in clean)
        if left:
            self._unfinished.set()
        return Settled(committed, rolled_back, left)

    def _recover_at(self, name: str) -> tuple[int, int]:
        """Ends the prepared transactions at a resource. Raises the resource's errors."""
        connection, is_own = self._connection(name)
        counts = [0, 0]
        try:
            database = getattr(getattr(connection, "info", None), "dbname", None)
            for xid in connection.tpc_recover():
                gtrid = xid.gtrid.decode("ascii", "replace") if isinstance(xid.gtrid, bytes) else str(xid.gtrid)
                if not gtrid.startswith(f"co-{self._log.identity}-") or _text(xid.bqual) != name:
                    continue
                if database is not None and getattr(xid, "database", database) != database:
                    continue
                if gtrid in self._running or gtrid in self._undecided:
                    continue
                self._check_open()  # after close() another Coordinator may have the folder and these transactions
                commits = gtrid in self._log.open
                getattr(connection, "rollback", lambda: None)()  # psycopg's tpc_recover() leaves a transaction open
                (connection.tpc_commit if commits else connection.tpc_rollback)(xid)
                counts[not commits] += 1
                log.info("transaction %s at %r: %s", _named(gtrid), name, "committed" if commits else "rolled back")
        finally:
            if is_own:
                connection.close()
        return counts[0], counts[1]

    def _keep_recovering(self) -> None:
        while not self._closed.wait(self._every_s):
            if self._unfinished.is_set():
                try:
                    self.recover()
                except MetamqError as error:
                    if not self._closed.is_set():
                        log.warning("recovery will be tried again: %s", error)
                        self._unfinished.set()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("Coordinator", hint="Make a new one.")

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


def _named(gtrid: str) -> str:
    """Returns the name for logs and for `metamq tx show`."""
    return Xid(FORMAT_ID, gtrid.encode()).whole


def _text(value: bytes | str | None) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
