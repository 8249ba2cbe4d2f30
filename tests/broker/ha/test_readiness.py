"""/readyz and its metric while ZooKeeper does not answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metamq import Admin
from metamq.testing import BrokerProcess, Cluster, cluster
from tests.parts import SLOW_S, http_get, wait_until


@pytest.fixture
def parts() -> Iterator[Cluster]:
    """A cluster of its own, with a lease that ends soon."""
    with cluster(session_timeout_ms=3_000) as running:
        running.create_topic("t", 1)
        yield running


def readiness(broker: BrokerProcess) -> tuple[int, str]:
    return http_get(broker.http_port, "/readyz")


def is_ready(broker: BrokerProcess) -> bool:
    """As /readyz and the metric say, which have to agree."""
    while True:
        before = readiness(broker)[0]
        metric = 'metamq_broker_ready{broker="0"} 1.0' in http_get(broker.http_port, "/metrics")[1].splitlines()
        if before == readiness(broker)[0]:
            assert metric == (before == 200)
            return metric


def in_sync(admin: Admin) -> int:
    return sum(one.in_sync for one in admin.replicas()[0].replicas)


@pytest.mark.slow
def test_a_master_with_a_slave_is_not_ready_while_its_lease_is_over(parts: Cluster) -> None:
    slave = parts.add_slave()
    wait_until(lambda: is_ready(parts.broker) and is_ready(slave))
    with parts.producer(delivery_timeout_s=SLOW_S) as producer:
        producer.send("t", b"0").result(SLOW_S)
        parts.zookeeper_server.freeze()
        try:
            wait_until(lambda: "writes are refused" in readiness(parts.broker)[1])
            assert not is_ready(parts.broker)
            wait_until(lambda: not is_ready(slave))
            later = producer.send("t", b"1")
        finally:
            parts.zookeeper_server.thaw()
        later.result(SLOW_S)  # it is stored in the end
        wait_until(lambda: is_ready(parts.broker))
        wait_until(lambda: is_ready(slave))


@pytest.mark.slow
def test_a_lone_broker_is_not_ready_while_its_lease_is_over_and_takes_writes(parts: Cluster) -> None:
    with parts.producer(delivery_timeout_s=SLOW_S) as producer:
        producer.send("t", b"0").result(SLOW_S)
        wait_until(lambda: is_ready(parts.broker))
        parts.zookeeper_server.freeze()
        try:
            wait_until(lambda: not is_ready(parts.broker))
            assert readiness(parts.broker)[1].endswith("whether this replica is registered is not known\n")
            assert producer.send("t", b"1").result(SLOW_S).offset == 1
            assert not is_ready(parts.broker)
        finally:
            parts.zookeeper_server.thaw()
        wait_until(lambda: is_ready(parts.broker))


@pytest.mark.slow
def test_a_master_without_a_slave_in_sync_says_for_how_long_it_takes_writes(parts: Cluster) -> None:
    slave = parts.add_slave()
    with parts.admin() as admin, parts.producer(delivery_timeout_s=SLOW_S) as producer:
        producer.send("t", b"0").result(SLOW_S)
        wait_until(lambda: in_sync(admin) == 2, what="a slave in sync")
        slave.kill()
        wait_until(lambda: in_sync(admin) == 1, what="a master alone in the in-sync set")
        parts.zookeeper_server.freeze()
        try:
            wait_until(lambda: "s ago: writes are taken for" in readiness(parts.broker)[1])
            producer.send("t", b"1").result(SLOW_S)
            assert "s ago: writes are taken for" in readiness(parts.broker)[1]
        finally:
            parts.zookeeper_server.thaw()
        wait_until(lambda: is_ready(parts.broker))
