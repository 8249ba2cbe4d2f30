"""At an address that was learnt a while ago another broker answers now: nothing is read there, nothing stored."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq import Admin, Consumer
from metamq.errors import ConnectError, DeliveryTimeout
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.server.ports import free_port
from tests.one_zookeeper import cluster
from tests.parts import Line, read_to_end, wait_until

BROKER_HOST = "127.0.0.2"

NO_SECOND_LOOPBACK = "only Linux has 127.0.0.2 by itself, where the broker is whose port a line has at 127.0.0.1"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason=NO_SECOND_LOOPBACK)


@pytest.fixture
def swapped(tmp_path: Path) -> Iterator[tuple[Cluster, list[Line]]]:
    """Two brokers, each with one partition of topic "t", and the lines that clients reach them over."""
    with cluster(brokers=0, folder=tmp_path / "cluster") as running:
        lines: list[Line] = []
        for number in range(2):
            broker = BrokerProcess(
                running.zookeeper, tmp_path / f"far-{number}", number, host=BROKER_HOST, advertise="127.0.0.1"
            )
            broker.port = free_port()
            lines.append(Line(broker.port, BROKER_HOST))
            broker.start()
            running.brokers.append(broker)
        running.create_topic("t", partitions=2, brokers=[0, 1])
        yield running, lines
        for line in lines:
            line.close()


def swap(lines: list[Line]) -> None:
    """Each address is that of the other broker from now on, without a word in ZooKeeper."""
    first, second = lines
    first.target, second.target = second.target, first.target
    for line in lines:
        line.cut()


@pytest.mark.slow
def test_nothing_is_stored_at_another_broker(swapped: tuple[Cluster, list[Line]]) -> None:
    running, lines = swapped
    with running.producer(delivery_timeout_s=3) as producer:
        producer.send("t", b"before", partition="0-0").result(60)
        swap(lines)
        meanwhile = producer.send("t", b"meanwhile", partition="0-0")
        with pytest.raises(DeliveryTimeout, match="broker 1 is there, not broker 0"):
            meanwhile.result(60)
        swap(lines)
        producer.send("t", b"after", partition="0-0").result(60)
    with running.consumer(topics="t", idle_timeout_s=0.1) as consumer:
        assert [(one.partition, one.value) for one in read_to_end(consumer)] == [("0-0", b"before"), ("0-0", b"after")]


def test_nothing_is_read_from_another_broker(swapped: tuple[Cluster, list[Line]]) -> None:
    running, lines = swapped
    with running.producer() as producer:
        producer.send("t", b"here", partition="0-0").result(60)
        for _ in range(3):
            producer.send("t", b"there", partition="1-0").result(60)
    with running.consumer(topics="t", idle_timeout_s=0.1) as consumer:
        assert len(read_to_end(consumer)) == 4
        swap(lines)
        wait_until(lambda: "broker 1 is there, not broker 0" in lag_refused(consumer), 20, "the consumer sees it")
        swap(lines)
        assert read_to_end(consumer) == []


def test_nothing_is_asked_of_another_broker(swapped: tuple[Cluster, list[Line]]) -> None:
    running, lines = swapped
    with running.admin() as admin:
        assert admin.statistics(0)
        swap(lines)
        wait_until(lambda: "broker 1 is there, not broker 0" in statistics_refused(admin), 20, "the admin sees it")


def statistics_refused(admin: Admin) -> str:
    try:
        admin.statistics(0)
    except ConnectError as error:
        return str(error)
    return ""


def lag_refused(consumer: Consumer[bytes]) -> str:
    """Why the brokers do not answer how much there is to read."""
    try:
        consumer.lag()
    except ConnectError as error:
        return str(error)
    return ""
