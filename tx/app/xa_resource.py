"""The blocking XAResource."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from metamq.client.background import background
from metamq.client.net.branches import BranchDescription
from metamq.client.producer.partitioner import Partitioner
from metamq.client.settings import cluster_access, load
from metamq.client.typevars import T
from metamq.errors import ForkedError
from metamq.tx.app.resource import TM, Vote, XACore, XAOptions
from metamq.wire.xa import Xid

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig


class XASettings(TypedDict, total=False):
    """The keyword arguments of an XAResource, as `settings`."""

    batch_bytes: int
    max_message_bytes: int
    compression: str | None
    partitioner: str | Partitioner
    request_timeout_s: float


class XAResource:
    """The verbs of XA at one broker. For one thread at a time.

    broker:     the id of the broker that has the branches; messages go to its partitions only.
    zookeeper, config, root: see metamq.Producer.
    settings:   batch_bytes, max_message_bytes, compression, partitioner, request_timeout_s.

        with XAResource(broker=0) as mq:
            mq.start(xid)
            mq.send("orders", b"...")
            mq.end(xid)
            if mq.prepare(xid) is Vote.OK:
                mq.commit(xid)

    Every method raises a TransactionError whose class shows the next step: RolledBack, OutcomeUnknown, BranchNotKnown,
    HeuristicOutcome, BranchMisuse, TryLater; its `code` is the code of XA. A method raises ConnectError or Fenced if
    the verb was certainly not carried out, because no broker could be asked.
    """

    def __init__(
        self,
        broker: int = 0,
        zookeeper: str | None = None,
        *,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
        **settings: Unpack[XASettings],
    ) -> None:
        self._core = XACore(broker, load(XAOptions, "xa", file=config, arguments=settings, others=type(self)))
        self._background = background()
        self._background.run(self._core.open(cluster_access(zookeeper, root, config, security)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work in the background loop. Raises ForkedError in a fork's child, where the loop does not run."""
        if self._core.is_forked:
            work.close()
            raise ForkedError("XAResource")
        return self._background.run(work)

    def start(self, xid: Xid, flags: TM = TM.NOFLAGS, *, timeout_s: float | None = None) -> None:
        """Begins a branch and works in it. JOIN: works in an existing branch. RESUME: works in a suspended one again.

        `timeout_s`: seconds until the broker rolls back an unprepared branch. None: the value of set_timeout(), or else
        the broker's own.
        """
        self._run(self._core.start(xid, flags, timeout_s))

    def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
    ) -> None:
        """Sends a message in the current branch: readers see it after the branch is committed.

        Raises BranchMisuse outside of a branch, TopicNotFound, MessageTooLarge, and ConfigError for a wrong argument or
        a partition of another broker.
        """
        self._run(self._core.send(topic, value, key, headers, partition, timestamp))

    def end(self, xid: Xid, flags: TM = TM.SUCCESS) -> None:
        """Ends the work in a branch. FAIL: it can only be rolled back. SUSPEND: it can be resumed, or ended."""
        self._run(self._core.end(xid, flags))

    def prepare(self, xid: Xid) -> Vote:
        """Prepares the branch: it survives every crash, and waits for commit() or rollback().

        Returns Vote.RDONLY if the branch has no messages: then it is finished.
        """
        return self._run(self._core.prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commits the branch: readers see its messages. `one_phase`: without prepare(). A repeated call is allowed."""
        self._run(self._core.commit(xid, one_phase))

    def rollback(self, xid: Xid) -> None:
        """Rolls the branch back: readers never see its messages."""
        self._run(self._core.rollback(xid))

    def recover(self, flags: TM = TM.STARTRSCAN) -> list[BranchDescription]:
        """Returns this broker's branches that are prepared, or were finished by an operator, of all clients.

        Returns all of them, or raises. With NOFLAGS or ENDRSCAN, which continue a scan in XA, the list is empty.
        """
        return self._run(self._core.recover(flags))

    def forget(self, xid: Xid) -> None:
        """Drops the record of a branch that an operator has finished."""
        self._run(self._core.forget(xid))

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the time-out, in seconds, of branches that start from now on; 0 is the broker's own."""
        self._core.set_timeout(timeout_s)

    def is_same_rm(self, other: XAResource) -> bool:
        """True if both reach the same broker id of one cluster: then one may join a branch of the other."""
        return self._core.is_same_rm(other._core)

    def close(self) -> None:
        """Disconnects; a second call does nothing. The broker rolls back unprepared branches some seconds later."""
        if not self._core.is_forked:
            self._background.run(self._core.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
