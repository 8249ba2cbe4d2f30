"""A Python worker's connection to the cluster, for its writes: its first task opens it, the next ones use it.

Spark keeps its workers, in executors and in the driver, for many tasks. One worker may write for several queries.
All of them share one session with ZooKeeper, and one connection to each broker. The option `deliveryTimeoutMs` limits
the waiting: until then a task waits for brokers and ZooKeeper to come back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from metamq.client.background import background
from metamq.client.fetch.columnar import ColumnarSender, Shipment
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.delegating import DelegatedToken
from metamq.client.net.first_contact import open_client_session
from metamq.errors import ConnectError
from metamq.security.config import DelegatedConfig
from metamq.security.rights import ANY_TOPIC, WRITE
from metamq.spark_consumers.sink.branch_ends import BranchEnds
from metamq.spark_consumers.sink.committing import Committer
from metamq.spark_consumers.sink.task_branches import TaskBranches
from metamq.spark_consumers.source.driver_secret import token_seed

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.spark_consumers.sink.decision_store import SinkOwner
    from metamq.spark_consumers.sink.decisions import BranchName
    from metamq.spark_consumers.sink.sink_options import SinkOptions
    from metamq.wire.compression import Codec
    from metamq.zk.cluster.topics import TopicConfig

T = TypeVar("T")

SESSION_TIMEOUT_MS = 10_000
RETRY_S = 0.2
TOKENS_KEPT = 4
"""Connections by tokens that a process keeps."""


class Connected:
    """The connection of a process to a cluster, for all of its writes. For any thread."""

    def __init__(self, access: ClusterAccess, patience_s: float) -> None:
        """Raises ConnectError if ZooKeeper is not reached in `patience_s` and at least one try; ConfigError."""
        self.background = background()
        self._senders: dict[tuple[Codec, float], ColumnarSender] = {}
        self.cluster = patiently(lambda: self.background.run(self._open(access)), patience_s)
        self.ends = BranchEnds(self.cluster)

    async def _open(self, access: ClusterAccess) -> ClusterClient:
        session = await open_client_session(access, SESSION_TIMEOUT_MS)
        return ClusterClient(session, changed=self._changed)

    def _changed(self) -> None:
        for sender in self._senders.values():
            sender.changed_cluster()

    async def sender(self, codec: Codec, delivery_timeout_s: float) -> ColumnarSender:
        """Returns the sender for shipments with these settings."""
        key = codec, delivery_timeout_s
        if key not in self._senders:
            self._senders[key] = ColumnarSender(self.cluster, codec, delivery_timeout_s=delivery_timeout_s)
        return self._senders[key]

    async def close(self) -> None:
        """Disconnects; running requests may not be carried out."""
        for sender in self._senders.values():
            await sender.close()
        await self.cluster.close()
        await self.cluster.session.close()


class SinkClient:
    """The client of one query that writes. For any thread."""

    def __init__(self, options: SinkOptions, connected: Connected | None = None) -> None:
        """`connected`: None for a connection of its own. Raises ConnectError, ConfigError."""
        self.options = options
        self._connected = connected or Connected(options.access, options.delivery_timeout_s)
        self.background = self._connected.background
        self.cluster = self._connected.cluster

    def close(self) -> None:
        """Disconnects, also for other users of the connection."""
        self.background.run(self._connected.close())

    def shipment(self) -> Shipment:
        """Returns a shipment for the rows of one task."""
        options = self.options
        return Shipment(self.background.run(self._connected.sender(options.codec, options.delivery_timeout_s)))

    async def branches(self, name: BranchName) -> TaskBranches:
        """Returns the branches for one attempt at a task. Called in the background loop, as committer() may be."""
        with contextlib.suppress(ConnectError):  # the first request waits
            await self.cluster.refresh_brokers()
        options = self.options
        return TaskBranches(
            self.cluster, name, options.codec, branch_timeout_s=options.transaction_timeout_s,
            patience_s=options.delivery_timeout_s,
        )  # fmt: skip

    def committer(self, sink: str, owner: SinkOwner) -> Committer:
        """Returns a committer, for the driver."""
        return Committer(
            self._connected.ends, sink, owner, self.options.delivery_timeout_s,
            accepts_loss=not self.options.fail_on_data_loss,
        )  # fmt: skip

    def topic(self, name: str) -> TopicConfig:
        """Returns the topic's configuration, the present or the last known one. Raises TopicNotFound, ConnectError."""
        known = self.cluster.configs.get(name)  # a watch keeps it current
        if known is not None:
            return known
        return patiently(lambda: self.background.run(self.cluster.topic(name)), self.options.delivery_timeout_s)


def patiently(call: Callable[[], T], patience_s: float) -> T:
    """Calls again while there is no connection. Raises the last ConnectError after the time-out."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except ConnectError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)


_connected: dict[ClusterAccess, Connected] = {}


def sink_client(options: SinkOptions, *, is_first: bool = False) -> SinkClient:
    """Returns a client with this process's connection. `is_first`: no process has reached this cluster yet, so
    ZooKeeper is tried once, for ten seconds. Raises ConnectError, ConfigError."""
    access = options.access
    if access not in _connected:
        _close_former_tokens()
        _connected[access] = Connected(access, 0.0 if is_first else options.delivery_timeout_s)
    return SinkClient(options, _connected[access])


def for_tasks(options: SinkOptions) -> SinkOptions:
    """Returns the options of tasks. With security on, tasks write with a token instead of the driver's files.

    Spark calls this for each batch, and the token is mostly the same: see metamq.spark_consumers.source.driver_secret.
    It ends by itself, its lifetime after the last query renewed it. Raises ConnectError, NotAuthorized, ConfigError.
    """
    security = options.access.security
    if not security.is_on or not options.token_lifetime_s:
        return options
    client = sink_client(options)
    rights = frozenset({(WRITE, options.topic or ANY_TOPIC)})
    seed = token_seed(security, rights)
    token = DelegatedToken.new(client.cluster, security, rights, options.token_lifetime_s, seed)
    patiently(lambda: client.background.run(token.renew()), options.delivery_timeout_s)
    return replace(options, access=options.access._replace(security=token.config))


def _close_former_tokens() -> None:
    """Closes earlier queries' connections by token, except for the newest: each query has a token of its own."""
    by_token = [access for access in _connected if isinstance(access.security, DelegatedConfig)]
    for access in by_token[: -TOKENS_KEPT + 1]:
        former = _connected.pop(access)
        former.background.run(former.close())


os.register_at_fork(after_in_child=_connected.clear)
"""A fork's child makes its own: the parent's loop does not run there."""
