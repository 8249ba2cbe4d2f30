"""Streaming queries while brokers and ZooKeeper come and go, and what limits a batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from metamq.testing import Cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.held import begun, scan_in_the_middle
from tests.spark.test_source_losses import GatedQuery
from tests.spark.test_stream_source import Query, numbers

FROZEN_BATCHES = 3
DAEMON = ["pyspark.daemon", "pyspark.worker"]


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
    send(running, topic, numbers(0, 10))
    active = query.start()
    try:
        wait_until(lambda: sum(query.seen().values()) == 10, 60, "the first batch, which waits for nothing")
        for number in range(1, 25):
            send(running, topic, numbers(number * 10, number * 10 + 10))
        wait_until(lambda: sum(query.seen().values()) >= 110, 60, "the second batch")
    finally:
        active.stop()
    assert all(len(batch) >= 100 for batch in [batch for batch in query.batches if batch][1:])
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


@pytest.mark.timeout(240)
def test_a_master_that_is_killed_and_its_slave_promoted_while_a_query_runs(
    spark: Any, own: Cluster, tmp_path: Path
) -> None:
    """A batch that was planned with the dead master is read from the slave, what comes later from the new master."""
    own.add_slave()
    own.create_topic("t", partitions=2, replication="sync")
    wait_until(lambda: in_sync(own), what="a slave in sync")
    send(own, "t", numbers(0, 1000))
    query = GatedQuery(spark, own, tmp_path / "checkpoint", subscribe="t")
    active = query.start()
    try:
        wait_until(lambda: query.planned.is_set() or active.exception() is not None, 60, "a batch")
        own.broker.kill()
        query.gate.set()
        wait_until(lambda: query.seen() == Counter(numbers(0, 1000)) or active.exception() is not None, 60, "the batch")
        with own.admin() as admin:
            admin.promote(0, 1)
        send(own, "t", numbers(1000, 1500), keys=numbers(1000, 1500))  # to both brokers
        wait_until(lambda: query.seen() == Counter(numbers(0, 1500)) or active.exception() is not None, 90, "the rest")
        assert active.exception() is None, str(active.exception())
        assert query.seen() == Counter(numbers(0, 1500))
    finally:
        query.gate.set()
        active.stop()


def in_sync(own: Cluster) -> bool:
    with own.admin() as admin:
        first = admin.replicas()[0]
    return len(first.replicas) == 2 and all(one.in_sync for one in first.replicas)


def test_killed_workers_are_replaced_and_counts_are_exact(spark: Any, running: Cluster, tmp_path: Path) -> None:
    """kill -9 of every Python worker that has a task, while each is in the middle of its range."""
    with scan_in_the_middle(spark, running, tmp_path):
        workers = task_workers()
        assert len(workers) >= 4  # for each task one that fetches and one that maps; others may be idle
        for worker in workers:
            worker.kill()
    assert begun(tmp_path) == 4  # each task was run twice


def task_workers() -> list[psutil.Process]:
    """The Python processes that run tasks: the children of the executor's daemon."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            parent = process.parent()
            if parent is not None and process.cmdline()[-2:] == parent.cmdline()[-2:] == DAEMON:
                found.append(process)
    return found
