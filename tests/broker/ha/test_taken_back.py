"""ZooKeeper comes back from an older copy: no epoch is used twice, nobody acknowledges anything, and a person decides.

Whatever the two replicas had agreed upon since the copy was made, each of them knows more than ZooKeeper does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.errors import DeliveryTimeout, Fenced
from metamq.testing import BrokerProcess, cluster
from metamq.wire.batch import walk
from tests.broker.ha.test_replication import Group, a_sync_topic, log_bytes, raises_fenced, replica_group, send
from tests.parts import http_get, wait_until

SIZES = [(30, 20, 25, 60), (1, 0, 1, 1), (5, 1, 40, 3), (10, 0, 3, 30)]


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group(cluster) as made:
        yield made


class Copy:
    """A copy of ZooKeeper's data, as of now."""

    def __init__(self, group: Group) -> None:
        self._server = group.cluster.zookeeper_server
        assert self._server.data_dir is not None
        self._data, self._copy = self._server.data_dir / "data", group.cluster.folder / "yesterday"
        shutil.rmtree(self._copy, ignore_errors=True)
        self._server.freeze()
        shutil.copytree(self._data, self._copy)
        self._server.thaw()

    def put_back(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """The server is started again with it. `meanwhile` is called while it is down."""
        self._server.kill()
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)
        meanwhile()
        self._server.restart()


def is_waiting(group: Group, number: int) -> bool:
    return bool(group.replication(number)["role"] == "waiting")


def assert_waits(group: Group, topic: str, *numbers: int) -> None:
    """These replicas wait, say why wherever somebody looks, and nobody stores anything."""
    for number in numbers:
        wait_until(lambda n=number: is_waiting(group, n), what=f"replica {number} waiting")  # type: ignore[misc]
        assert "ZooKeeper was taken back" in group.replication(number)["reason"]
        status, text = http_get(group.replicas[number].http_port, "/readyz")
        assert (status, "ZooKeeper was taken back" in text) == (503, True)
        assert "ZooKeeper was taken back" in group.replicas[number].log_path.read_text()
        assert "ZooKeeper was taken back" in str(raises_fenced(lambda n=number: group.promote_once(n)))  # type: ignore[misc]
    before = [group.ends(number) for number in numbers]
    with group.cluster.producer(delivery_timeout_s=1) as producer:
        assert isinstance(producer.send(topic, b"refused").exception(60), DeliveryTimeout)
    with group.cluster.admin() as admin:
        broker = admin.replicas()[0]
        assert "ZooKeeper was taken back" in broker.taken_back
        assert not any(replica.in_sync for replica in broker.replicas)
    assert [group.ends(number) for number in numbers] == before


def knows(group: Group, number: int) -> int:
    return int(group.replication(number)["known_epoch"])


def epochs_of(data: Path) -> set[int]:
    return {header.epoch for log in log_bytes(data).values() for _at, header in walk(memoryview(log))}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_across_a_promotion_the_replica_that_has_most_is_promoted_and_nothing_is_lost(
    group: Group, sizes: tuple[int, int, int, int]
) -> None:
    first, both, alone, after = sizes
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, first, b"A")
    copy = Copy(group)
    group.wait_insync(0, 1)
    group.promote(1)
    group.wait_insync(0, 1, master=1)
    wait_until(lambda: knows(group, 0) == group.state().epoch, what="replica 0 knows of it")
    values += send(group, topic, both, b"B")
    group.replicas[0].kill()
    values += send(group, topic, alone, b"C")
    slave.kill()
    copy.put_back()
    for replica in group.replicas:
        replica.start()
    assert_waits(group, topic, 0, 1)
    with group.cluster.admin() as admin:
        assert admin.plan_promotion(0, 1).lost == {}
        assert admin.plan_promotion(0, 0).lost == {topic: alone}
    used = epochs_of(group.replicas[0].data) | epochs_of(slave.data)
    assert group.promote(1, accept_loss=True) > max(used)
    group.wait_insync(0, 1, master=1)
    values += send(group, topic, after, b"D")
    group.wait_equal(0, 1)
    assert group.read(topic) == values


