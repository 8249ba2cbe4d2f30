"""Recoverer: finishes the branches that dbtx left prepared, as the database has decided. Any process may run one.

A prepared branch that is younger than `grace_s` is left alone: most likely its application finishes it soon. Then the
recoverer asks the database. If there is no decision, the question decides `abort` (metamq.tx.database.outcomes). So the
age decides when a branch is ended, and never how: a wrong clock can only refuse an application that is still at work.
The age is the broker's, which set the time of the prepare, or the time since this object first saw the branch. Several
recoverers may run at the same time: each step may be repeated.

A decision is forgotten only when every broker id has answered that it has no prepared branch of the transaction: a
broker that is down may have one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from metamq.client.background import at_once, background
from metamq.client.checks import check_seconds, wrong_type
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.client.offsets.connections import AnyConnection, database_of
from metamq.client.offsets.dbapi import Database, check_paramstyle
from metamq.client.settings import cluster_access
from metamq.errors import BranchNotKnown, MetamqError, NotAuthorized, OutcomeUnknown, TransactionError
from metamq.tx.database.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable
from metamq.wire.xa import Verb, Xid

if TYPE_CHECKING:
    from metamq.client.typevars import T
    from metamq.security.config import SecurityConfig

log = logging.getLogger("metamq.tx")

PREPARED = "prepared"
GRACE_S = 10.0
COMMITS_KEPT_S = 60.0
ABORTS_KEPT_S = 7 * 24 * 3600.0
"""Seconds that an application may be paused, and still finds that the decision is `abort`."""


_FOREIGN = "another user or certificate began it", "Recover as that one, or with the right `recover cluster`."
_SILENT_HINT = "Check the broker with `metamq doctor`."


class RecoveryProblem(NamedTuple):
    """A reason for which prepared branches at one broker wait. `str()` gives the problem, then the next step."""

    broker_id: int
    reason: str
    hint: str
    """The next step, a sentence."""
    xids: tuple[Xid, ...] = ()
    """The branches; empty if the broker does not list its branches."""

    def __str__(self) -> str:
        where = f"broker {self.broker_id}"
        if not self.xids:
            what = f"{where} does not list its prepared branches"
        elif len(self.xids) == 1:
            what = f"branch {self.xids[0]} at {where}"
        else:
            what = f"{len(self.xids):,} branches at {where}, such as {self.xids[0]}"
        return f"{what}: {self.reason}. {self.hint}"


class Recovered(NamedTuple):
    """The result of one pass."""

    committed: int
    rolled_back: int
    left: int
    """Prepared branches that are too young, or whose outcome the database does not know yet."""
    problems: tuple[RecoveryProblem, ...] = ()
    """Reasons for which other prepared branches wait: a broker refuses or does not answer, or others began them."""


class Recoverer:
    """Finishes branches of dbtx. `connect` opens database connections; the Recoverer commits and closes them.

    `connect` may be asynchronous: `lambda: asyncpg.connect(dsn)`. run() and run_once() still block: call them in a
    thread or a process of their own.

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
        security: SecurityConfig | None = None,
    ) -> None:
        if not callable(connect):
            raise wrong_type("`connect`", "a function that opens a connection", connect)
        self._connect = connect
        self._outcomes = OutcomeTable(table)
        self._paramstyle = paramstyle if paramstyle is None else check_paramstyle(paramstyle)
        self._grace_s = grace_s
        self._seen: dict[tuple[int, Xid, int], float] = {}
        """(broker id, xid, epoch), and the time when it was first seen."""
        self._stop = threading.Event()
        self._background = background()
        access = cluster_access(zookeeper, root, config, security)
        session = self._background.run(open_client_session(access))
        self._cluster = ClusterClient(session)

    def run(self, *, every_s: float = 5.0) -> None:
        """Repeats run_once() until close() or Ctrl-C. Logs the error of a pass, and each new problem of a pass.

        Raises WrongType or ConfigError for a wrong `every_s`.
        """
        check_seconds("every_s", every_s, optional=False)
        problems: set[RecoveryProblem] = set()
        while not self._stop.is_set():
            try:
                before, problems = problems, set(self.run_once().problems)
                for problem in problems - before:
                    log.warning("recovery will be tried again: %s", problem)
            except MetamqError as error:
                log.warning("recovery will be tried again: %s", error)
            self._stop.wait(every_s)

    def run_once(self) -> Recovered:
        """Makes one pass, and returns its work and its problems.

        Raises MetamqError if the database or ZooKeeper fails; its finished work stays.
        """
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
        """Runs the work: in this thread for blocking connections, in the background loop for asyncio connections."""
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
        self._do(database, database.begin())  # refuses a transaction that its commit() would not end
        identity = self._do(database, outcomes.identity(database))
        self._do(database, database.rollback())
        # Read before the brokers are asked: a later decision may be of a branch that is prepared later, too.
        now_us = time.time_ns() // 1000
        old = self._do(database, outcomes.older(database, now_us - int(COMMITS_KEPT_S * 1e6), COMMIT))
        old += self._do(database, outcomes.older(database, now_us - int(ABORTS_KEPT_S * 1e6), ABORT))
        known, problems = self._background.run(self._known(identity))
        are_all_known = not problems
        branches = [one for one in known if one.state == PREPARED]
        now_s = time.monotonic()
        self._seen = {key: self._seen.get(key, now_s) for key in map(_key, branches)}
        done: Counter[str] = Counter()
        silent: dict[int, list[Xid]] = {}
        for branch in branches:
            age_s = max(now_s - self._seen[_key(branch)], branch.age_ms / 1000)
            if age_s < self._grace_s:
                continue
            if not branch.owner:  # the broker shows it only to its own client, and with the right to recover
                problems[branch.broker_id, *_FOREIGN].append(branch.xid)
                continue
            if branch.broker_id in silent:  # it would wait as long
                silent[branch.broker_id].append(branch.xid)
                continue
            outcome = self._do(database, outcomes.decide(database, branch.xid.gtrid))
            if outcome is None:
                log.warning("branch %s: the database does not know the outcome yet", branch.xid)
            elif (error := self._background.run(self._finish(branch, outcome))) is None:
                done[outcome] += 1
            else:
                waiting = problems[branch.broker_id, *_reason(error)]
                waiting.append(branch.xid)
                if not _has_answered(error):
                    silent[branch.broker_id] = waiting
        if are_all_known:
            self._do(database, outcomes.forget(database, set(old) - {branch.xid.gtrid for branch in known}))
        left = len(branches) - done.total() - sum(map(len, problems.values()))
        found = tuple(RecoveryProblem(*key, tuple(xids)) for key, xids in problems.items())
        return Recovered(done[COMMIT], done[ABORT], left, found)

    async def _known(self, identity: bytes) -> tuple[list[BranchDescription], _Problems]:
        """Returns this database's branches that are prepared, or finished by an operator, at all broker ids that ever
        existed; and a problem for each broker id that did not list its branches."""
        client = TxClient(self._cluster)
        found: list[BranchDescription] = []
        problems: _Problems = defaultdict(list)
        for broker_id in await self._cluster.broker_ids():
            try:
                found += await client.branches(broker_id, of_others=True)
            except MetamqError as error:
                problems[broker_id, *_reason(error)] = []
        return [one for one in found if one.xid.gtrid.startswith(identity)], problems

    async def _finish(self, description: BranchDescription, outcome: str) -> MetamqError | None:
        """Returns the error for which the branch is not finished."""
        branch = Branch(description.xid, description.broker_id, new_session())
        branch.epoch = description.epoch
        verb = Verb.COMMIT if outcome == COMMIT else Verb.ROLLBACK
        try:
            await TxClient(self._cluster).ask(branch, [verb], timeout_s=ANSWER_S)
        except BranchNotKnown:
            return None  # its application, or another recoverer, was faster
        except MetamqError as error:
            return error
        log.info("branch %s at broker %d: %s", description.xid, description.broker_id, outcome)
        return None

    def close(self) -> None:
        """Ends run(), and disconnects; a second call does nothing."""
        self._stop.set()
        self._background.run(self._cluster.close())
        self._background.run(self._cluster.session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_Problems = defaultdict[tuple[int, str, str], list[Xid]]
"""The branches of each problem: (broker id, reason, hint)."""


def _reason(error: MetamqError) -> tuple[str, str]:
    """Returns the reason and the hint."""
    reason = error.reason if isinstance(error, TransactionError) else error.problem
    return reason, _SILENT_HINT if isinstance(error, OutcomeUnknown) else error.hint or _SILENT_HINT


def _has_answered(error: MetamqError) -> bool:
    return isinstance(error, TransactionError | NotAuthorized) and not isinstance(error, OutcomeUnknown)


async def _awaited(opening: Awaitable[T]) -> T:
    return await opening


def _key(branch: BranchDescription) -> tuple[int, Xid, int]:
    return branch.broker_id, branch.xid, branch.epoch
