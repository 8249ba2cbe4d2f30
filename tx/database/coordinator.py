"""Coordinator: one transaction over several databases and the queue, by two-phase commit with a log of its own.

    1  every resource prepares               what fails here rolls all of them back
    2  the decision goes into the log        durable; what is not in there by now never will be committed
    3  every resource commits                what cannot be told now is told by recover(), again and again

A resource is what has PEP 249's tpc_* methods: psycopg's connections, a Producer of metamq. With one resource only
there is one phase and no record. What a process that dies leaves prepared, the next Coordinator with the same
folder ends as the log says; nobody else knows how. It touches ids that begin with its log's own identity only.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from metamq.client.checks import check_seconds, wrong_type
from metamq.errors import BranchMisuse, ClosedError, ConfigError, MetamqError, OutcomeUnknown, RolledBack
from metamq.tx.app.transactional import TransactionalFace
from metamq.tx.database.decision_log import DecisionLog, LogEnded
from metamq.wire.xa import FORMAT_ID, XACode, Xid

log = logging.getLogger("metamq.tx")

INTRANS = 2
"""libpq's word for a transaction that can be prepared. tpc_prepare() of one that has failed returns as if it were."""
RECOVER_EVERY_S = 5.0
CLOSE_S = 10.0


class TpcConnection(Protocol):
    """What is used of a resource: PEP 249's optional two-phase commit."""

    def xid(self, format_id: int, gtrid: str, bqual: str, /) -> Any: ...
    def tpc_begin(self, xid: Any, /) -> None: ...
    def tpc_prepare(self) -> Any: ...
    def tpc_commit(self, xid: Any = None, /) -> None: ...
    def tpc_rollback(self, xid: Any = None, /) -> None: ...
    def tpc_recover(self) -> Any: ...


class Settled(NamedTuple):
    """What one recover() has done."""

    committed: int
    rolled_back: int
    left: tuple[str, ...] = ()
    """Resources that could not be asked, or did not do it: it is tried again."""


class _Part:
    """A resource in a transaction."""

    def __init__(self, name: str, connection: Any, *, is_own: bool, xid: Any) -> None:
        self.name = name
        self.connection = connection
        self.is_own = is_own
        """Whether the connection was made for this transaction, and is closed with it."""
        self.xid = xid
        self.prepared = False
        self.ended = False
        """It was told the outcome."""

    def prepare(self) -> bool:
        """False when there is nothing to commit."""
        info = getattr(self.connection, "info", None)
        status = getattr(info, "transaction_status", None)
        if status is not None and int(status) != INTRANS:
            raise RolledBack(self.xid, XACode.RBROLLBACK, f"the transaction of {self.name!r} has failed before")
        self.prepared = self.connection.tpc_prepare() is not False
        return self.prepared

    def close(self) -> None:
        """Of a connection that was opened for it."""
        if self.is_own:
            try:
                self.connection.close()
            except Exception as error:  # it is over, whatever became of its transaction
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

    folder:     where the decision log is kept: on a disk that is not lost, of this process alone. With it go the
                outcomes of what is prepared: keep it as long as the resources.
    resources:  by name: a function that opens a connection with PEP 249's tpc_* methods, as of psycopg, closed after
                each transaction; or a blocking metamq.Producer.

        with Coordinator("/var/lib/shop/decisions", {"orders": connect, "queue": producer}) as coordinator:
            with coordinator.begin() as tx:
                tx["orders"].execute("INSERT ...")
                tx["queue"].send("orders", b"17")

    What former processes left is ended at once, and from then on by a thread, `recover_every_s` apart, while something
    is left. Raises ConfigError while another process has the folder, CorruptData when the log is damaged.
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
        """Whose threads are at work."""
        self._undecided: set[str] = set()
        """Of which nobody knows whether they are in the log: only who opens it again finds out."""
        self._recovering = threading.Lock()
        self._unfinished = threading.Event()
        """Something may be prepared that no thread works at."""
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
        """Commits at the end of the block, or rolls back when it raises.

        Entering raises StorageError once the log has failed: begin again with a new Coordinator on the same folder.
        Leaving raises what a resource raised when it could not prepare: then nothing has happened, anywhere.
        OutcomeUnknown: all of it happens, or nothing, once it is known. What could not be told to a resource after the
        decision is not raised: it is logged, and told later.
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
        """And whether it is this transaction's own. Raises ConfigError for one without two phases."""
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
        self._tell(tx.gtrid, parts)

    def _decide(self, tx: CoordinatedTransaction, names: tuple[str, ...]) -> None:
        try:
            self._log.commit(tx.gtrid, names)
        except LogEnded:  # by another one's decision, or close(): nothing of this one is in it
            self._roll_back(tx)
            raise
        except BaseException as error:
            # It may be on the disk, or not: this process leaves it alone from here on.
            self._undecided.add(tx.gtrid)
            if not isinstance(error, MetamqError):
                raise
            raise OutcomeUnknown(
                _named(tx.gtrid), XACode.RMFAIL, f"the decision could not be written down: {error.problem}",
                hint="Begin again with a new Coordinator on the same folder: it finds out, and ends it.",
            ) from error  # fmt: skip

    def _commit_alone(self, tx: CoordinatedTransaction, part: _Part) -> None:
        """One resource decides by itself; a transaction of psycopg that has failed would be rolled back in silence."""
        status = getattr(getattr(part.connection, "info", None), "transaction_status", None)
        if status is not None and int(status) != INTRANS:
            self._roll_back(tx)
            raise RolledBack(_named(tx.gtrid), XACode.RBROLLBACK, f"the transaction of {part.name!r} has failed before")
        part.connection.tpc_commit()
        part.ended = True

    def _tell(self, gtrid: str, parts: list[_Part]) -> None:
        done = True
        for part in parts:
            try:
                part.connection.tpc_commit()
                part.ended = True
            except Exception as error:
                done = False
                log.warning("transaction %s is decided; %r is told later: %s", _named(gtrid), part.name, error)
        if not done:
            self._unfinished.set()
            return
        try:
            self._log.ended(gtrid)
        except Exception as error:  # who opens the log next tells them once more
            log.warning(
                "transaction %s is committed everywhere, and its log could not say so: %s", _named(gtrid), error
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
        """A Producer goes on without what it could not end, or was not told of, as after Ctrl-C; a connection is closed
        with the block."""
        if not part.ended and isinstance(part.connection, TransactionalFace):
            part.connection._abandon()

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> Settled:
        """Ends what is prepared and nobody works at, as the log says. May be called at any time; raises nothing that a
        resource raises: `left` names it, and the log has the reason."""
        self._check_open()
        with self._recovering:
            try:
                return self._recover()
            finally:
                if self._closed.is_set():  # close() did not wait for so long
                    self._log.close()

    def _recover(self) -> Settled:
        self._log.check()
        self._unfinished.clear()
        # Before the resources are asked: what is decided, or left, later, they may not show as it will be.
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
        """Ends what is prepared at a resource. Raises whatever it raises."""
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
                self._check_open()  # the folder may be another Coordinator's soon, and with it what is prepared
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
                        log.warning("recovery is to be tried again: %s", error)
                        self._unfinished.set()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("Coordinator", hint="Make a new one.")

    def close(self) -> None:
        """Ends recovery and lets go of the folder; may be repeated. The resources are the caller's.

        While one of them does not answer to a recovery that is under way, the folder stays in use until it does.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _named(gtrid: str) -> str:
    """As `metamq tx show` takes it."""
    return Xid(FORMAT_ID, gtrid.encode()).whole


def _text(value: bytes | str | None) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
