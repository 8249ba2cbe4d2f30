"""Clusters and readers for tests of transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from metamq.client.branches import BranchDescription
from metamq.testing import Cluster, cluster
from metamq.tx import XAResource
from tests.parts import wait_until


class Shop:
    """A cluster of two brokers, and what is seen of it."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self._watchers: dict[int, XAResource] = {}

    def topic(self) -> str:
        """A new one, with two partitions at each broker."""
        name = f"orders-{time.monotonic_ns()}"
        self.cluster.create_topic(name, partitions=4)
        return name

    def seen(self, topic: str) -> list[bytes]:
        """All that a new reader finds, sorted."""
        with self.cluster.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
            return sorted(message.value for message in consumer)

    def branches(self, broker_id: int) -> list[BranchDescription]:
        """All that are open at a broker, in whatever state."""
        if broker_id not in self._watchers:
            self._watchers[broker_id] = XAResource(broker_id, self.cluster.zookeeper)
        watcher = self._watchers[broker_id]
        return watcher._background.run(watcher._core._client.branches(broker_id, all_of_them=True))

    def open_branches(self) -> list[tuple[int, str]]:
        """(broker id, state) of all."""
        return [(broker_id, one.state) for broker_id in (0, 1) for one in self.branches(broker_id)]

    def until_ended(self, limit_s: float = 60.0) -> None:
        """Waits until no branch is open at any broker, but those of which only the reason is kept."""
        wait_until(lambda: all(one[1] == "rollback-only" for one in self.open_branches()), limit_s, "no branch open")

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with cluster(brokers=2, branch_grace_ms=700) as running:
        made = Shop(running)
        yield made
        made.close()
