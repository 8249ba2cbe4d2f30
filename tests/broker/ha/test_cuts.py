"""One fault each, brought about on purpose: cuts of the network, and what a slave finds when it comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from metamq.errors import MetamqError
from tests.broker.ha.chaos import ZOOKEEPER, NetworkedGroup, networked_group, party
from tests.broker.ha.test_replication import a_sync_topic, send
from tests.network import Way
from tests.parts import statistics, wait_until

TO_SLAVE = Way(party(0), party(1))
TO_ZOOKEEPER = Way(party(0), ZOOKEEPER)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedGroup]:
    folder = tmp_path_factory.mktemp("cuts")
    with networked_group(folder, replicas=2, retention_check_s=0.1) as group:
        group.wait_insync(0, 1)
        yield group


@pytest.fixture
def group(shared: NetworkedGroup) -> Iterator[NetworkedGroup]:
    """Replica 0 is the master, replica 1 in sync; so they are left as well."""
    yield shared
    shared.network.heal(*(way for one in (TO_SLAVE, TO_ZOOKEEPER) for way in (one, one.back)))
    for replica in shared.replicas:
        if not replica.running:
            replica.start()
    wait_until(lambda: has_both(shared, 0) or has_both(shared, 1), limit_s=30, what="both in sync")
    if has_both(shared, 1):
        shared.promote(0)
        shared.wait_insync(0, 1)


def has_both(group: NetworkedGroup, master: int) -> bool:
    with contextlib.suppress(MetamqError):
        return bool(group.replication(master).get("insync") == [0, 1])
    return False


def registered_master(group: NetworkedGroup) -> str | None:
    """Its address in ZooKeeper."""
    with group.cluster.admin() as admin:
        return next((one.address for one in admin.replicas()[0].replicas if one.role == "master"), None)


def partition(group: NetworkedGroup, number: int, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in statistics(group.replicas[number])["partitions"] if p["topic"] == topic)
    return found


@pytest.mark.parametrize("way", [TO_SLAVE, TO_SLAVE.back], ids=["to the slave", "from the slave"])
def test_a_link_of_which_one_direction_is_dead(group: NetworkedGroup, way: Way) -> None:
    """Nobody waits for the slave for longer than the lag allows, and nobody reads meanwhile what it may lack."""
    topic = a_sync_topic(group, f"one-way-{way.source[-1]}")
    values = send(group, topic, 5, b"before")
    group.network.cut(way)
    values += send(group, topic, 10, b"during")
    group.wait_insync(0)
    group.network.heal(way)
    group.wait_insync(0, 1)
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_master_without_zookeeper_whose_slave_and_clients_are_there(group: NetworkedGroup) -> None:
    """Its session ends; its slave stays with it, and once promoted is handed everything: nothing has to be cut."""
    topic = a_sync_topic(group, "no-zookeeper")
    values = [b"%d" % number for number in range(200)]
    with group.cluster.producer() as producer:
        deliveries = [producer.send(topic, value) for value in values[:50]]
        group.network.cut(TO_ZOOKEEPER, TO_ZOOKEEPER.back)
        deliveries += [producer.send(topic, value) for value in values[50:100]]
        wait_until(lambda: registered_master(group) is None, what="the session's end")
        assert group.replication(1)["link"] == "transfer"
        deliveries += [producer.send(topic, value) for value in values[100:150]]
        group.promote(1)
        deliveries += [producer.send(topic, value) for value in values[150:]]
        for delivery in deliveries:
            delivery.result(20)
        group.network.heal(TO_ZOOKEEPER, TO_ZOOKEEPER.back)
        group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)
    assert "does not hand over" not in group.replicas[1].log_path.read_text()


def test_a_master_that_only_its_clients_reach_acknowledges_nothing_once_another_is_promoted(
    group: NetworkedGroup,
) -> None:
    """Neither on an async topic, where its lease is all that says so."""
    group.cluster.create_topic("cut-off", partitions=1)
    ways = [way for one in (TO_SLAVE, TO_ZOOKEEPER) for way in (one, one.back)]
    with group.cluster.producer() as producer:
        producer.send("cut-off", b"before").result(20)
        group.network.cut(*ways)
        group.promote(1)
        after = [b"after-%d" % number for number in range(20)]
        for value in after:
            producer.send("cut-off", value).result(30)
        assert [value for value in group.read("cut-off") if value in after] == after
        group.network.heal(*ways, broken=True)
        group.wait_insync(0, 1, master=1)
        group.wait_equal(0, 1)


def test_a_promotion_while_the_link_is_down_is_handed_what_the_living_master_has(group: NetworkedGroup) -> None:
    """On an async topic the master alone has acknowledged it."""
    topic = "link-down"
    group.cluster.create_topic(topic, partitions=2, replication="async")
    wait_until(lambda: (topic, 1) in group.ends(1), what="the topic at the slave")
    group.network.cut(TO_SLAVE)
    values = send(group, topic, 10)
    group.network.heal(TO_SLAVE, broken=True)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_topic_that_was_made_anew_while_the_slave_was_down(group: NetworkedGroup) -> None:
    topic = a_sync_topic(group, "anew")
    send(group, topic, 10, b"old")
    group.wait_equal(0, 1)
    group.replicas[1].kill()
    with group.cluster.admin() as admin:
        admin.delete(topic)
    a_sync_topic(group, topic)
    values = send(group, topic, 5, b"new")
    group.replicas[1].start()
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_slave_whose_end_lies_before_what_its_master_still_has(group: NetworkedGroup) -> None:
    topic = a_sync_topic(group, "trimmed", partitions=1, segment_bytes=10_000)
    send(group, topic, 5)
    group.wait_equal(0, 1)
    group.replicas[1].kill()
    with group.cluster.producer(compression=None, linger_ms=0) as producer:
        for _ in range(40):
            producer.send(topic, b"x" * 1000).result(20)
    with group.cluster.admin() as admin:
        admin.alter(topic, retention_bytes=20_000)
    wait_until(lambda: partition(group, 0, topic)["start_offset"] > 5, what="retention at the master")
    group.replicas[1].start()
    group.wait_insync(0, 1)
    values = group.read(topic) + send(group, topic, 5, b"after")
    there = partition(group, 1, topic)
    assert there["start_offset"] > 5
    assert there["end_offset"] == partition(group, 0, topic)["end_offset"]
    group.promote(1)
    assert group.read(topic) == values[-len(group.read(topic)) :]
    assert group.read(topic)[-5:] == values[-5:]
