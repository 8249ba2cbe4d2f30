"""Recoverer: finishes the branches that dbtx left prepared, as the database has decided. Any process may run one.

A branch that is seen for the first time is left alone for `grace_s`: its application is most likely about to finish it.
After that the database is asked; the question itself decides `abort` where nothing was (metamq.tx.database.outcomes).
Any number of recoverers may do so at once, and any number of times: each step may be repeated.

A decision is forgotten only when every broker id that there is has said that no branch of it is prepared there: a
broker that is down may have one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, NamedTuple, Self

from metamq.client.background import background
from metamq.client.checks import wrong_type
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.client.offsets.dbapi import AnyConnection, Database, at_once, check_paramstyle, database_of
from metamq.client.settings import zookeeper_root, zookeeper_servers
from metamq.client.typevars import T
from metamq.errors import BranchNotKnown, MetamqError, OutcomeUnknown, TransactionError
from metamq.tx.database.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable
from metamq.wire.xa import Verb, Xid

log = logging.getLogger("metamq.tx")

SESSION_TIMEOUT_MS = 10_000
PREPARED = "prepared"
GRACE_S = 10.0
COMMITS_KEPT_S = 60.0
ABORTS_KEPT_S = 7 * 24 * 3600.0
"""So long an application may be paused and still find that it was decided against."""


class Recovered(NamedTuple):
    """What one look has done."""

    committed: int
    rolled_back: int
    left: int
    """Prepared branches that are too young, or whose database or broker did not answer."""
    unreachable: tuple[int, ...] = ()
    """Broker ids that could not be asked: what is prepared there waits."""


class Recoverer:
    """Finishes what dbtx left. `connect` opens connections to the database; they are committed and closed here.

    `connect` may be asynchronous: `lambda: asyncpg.connect(dsn)`. run() and run_once() block all the same: call them in
    a thread or a process of their own.

    with Recoverer(connect) as recoverer:
        recoverer.run(every_s=5)
    """

    def __init__(
        self,
        connect: Callable[[], AnyConnection | Awaitable[AnyConnection]],
        zookeeper: str | None = None,
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
        grace_s: float = GRACE_S,
        config: str | None = None,
        root: str | None = None,
    ) -> None:
        if not callable(connect):
            raise wrong_type("`connect`", "a function that opens a connection", connect)
        self._connect = connect
        self._outcomes = OutcomeTable(table)
        self._paramstyle = paramstyle if paramstyle is None else check_paramstyle(paramstyle)
        self._grace_s = grace_s
        self._seen: dict[tuple[int, Xid, int], float] = {}
        """(broker id, xid, epoch) and since when."""
        self._stop = threading.Event()
        self._background = background()
        servers = zookeeper_servers(zookeeper, config)
        session = self._background.run(open_client_session(servers, zookeeper_root(root, config), SESSION_TIMEOUT_MS))
        self._cluster = ClusterClient(session)

    def run(self, *, every_s: float = 5.0) -> None:
        """Looks again and again, until close() or Ctrl-C. What fails is logged, and tried again."""
        while not self._stop.is_set():
            try:
                self.run_once()
            except MetamqError as error:
                log.warning("recovery is to be tried again: %s", error)
            self._stop.wait(every_s)

    def run_once(self) -> Recovered:
        """Looks once. Raises MetamqError when the database or ZooKeeper cannot be asked; what was done stays done."""
        database = self._opened()
        try:
            return self._look(database)
        except MetamqError:
            raise
        except Exception as error:  # PEP 249 has a tree of exceptions per module, with no common root
            raise MetamqError(f"the database does not answer: {type(error).__name__}: {error}") from error
        finally:
            with contextlib.suppress(Exception):
                self._do(database, database.close())

    def _do(self, database: Database, work: Coroutine[Any, Any, T]) -> T:
        """Blocking connections belong to this thread, those for asyncio to the background loop."""
        return self._background.run(work) if database.is_asyncio else at_once(work)

    def _opened(self) -> Database:
        try:
            opened = self._connect()
            if inspect.isawaitable(opened):
                opened = self._background.run(_awaited(opened))
            return database_of(opened, self._paramstyle)
        except MetamqError:
            raise
        except Exception as error:
            raise MetamqError(f"no connection to the database: {type(error).__name__}: {error}") from error

    def _look(self, database: Database) -> Recovered:
        outcomes = self._outcomes
        identity = self._do(database, outcomes.identity(database))
        self._do(database, database.rollback())
        # Before the brokers are asked: what was decided later may be of a branch that was prepared later, too.
        now_us = time.time_ns() // 1000
        old = self._do(database, outcomes.older(database, now_us - int(COMMITS_KEPT_S * 1e6), COMMIT))
        old += self._do(database, outcomes.older(database, now_us - int(ABORTS_KEPT_S * 1e6), ABORT))
        known, unreachable = self._background.run(self._known(identity))
        branches = [branch for branch in known if branch.state == PREPARED]
        now_s = time.monotonic()
        self._seen = {key: self._seen.get(key, now_s) for key in map(_key, branches)}
        done: Counter[str] = Counter()
        silent: set[int] = set()
        for branch in branches:
            if now_s - self._seen[_key(branch)] < self._grace_s or branch.broker_id in silent:
                continue
            outcome = self._do(database, outcomes.decide(database, branch.xid.gtrid))
            if outcome is None:
                log.warning("branch %s: the database cannot tell yet what becomes of it", branch.xid)
            elif self._background.run(self._finish(branch, outcome, silent)):
                done[outcome] += 1
        if not unreachable:
            self._do(database, outcomes.forget(database, set(old) - {branch.xid.gtrid for branch in known}))
        return Recovered(done[COMMIT], done[ABORT], len(branches) - done.total(), unreachable)

    async def _known(self, identity: bytes) -> tuple[list[BranchDescription], tuple[int, ...]]:
        """This database's branches that are prepared, or were finished by an operator, at all broker ids that there
        ever were; and which did not answer."""
        session, client = self._cluster.session, TxClient(self._cluster)
        names = await session.children(session.paths.broker_ids())
        found: list[BranchDescription] = []
        unreachable = []
        for broker_id in sorted(int(name) for name in names if name.isdecimal()):
            try:
                found += await client.branches(broker_id)
            except MetamqError as error:
                log.warning("broker %d cannot be asked for prepared branches: %s", broker_id, error)
                unreachable.append(broker_id)
        return [one for one in found if one.xid.gtrid.startswith(identity)], tuple(unreachable)

    async def _finish(self, description: BranchDescription, outcome: str, silent: set[int]) -> bool:
        """Whether it is finished. `silent` gets its broker's id when that does not answer: the next branch would wait
        for it just as long."""
        branch = Branch(description.xid, description.broker_id, new_session())
        branch.epoch = description.epoch
        verb = Verb.COMMIT if outcome == COMMIT else Verb.ROLLBACK
        try:
            await TxClient(self._cluster).ask(branch, [verb], timeout_s=ANSWER_S)
        except BranchNotKnown:
            return True  # its application, or another recoverer, was faster
        except MetamqError as error:
            log.warning("%s of %s is to be tried again: %s", outcome, description.xid, error)
            if not isinstance(error, TransactionError) or isinstance(error, OutcomeUnknown):
                silent.add(description.broker_id)
            return False
        log.info("branch %s at broker %d: %s", description.xid, description.broker_id, outcome)
        return True

    def close(self) -> None:
        """Ends run(), and disconnects; may be repeated."""
        self._stop.set()
        self._background.run(self._cluster.close())
        self._background.run(self._cluster.session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _awaited(opening: Awaitable[T]) -> T:
    return await opening


def _key(branch: BranchDescription) -> tuple[int, Xid, int]:
    return branch.broker_id, branch.xid, branch.epoch
