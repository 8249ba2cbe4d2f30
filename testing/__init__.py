"""Real clusters for tests: pytest fixtures, brokers and ZooKeeper as processes, and faults to inject.

    def test_orders(metamq_producer, metamq_topic):
        metamq_producer.send(metamq_topic, b"1").result()

    with cluster() as running:                             # without pytest
        ...

Nothing is faked: a test that passes here passes against a real cluster. `docs/testing.md` has the tasks.

The names are imported on first use: the pytest plugin `plugin.py` costs a run without its fixtures almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "metamq.testing":
    raise ImportError(f"import metamq.testing, not {__name__}: a bare import makes a second copy of every class")

if TYPE_CHECKING:
    from metamq.testing.broker_process import BrokerProcess as BrokerProcess
    from metamq.testing.clusters import Cluster as Cluster
    from metamq.testing.clusters import cluster as cluster
    from metamq.testing.messages import Handled as Handled
    from metamq.testing.messages import aio_handle as aio_handle
    from metamq.testing.messages import handle as handle
    from metamq.testing.messages import message as message
    from metamq.testing.plugin import cluster_fixture as cluster_fixture
    from metamq.testing.workers import WorkerProcess as WorkerProcess
    from metamq.testing.workers import aio_running as aio_running
    from metamq.testing.workers import running as running
    from metamq.zk.server.embedded import EmbeddedZooKeeper as EmbeddedZooKeeper

_HOME = {
    "BrokerProcess": "metamq.testing.broker_process",
    "Cluster": "metamq.testing.clusters",
    "EmbeddedZooKeeper": "metamq.zk.server.embedded",
    "Handled": "metamq.testing.messages",
    "WorkerProcess": "metamq.testing.workers",
    "aio_handle": "metamq.testing.messages",
    "aio_running": "metamq.testing.workers",
    "cluster": "metamq.testing.clusters",
    "cluster_fixture": "metamq.testing.plugin",
    "handle": "metamq.testing.messages",
    "message": "metamq.testing.messages",
    "running": "metamq.testing.workers",
}

__all__ = [
    "BrokerProcess",
    "Cluster",
    "EmbeddedZooKeeper",
    "Handled",
    "WorkerProcess",
    "aio_handle",
    "aio_running",
    "cluster",
    "cluster_fixture",
    "handle",
    "message",
    "running",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'metamq.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
