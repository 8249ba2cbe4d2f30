"""Brokers with fewer descriptors than partitions: whatever is dirty, they serve, copy, are promoted, stop in order."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Producer
from metamq.broker.front_door.limits.admission import SLOTS_KEPT
from metamq.broker.process.descriptors import OPEN_FILES_LEAST, shares
from metamq.errors import ConfigError, MetamqError
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.cluster.topics import Flush, FlushEvery, TopicConfig
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, http_get, read_topic, statistics, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on open files to set")


class LimitedBroker(BrokerProcess):
    """A broker whose process has `limit` descriptors, and may not have more."""

    limit = 1024

    @property
    def command(self) -> tuple[str, ...]:  # type: ignore[override]
        return "/bin/sh", "-c", f'ulimit -n {self.limit} && exec "$@"', "sh", sys.executable, "-m", "metamq.broker"


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


@contextmanager
def started(parts: Cluster, data: Path, broker_id: int, limit: int, **settings: object) -> Iterator[LimitedBroker]:
    broker = LimitedBroker(parts.zookeeper, data, broker_id, **settings)
    broker.limit = limit
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def one_to_each(producer: Producer, topic: TopicConfig, broker_id: int, partitions: int, text: str) -> None:
    deliveries = [
        producer.send(topic.topic, f"{text} {n}".encode(), partition=f"{broker_id}-{n}") for n in range(partitions)
    ]
    for delivery in deliveries:
        delivery.result(4 * SLOW_S)


def create(admin: Admin, name: str, partitions: int, broker_id: int, flush: str = "1s", **more: Any) -> TopicConfig:
    policy: Flush = FlushEvery(ms=60_000) if flush == "1s" else "ack"
    return admin.create_topic(
        name, partitions=partitions, brokers=[broker_id], flush=policy, timeout_s=4 * SLOW_S, **more
    )


def check_all(broker: BrokerProcess, topic: TopicConfig, texts: list[str]) -> None:
    stored = read_topic(broker, topic.topic, topic.id)
    for name, messages in stored.items():
        number = name.partition("-")[2]
        assert [m.value.decode() for m in messages] == [f"{text} {number}" for text in texts], name


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "partitions", "flush"), [(1024, 900, "1s"), (256, 300, "1s"), (256, 300, "ack")])
def test_a_message_to_each_of_more_partitions_than_descriptors(
    parts: Cluster, tmp_path: Path, limit: int, partitions: int, flush: str
) -> None:
    broker_id = {"1s": limit % 7, "ack": 9}[flush]
    with started(parts, tmp_path / "b", broker_id, limit) as broker:
        with parts.admin() as admin:
            topic = create(admin, f"many-{broker_id}", partitions, broker_id, flush)
        with parts.producer(delivery_timeout_s=4 * SLOW_S) as producer:
            one_to_each(producer, topic, broker_id, partitions, "a")
            one_to_each(producer, topic, broker_id, partitions, "b")
            check_all(broker, topic, ["a", "b"])
            broker.kill()
            broker.start()
            one_to_each(producer, topic, broker_id, partitions, "c")
        check_all(broker, topic, ["a", "b", "c"])
        assert http_get(broker.http_port, "/readyz")[0] == 200
        assert broker.stop() == 0, broker.log_path.read_text()[-2000:]
        assert "descriptors" not in broker.log_path.read_text()


def master_of(*replicas: LimitedBroker) -> LimitedBroker | None:
    return next((r for r in replicas if statistics(r)["replication"]["role"] == "master"), None)


def in_sync(broker: BrokerProcess, replicas: int) -> bool:
    return len(statistics(broker)["replication"]["insync"]) == replicas


@pytest.mark.slow
def test_a_slave_joins_is_promoted_and_the_former_master_follows(parts: Cluster, tmp_path: Path) -> None:
    partitions, broker_id, limit = 300, 21, 256
    first = started(parts, tmp_path / "r0", broker_id, limit, retention_check_s=0.5)
    second = started(parts, tmp_path / "r1", broker_id, limit, retention_check_s=0.5, replica=1)
    with first as r0, parts.producer(delivery_timeout_s=4 * SLOW_S) as producer, parts.admin() as admin:
        topic = create(admin, "copied", partitions, broker_id, "ack", segment_bytes=4096)
        for text in "abc":
            one_to_each(producer, topic, broker_id, partitions, text)
        with second as r1:
            wait_until(lambda: in_sync(r0, 2), 4 * SLOW_S, what="the slave in the in-sync set")
            one_to_each(producer, topic, broker_id, partitions, "d")
            admin.promote(broker_id, 1)
            one_to_each(producer, topic, broker_id, partitions, "e")
            wait_until(lambda: in_sync(r1, 2), 4 * SLOW_S, what="the former master in the in-sync set")
            assert r0.stop() == 0, r0.log_path.read_text()[-3000:]
            one_to_each(producer, topic, broker_id, partitions, "f")
            check_all(r1, topic, list("abcdef"))
            assert r1.stop() == 0, r1.log_path.read_text()[-3000:]


def test_the_limit_is_shared_out_and_too_small_a_one_is_refused() -> None:
    for limit in (OPEN_FILES_LEAST, 200, 256, 1024, 65536):
        files, connections = shares(limit, 0)
        assert files >= 32
        assert connections >= 32
        assert files + connections <= limit - 64
    assert shares(1024, 100) == (100, 860)
    assert shares(1024, 5000) == (5000, 1)
    with pytest.raises(ConfigError, match=r"the limit on open files is 64, a broker needs at least 128"):
        shares(64, 0)


def test_a_broker_below_the_least_says_so_and_what_to_do(parts: Cluster, tmp_path: Path) -> None:
    broker = LimitedBroker(parts.zookeeper, tmp_path / "b", 22)
    broker.limit = 100
    with pytest.raises(MetamqError, match=r"ended with status 1(.|\n)*the limit on open files is 100(.|\n)*ulimit -n"):
        broker.start()


def test_who_is_turned_away_is_told_apart_by_the_limit(parts: Cluster, tmp_path: Path) -> None:
    settings = {"open_files_max": 63}
    with started(parts, tmp_path / "b", 23, OPEN_FILES_LEAST, **settings) as broker, contextlib.ExitStack() as stack:
        for _ in range(1 + SLOTS_KEPT + 1):
            stack.enter_context(socket.create_connection(("127.0.0.1", broker.port)))
        said = "busy: the broker has 1 connection already, its limit"
        wait_until(lambda: said in broker.log_path.read_text())
        assert "The limit on open files is 128." in broker.log_path.read_text()
