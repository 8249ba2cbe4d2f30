"""A master and its slaves as real processes: what is replicated, what is acknowledged, who is promoted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metamq import Producer
from metamq.client.transport import BrokerConnection
from metamq.errors import DeliveryTimeout, Fenced, MetamqError
from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.wire.commands import Command, Promote
from metamq.zk.brokers import BrokerState, read_state
from metamq.zk.offers import slaves_offering
from metamq.zk.session import Session
from tests.parts import http_get, statistics, wait_until

SESSION_MS = 3000
LAG_MS = 1000


class Group:
    """One broker id: replica 0 and its slaves."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self.replicas: list[BrokerProcess] = [running.broker]

    def add_slave(self, **settings: object) -> BrokerProcess:
        number = len(self.replicas)
        data = self.cluster.folder / f"replica-{number}"
        settings = {"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS, **settings}
        slave = BrokerProcess(self.cluster.zookeeper, data, 0, replica=number, **settings)
        self.replicas.append(slave)
        slave.start()
        return slave

    def replication(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = statistics(self.replicas[number])["replication"]
        return found

    def state(self) -> BrokerState:
        """What stands in ZooKeeper."""

        async def read() -> BrokerState:
            async with await Session.open(self.cluster.zookeeper) as session:
                stored = await read_state(session, 0)
                assert stored is not None
                return stored[0]

        return asyncio.run(read())

    def wait_insync(self, *numbers: int, master: int = 0, limit_s: float = 20) -> None:
        wait_until(lambda: self.replication(master).get("insync") == list(numbers), limit_s, f"{numbers} in sync")

    def promote(self, number: int, *, accept_loss: bool = False, timeout_s: float = 20) -> int:
        """Asks a slave to become the master; returns the new epoch."""

        async def ask() -> int:
            connection = await BrokerConnection.open("127.0.0.1", self.replicas[number].port)
            try:
                answer = await connection.request(Command.PROMOTE, Promote(accept_loss), timeout_s=timeout_s)
                return int(answer[0])
            finally:
                await connection.close()

        return asyncio.run(ask())

    def ends(self, number: int) -> dict[tuple[str, int], tuple[int, int]]:
        """(end offset, bytes) of every partition."""
        partitions = statistics(self.replicas[number])["partitions"]
        return {(p["topic"], p["partition"]): (p["end_offset"], p["size_bytes"]) for p in partitions}

    def wait_equal(self, *numbers: int) -> None:
        """Until the replicas' logs end at the same place; then their bytes are compared.

        Nothing is under way then: so readers see the same at all of them, and slaves that are linked offer it.
        """
        wait_until(lambda: len({tuple(sorted(self.ends(n).items())) for n in numbers}) == 1, what="the same ends")
        logs = [log_bytes(self.replicas[number].data) for number in numbers]
        assert logs[0]
        assert all(log == logs[0] for log in logs[1:])
        first = numbers[0]
        wait_until(lambda: all(self.stable(n) == self.stable(first) for n in numbers), what="the same stable marks")
        topics = {topic for topic, _partition in self.ends(first)}
        for slave in (n for n in numbers if self.replication(n).get("link") == "transfer"):
            wait_until(partial(self.offers, slave, topics), what=f"replica {slave} offering {topics}")

    def stable(self, number: int) -> dict[tuple[str, int], int]:
        """Up to which offset readers see each partition."""
        partitions = statistics(self.replicas[number])["partitions"]
        return {(p["topic"], p["partition"]): p["stable_offset"] for p in partitions}

    def offers(self, slave: int, topics: set[str]) -> bool:
        """Whether a slave offers these topics to readers."""

        async def ask() -> bool:
            async with await Session.open(self.cluster.zookeeper) as session:
                return all([(0, slave) in await slaves_offering(session, topic) for topic in topics])

        return asyncio.run(ask())

    def read(self, topic: str) -> list[bytes]:
        with self.cluster.consumer(topics=[topic], idle_timeout_s=0.5) as consumer:
            return [value for batch in consumer.batches() for value in batch.values]


def log_bytes(data: Path) -> dict[str, bytes]:
    """The bytes of each topic's partitions' logs, by their place below the topics' folder."""
    logs: dict[str, bytes] = {}
    for path in sorted((data / "topics").glob("[!~]*/*/*.log")):
        if not path.parent.name.isdecimal():  # set aside
            continue
        place = str(path.parent.relative_to(data))
        logs[place] = logs.get(place, b"") + path.read_bytes()
    return logs


def metrics(broker: BrokerProcess) -> dict[tuple[str, str], float]:
    """By name, and the value of the one label, if any."""
    _status, text = http_get(broker.http_port, "/metrics")
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if len(sample.labels) < 2
    }


@contextmanager
def replica_group(**settings: object) -> Iterator[Group]:
    """A cluster of one broker id, whose slaves end with the block. `settings` are those of its first master."""
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS, **settings) as running:
        group = Group(running)
        try:
            yield group
        finally:
            for slave in group.replicas[1:]:
                slave.kill()


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group() as made:
        yield made


