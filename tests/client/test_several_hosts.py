"""A broker that advertises several hosts, as one in a container does: who reaches only one of them is served."""

from __future__ import annotations

import asyncio

import pytest

from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import wait_until

NOBODY = "127.0.0.99"


def test_clients_and_slaves_take_the_first_host_that_answers() -> None:
    with cluster(advertise=f"{NOBODY}, 127.0.0.1") as running:
        running.add_slave()
        running.create_topic("t", partitions=1, replication="sync", min_insync=1)
        with running.producer() as producer:
            producer.send("t", b"one").result(60)
        with running.admin() as admin:
            wait_until(lambda: {one.role for one in admin.replicas()[0].replicas} == {"master", "slave"})
        with running.consumer(topics=["t"], start="earliest") as consumer:
            assert next(iter(consumer)).value == b"one"
        refuse_all(running)


def refuse_all(running: Cluster) -> None:
    port = running.broker.port
    running.broker.kill()
    with pytest.raises(ConnectError) as failure:
        asyncio.run(BrokerConnection.open(f"{NOBODY},127.0.0.1", port))
    assert f"{NOBODY}: " in failure.value.reason
    assert "127.0.0.1: " in failure.value.reason
