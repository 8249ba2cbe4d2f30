"""A Python worker's connection to the cluster, for what it writes: opened by its first task, kept for the next ones.

Spark keeps its workers, of executors as of the driver, for task after task. Waiting is bounded by the option
`deliveryTimeoutMs`: until then a task waits for brokers and ZooKeeper to come back.
"""

from __future__ import annotations

import os
import time

from metamq.client.background import background
from metamq.client.cluster import Cluster
from metamq.client.columnar import ColumnarSender, Shipment
from metamq.client.first_contact import open_client_session
from metamq.errors import ConnectError
from metamq.spark_consumers.committing import Committer
from metamq.spark_consumers.decisions import BranchName
from metamq.spark_consumers.sink_options import SinkOptions
from metamq.spark_consumers.task_branches import TaskBranches
from metamq.zk.topics import TopicConfig

SESSION_TIMEOUT_MS = 10_000
RETRY_S = 0.2
ANSWER_S = 30.0
"""What a broker that a task writes to in a branch does not answer for so long fails the attempt."""


class SinkClient:
    """For any thread."""

    def __init__(self, options: SinkOptions) -> None:
        """Raises ConnectError, ConfigError."""
        self.options = options
        self.background = background()
        deadline_s = time.monotonic() + options.delivery_timeout_s
        while True:
            try:
                self.background.run(self._open())
                return
            except ConnectError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)

    async def _open(self) -> None:
        options = self.options
        session = await open_client_session(options.zookeeper, options.root, SESSION_TIMEOUT_MS)
        self.cluster = Cluster(session, changed=lambda: self._sender.changed_cluster())
        self._sender = ColumnarSender(self.cluster, options.codec, delivery_timeout_s=options.delivery_timeout_s)

    def close(self) -> None:
        """Disconnects; what is under way may never be done."""
        self.background.run(self._close())

    async def _close(self) -> None:
        await self._sender.close()
        await self.cluster.close()
        await self.cluster.session.close()

    def shipment(self) -> Shipment:
        """For what one task writes."""
        return Shipment(self._sender)

    async def branches(self, name: BranchName) -> TaskBranches:
        """For what one attempt at a task writes. In the background loop, as the next."""
        return TaskBranches(
            self.cluster, name, self.options.codec, branch_timeout_s=self.options.transaction_timeout_s,
            answer_s=min(self.options.delivery_timeout_s, ANSWER_S),
        )  # fmt: skip

    def committer(self, sink: str, identity: str) -> Committer:
        """For the driver."""
        return Committer(self.cluster.session, sink, identity, self.options.delivery_timeout_s)

    def topic(self, name: str) -> TopicConfig:
        """The topic's configuration, as it is now or was last known. Raises TopicNotFound, ConnectError."""
        known = self.cluster.configs.get(name)  # followed by a watch
        if known is not None:
            return known
        deadline_s = time.monotonic() + self.options.delivery_timeout_s
        while True:
            try:
                return self.background.run(self.cluster.topic(name))
            except ConnectError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)


_clients: dict[SinkOptions, SinkClient] = {}


def sink_client(options: SinkOptions) -> SinkClient:
    """This process's. Raises ConnectError, ConfigError."""
    known = _clients.get(options)
    if known is None:
        known = _clients[options] = SinkClient(options)
    return known


os.register_at_fork(after_in_child=_clients.clear)
"""The others' loop is not in the child."""
