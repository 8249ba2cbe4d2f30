"""One fault each, brought about on purpose: cuts of the network, and what a slave finds when it comes back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from metamq.errors import Fenced, MetamqError
from metamq.testing import BrokerProcess
from metamq.testing.network import Way
from metamq.zk.cluster.topics import TopicConfig
from tests.broker.ha.chaos import ZOOKEEPER, NetworkedGroup, networked_group, party
from tests.broker.ha.direct_puts import DirectPuts
from tests.broker.ha.test_replication import SESSION_MS, a_sync_topic, send
from tests.parts import SLOW_S, read_topic, statistics, wait_until

pytestmark = pytest.mark.timeout(400)
LEASE_S = SESSION_MS / 1000 * 2 / 3
ALONE_S = 6.0
TO_SLAVE = Way(party(0), party(1))
TO_ZOOKEEPER = Way(party(0), ZOOKEEPER)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedGroup]:
    folder = tmp_path_factory.mktemp("cuts")
    with networked_group(folder, replicas=2, retention_check_s=0.1, alone_lease_s=ALONE_S) as group:
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
    wait_until(lambda: has_both(shared, 0) or has_both(shared, 1), what="both in sync")
    if has_both(shared, 1):
        shared.promote(0)
        shared.wait_insync(0, 1)


def has_both(group: NetworkedGroup, master: int) -> bool:
    with contextlib.suppress(MetamqError):
        return bool(group.replication(master).get("insync") == [0, 1])
    return False


def registered(group: NetworkedGroup, role: str) -> str | None:
    """The address in ZooKeeper of the master, or of a slave."""
    with group.cluster.admin() as admin:
        return next((one.address for one in admin.replicas()[0].replicas if one.role == role), None)


def partition(group: NetworkedGroup, number: int, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in statistics(group.replicas[number])["partitions"] if p["topic"] == topic)
    return found


def a_topic_of_each_kind(group: NetworkedGroup, name: str) -> dict[str, TopicConfig]:
    """Topics of one partition, by what `replication` is for them."""
    kinds = ("sync", "async")
    for kind in kinds:
        group.cluster.create_topic(f"{name}-{kind}", partitions=1, replication=kind)
    with group.cluster.admin() as admin:
        return {kind: admin.describe_topic(f"{name}-{kind}").config for kind in kinds}


def until_answered_after(puts: DirectPuts, at: float) -> None:
    """Waits for the answer, of any kind, to a PUT that was sent after this time."""
    wait_until(lambda: puts.answers[-1].sent_at > at)


def until_acknowledged_after(puts: DirectPuts, at: float) -> None:
    """Waits until a PUT is acknowledged that was sent after this time."""
    wait_until(lambda: puts.acknowledged[-1].sent_at > at)


def values_at(replica: BrokerProcess, config: TopicConfig) -> list[bytes]:
    """What readers see of a topic of one partition at a replica."""
    (messages,) = read_topic(replica, config.topic, config.id).values()
    return [message.value for message in messages]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_master_without_zookeeper_whose_slave_and_clients_are_there(group: NetworkedGroup) -> None:
    """Its session ends; its slave stays with it, and once promoted is handed everything: nothing has to be cut."""
    topic = a_sync_topic(group, "no-zookeeper")
    values = [b"%d" % number for number in range(200)]
    with group.cluster.producer(delivery_timeout_s=2 * SLOW_S) as producer:
        deliveries = [producer.send(topic, value) for value in values[:50]]
        group.network.cut(TO_ZOOKEEPER, TO_ZOOKEEPER.back)
        deliveries += [producer.send(topic, value) for value in values[50:100]]
        wait_until(lambda: registered(group, "master") is None, what="the session's end")
        wait_until(lambda: group.replication(1)["link"] == "transfer", what="the link, which stays")
        deliveries += [producer.send(topic, value) for value in values[100:150]]
        group.promote(1)
        deliveries += [producer.send(topic, value) for value in values[150:]]
        for delivery in deliveries:
            delivery.result(3 * SLOW_S)
        group.network.heal(TO_ZOOKEEPER, TO_ZOOKEEPER.back)
        group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)
    assert "does not hand over" not in group.replicas[1].log_path.read_text()


@pytest.mark.slow
def test_a_master_that_only_its_clients_reach_acknowledges_nothing_on_sync_topics_once_another_is_promoted(
    group: NetworkedGroup,
) -> None:
    """And nothing on async ones once its lease is over, until it is the other one's slave."""
    configs = a_topic_of_each_kind(group, "cut-off")
    ways = [way for one in (TO_SLAVE, TO_ZOOKEEPER) for way in (one, one.back)]
    old, topic = group.replicas[0], configs["sync"].topic
    with DirectPuts(old, configs["sync"]) as sync, DirectPuts(old, configs["async"]) as async_:
        wait_until(lambda: sync.acknowledged and async_.acknowledged, what="acknowledgements before")
        group.network.cut(*ways)
        cut_at = time.monotonic()
        group.promote(1)
        sync.settle()  # what was answered before that
        promoted_at = time.monotonic()
        after = send(group, topic, 20, b"after")
        assert [value for value in group.read(topic) if value in after] == after
        wait_until(lambda: sync.refused and async_.refused, what="the lease's end")
        lease_over_at = cut_at + LEASE_S
        wait_until(lambda: async_.refused[-1].sent_at > lease_over_at + 0.5, what="refusals for a while")
        shown = {kind: values_at(old, config) for kind, config in configs.items()}
        group.network.heal(*ways, broken=True)
        group.wait_insync(0, 1, master=1)
    assert [one for one in sync.acknowledged if one.answered_at > promoted_at] == []
    assert [one for one in async_.acknowledged if one.sent_at > lease_over_at] == []
    soon = [one for one in async_.answers if one.sent_at > cut_at and one.answered_at < cut_at + LEASE_S / 2]
    assert not soon or any(one.error is None for one in soon), "before that it knows of nothing"
    assert {type(one.error) for one in sync.refused + async_.refused} == {Fenced}
    group.wait_equal(0, 1)
    for kind, config in configs.items():
        assert shown[kind] == group.read(config.topic)[: len(shown[kind])], "readers of the former one were shown this"
    stored = group.read(topic)
    assert {one.value for one in sync.acknowledged} <= set(stored)
    assert [value for value in stored if value in after] == after