def a_sync_topic(group: Group, name: str = "t", partitions: int = 2, **settings: Any) -> str:
    group.cluster.create_topic(name, partitions=partitions, replication="sync", **settings)
    return name


def send(group: Group, topic: str, count: int, what: bytes = b"m") -> list[bytes]:
    """Sends messages, each acknowledged before the next one is sent; returns their values."""
    values = [b"%s-%d" % (what, number) for number in range(count)]
    with group.cluster.producer() as producer:
        for value in values:
            producer.send(topic, value, key=value).result(20)
    return values


def raises_fenced(promote: Callable[[], object]) -> Fenced:
    with pytest.raises(Fenced) as caught:
        promote()
    return caught.value


def test_a_slave_has_every_byte_of_its_master_whenever_it_comes(group: Group) -> None:
    topic = a_sync_topic(group)
    values = send(group, topic, 50, b"before")
    group.add_slave()
    group.wait_insync(0, 1)
    values += send(group, topic, 50, b"after")
    with group.cluster.producer(compression=None) as producer:
        producer.send_many(topic, [b"many"] * 20_000).result(20)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values + [b"many"] * 20_000)


def test_metrics_tell_of_roles_links_and_lag(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    send(group, topic, 20)
    group.wait_equal(0, 1)
    size = float(sum(size for _end, size in group.ends(0).values()))
    master = metrics(group.replicas[0])
    assert master["metamq_replication_role", "master"] == 1
    assert master["metamq_replication_role", "slave"] == 0
    assert master["metamq_replication_insync_replicas", ""] == 2
    assert master["metamq_replication_in_sync", "1"] == 1
    assert master["metamq_replication_sent_bytes_total", "1"] == size
    wait_until(lambda: metrics(group.replicas[0])["metamq_replication_lag_bytes", "1"] == 0, what="no lag")
    at_slave = metrics(slave)
    assert at_slave["metamq_replication_role", "slave"] == 1
    assert at_slave["metamq_replication_linked", ""] == 1
    assert at_slave["metamq_replication_received_bytes_total", ""] == size
    assert at_slave["metamq_broker_epoch", ""] == master["metamq_broker_epoch", ""] == 1
    slave.freeze()
    with group.cluster.producer() as producer:
        delivery = producer.send(topic, b"x" * 1000)
        lag = "metamq_replication_lag_bytes", "1"
        wait_until(lambda: metrics(group.replicas[0]).get(lag, 0) > 1000, what="a lag")
        delivery.result(20)
    assert metrics(group.replicas[0])["metamq_replication_insync_replicas", ""] == 1
    slave.thaw()


def test_topics_made_enlarged_and_deleted_reach_the_slave(group: Group) -> None:
    group.add_slave()
    group.wait_insync(0, 1)
    a_sync_topic(group, "new", 1)
    send(group, "new", 5)
    with group.cluster.admin() as admin:
        admin.alter("new", partitions=3)
        send(group, "new", 20, b"more")
        group.wait_equal(0, 1)
        assert len(group.ends(1)) == 3
        admin.delete("new")
    wait_until(lambda: not group.ends(1), what="the topic gone at the slave")
    a_sync_topic(group, "new", 1)
    assert group.read("new") == []
    send(group, "new", 3, b"anew")
    group.wait_equal(0, 1)


def test_what_was_acknowledged_is_there_after_the_master_died_and_the_slave_was_promoted(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 100, b"old")
    group.cluster.broker.kill()
    assert group.promote(1) == 2
    values += send(group, topic, 50, b"new")
    assert sorted(group.read(topic)) == sorted(values)
    group.replicas[0].start()  # it comes back as a slave by itself, and cuts what diverged
    group.wait_insync(0, 1, master=1)
    values += send(group, topic, 20, b"last")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_living_master_hands_over_and_becomes_a_slave_under_load(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    with Producer(group.cluster.zookeeper) as producer:
        deliveries = [producer.send(topic, b"%d" % number, key=b"%d" % (number % 7)) for number in range(20_000)]
        group.promote(1)
        deliveries += [
            producer.send(topic, b"%d" % number, key=b"%d" % (number % 7)) for number in range(20_000, 40_000)
        ]
        for delivery in deliveries:
            delivery.result(30)
    group.wait_insync(0, 1, master=1)
    assert sorted(map(int, group.read(topic))) == list(range(40_000))
    group.promote(0)  # and back
    send(group, topic, 10, b"back")
    group.wait_equal(0, 1)


def test_a_slave_that_is_not_in_sync_is_promoted_with_accepted_loss_only(group: Group) -> None:
    topic = a_sync_topic(group)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    send(group, topic, 10, b"both")
    slave.kill()
    group.wait_insync(0)
    send(group, topic, 10, b"master only")
    group.cluster.broker.kill()
    slave.start()
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote(1)))
    group.promote(1, accept_loss=True)
    assert sorted(group.read(topic)) == sorted(b"both-%d" % n for n in range(10))
    new = send(group, topic, 10, b"new")
    group.replicas[0].start()
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted([b"both-%d" % n for n in range(10)] + new)


