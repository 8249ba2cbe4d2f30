"""A Python worker's connection to the cluster, for what it writes: opened by its first task, kept for the next ones.

Spark keeps its workers, of executors as of the driver, for task after task, and one may write for several queries. What
it has of the cluster is the same for all of them: one session with ZooKeeper, and one connection to each broker.
Waiting is bounded by the option `deliveryTimeoutMs`: until then a task waits for brokers and ZooKeeper to come back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

from metamq.client.background import background
from metamq.client.fetch.columnar import ColumnarSender, Shipment
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.errors import ConnectError
from metamq.spark_consumers.sink.branch_ends import BranchEnds
from metamq.spark_consumers.sink.committing import Committer
from metamq.spark_consumers.sink.decision_store import SinkOwner
from metamq.spark_consumers.sink.decisions import BranchName
from metamq.spark_consumers.sink.sink_options import SinkOptions
from metamq.spark_consumers.sink.task_branches import TaskBranches
from metamq.wire.compression import Codec
from metamq.zk.cluster.topics import TopicConfig

T = TypeVar("T")

SESSION_TIMEOUT_MS = 10_000
RETRY_S = 0.2


class Connected:
    """What all that a process writes to a cluster goes through. For any thread."""

    def __init__(self, zookeeper: str, root: str, patience_s: float) -> None:
        """Raises ConnectError when ZooKeeper is not reached in so long, and in one try; ConfigError."""
        self.background = background()
        self._senders: dict[tuple[Codec, float], ColumnarSender] = {}
        self.cluster = _patiently(lambda: self.background.run(self._open(zookeeper, root)), patience_s)
        self.ends = BranchEnds(self.cluster)

    async def _open(self, zookeeper: str, root: str) -> ClusterClient:
        session = await open_client_session(zookeeper, root, SESSION_TIMEOUT_MS)
        return ClusterClient(session, changed=self._changed)

    def _changed(self) -> None:
        for sender in self._senders.values():
            sender.changed_cluster()

    async def sender(self, codec: Codec, delivery_timeout_s: float) -> ColumnarSender:
        """For shipments with these settings."""
        key = codec, delivery_timeout_s
        if key not in self._senders:
            self._senders[key] = ColumnarSender(self.cluster, codec, delivery_timeout_s=delivery_timeout_s)
        return self._senders[key]

    async def close(self) -> None:
        """Disconnects; what is under way may never be done."""
        for sender in self._senders.values():
            await sender.close()
        await self.cluster.close()
        await self.cluster.session.close()


class SinkClient:
    """What one query writes with. For any thread."""

    def __init__(self, options: SinkOptions, connected: Connected | None = None) -> None:
        """`connected`: None for one of its own. Raises ConnectError, ConfigError."""
        self.options = options
        self._connected = connected or Connected(options.zookeeper, options.root, options.delivery_timeout_s)
        self.background = self._connected.background
        self.cluster = self._connected.cluster

    def close(self) -> None:
        """Disconnects, whoever else is connected by it."""
        self.background.run(self._connected.close())

    def shipment(self) -> Shipment:
        """For what one task writes."""
        options = self.options
        return Shipment(self.background.run(self._connected.sender(options.codec, options.delivery_timeout_s)))

    async def branches(self, name: BranchName) -> TaskBranches:
        """For what one attempt at a task writes. In the background loop, as the next."""
        with contextlib.suppress(ConnectError):  # the first request waits
            await self.cluster.refresh_brokers()
        options = self.options
        return TaskBranches(
            self.cluster, name, options.codec, branch_timeout_s=options.transaction_timeout_s,
            patience_s=options.delivery_timeout_s,
        )  # fmt: skip

    def committer(self, sink: str, owner: SinkOwner) -> Committer:
        """For the driver."""
        return Committer(
            self._connected.ends, sink, owner, self.options.delivery_timeout_s,
            accepts_loss=not self.options.fail_on_data_loss,
        )  # fmt: skip

    def topic(self, name: str) -> TopicConfig:
        """The topic's configuration, as it is now or was last known. Raises TopicNotFound, ConnectError."""
        known = self.cluster.configs.get(name)  # followed by a watch
        if known is not None:
            return known
        return _patiently(lambda: self.background.run(self.cluster.topic(name)), self.options.delivery_timeout_s)


def _patiently(call: Callable[[], T], patience_s: float) -> T:
    """Calls again while there is no connection. Raises the last ConnectError once time is over."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except ConnectError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)


_connected: dict[tuple[str, str], Connected] = {}


def sink_client(options: SinkOptions, *, is_first: bool = False) -> SinkClient:
    """By this process's connection. `is_first`: nobody has reached this cluster yet, so ZooKeeper is tried once, for
    ten seconds, and not waited for. Raises ConnectError, ConfigError."""
    where = options.zookeeper, options.root
    if where not in _connected:
        _connected[where] = Connected(*where, 0.0 if is_first else options.delivery_timeout_s)
    return SinkClient(options, _connected[where])


os.register_at_fork(after_in_child=_connected.clear)
"""The others' loop is not in the child."""
