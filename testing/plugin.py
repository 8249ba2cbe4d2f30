"""The pytest plugin `metamq`: fixtures for clusters, topics and clients.

pytest imports this file in each run of an environment that has metamq, so it imports only pytest. `docs/testing.md` has
the tasks.

| fixture | scope | value |
|---|---|---|
| `metamq_cluster` | session | a ZooKeeper and one broker |
| `metamq_pair` | function | a master and a slave of the session, with a network to cut; repaired after each test |
| `metamq_topic` | function | the name of a new topic, removed after the test |
| `metamq_worker` | function | starts `metamq worker` processes, which stop after the test |
| `metamq_producer`, `metamq_consumer` | function | blocking clients, closed after the test |
| `metamq_aio_producer`, `metamq_aio_consumer` | function | asyncio clients for pytest-asyncio and anyio |

The fixtures of functions use `metamq_cluster`: a test module that defines its own `metamq_cluster`, such as by
`cluster_fixture(scope="module")`, has them on that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest

from metamq.testing import aio_clients

if TYPE_CHECKING:
    import metamq
    from metamq import Consumer, Producer
    from metamq.testing.clusters import Cluster
    from metamq.testing.workers import WorkerProcess

PAIR = {"slaves": 1, "network": True, "failover": "auto", "session_timeout_ms": 2000}


def cluster_fixture(*, scope: Literal["session", "package", "module", "class", "function"], **settings: Any) -> Any:
    """Returns a fixture that runs a cluster. `settings` are those of `metamq.testing.cluster`; in `folder` each cluster
    has a new folder.

    metamq_cluster = cluster_fixture(scope="module", brokers=2)     # in a test module or conftest.py
    """

    @pytest.fixture(scope=scope)
    def running_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
        from metamq.testing.clusters import cluster
        from metamq.testing.temporary_folder import own_folder

        own = dict(settings)
        if (folder := own.get("folder")) is not None:  # tests and workers share it
            own["folder"] = own_folder(folder, request.node.name)
        with cluster(**own) as running:
            yield running

    running_cluster.__doc__ = f"A cluster for each {scope}."
    return running_cluster


metamq_cluster = cluster_fixture(scope="session")
_metamq_session_pair = cluster_fixture(scope="session", **PAIR)


@pytest.fixture
def metamq_pair(_metamq_session_pair: Cluster) -> Iterator[Cluster]:
    """A master and a slave in sync, with automatic failover and a network to cut. Repaired after each test."""
    yield _metamq_session_pair
    _metamq_session_pair.repair()


@pytest.fixture
def metamq_topic(metamq_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new topic of 4 partitions. It is removed after the test."""
    topic = metamq_cluster.new_topic(request.node.name)
    yield topic
    metamq_cluster.repair()
    with metamq_cluster.admin() as admin:
        if topic in admin.topics():
            admin.delete(topic)


@pytest.fixture
def metamq_worker(metamq_cluster: Cluster) -> Iterator[Callable[[str | Sequence[str]], WorkerProcess]]:
    """A function that starts `metamq worker` with these arguments, and waits until it has joined its group. Its workers
    stop after the test: they finish the messages in progress, and an error of one fails the test."""
    with contextlib.ExitStack() as stack:
        yield lambda arguments: stack.enter_context(metamq_cluster.worker(arguments))
        metamq_cluster.repair()


@pytest.fixture
def metamq_producer(metamq_cluster: Cluster) -> Iterator[Producer[Any]]:
    """A Producer of `metamq_cluster`."""
    with metamq_cluster.producer() as producer:
        yield producer
        metamq_cluster.repair()


@pytest.fixture
def metamq_consumer(metamq_cluster: Cluster, metamq_topic: str) -> Iterator[Consumer[bytes]]:
    """A Consumer that reads `metamq_topic` from its beginning. Its loop ends when it has read all messages."""
    with metamq_cluster.consumer(topics=metamq_topic, idle_timeout_s=aio_clients.IDLE_TIMEOUT_S) as consumer:
        yield consumer
        metamq_cluster.repair()


# -- asyncio ----------------------------------------------------------------------------------------------------------
#
# An async fixture belongs to one plugin: pytest-asyncio runs those that its own decorator made, anyio those of tests
# that use its fixture `anyio_backend`. So there are two of each, and the plain fixture chooses by the test.


_metamq_anyio_producer = pytest.fixture(aio_clients.producer)
_metamq_anyio_consumer = pytest.fixture(aio_clients.consumer)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the fixtures that pytest-asyncio runs, if it is there."""
    if config.pluginmanager.hasplugin("asyncio"):
        config.pluginmanager.import_plugin("metamq.testing.asyncio_fixtures")


def _of_the_tests_plugin(request: pytest.FixtureRequest, kind: str) -> Any:
    if "anyio_backend" in request.fixturenames:
        return request.getfixturevalue(f"_metamq_anyio_{kind}")
    if not request.config.pluginmanager.hasplugin("asyncio"):
        pytest.fail(
            f"metamq_aio_{kind} needs a plugin that runs asyncio tests: pip install pytest-asyncio, or mark the test "
            "with pytest.mark.anyio",
            pytrace=False,
        )
    mark = request.node.get_closest_marker("asyncio")
    scope = (mark and mark.kwargs.get("loop_scope")) or request.config.getini("asyncio_default_test_loop_scope")
    return request.getfixturevalue(f"_metamq_asyncio_{kind}_{scope or 'function'}")


@pytest.fixture
def metamq_aio_producer(request: pytest.FixtureRequest) -> metamq.aio.Producer[Any]:
    """An asyncio Producer of `metamq_cluster`, open in the loop of the test."""
    producer: metamq.aio.Producer[Any] = _of_the_tests_plugin(request, "producer")
    return producer


@pytest.fixture
def metamq_aio_consumer(request: pytest.FixtureRequest) -> metamq.aio.Consumer[bytes]:
    """An asyncio Consumer that reads `metamq_topic`. Its loop ends when it has read all messages."""
    consumer: metamq.aio.Consumer[bytes] = _of_the_tests_plugin(request, "consumer")
    return consumer
