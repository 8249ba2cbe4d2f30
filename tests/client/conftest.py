"""The real parts shared by the tests of the client: a ZooKeeper, a cluster, a PostgreSQL."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer, TopicPartition
from metamq.testing import Cluster
from metamq.testing import cluster as running_cluster
from tests import one_zookeeper


class Shop:
    """A running cluster, and short ways to fill it and to ask what came of it."""

    def __init__(self, cluster: Cluster, admin: Admin, producer: Producer[bytes]) -> None:
        self.cluster = cluster
        self.admin = admin
        self.producer = producer

    def topic(self, partitions: int = 1, **settings: Any) -> str:
        """A new topic."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        self.admin.create_topic(name, partitions, **settings)
        return name

    def send(self, topic: str, values: Sequence[bytes], partition: str | None = None) -> None:
        """Stores the values in one partition, or spread; returns when they are stored."""
        deliveries = [self.producer.send(topic, value, partition=partition) for value in values]
        for delivery in deliveries:
            delivery.result(60)

    def numbers(self, topic: str, count: int, start: int = 0) -> None:
        """Stores b"0", b"1", ... in order, in partition 0-0."""
        self.send(topic, [b"%d" % number for number in range(start, start + count)], "0-0")

    def consumer(self, topic: str, group: str | None = None, **settings: Any) -> Consumer[Any]:
        """A Consumer."""
        return self.cluster.consumer(topics=topic, group=group, **settings)

    def committed(self, group: str) -> dict[TopicPartition, int | None]:
        """The group's committed offsets, as an outsider sees them."""
        partitions = self.admin.describe_group(group).partitions
        return {TopicPartition(each.topic, each.partition): each.committed for each in partitions}

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        """Returns once the condition holds, fails after the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s} s"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with one_zookeeper.cluster() as running:
        yield running


@pytest.fixture(scope="session")
def shop() -> Iterator[Shop]:
    """A cluster shared by all tests; its parts are not to be stopped by any of them."""
    with running_cluster(retention_check_s=0.1) as cluster, cluster.admin() as admin, cluster.producer() as producer:
        yield Shop(cluster, admin, producer)


@pytest.fixture
def group() -> str:
    """The name of a group that only this test has."""
    return f"g-{uuid.uuid4().hex[:12]}"