@pytest.mark.slow
def test_a_master_that_was_alone_when_it_started_has_a_lease_all_the_same(group: NetworkedGroup) -> None:
    """Its slave was down at that time, and is promoted with an accepted loss while the master is cut off.

    The lease is longer while no slave is in sync: only a person can promote one.
    """
    configs = a_topic_of_each_kind(group, "alone")
    old, slave = group.replicas
    slave.kill()
    group.wait_insync(0)
    wait_until(lambda: registered(group, "slave") is None, what="the end of the slave's session")
    old.restart()
    ways = [way for one in (TO_SLAVE, TO_ZOOKEEPER) for way in (one, one.back)]
    with DirectPuts(old, configs["sync"]) as sync, DirectPuts(old, configs["async"]) as async_:
        wait_until(lambda: sync.acknowledged and async_.acknowledged, what="acknowledgements before")
        group.network.cut(*ways)
        lease_over_at = time.monotonic() + LEASE_S
        longer_until = lease_over_at + ALONE_S
        slave.start()
        group.promote(1, accept_loss=True)
        wait_until(lambda: sync.refused and async_.refused, what="the lease's end")
        wait_until(lambda: async_.refused[-1].sent_at > longer_until + 0.5, what="refusals for a while")
        group.network.heal(*ways, broken=True)
        group.network.slow_down(0.1, TO_ZOOKEEPER, TO_ZOOKEEPER.back)  # it has a new session before it knows its role
        group.wait_insync(0, 1, master=1)
    for puts in (sync, async_):
        assert [one for one in puts.acknowledged if one.sent_at > longer_until] == []
        assert any(one.sent_at > lease_over_at for one in puts.acknowledged), "the longer lease"
        assert {type(one.error) for one in puts.refused} == {Fenced}
    group.wait_equal(0, 1)


