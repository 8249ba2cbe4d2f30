"""One Spark session and one cluster for all tests here. Those that need pyspark are a run of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq.testing import Cluster, cluster
from metamq.zk.server.ports import free_port
from tests.spark.drivers import next_name

if TYPE_CHECKING:
    from tests.spark.standalone import Standalone

HERE = Path(__file__).parent
WITHOUT_SPARK = {
    "test_decision_rules.py",
    "test_exact_decisions.py",
    "test_exact_jobs.py",
    "test_exact_lives.py",
    "test_fetch.py",
    "test_files.py",
    "test_gathering.py",
    "test_lag.py",
    "test_connection_pool.py",
    "test_plans.py",
    "test_sink_options.py",
    "test_strange_files.py",
    "test_stream_planner.py",
    "test_stream_plans.py",
    "test_task_branches.py",
    "test_tokens.py",
}
"""They run wherever pyarrow is, with the others."""
if importlib.util.find_spec("pyspark") is None:
    collect_ignore = [file.name for file in HERE.glob("test_*.py") if file.name not in WITHOUT_SPARK]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name not in WITHOUT_SPARK:
            item.add_marker(pytest.mark.spark)


def small_session(place: Path) -> dict[str, Any]:
    """Settings of any session here."""
    return {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": place / "warehouse",
        "spark.local.dir": place / "local",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    """A ZooKeeper and one broker."""
    with cluster() as started:
        yield started


@pytest.fixture(scope="session")
def two() -> Iterator[Cluster]:
    """Two brokers, for what needs no Spark."""
    with cluster(brokers=2) as started:
        yield started


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that a test may hurt."""
    with cluster(brokers=2, folder=tmp_path / "cluster") as started:
        yield started


@pytest.fixture
def sink() -> str:
    """The name of a sink that no test used."""
    return next_name("sink")


@pytest.fixture(scope="session")
def connect(spark: Any) -> str:
    """Where the session is a server of Spark Connect as well."""
    return f"sc://127.0.0.1:{spark.conf.get('spark.connect.grpc.binding.port')}"


@pytest.fixture(scope="session")
def spark(running: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session of two cores, in which a task is tried four times. Without `zookeeper` it is the cluster's.

    Not for tests that are `long`: their sessions are on clusters of their own, and a process has one at a time.
    """
    from metamq.spark_consumers import session

    conf = {
        **small_session(tmp_path_factory.mktemp("spark")),
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": free_port(),
        # What a short run compiles well is never earned back: this halves the JVM's time.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("METAMQ_ZOOKEEPER", running.zookeeper)  # planners and workers get the JVM's
        started = session("tests", "local[2,4]", conf)
    started.sparkContext.setLogLevel("ERROR")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A standalone cluster, for tests that are `long`."""
    from tests.spark.standalone import standalone

    with standalone(tmp_path_factory.mktemp("standalone")) as started:
        yield started


@pytest.fixture
def topic(running: Cluster) -> str:
    """A new topic of two partitions."""
    return new_topic(running)


def new_topic(running: Cluster, partitions: int = 2, **settings: Any) -> str:
    """Creates a topic that no test used."""
    name = next_name("topic")
    running.create_topic(name, partitions=partitions, **settings)
    return name


def send(running: Cluster, topic: str, values: list[bytes], **columns: Any) -> None:
    """Stores messages."""
    with running.producer() as producer:
        producer.send_many(topic, values, **columns).result()
        producer.flush()