@pytest.mark.slow
def test_a_former_master_with_a_longer_log_is_not_said_to_lose_nothing() -> None:
    """It has more messages than the last master, which nobody acknowledged, and lacks those that were acknowledged."""
    with replica_group(cluster, insync_lag_ms=120_000) as group:
        topic = a_sync_topic(group, partitions=1)
        slave = group.add_slave()
        group.wait_insync(0, 1)
        values = send(group, topic, 5, b"both")
        slave.kill()
        with group.cluster.producer(delivery_timeout_s=1) as producer:
            tail = [producer.send(topic, b"tail-%d" % number) for number in range(30)]
            assert all(isinstance(one.exception(60), DeliveryTimeout) for one in tail)
        unacknowledged = group.ends(0)[topic, 0][0] - len(values) - 1
        """More than what comes after it."""
        assert unacknowledged > 0
        group.replicas[0].kill()
        slave.start()
        copy = Copy(group)
        group.promote(1)
        values += send(group, topic, 1, b"acknowledged")
        slave.kill()
        copy.put_back()
        slave.start()
        group.replicas[0].start()
        assert_waits(group, topic, 0, 1)
        with group.cluster.admin() as admin:
            former, last = admin.plan_promotion(0, 0), admin.plan_promotion(0, 1)
        assert (former.lost, former.promote_instead) == (None, 1)
        assert (last.promote_instead, last.lost) == (None, {topic: unacknowledged})
        group.promote(1, accept_loss=True)
        group.wait_insync(0, 1, master=1)
        group.wait_equal(0, 1)
        assert group.read(topic) == values


@pytest.mark.slow
def test_a_replica_that_knows_no_more_than_zookeeper_goes_on_until_one_comes_that_does(group: Group) -> None:
    """It takes no epoch that the other one has had, so that both logs show where they parted."""
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 10, b"A")
    copy = Copy(group)
    group.lose_master(group.replicas[0].kill, 1)
    group.promote(1)
    lost = send(group, topic, 10, b"C")
    slave.kill()
    copy.put_back()
    group.replicas[0].start()
    values += send(group, topic, 10, b"D")
    assert epochs_of(group.replicas[0].data) & epochs_of(slave.data) == {1}
    slave.start()
    assert_waits(group, topic, 0, 1)
    with group.cluster.admin() as admin:
        assert [admin.plan_promotion(0, number).lost for number in (0, 1)] == [None, None]
    group.promote(0, accept_loss=True)
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    assert group.read(topic) == values
    assert lost != []


@pytest.mark.slow
def test_the_in_sync_set_of_yesterday_promotes_nobody(group: Group) -> None:
    """Within one epoch: replica 1 has left the set since, and lacks what was acknowledged without it."""
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"A")
    copy = Copy(group)
    group.wait_insync(0, 1)
    slave.kill()
    values += send(group, topic, 5, b"B")
    assert [replica for replica, _ in group.state().insync] == [0]
    group.replicas[0].kill()
    copy.put_back()
    for replica in group.replicas:
        replica.start()
    assert_waits(group, topic, 0)
    assert isinstance(raises_fenced(lambda: group.promote_once(1)), Fenced)
    group.promote(0, accept_loss=True)
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    assert group.read(topic) == values


@pytest.mark.slow
def test_a_broker_without_slaves_waits_too(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    copy = Copy(group)
    broker = group.replicas[0]
    broker.restart()
    values = send(group, topic, 5)
    broker.kill()
    copy.put_back()
    broker.start()
    assert_waits(group, topic, 0)
    group.promote(0, accept_loss=True)
    values += send(group, topic, 5, b"after")
    assert group.read(topic) == values


@pytest.mark.slow
@pytest.mark.parametrize("meta", ["of an older release", "of yesterday"])
def test_the_logs_tell_the_epoch_that_meta_json_does_not(group: Group, meta: str) -> None:
    topic = a_sync_topic(group, partitions=1)
    broker = group.replicas[0]
    send(group, topic, 1, b"first")
    copy, yesterday = Copy(group), (broker.data / "meta.json").read_text()
    broker.restart()
    values = send(group, topic, 5)
    broker.kill()
    copy.put_back()
    forget_epoch(broker) if meta == "of an older release" else put_in_place(broker, yesterday)
    broker.start()
    assert_waits(group, topic, 0)
    group.promote(0, accept_loss=True)
    assert group.read(topic)[1:] == values


def forget_epoch(broker: BrokerProcess) -> None:
    path = broker.data / "meta.json"
    document = json.loads(path.read_text())
    del document["epoch"], document["state_version"]
    path.write_text(json.dumps(document))


def put_in_place(broker: BrokerProcess, text: str) -> None:
    new = broker.data / "meta.json.restored"
    new.write_text(text)
    new.replace(broker.data / "meta.json")
