"""A master and its slaves as real processes: what is replicated, what is acknowledged, who is promoted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metamq import Producer
from metamq.errors import Fenced, MetamqError
from metamq.security.tls import client_security
from metamq.testing import BrokerProcess, Cluster
from metamq.wire.commands import Command, Promote
from metamq.zk.cluster.brokers import BrokerState, read_state
from metamq.zk.cluster.offers import slaves_offering
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, connected, http_get, statistics, timed_out, until_answered, values_to_end, wait_until

pytestmark = pytest.mark.timeout(400)
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

    async def _session(self) -> Session:
        security = client_security(self.cluster.security)
        return await Session.open(self.cluster.zookeeper, connect_timeout_s=SLOW_S, security=security)

    def state(self) -> BrokerState:
        """What stands in ZooKeeper."""

        async def read() -> BrokerState:
            async with await self._session() as session:
                stored = await read_state(session, 0)
                assert stored is not None
                return stored[0]

        return until_answered(lambda: asyncio.run(read()))

    def wait_insync(self, *numbers: int, master: int = 0, limit_s: float = SLOW_S) -> None:
        wait_until(lambda: self.replication(master).get("insync") == list(numbers), limit_s, f"{numbers} in sync")

    def lose_master(self, lose: Callable[[], object], *heirs: int, master: int = 0) -> None:
        """Does that to the master, which is the end of it or a long pause, while these slaves are in sync.

        One that stands still for a moment leaves the set, comes back by itself, and then has everything again.
        """
        while True:
            self.wait_insync(*sorted((master, *heirs)), master=master)
            lose()
            members = dict(self.state().insync)
            if all(members.get(heir) == statistics(self.replicas[heir])["incarnation"] for heir in heirs):
                return
            lost = self.replicas[master]
            lost.thaw() if lost.running else lost.start()

    def promote(self, number: int, *, accept_loss: bool = False) -> int:
        """Makes a slave the master; returns the new epoch. Again where it was not in sync, or cut off, for a moment."""
        deadline, tries = time.monotonic() + SLOW_S, 0
        while True:
            tries += 1
            try:
                return self.promote_once(number, accept_loss=accept_loss)
            except MetamqError as error:
                if tries > 1 and "it is the master already" in str(error):
                    return int(statistics(self.replicas[number])["epoch"])
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def promote_once(self, number: int, *, accept_loss: bool = False, timeout_s: float = SLOW_S) -> int:
        """Asks a slave to become the master; returns the new epoch."""

        async def ask() -> int:
            connection = await connected(self.replicas[number], timeout_s)
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
        first = numbers[0]
        topics = {topic for topic, _partition in self.ends(first)}
        served = [served_bytes(self.replicas[number].data, topics) for number in numbers]
        assert served[0]
        assert all(logs == served[0] for logs in served[1:])
        wait_until(lambda: all(self.stable(n) == self.stable(first) for n in numbers), what="the same stable marks")
        for slave in (n for n in numbers if self.replication(n).get("link") == "transfer"):
            wait_until(partial(self.offers, slave, topics), what=f"replica {slave} offering {topics}")

    def stable(self, number: int) -> dict[tuple[str, int], int]:
        """Up to which offset readers see each partition."""
        partitions = statistics(self.replicas[number])["partitions"]
        return {(p["topic"], p["partition"]): p["stable_offset"] for p in partitions}

    def offers(self, slave: int, topics: set[str]) -> bool:
        """Whether a slave offers these topics to readers."""

        async def ask() -> bool:
            async with await self._session() as session:
                return all([(0, slave) in await slaves_offering(session, topic) for topic in topics])

        return until_answered(lambda: asyncio.run(ask()))

    def read(self, topic: str) -> list[bytes]:
        with self.cluster.consumer(topics=[topic], idle_timeout_s=0.5) as consumer:
            return values_to_end(consumer)


def served_bytes(data: Path, topics: set[str]) -> dict[str, bytes]:
    """As log_bytes(), of these topics."""
    return {place: log for place, log in log_bytes(data).items() if place.split("/")[1].split("@")[0] in topics}


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
    """By name, and the value of the one label besides the broker's, if any."""
    _status, text = http_get(broker.http_port, "/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = [[value for name, value in sample.labels.items() if name != "broker"] for sample in samples]
    return {
        (sample.name, next(iter(values), "")): sample.value
        for sample, values in zip(samples, labels, strict=True)
        if len(values) < 2
    }


@contextmanager
def replica_group(
    make: Callable[..., AbstractContextManager[Cluster]] = cluster, **settings: object
) -> Iterator[Group]:
    """A cluster of one broker id, whose slaves end with the block. `settings` are those of its first master."""
    with make(**{"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS, **settings}) as running:
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
    with group.cluster.producer(delivery_timeout_s=SLOW_S) as producer:
        for value in values:
            producer.send(topic, value, key=value).result(2 * SLOW_S)
    return values


def raises_fenced(promote: Callable[[], object]) -> Fenced:
    def ask() -> Fenced:
        with pytest.raises(Fenced) as caught:
            promote()
        return caught.value

    return until_answered(ask)


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
    wait_until(lambda: metrics(group.replicas[0]).get(("metamq_replication_in_sync", "1")) == 1, what="it in sync")
    master = metrics(group.replicas[0])
    assert master["metamq_replication_role", "master"] == 1
    assert master["metamq_replication_role", "slave"] == 0
    assert master["metamq_replication_insync_replicas", ""] == 2
    wait_until(lambda: metrics(group.replicas[0])["metamq_replication_lag_bytes", "1"] == 0, what="no lag")
    wait_until(lambda: metrics(slave).get(("metamq_replication_linked", "")) == 1, what="the link")
    at_slave = metrics(slave)
    assert at_slave["metamq_replication_role", "slave"] == 1
    assert at_slave["metamq_replication_linked", ""] == 1
    assert at_slave["metamq_broker_epoch", ""] == master["metamq_broker_epoch", ""] >= 1
    if slave.log_path.read_text().count("linked to the master") == 1:  # over another link it would all be sent again
        assert master["metamq_replication_sent_bytes_total", "1"] == size
        assert at_slave["metamq_replication_received_bytes_total", ""] == size
    with group.cluster.producer(delivery_timeout_s=SLOW_S) as producer:
        wait_until(lambda: shows_lag(group, slave, producer, topic), what="a lag")


def shows_lag(group: Group, slave: BrokerProcess, producer: Producer[bytes], topic: str) -> bool:
    """Whether there was time to see it before the link was given up; in the end the master is alone."""
    master = group.replicas[0]
    group.wait_insync(0, 1)
    slave.freeze()
    try:
        delivery = producer.send(topic, b"x" * 1000)
        seen = 0.0
        while seen <= 1000 and not delivery.done():
            seen = metrics(master).get(("metamq_replication_lag_bytes", "1"), 0)
        delivery.result(2 * SLOW_S)
        wait_until(lambda: metrics(master)["metamq_replication_insync_replicas", ""] == 1, what="the slave out of it")
        return seen > 1000
    finally:
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


@pytest.mark.slow
def test_what_was_acknowledged_is_there_after_the_master_died_and_the_slave_was_promoted(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 100, b"old")
    group.lose_master(group.cluster.broker.kill, 1)
    before = group.state().epoch
    assert group.promote(1) > before
    values += send(group, topic, 50, b"new")
    assert sorted(group.read(topic)) == sorted(values)
    group.replicas[0].start()  # it comes back as a slave by itself, and cuts what diverged
    group.wait_insync(0, 1, master=1)
    values += send(group, topic, 20, b"last")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
def test_a_living_master_hands_over_and_becomes_a_slave_under_load(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    with Producer(group.cluster.zookeeper, delivery_timeout_s=2 * SLOW_S) as producer:
        deliveries = [producer.send(topic, b"%d" % number, key=b"%d" % (number % 7)) for number in range(20_000)]
        group.promote(1)
        deliveries += [
            producer.send(topic, b"%d" % number, key=b"%d" % (number % 7)) for number in range(20_000, 40_000)
        ]
        for delivery in deliveries:
            delivery.result(3 * SLOW_S)
    group.wait_insync(0, 1, master=1)
    assert sorted(map(int, group.read(topic))) == list(range(40_000))
    group.promote(0)  # and back
    send(group, topic, 10, b"back")
    group.wait_equal(0, 1)


@pytest.mark.slow
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
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))
    group.promote(1, accept_loss=True)
    assert sorted(group.read(topic)) == sorted(b"both-%d" % n for n in range(10))
    new = send(group, topic, 10, b"new")
    group.replicas[0].start()
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted([b"both-%d" % n for n in range(10)] + new)


@pytest.mark.slow
def test_a_frozen_master_that_thaws_after_a_promotion_acknowledges_nothing(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 10, b"before")
    with Producer(group.cluster.zookeeper, delivery_timeout_s=2 * SLOW_S) as producer:
        producer.send(topic, b"warm").result(2 * SLOW_S)
        group.lose_master(group.replicas[0].freeze, 1)
        delivery = producer.send(topic, b"on the way")  # lies in the frozen master's socket
        group.promote(1)
        values += send(group, topic, 10, b"after")
        group.replicas[0].thaw()
        delivery.result(3 * SLOW_S)
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted([*values, b"warm", b"on the way"])


def test_a_dead_slave_holds_sync_writes_up_until_it_has_left_the_set(group: Group) -> None:
    topic = a_sync_topic(group)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    with group.cluster.producer(delivery_timeout_s=SLOW_S) as producer:
        wait_until(lambda: is_held_up(group, slave, producer, topic), what="a write that is held up")
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)


def is_held_up(group: Group, slave: BrokerProcess, producer: Producer[bytes], topic: str) -> bool:
    """Whether a write was seen to wait for a slave that is dead, and by nobody, before that has left the set."""

    def waiting() -> list[int]:
        ends = [(p["end_offset"], p["stable_offset"]) for p in statistics(group.replicas[0])["partitions"]]
        return [end - stable for end, stable in ends]

    group.wait_insync(0, 1)
    wait_until(lambda: not any(waiting()), what="what was sent before at the slave")
    slave.freeze()
    try:
        delivery = producer.send(topic, b"waits")
        is_seen = False
        while not is_seen and not delivery.done():
            is_seen = sorted(waiting()) == [0, 1] and not delivery.done()
        delivery.result(2 * SLOW_S)
        group.wait_insync(0)
        return is_seen
    finally:
        slave.thaw()


@pytest.mark.slow
def test_a_slave_that_is_stopped_holds_nothing_up_and_one_that_was_killed_not_for_long() -> None:
    lag_ms = 40_000
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=lag_ms) as running:
        group = Group(running)
        topic = a_sync_topic(group)
        slave = group.add_slave(insync_lag_ms=lag_ms)
        group.wait_insync(0, 1)
        with group.cluster.producer(delivery_timeout_s=2 * SLOW_S) as producer:

            def took_s(message: bytes) -> float:
                began = time.monotonic()
                producer.send(topic, message).result(3 * SLOW_S)
                return time.monotonic() - began

            for _ in range(3):  # whatever stands still for a moment takes time as well
                slave.stop()
                stopped_s = took_s(b"1")
                slave.start()
                group.wait_insync(0, 1)
                if stopped_s < lag_ms / 1000 / 10:
                    break
            assert stopped_s < lag_ms / 1000 / 10
            slave.kill()
            assert took_s(b"2") < lag_ms / 1000 * 0.9
        group.wait_insync(0)


@pytest.mark.slow
def test_min_insync_refuses_writes_and_stores_nothing(group: Group) -> None:
    topic = a_sync_topic(group, min_insync=2)
    few = "has 1 in-sync replica, 2 needed"
    timed_out(group.cluster, topic, few)
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
    assert "in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))


def test_async_is_acknowledged_without_the_slave() -> None:
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=600_000) as running:
        group = Group(running)
        group.cluster.create_topic("a", partitions=1)
        slave = group.add_slave()
        try:
            group.wait_insync(0, 1)
            slave.freeze()
            with group.cluster.producer() as producer:
                producer.send("a", b"1").result(20)
            slave.thaw()
            group.wait_equal(0, 1)
        finally:
            slave.kill()
