"""ZooKeeper comes back from a copy that is older than a topic: its messages stay where they are, and come back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.testing import BrokerProcess, cluster
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.broker.ha.test_replication import SESSION_MS, Group, replica_group
from tests.broker.ha.test_taken_back import Copy
from tests.parts import http_get, read_topic, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
METAMQ = [sys.executable, "-m", "metamq.cli"]
VALUES = [b"%d" % number for number in range(20)]


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group(cluster) as made:
        yield made


def fill(group: Group, topic: str, partition: str = "0-0") -> str:
    """Returns the topic's id."""
    with group.cluster.producer() as producer, group.cluster.admin() as admin:
        for value in VALUES:
            producer.send(topic, value, partition=partition).result(60)
        return admin.describe_topic(topic).config.id


def made(group: Group) -> str:
    group.cluster.create_topic("today", 1)
    return fill(group, "today")


def made_anew(group: Group) -> str:
    with group.cluster.admin() as admin:
        admin.delete("yesterday")
        admin.create_topic("yesterday", partitions=1)
    return fill(group, "yesterday")


def put_back(group: Group, copy: Copy, *, is_down: bool) -> None:
    if not is_down:
        copy.put_back()
        return
    for broker in group.cluster.brokers:
        broker.kill()
    copy.put_back()
    for broker in group.cluster.brokers:
        broker.start()


def wait_told(broker: BrokerProcess, topic: str) -> None:
    said = f"topic {topic} is not served, and keeps its folder: ZooKeeper does not list topic '{topic}' with id "
    wait_until(lambda: said in broker.log_path.read_text(), what=f"{topic} told")
    assert broker.running


@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("today", [made, made_anew])
def test_what_was_made_since_the_copy_is_kept_and_comes_back_by_a_restore(
    group: Group, tmp_path: Path, today: type, is_down: bool
) -> None:
    group.cluster.create_topic("yesterday", 1)
    copy = Copy(group)
    topic_id = today(group)
    topic = "today" if today is made else "yesterday"
    broker = group.cluster.broker
    folder = broker.data / "topics" / f"{topic}@{topic_id}"
    put_back(group, copy, is_down=is_down)
    wait_told(broker, topic)
    assert "metamq cluster restore" in broker.log_path.read_text()
    with group.cluster.admin() as admin:
        if broker.data and admin.replicas()[0].taken_back:
            group.promote(0, accept_loss=True)
        for number in range(5):  # the list of topics has changed as often as before, and more
            admin.create_topic(f"later-{number}", partitions=1)
    broker.restart()
    assert http_get(broker.http_port, "/readyz")[0] == 503
    assert f"does not list topic '{topic}'" in http_get(broker.http_port, "/readyz")[1]
    assert folder.is_dir()
    environment = {**os.environ, "METAMQ_ZOOKEEPER": group.cluster.zookeeper}
    doctor = subprocess.run([*METAMQ, "doctor"], env=environment, capture_output=True, text=True, timeout=120)
    assert f"it keeps topics that ZooKeeper lacks: ZooKeeper does not list topic '{topic}'" in doctor.stdout, doctor
    assert broker.stop() == 0
    with EmbeddedZooKeeper(tmp_path / "another") as other:
        command = [*METAMQ, "cluster", "restore", "--data", str(broker.data), "--yes"]
        environment = {**os.environ, "METAMQ_ZOOKEEPER": other.address}
        subprocess.run(command, env=environment, check=True, timeout=120)
        again = BrokerProcess(other.address, broker.data, 0, session_timeout_ms=SESSION_MS)
        again.start()
        try:
            (found,) = read_topic(again, topic, topic_id).values()
            assert [message.value for message in found] == VALUES
            assert http_get(again.http_port, "/readyz")[0] == 200
        finally:
            again.kill()


@pytest.mark.parametrize("is_down", [False, True])
def test_partitions_at_a_broker_that_had_none_are_kept(group: Group, is_down: bool) -> None:
    other = group.cluster.add_broker(session_timeout_ms=SESSION_MS)
    group.cluster.create_topic("yesterday", 1, brokers=[0])
    copy = Copy(group)
    with group.cluster.admin() as admin:
        admin.alter("yesterday", partitions=2, brokers=[0, 1])
    topic_id = fill(group, "yesterday", "1-0")
    put_back(group, copy, is_down=is_down)
    said = "topic yesterday is not served, and keeps its folder: ZooKeeper lists no partitions"
    wait_until(lambda: said in other.log_path.read_text(), what="the partitions told")
    assert (other.data / "topics" / f"yesterday@{topic_id}").is_dir()
    with group.cluster.admin() as admin:
        admin.alter("yesterday", partitions=2, brokers=[0, 1])
    (found,) = read_topic(other, "yesterday", topic_id).values()
    assert [message.value for message in found] == VALUES


def test_partitions_that_were_added_since_the_copy_are_told_and_come_back(group: Group) -> None:
    group.cluster.create_topic("yesterday", 1)
    copy = Copy(group)
    broker = group.cluster.broker
    with group.cluster.admin() as admin:
        admin.alter("yesterday", partitions=2)
        topic_id = fill(group, "yesterday", "0-1")
        put_back(group, copy, is_down=True)
        said = "ZooKeeper lists 1 of the 2 partitions of topic 'yesterday' at broker 0"
        assert said in broker.log_path.read_text()
        if admin.replicas()[0].taken_back:
            group.promote(0, accept_loss=True)
        assert said in http_get(broker.http_port, "/readyz")[1]
        admin.alter("yesterday", partitions=2)
        found = read_topic(broker, "yesterday", topic_id)
    assert {partition: len(messages) for partition, messages in found.items()} == {"0-0": 0, "0-1": len(VALUES)}
    assert http_get(broker.http_port, "/readyz")[0] == 200


def test_a_topic_that_was_deleted_after_zookeeper_came_back_is_removed(group: Group) -> None:
    group.cluster.create_topic("yesterday", 1)
    copy = Copy(group)
    group.cluster.create_topic("today", 1)
    put_back(group, copy, is_down=True)
    topics = group.cluster.broker.data / "topics"
    with group.cluster.admin() as admin:
        if admin.replicas()[0].taken_back:
            group.promote(0, accept_loss=True)
        admin.delete("yesterday")
    wait_until(lambda: not list(topics.glob("yesterday@*")), what="its folder gone")
    assert list(topics.glob("today@*"))


@pytest.mark.parametrize("today", ["a topic", "a partition"])
def test_a_slave_that_restarts_comes_into_sync_with_a_master_that_did_not(group: Group, today: str) -> None:
    """Neither serves what ZooKeeper does not list: so the slave lacks nothing that the master serves."""
    group.cluster.create_topic("yesterday", 1)
    group.add_slave()
    group.wait_insync(0, 1)
    copy = Copy(group)
    if today == "a topic":
        made(group)
    else:
        with group.cluster.admin() as admin:
            admin.alter("yesterday", partitions=2)
        fill(group, "yesterday", "0-1")
    group.wait_insync(0, 1)
    copy.put_back()
    master, slave = group.replicas
    wait_until(lambda: group.ends(0).keys() == {("yesterday", 0)}, what="only what is listed at the master")
    slave.kill()
    wait_until(lambda: group.replication(0).get("insync") == [0], what="the slave out of the set")
    slave.start()
    group.wait_insync(0, 1)
    with group.cluster.producer() as producer:
        producer.send("yesterday", b"more", partition="0-0").result(60)
    group.wait_equal(0, 1)
    assert master.running
