"""Streaming queries while brokers and ZooKeeper come and go, and what limits a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster, cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.test_stream_source import Query, numbers

FROZEN_BATCHES = 3


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that a test may hurt."""
    with cluster(brokers=2, folder=tmp_path / "cluster") as started:
        yield started


@pytest.mark.timeout(240)
def test_a_query_outlives_brokers_and_zookeeper(spark: Any, own: Cluster, tmp_path: Path) -> None:
    own.create_topic("t", partitions=4)
    send(own, "t", numbers(0, 100))
    query = Query(spark, own, tmp_path / "checkpoint", subscribe="t")
    active = query.start()

    def comes(end: int, what: str) -> None:
        wait_until(lambda: query.seen() == Counter(numbers(0, end)) or active.exception() is not None, 90, what)
        assert active.exception() is None, str(active.exception())
        assert query.seen() == Counter(numbers(0, end))

    try:
        comes(100, "the first messages")
        own.brokers[1].kill()
        # The other broker's partitions go on; this one's are known to have nothing new.
        with own.producer(delivery_timeout_s=60) as producer:
            first = producer.send_many("t", numbers(100, 400), keys=numbers(100, 400))  # to all partitions
            wait_until(lambda: len(query.seen()) > 100, 60, "messages of the other broker")
            own.brokers[1].start()
            first.result()
            comes(400, "all messages, with the broker back")
            own.zookeeper_server.freeze()
            for number in range(FROZEN_BATCHES):
                producer.send_many("t", numbers(400 + number * 10, 410 + number * 10)).result()
                comes(410 + number * 10, "messages while ZooKeeper is frozen")
            own.zookeeper_server.thaw()
        send(own, "t", numbers(430, 500))
        comes(500, "messages with ZooKeeper back")
    finally:
        own.zookeeper_server.thaw()
        active.stop()


def test_few_messages_wait_for_others_but_not_for_ever(spark: Any, running: Cluster, tmp_path: Path) -> None:
    topic = new_topic(running)
    limits = {"minOffsetsPerTrigger": 100, "maxTriggerDelay": "1h"}
    query = Query(spark, running, tmp_path / "checkpoint", subscribe=topic, **limits)
    active = query.start()
    try:
        for number in range(25):
            send(running, topic, numbers(number * 10, number * 10 + 10))
        wait_until(lambda: sum(query.seen().values()) >= 200, 60, "two batches")
    finally:
        active.stop()
    assert all(len(batch) >= 100 for batch in query.batches if batch)
    query.run()  # what there is now, however few
    # The batch that was under way when the query was stopped came again.
    assert set(query.seen()) == set(numbers(0, 250))
    send(running, topic, numbers(250, 253))
    query.options["maxTriggerDelay"] = "100ms"
    active = query.start()
    try:
        wait_until(lambda: set(query.seen()) == set(numbers(0, 253)), 60, "the few, once the delay is over")
    finally:
        active.stop()


def test_a_killed_worker_is_replaced_and_counts_are_exact(spark: Any, running: Cluster, tmp_path: Path) -> None:
    """A Python worker that dies in the middle of its range: the task runs again, in another one."""
    topic = new_topic(running, 1)
    send(running, topic, numbers(0, 50_000))
    frame = spark.read.format("metamq").options(zookeeper=running.zookeeper, subscribe=topic).load()
    counted = frame.select("value").mapInArrow(_dying_once(str(tmp_path / "mark")), "value binary")
    assert Counter(bytes(row.value) for row in counted.collect()) == Counter(numbers(0, 50_000))
    assert (tmp_path / "mark").exists()


def _dying_once(mark: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def each(batches: Iterator[Any]) -> Iterator[Any]:
        import os

        for batch in batches:
            yield batch
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os._exit(1)

    return each
