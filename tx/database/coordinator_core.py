"""The steps of a Coordinator: one transaction over several databases and the queue, by two-phase commit with a log.

    1  every resource prepares               if one fails, all roll back
    2  the decision goes into the log        durable; without this record the transaction is never committed
    3  every resource commits                recover() repeats this for each resource that does not answer now

A resource has the tpc_* methods of PEP 249: psycopg's connections, a Producer of metamq. A transaction with one
resource has one phase and no record. If a process crashes, the next Coordinator with the same folder ends its prepared
transactions by the log; no other process can. A Coordinator changes only ids that begin with its log's identity.

The steps are coroutines, written once. With blocking resources they never wait for a loop. The APIs are `Coordinator`
in metamq.tx.database.coordinator and in metamq.tx.database.aio_coordinator.
"""

from __future__ import annotations

import inspect
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from metamq.client.checks import check_seconds, wrong_type
from metamq.client.offsets.dbapi import settled
from metamq.errors import BranchMisuse, ClosedError, ConfigError, MetamqError, OutcomeUnknown, RolledBack
from metamq.tx.database.decision_log import DecisionLog, LogEnded
from metamq.tx.database.part import Part
from metamq.wire.xa import FORMAT_ID, XACode, Xid

log = logging.getLogger("metamq.tx")

RECOVER_EVERY_S = 5.0


class Settled(NamedTuple):
    """The result of one recover()."""

    committed: int
    rolled_back: int
    left: tuple[str, ...] = ()
    """Resources that did not answer, or did not end a transaction. Recovery tries them again."""


class BaseTransaction:
    """The common part of the transactions of both APIs."""

    def __init__(self, coordinator: BaseCoordinator, gtrid: str) -> None:
        self.gtrid = gtrid
        self._coordinator = coordinator
        self._owner = coordinator._worker()
        self._parts: dict[str, Part] = {}

    async def _joined(self, name: str) -> Any:
        """Returns the resource's connection, which takes part from now on.

        Raises BranchMisuse in another thread or task than the block's for a Producer: it sends the messages of another
        one outside of the transaction.
        """
        if self._coordinator._is_shared(name) and self._coordinator._worker() is not self._owner:
            raise BranchMisuse(_named(self.gtrid), XACode.PROTO, self._coordinator._other_worker)
        if name not in self._parts:
            self._parts[name] = await self._coordinator._begin_part(self.gtrid, name)
        return self._parts[name].connection


