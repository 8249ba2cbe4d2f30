"""Faults of metamq.testing: each one has its effect on real clients, ends, and is repaired."""

from __future__ import annotations

import pytest

from metamq.errors import ConfigError, Timeout
from metamq.testing import Cluster
from metamq.testing.broker_process import BrokerProcess
from tests.parts import SLOW_S, wait_until

pytestmark = pytest.mark.slow


def slave_of(pair: Cluster) -> BrokerProcess:
    master = pair.master()
    return next(one for one in pair.processes if one is not master)


def roles(pair: Cluster) -> dict[int, str]:
    with pair.admin() as admin:
        return {one.replica: one.role for one in admin.replicas()[0].replicas if one.in_sync}


def test_a_killed_master_is_replaced_and_repaired(metamq_pair: Cluster) -> None:
    killed = metamq_pair.kill_master()
    assert not killed.running
    wait_until(lambda: metamq_pair.master() is not killed)
    metamq_pair.repair()
    assert killed.running
    assert sorted(roles(metamq_pair).values()) == ["master", "slave"]


def test_a_frozen_master_is_replaced_and_repaired(metamq_pair: Cluster) -> None:
    master = metamq_pair.master()
    with metamq_pair.freeze(master):
        wait_until(lambda: metamq_pair.master() is not master)
        assert master.frozen
    assert not master.frozen
    metamq_pair.freeze(metamq_pair.master())
    metamq_pair.repair()
    assert len(roles(metamq_pair)) == 2


@pytest.mark.parametrize("fault", ["stopped", "frozen", "cut"])
def test_clients_wait_for_zookeeper(metamq_pair: Cluster, fault: str) -> None:
    topic = metamq_pair.new_topic(fault)
    block = {
        "stopped": metamq_pair.stop_zookeeper,
        "frozen": lambda: metamq_pair.freeze("zookeeper"),
        "cut": lambda: metamq_pair.cut("clients", "zookeeper"),
    }[fault]
    with metamq_pair.producer() as producer:
        with block():
            delivery = producer.send(topic, b"first")  # it needs ZooKeeper to find the topic
            with pytest.raises(Timeout):
                delivery.result(0.3)
        assert delivery.result(SLOW_S).topic == topic


def test_a_cut_between_replicas_takes_the_slave_out_of_the_set(metamq_pair: Cluster) -> None:
    topic = metamq_pair.new_topic("apart", replication="sync")
    master, slave = metamq_pair.master(), slave_of(metamq_pair)
    metamq_pair.cut(master, slave)
    with metamq_pair.producer() as producer:
        producer.send(topic, b"alone").result(SLOW_S)
    assert list(roles(metamq_pair)) == [master.replica]
    with pytest.raises(Timeout, match=rf"\(0, {slave.replica}\)"):
        metamq_pair.wait_in_sync(timeout_s=0.5)
    metamq_pair.repair()
    assert len(roles(metamq_pair)) == 2


def test_a_master_without_zookeeper_is_replaced(metamq_pair: Cluster) -> None:
    master = metamq_pair.master()
    with metamq_pair.cut(master, "zookeeper"):
        wait_until(lambda: metamq_pair.master() is not master)


def test_restarts(metamq_pair: Cluster) -> None:
    topic = metamq_pair.new_topic("restarts")
    slave = slave_of(metamq_pair)
    before = slave.pid, metamq_pair.zookeeper_server.pid
    metamq_pair.restart(slave)
    metamq_pair.restart("zookeeper")
    assert slave.pid != before[0]
    assert metamq_pair.zookeeper_server.pid != before[1]
    with metamq_pair.producer() as producer:
        producer.send(topic, b"after").result(SLOW_S)


def test_a_healthy_cluster_needs_no_repair(metamq_pair: Cluster) -> None:
    before = [one.pid for one in metamq_pair.processes]
    metamq_pair.repair()
    assert [one.pid for one in metamq_pair.processes] == before


def test_bad_arguments_are_named(metamq_pair: Cluster, metamq_cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="this cluster has no network that can be cut") as caught:
        metamq_cluster.cut("clients", "zookeeper")
    assert "cluster(network=True)" in caught.value.hint
    with pytest.raises(ConfigError, match="'client' is no party of the network"):
        metamq_pair.cut("client", "zookeeper")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'clients' is not a process of the cluster"):
        metamq_pair.freeze("clients")
