"""Executors that are processes of their own, on a standalone cluster: killed under a query, and long outages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster, cluster
from tests.parts import values_to_end, wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.held import begun, scan_in_the_middle, waiting_in_the_middle
from tests.spark.standalone import Standalone, session_on
from tests.spark.test_stream_source import Query, numbers

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

AWAY_S = 30


@pytest.fixture(scope="module")
def spark(executors: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session there, in place of the local one."""
    with session_on(executors, tmp_path_factory.mktemp("driver")) as started:
        yield started


class Held(Query):
    """Its first batch waits in the middle of each task's range until `place`/go is there."""

    def __init__(self, spark: Any, running: Cluster, place: Path, **options: Any) -> None:
        super().__init__(spark, running, place / "checkpoint", **options)
        self._between = waiting_in_the_middle(str(place))

    def _keep(self, frame: Any, batch_id: int) -> None:
        super()._keep(frame.select("value").mapInArrow(self._between, "value binary"), batch_id)


def kill_an_executor(executors: Standalone) -> None:
    """kill -9, and another one takes its place."""
    before = executors.executors()
    assert len(before) == 2
    before[0].kill()
    wait_until(lambda: before[0] not in executors.executors(), what="the end of the executor")


def test_a_batch_outlives_an_executor_that_is_killed_in_the_middle(
    spark: Any, executors: Standalone, running: Cluster, tmp_path: Path
) -> None:
    with scan_in_the_middle(spark, running, tmp_path):
        kill_an_executor(executors)
    assert begun(tmp_path) == 3  # the killed one's task was run again


def test_a_streaming_query_outlives_an_executor_that_is_killed_in_the_middle(
    spark: Any, executors: Standalone, running: Cluster, tmp_path: Path
) -> None:
    topic = new_topic(running, 1)
    send(running, topic, [number.ljust(300) for number in numbers(0, 60_000)])
    wait_until(lambda: len(executors.executors()) == 2, 60, "two executors")
    query = Held(spark, running, tmp_path, subscribe=topic, minPartitions=2)
    active = query.start()

    def comes(end: int) -> None:
        def is_there() -> bool:
            return sum(query.seen().values()) >= end or active.exception() is not None

        wait_until(is_there, 120, f"{end} messages")
        assert active.exception() is None, str(active.exception())
        assert Counter(value.rstrip() for value in query.seen().elements()) == Counter(numbers(0, end))

    try:
        wait_until(lambda: begun(tmp_path) == 2 or active.exception() is not None, 90, "two tasks")
        kill_an_executor(executors)
        (tmp_path / "go").touch()
        comes(60_000)
        send(running, topic, numbers(60_000, 60_100))
        comes(60_100)
    finally:
        (tmp_path / "go").touch()
        active.stop()


def test_a_stream_into_a_topic_outlives_an_executor_that_is_killed_in_the_middle(
    spark: Any, executors: Standalone, running: Cluster, tmp_path: Path
) -> None:
    """At least once: nothing is lost, and twice is only what the killed executor's task had stored already."""
    topic, to = new_topic(running, 1), new_topic(running, 2)
    send(running, topic, [number.ljust(300) for number in numbers(0, 60_000)])
    wait_until(lambda: len(executors.executors()) == 2, 60, "two executors")
    source = spark.readStream.format("metamq").options(
        zookeeper=running.zookeeper, subscribe=topic, startingOffsets="earliest", minPartitions=2
    )
    frame = source.load().select("value").mapInArrow(waiting_in_the_middle(str(tmp_path)), "value binary")
    writer = frame.writeStream.format("metamq").options(zookeeper=running.zookeeper, topic=to)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    active = writer.trigger(availableNow=True).start()
    try:
        wait_until(lambda: begun(tmp_path) == 2 or active.exception() is not None, 90, "two tasks")
        kill_an_executor(executors)
        (tmp_path / "go").touch()
        assert active.awaitTermination(120)
    finally:
        (tmp_path / "go").touch()
        active.stop()
    with running.consumer(topics=to, start="earliest", idle_timeout_s=0.1) as consumer:
        found = Counter(int(value) for value in values_to_end(consumer))
    assert found.keys() == set(range(60_000))
    assert max(found.values()) <= 2
    twice = {value for value, times in found.items() if times > 1}
    assert twice <= set(range(30_000)) or twice <= set(range(30_000, 60_000)), "the other task did it once"


def test_a_streaming_query_outlives_zookeeper_being_away_for_half_a_minute(spark: Any, tmp_path: Path) -> None:
    """Three times its session's time-out: the driver and the brokers need new ones."""
    with cluster(brokers=2, folder=tmp_path / "cluster") as own:
        own.create_topic("t", partitions=4)
        send(own, "t", numbers(0, 100))
        query = Query(spark, own, tmp_path / "checkpoint", subscribe="t")
        active = query.start()

        def comes(end: int) -> None:
            wait_until(lambda: query.seen() == Counter(numbers(0, end)) or active.exception() is not None, 60)
            assert active.exception() is None, str(active.exception())

        try:
            comes(100)
            with own.producer(delivery_timeout_s=120) as producer:
                own.zookeeper_server.freeze()
                until = time.monotonic() + AWAY_S
                sent = [producer.send_many("t", numbers(100, 200), keys=numbers(100, 200))]
                while time.monotonic() < until:  # the length of the fault itself
                    assert active.exception() is None, str(active.exception())
                    time.sleep(0.5)
                sent.append(producer.send_many("t", numbers(200, 300), keys=numbers(200, 300)))
                own.zookeeper_server.thaw()
                for delivery in sent:
                    delivery.result()
            comes(300)
            with own.admin() as admin:
                admin.alter("t", partitions=8)
            send(own, "t", numbers(300, 500), keys=numbers(300, 500))
            comes(500)
        finally:
            own.zookeeper_server.thaw()
            active.stop()
