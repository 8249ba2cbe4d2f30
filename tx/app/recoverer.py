"""Recoverer: finishes the branches that dbtx left prepared, as the database has decided. Any process may run one.

A branch that is seen for the first time is left alone for `grace_s`: its application is most likely about to finish it.
After that the database is asked; the question itself decides `abort` where nothing was (metamq.tx.app.outcomes). Any
number of recoverers may do so at once, and any number of times: each step may be repeated.

A decision is forgotten only when every broker id that there is has said that no branch of it is prepared there: a
broker that is down may have one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import NamedTuple, Self

from metamq.client.background import background
from metamq.client.branches import ANSWER_S, Branch, BranchDescription, TxClient, new_session
from metamq.client.cluster import Cluster
from metamq.client.dbapi import Connection
from metamq.client.first_contact import open_client_session
from metamq.client.settings import zookeeper_root, zookeeper_servers
from metamq.errors import BranchNotKnown, MetamqError
from metamq.tx.app.outcomes import ABORT, COMMIT, DEFAULT_TABLE, OutcomeTable
from metamq.wire.xa import Verb, Xid

log = logging.getLogger("metamq.tx")

SESSION_TIMEOUT_MS = 10_000
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

    with Recoverer(connect) as recoverer:
        recoverer.run(every_s=5)
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        zookeeper: str | None = None,
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
        grace_s: float = GRACE_S,
        config: str | None = None,
        root: str | None = None,
    ) -> None:
        self._connect = connect
        self._outcomes = OutcomeTable(table, paramstyle)
        self._grace_s = grace_s
        self._seen: dict[tuple[int, Xid, int], float] = {}
        """(broker id, xid, epoch) and since when."""
        self._stop = threading.Event()
        self._background = background()
        servers = zookeeper_servers(zookeeper, config)
        session = self._background.run(open_client_session(servers, zookeeper_root(root, config), SESSION_TIMEOUT_MS))
        self._cluster = Cluster(session)

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
        with closing(self._opened()) as connection:
            identity = self._outcomes.identity(connection)
            connection.rollback()
            branches, unreachable = self._background.run(self._prepared(identity))
            now_s = time.monotonic()
            self._seen = {key: self._seen.get(key, now_s) for key in map(_key, branches)}
            committed = rolled_back = left = 0
            for branch in branches:
                if now_s - self._seen[_key(branch)] < self._grace_s:
                    left += 1
                    continue
                outcome = self._outcomes.decide(connection, branch.xid.gtrid)
                if outcome is None:
                    left += 1
                elif self._background.run(self._finish(branch, outcome)):
                    committed += outcome == COMMIT
                    rolled_back += outcome == ABORT
                else:
                    left += 1
            if not unreachable:
                needed = {branch.xid.gtrid for branch in branches}
                now_us = time.time_ns() // 1000
                self._outcomes.forget(connection, now_us - int(COMMITS_KEPT_S * 1e6), COMMIT, needed)
                self._outcomes.forget(connection, now_us - int(ABORTS_KEPT_S * 1e6), ABORT, needed)
        return Recovered(committed, rolled_back, left, unreachable)

    def _opened(self) -> Connection:
        try:
            return self._connect()
        except Exception as error:  # PEP 249 has a tree of exceptions per module, with no common root
            raise MetamqError(f"no connection to the database: {type(error).__name__}: {error}") from error

    async def _prepared(self, identity: bytes) -> tuple[list[BranchDescription], tuple[int, ...]]:
        """This database's prepared branches, at all broker ids that there ever were; and which did not answer."""
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
        mine = [one for one in found if one.state == "prepared" and one.xid.gtrid.startswith(identity)]
        return mine, tuple(unreachable)

    async def _finish(self, description: BranchDescription, outcome: str) -> bool:
        branch = Branch(description.xid, description.broker_id, new_session())
        branch.epoch = description.epoch
        verb = Verb.COMMIT if outcome == COMMIT else Verb.ROLLBACK
        try:
            await TxClient(self._cluster).ask(branch, [verb], timeout_s=ANSWER_S)
        except BranchNotKnown:
            return True  # its application, or another recoverer, was faster
        except MetamqError as error:
            log.warning("%s of %s is to be tried again: %s", outcome, description.xid, error)
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


def _key(branch: BranchDescription) -> tuple[int, Xid, int]:
    return branch.broker_id, branch.xid, branch.epoch