class BaseCoordinator(ABC):
    """The steps. A subclass makes a block of them, runs recovery, and writes the log."""

    _is_asyncio: bool
    _log: DecisionLog
    _other_worker: str
    """The problem of a call in another thread or task than the block's."""

    def __init__(self, resources: Mapping[str, Any], recover_every_s: float) -> None:
        check_seconds("recover_every_s", recover_every_s, optional=False)
        if not isinstance(resources, Mapping):
            raise wrong_type("`resources`", "a mapping of names to functions and Producers", resources)
        for name, resource in resources.items():
            if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isascii():
                raise ConfigError(f"the resource name {name!r} is not 1 to 64 ASCII characters")
            if not callable(resource) and not hasattr(resource, "tpc_begin"):
                raise wrong_type(f"resource {name!r}", "a function that opens a connection, or a Producer", resource)
            if hasattr(resource, "tpc_begin"):
                self._check_kind(name, resource)
        self._resources = dict(resources)
        self._running: set[str] = set()
        """The gtrids of transactions that a thread or task works on."""
        self._undecided: set[str] = set()
        """The gtrids that may or may not be in the log. The next process that opens the log finds out."""
        self._unfinished = threading.Event()
        """Set if a transaction may be prepared that no thread or task works on."""
        self._unfinished.set()
        self._closed = threading.Event()
        self._every_s = recover_every_s

    @abstractmethod
    def _worker(self) -> object:
        """Returns the running thread or task."""

    def _is_shared(self, name: str) -> bool:
        """True for a Producer, False for a function that opens a connection."""
        return hasattr(self._resources.get(name), "tpc_begin")

    @abstractmethod
    async def _write_decision(self, tx: BaseTransaction, names: tuple[str, ...]) -> None:
        """Writes the decision into the log; raises the errors of DecisionLog.commit()."""

    @abstractmethod
    async def _record_end(self, gtrid: str) -> None:
        """Writes into the log that every resource has committed; raises the errors of DecisionLog.ended()."""

    def _check_kind(self, name: str, connection: Any) -> None:
        """Raises ConfigError for an asyncio connection in the blocking API, and for a blocking one in asyncio."""
        if inspect.iscoroutinefunction(connection.tpc_begin) == self._is_asyncio:
            return
        kind = type(connection)
        names = f"resource {name!r} is a {kind.__module__}.{kind.__qualname__}"
        if self._is_asyncio:
            raise ConfigError(f"{names}, and would block the loop", hint="Use metamq.tx.Coordinator in a thread.")
        raise ConfigError(f"{names}, which is for asyncio", hint="Use metamq.tx.aio.Coordinator.")

    # -- transactions -------------------------------------------------------------------------------------------------

    def _new_gtrid(self) -> str:
        """Returns the id of a new transaction. Raises ClosedError, and LogEnded after the log has failed."""
        self._check_open()
        self._log.check()
        return f"co-{self._log.identity}-{secrets.token_hex(12)}"

    async def _begin_part(self, gtrid: str, name: str) -> Part:
        resource = self._resources.get(name)
        if resource is None:
            raise ConfigError(f"there is no resource {name!r}", hint=f"There are: {', '.join(self._resources)}.")
        if gtrid not in self._running:
            raise BranchMisuse(_named(gtrid), XACode.PROTO, "the block has ended")
        connection, is_own = await self._connection(name)
        xid = connection.xid(FORMAT_ID, gtrid, name)
        part = Part(name, connection, is_own=is_own, xid=xid)
        try:
            await settled(connection.tpc_begin(xid))
        except BaseException:
            await part.close()
            raise
        return part

    async def _connection(self, name: str) -> tuple[Any, bool]:
        """Returns the connection, and True if it is opened for this transaction. Raises ConfigError for one without
        two phases."""
        resource: Any = self._resources[name]
        if self._is_shared(name):
            return resource, False
        opened = resource()
        if inspect.isawaitable(opened) and not self._is_asyncio:
            if inspect.iscoroutine(opened):
                opened.close()
            raise ConfigError(
                f"the function of resource {name!r} is for asyncio", hint="Use metamq.tx.aio.Coordinator."
            )
        connection = await settled(opened)
        if not hasattr(connection, "tpc_begin"):
            await settled(getattr(connection, "close", lambda: None)())
            problem = f"a {type(connection).__name__} of resource {name!r} has no tpc_begin(): it cannot be prepared"
            raise ConfigError(problem, hint="With a single database, dbtx needs none.")
        self._check_kind(name, connection)
        return connection, True

    async def _end(self, tx: BaseTransaction, error: BaseException | None) -> None:
        """Commits the transaction, or rolls it back after an error of the block. Raises the errors of begin()."""
        try:
            if error is None:
                await self._commit(tx)
            else:
                await self._roll_back(tx)
        except BaseException:
            self._unfinished.set()
            raise
        finally:
            for part in tx._parts.values():
                part.abandon()
            try:
                for part in tx._parts.values():
                    await part.close()
            finally:
                self._running.discard(tx.gtrid)

    async def _commit(self, tx: BaseTransaction) -> None:
        parts = list(tx._parts.values())
        if len(parts) == 1:
            await self._commit_alone(tx, parts[0])
            return
        try:
            self._log.check()
            prepared = [part for part in parts if await part.prepare()]
        except BaseException:
            await self._roll_back(tx)
            raise
        if prepared:
            await self._decide(tx, tuple(part.name for part in prepared))
        await self._commit_parts(tx.gtrid, parts)

    async def _decide(self, tx: BaseTransaction, names: tuple[str, ...]) -> None:
        try:
            await self._write_decision(tx, names)
        except LogEnded:  # by another transaction's decision, or close(): the log has nothing of this one
            await self._roll_back(tx)
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

    async def _commit_alone(self, tx: BaseTransaction, part: Part) -> None:
        """Commits with one resource, which decides."""
        if part.has_failed:
            await self._roll_back(tx)
            raise RolledBack(_named(tx.gtrid), XACode.RBROLLBACK, f"the transaction of {part.name!r} has failed before")
        await part.commit()

    async def _commit_parts(self, gtrid: str, parts: list[Part]) -> None:
        for part in parts:
            try:
                await part.commit()
            except Exception as error:
                log.warning("transaction %s is decided; %r commits it later: %s", _named(gtrid), part.name, error)
        if not all(part.ended for part in parts):
            self._unfinished.set()
            return
        try:
            await self._record_end(gtrid)
        except Exception as error:  # the next process that opens the log commits again
            log.warning(
                "transaction %s is committed everywhere, but its log could not record that: %s", _named(gtrid), error
            )
            self._unfinished.set()

    async def _roll_back(self, tx: BaseTransaction) -> None:
        for part in tx._parts.values():
            try:
                await settled(part.connection.tpc_rollback())
                part.ended = True
            except Exception as error:
                log.info("transaction %s: %r is rolled back later: %s", _named(tx.gtrid), part.name, error)
                self._unfinished.set()

    # -- recovery -----------------------------------------------------------------------------------------------------

    async def _recover(self) -> Settled:
        self._log.check()
        self._unfinished.clear()
        try:
            settled_now = await self._recover_all()
        except BaseException:  # a cancellation, or Ctrl-C
            self._unfinished.set()
            raise
        if settled_now.left:
            self._unfinished.set()
        return settled_now

    async def _recover_all(self) -> Settled:
        # Read before the resources are asked: they may not show later decisions yet.
        busy = self._running | self._undecided
        decided = {gtrid: names for gtrid, names in list(self._log.open.items()) if gtrid not in busy}
        committed = rolled_back = 0
        clean: set[str] = set()
        for name in self._resources:
            self._check_open()
            try:
                commits, rollbacks = await self._recover_at(name)
            except Exception as error:
                log.warning("resource %r cannot be recovered now: %s", name, error)
                continue
            clean.add(name)
            committed += commits
            rolled_back += rollbacks
        for gtrid, names in decided.items():
            if clean.issuperset(names):
                await self._record_end(gtrid)
        return Settled(committed, rolled_back, tuple(name for name in self._resources if name not in clean))

    async def _recover_at(self, name: str) -> tuple[int, int]:
        """Ends the prepared transactions at a resource. Raises the resource's errors."""
        connection, is_own = await self._connection(name)
        counts = [0, 0]
        try:
            database = getattr(getattr(connection, "info", None), "dbname", None)
            for xid in await settled(connection.tpc_recover()):
                gtrid = xid.gtrid.decode("ascii", "replace") if isinstance(xid.gtrid, bytes) else str(xid.gtrid)
                if not gtrid.startswith(f"co-{self._log.identity}-") or _text(xid.bqual) != name:
                    continue
                if database is not None and getattr(xid, "database", database) != database:
                    continue
                if gtrid in self._running or gtrid in self._undecided:
                    continue
                self._check_open()  # after close() another Coordinator may have the folder and these transactions
                commits = gtrid in self._log.open
                await settled(
                    getattr(connection, "rollback", lambda: None)()
                )  # psycopg's tpc_recover() leaves one open
                await settled((connection.tpc_commit if commits else connection.tpc_rollback)(xid))
                counts[not commits] += 1
                log.info("transaction %s at %r: %s", _named(gtrid), name, "committed" if commits else "rolled back")
        finally:
            if is_own:
                await settled(connection.close())
        return counts[0], counts[1]

    def _will_recover_again(self, error: MetamqError) -> None:
        if not self._closed.is_set():
            log.warning("recovery will be tried again: %s", error)
            self._unfinished.set()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("Coordinator", hint="Make a new one.")


def _named(gtrid: str) -> str:
    """Returns the name for logs and for `metamq tx show`."""
    return Xid(FORMAT_ID, gtrid.encode()).whole


def _text(value: bytes | str | None) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