@pytest.mark.slow
def test_an_outage_of_zookeeper_within_the_lease_stops_no_writes(group: NetworkedGroup) -> None:
    configs = a_topic_of_each_kind(group, "within")
    zookeeper, lease_left_s = group.cluster.zookeeper_server, LEASE_S - SESSION_MS / 1000 / 6
    master = group.replicas[0]
    with DirectPuts(master, configs["sync"]) as sync, DirectPuts(master, configs["async"]) as async_:
        wait_until(lambda: sync.acknowledged and async_.acknowledged, what="acknowledgements before")
        frozen_at = time.monotonic()
        zookeeper.freeze()
        try:
            for puts in (sync, async_):
                until_answered_after(puts, frozen_at + lease_left_s / 2)
        finally:
            zookeeper.thaw()
        thawed_at = time.monotonic()
        for puts in (sync, async_):
            until_acknowledged_after(puts, thawed_at)
    for puts in (sync, async_):
        assert [one for one in puts.refused if one.answered_at < frozen_at + lease_left_s] == []


@pytest.mark.slow
def test_a_slave_that_comes_back_while_zookeeper_is_away_ends_no_writes(group: NetworkedGroup) -> None:
    """It was not in sync when the outage began: until ZooKeeper is back, it cannot be promoted."""
    configs = a_topic_of_each_kind(group, "back")
    master = group.replicas[0]
    group.network.cut(TO_SLAVE, TO_SLAVE.back)
    group.wait_insync(0)
    zookeeper = group.cluster.zookeeper_server
    with DirectPuts(master, configs["sync"]) as sync, DirectPuts(master, configs["async"]) as async_:
        wait_until(lambda: sync.acknowledged and async_.acknowledged, what="acknowledgements before")
        zookeeper.freeze()
        try:
            lease_over_at = time.monotonic() + LEASE_S
            wait_until(lambda: async_.acknowledged[-1].sent_at > lease_over_at, what="the longer lease")
            group.network.heal(TO_SLAVE, TO_SLAVE.back, broken=True)
            wait_until(lambda: [one["stage"] for one in group.replication(0)["slaves"]] == ["joining"], what="a joiner")
            joined_at = time.monotonic()
            for puts in (sync, async_):
                until_acknowledged_after(puts, joined_at)
        finally:
            zookeeper.thaw()
        group.wait_insync(0, 1)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_slave_whose_end_lies_before_what_its_master_still_has(group: NetworkedGroup) -> None:
    topic = a_sync_topic(group, "trimmed", partitions=1, segment_bytes=10_000)
    send(group, topic, 5)
    group.wait_equal(0, 1)
    group.replicas[1].kill()
    with group.cluster.producer(compression=None, linger_ms=0) as producer:
        for _ in range(40):
            producer.send(topic, b"x" * 1000).result(SLOW_S)
    with group.cluster.admin() as admin:
        admin.alter(topic, retention_bytes=20_000)
    wait_until(lambda: partition(group, 0, topic)["start_offset"] > 5, what="retention at the master")
    group.replicas[1].start()
    group.wait_insync(0, 1)
    values = group.read(topic) + send(group, topic, 5, b"after")
    assert partition(group, 1, topic)["start_offset"] > 5
    wait_until(lambda: len({partition(group, number, topic)["end_offset"] for number in range(2)}) == 1, what="one end")
    group.promote(1)
    found = group.read(topic)
    assert found == values[-len(found) :]
    assert found[-5:] == values[-5:]