def test_a_frozen_master_that_thaws_after_a_promotion_acknowledges_nothing(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 10, b"before")
    with Producer(group.cluster.zookeeper, delivery_timeout_s=30) as producer:
        producer.send(topic, b"warm").result(10)
        group.replicas[0].freeze()
        delivery = producer.send(topic, b"on the way")  # lies in the frozen master's socket
        group.promote(1)
        values += send(group, topic, 10, b"after")
        group.replicas[0].thaw()
        delivery.result(30)
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted([*values, b"warm", b"on the way"])


def test_a_dead_slave_holds_sync_writes_up_until_it_has_left_the_set(group: Group) -> None:
    topic = a_sync_topic(group)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    slave.freeze()
    with group.cluster.producer() as producer:
        delivery = producer.send(topic, b"waits")
        with pytest.raises(MetamqError):
            delivery.result(0.3)
        ends = [(p["end_offset"], p["stable_offset"]) for p in statistics(group.replicas[0])["partitions"]]
        assert sorted(ends) == [(0, 0), (1, 0)], "nobody reads what one in-sync replica lacks"
        delivery.result(20)
    group.wait_insync(0)
    slave.thaw()
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)


def test_a_slave_that_is_stopped_holds_nothing_up_and_one_that_was_killed_not_for_long() -> None:
    lag_ms = 40_000
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=lag_ms) as running:
        group = Group(running)
        topic = a_sync_topic(group)
        slave = group.add_slave(insync_lag_ms=lag_ms)
        group.wait_insync(0, 1)
        with group.cluster.producer() as producer:
            slave.stop()
            producer.send(topic, b"1").result(lag_ms / 1000 / 10)
            slave.start()
            group.wait_insync(0, 1)
            slave.kill()
            producer.send(topic, b"2").result(lag_ms / 1000 / 2)
        group.wait_insync(0)


def test_min_insync_refuses_writes_and_stores_nothing(group: Group) -> None:
    topic = a_sync_topic(group, min_insync=2)
    few = "has 1 in-sync replica, 2 needed"
    with group.cluster.producer(delivery_timeout_s=1) as producer, pytest.raises(DeliveryTimeout, match=few):
        producer.send(topic, b"alone").result(10)
    assert group.read(topic) == []
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 5)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_learner_has_everything_and_never_counts(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave(learner=True)
    send(group, topic, 20)
    group.wait_equal(0, 1)
    assert group.replication(0)["insync"] == [0]
    assert "in-sync set" in str(raises_fenced(lambda: group.promote(1)))


def test_async_is_acknowledged_without_the_slave(group: Group) -> None:
    group.cluster.create_topic("a", partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    slave.freeze()
    with group.cluster.producer() as producer:
        producer.send("a", b"1").result(0.8)
    slave.thaw()
    group.wait_equal(0, 1)
