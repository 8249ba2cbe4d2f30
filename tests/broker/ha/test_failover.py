"""Automatic failover with real brokers: an in-sync slave takes over without a loss, or no slave takes over."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from metamq import Admin
from metamq.broker.roles.succession import PREFERRED
from metamq.cli.show.replica_view import replica_faults
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConfigError, ConnectError, Fenced
from metamq.wire.commands import Command, Promote
from metamq.zk.cluster.failover import Failover, Switch, change_failover
from metamq.zk.session.session import Session
from tests.broker.ha.test_damage import damage, set_aside
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic, metrics, replica_group, send
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, values_to_end, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group(failover="auto") as made:
        yield made


class Traffic:
    """A producer that sends numbers one after the other, until the block ends. Any error of a delivery fails it."""

    def __init__(self, group: Group, topic: str) -> None:
        self._producer = group.cluster.producer(linger_ms=0)
        self._topic = topic
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.acknowledged = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._producer.send(self._topic, b"%d" % self.acknowledged).result(SLOW_S)
                self.acknowledged += 1
        except BaseException as error:
            self._error = error

    def wait_for_more(self, count: int = 20) -> None:
        before = self.acknowledged
        wait_until(lambda: self.acknowledged >= before + count or self._error, what="more acknowledgements")

    def __enter__(self) -> Traffic:
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()
        if self._error is not None:
            raise self._error


def switches(group: Group) -> list[Switch]:
    with group.cluster.admin() as admin:
        return list(admin.failover(0).switches)


def master(group: Group) -> int:
    return group.state().master


@pytest.mark.parametrize("way", ["kill", "freeze", "stop"])
def test_the_slave_takes_over_and_nothing_is_lost_or_doubled(group: Group, way: str) -> None:
    topic = a_sync_topic(group, partitions=1)
    group.add_slave()
    group.wait_insync(0, 1)
    former = group.replicas[0]
    end: Callable[[], object] = {"kill": former.kill, "freeze": former.freeze, "stop": former.stop}[way]
    with Traffic(group, topic) as traffic:
        if way == "stop":
            end()
            assert master(group) == 1, "it has handed over before it ended"
        else:
            group.lose_master(end, 1)
        wait_until(lambda: master(group) == 1, what="the switch")
        traffic.wait_for_more()
        former.thaw() if way == "freeze" else former.start()
        group.wait_insync(0, 1, master=1)
        traffic.wait_for_more()
    assert group.read(topic) == [b"%d" % number for number in range(traffic.acknowledged)]
    group.wait_equal(0, 1)
    wait_until(lambda: switches(group), what="the list of switches")
    (switch,) = switches(group)
    assert (switch.was, switch.now, switch.epoch) == (0, 1, group.state().epoch)
    causes = {
        "kill": "no process listens at the master's address",
        "freeze": "the session of the master ended",
        "stop": "replica 0 stops",
    }
    assert switch.cause == causes[way]
    assert switch.is_automatic == (way != "stop")
    found = metrics(group.replicas[1])
    assert found["metamq_replication_failover_auto", ""] == 1
    promotions = [found["metamq_replication_promotions_total", by] for by in ("itself", "asked")]
    assert promotions == ([0, 1] if way == "stop" else [1, 0])


@pytest.mark.parametrize("obstacle", ["manual", "paused"])
def test_an_operator_can_stop_automatic_switches(group: Group, obstacle: str) -> None:
    group.add_slave()
    group.wait_insync(0, 1)
    with group.cluster.admin() as admin:
        changed = admin.set_failover(0, mode="manual") if obstacle == "manual" else admin.set_failover(0, paused=True)
        assert not changed.is_on
        described = admin.replicas()[0]
        assert (described.failover, described.successor) == (obstacle, None)
        assert obstacle in described.no_successor
        group.lose_master(group.replicas[0].kill, 1)
        wait_until(lambda: admin.replicas()[0].replicas[0].address is None, what="the end of the session")
        reason = f"failover is {obstacle}"
        wait_until(lambda: group.replication(1)["failover"].startswith(reason), what=reason)
        assert group.state().master == 0
        admin.set_failover(0, mode="auto", paused=False)
        wait_until(lambda: master(group) == 1, what="the switch")


def test_a_slave_that_is_not_in_sync_and_a_learner_never_take_over(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    slave, _learner = group.add_slave(), group.add_slave(learner=True)
    group.wait_insync(0, 1)
    slave.kill()
    group.wait_insync(0)
    with group.cluster.producer() as producer:
        producer.send(topic, b"only at replica 0").result(SLOW_S)
    group.replicas[0].kill()
    slave.start()
    reason = "it is not in the in-sync set"
    wait_until(lambda: all(group.replication(one)["failover"].startswith(reason) for one in (1, 2)), what=reason)
    with group.cluster.admin() as admin:
        described = admin.replicas()[0]
        assert (described.successor, described.no_successor) == (None, "no other replica is in sync")
    assert group.state().master == 0
    group.replicas[0].start()
    group.wait_insync(0, 1)
    assert group.read(topic) == [b"only at replica 0"]


def test_of_two_slaves_the_preferred_one_comes_first(group: Group) -> None:
    """On a slow machine it may lose its turn; the other one has waited for it."""
    group.add_slave()
    group.add_slave()
    group.wait_insync(0, 1, 2)
    with group.cluster.admin() as admin:
        admin.set_failover(0, preferred=2)
        assert admin.replicas()[0].successor == 2
        group.lose_master(group.replicas[0].kill, 1, 2)
        wait_until(lambda: master(group) != 0, what="the switch")
        now = master(group)
        group.wait_insync(1, 2, master=now)
        assert now == 2 or ": wait: replica 2 " in group.replicas[1].log_path.read_text()


def test_the_mode_has_errors_that_name_the_next_step(group: Group) -> None:
    with group.cluster.admin() as admin:
        assert admin.failover(0).mode == "auto"
        with pytest.raises(ConfigError, match="failover cannot be 'automatic'") as raised:
            admin.set_failover(0, mode="automatic")
        assert raised.value.hint
        with pytest.raises(ConfigError, match="there is no replica 16") as raised:
            admin.set_failover(0, preferred=16)
        assert raised.value.hint
        with pytest.raises(ConfigError, match="there is no broker 7"):
            admin.failover(7)


def test_both_in_sync_and_both_down_come_back_in_either_order(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    group.add_slave()
    group.wait_insync(0, 1)
    with group.cluster.producer() as producer:
        producer.send(topic, b"stays").result(SLOW_S)
    for first, second in ((0, 1), (1, 0), (0, 1)):
        for replica in group.replicas:
            replica.kill()
        group.replicas[first].start()
        group.replicas[second].start()
        wait_until(lambda: has_both(group), what="a master, and both in sync")
    assert group.read(topic) == [b"stays"]


def has_both(group: Group) -> bool:
    try:
        return bool(group.replication(master(group)).get("insync") == [0, 1])
    except ConnectError:  # it is not up yet
        return False


def test_an_operators_promotion_is_in_the_history(group: Group) -> None:
    group.add_slave()
    group.wait_insync(0, 1)
    group.promote(1)
    wait_until(lambda: switches(group), what="the list of switches")
    (switch,) = switches(group)
    assert (switch.was, switch.now, switch.cause, switch.is_automatic) == (0, 1, "an operator's command", False)
    with pytest.raises(Fenced):
        group.promote_once(1)
    assert len(switches(group)) == 1


def test_a_late_request_of_a_former_master_that_stopped_is_refused(group: Group) -> None:
    group.add_slave()
    group.wait_insync(0, 1)
    before = group.state()

    async def ask() -> None:
        connection = await BrokerConnection.open("127.0.0.1", group.replicas[1].port, timeout_s=SLOW_S)
        try:
            late = Promote(False, "replica 0 stops", master_stops=True, epoch=before.epoch + 16)
            await connection.request(Command.PROMOTE, late, timeout_s=SLOW_S)
        finally:
            await connection.close()

    with pytest.raises(Fenced, match=f"epoch {before.epoch} has begun meanwhile"):
        asyncio.run(ask())
    assert (group.state().epoch, group.state().master) == (before.epoch, 0)


def test_the_pause_against_flapping_counts_switches_from_before_a_restart(group: Group) -> None:
    group.add_slave()
    group.wait_insync(0, 1)

    def with_many(stored: Failover) -> Failover:
        now_ms = round(time.time() * 1000)
        return replace(stored, switches=tuple(Switch(epoch, "x", 0, 1, now_ms, 1, True) for epoch in range(1, 9)))

    async def change() -> None:
        async with await Session.open(group.cluster.zookeeper, connect_timeout_s=SLOW_S) as session:
            await change_failover(session, 0, with_many)

    asyncio.run(change())
    group.replicas[1].restart()
    group.lose_master(group.replicas[0].kill, 1)
    reason = "a pause against flapping, after 8 automatic switches"
    wait_until(lambda: group.replication(1)["failover"] == reason, what="the pause")
    assert master(group) == 0
    with group.cluster.admin() as admin:
        described = admin.replicas()[0]
    assert (described.successor, described.successor_waits) == (1, reason)
    assert f"takes over by itself later: {reason}" in next(iter(replica_faults(described))).hint


def test_the_preferred_replica_returns_by_a_hand_over() -> None:
    """No delivery fails, and each switch back counts as automatic."""
    with replica_group(failover="auto", failover_return_ms=500) as group:
        topic = a_sync_topic(group, partitions=1)
        group.add_slave(failover_return_ms=500)
        group.wait_insync(0, 1)
        with group.cluster.admin() as admin, Traffic(group, topic) as traffic:
            for preferred in (1, 0):
                admin.set_failover(0, preferred=preferred)
                wait_until(partial(is_master, group, preferred), what="the return")
                group.wait_insync(0, 1, master=preferred)
                traffic.wait_for_more()
        wait_until(lambda: len(switches(group)) == 2, what="the list of switches")
        assert {(one.cause, one.is_automatic) for one in switches(group)} == {(PREFERRED, True)}
        assert group.read(topic) == [b"%d" % number for number in range(traffic.acknowledged)]


def is_master(group: Group, replica: int) -> bool:
    return master(group) == replica


def test_a_session_of_two_seconds() -> None:
    with replica_group(failover="auto", session_timeout_ms=2000) as group:
        topic = a_sync_topic(group, partitions=1)
        group.add_slave(session_timeout_ms=2000)
        group.wait_insync(0, 1)
        with Traffic(group, topic) as traffic:
            group.lose_master(group.replicas[0].freeze, 1)
            wait_until(partial(is_master, group, 1), what="the switch")
            traffic.wait_for_more()
            group.replicas[0].thaw()
            group.wait_insync(0, 1, master=1)
            traffic.wait_for_more()
        assert group.read(topic) == [b"%d" % number for number in range(traffic.acknowledged)]


def test_a_master_that_stops_asks_the_next_slave_if_one_is_frozen(group: Group) -> None:
    a_sync_topic(group, partitions=1)
    first, _second = group.add_slave(), group.add_slave()
    group.wait_insync(0, 1, 2)
    first.freeze()
    group.replicas[0].stop()
    first.thaw()
    assert master(group) == 2


def test_a_master_that_stops_does_not_join_its_successor(group: Group) -> None:
    """Else it may end just when it has become a member of the in-sync set, and writes wait for it."""
    a_sync_topic(group, partitions=1)
    group.add_slave()
    group.wait_insync(0, 1)
    group.replicas[0].stop()
    assert master(group) == 1
    assert "replica 0 of broker 0 has joined" not in group.replicas[1].log_path.read_text()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), SLOW_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_master_that_stops_listens_as_long_as_it_may_acknowledge() -> None:
    """A slave takes a refused connection for the end of the process."""
    with replica_group(failover="auto", session_timeout_ms=4 * SESSION_MS, insync_lag_ms=4 * LAG_MS) as group:
        topic = a_sync_topic(group, partitions=1)
        slave, former = group.add_slave(), group.replicas[0]
        group.wait_insync(0, 1)
        with group.cluster.admin() as admin:
            admin.set_failover(0, paused=True)  # else it hands over at once
        with group.cluster.producer(linger_ms=0) as producer, ThreadPoolExecutor(1) as pool:
            producer.send(topic, b"0").result(SLOW_S)
            slave.freeze()
            waiting = producer.send(topic, b"1")  # until the slave has left the in-sync set
            wait_until(lambda: group.ends(0)[topic, 0][0] == 2, what="a stored message")
            stopping = pool.submit(former.stop)
            wait_until(lambda: not listens(former.port), what="a refused connection")
            on_its_way_s = 2 * LAG_MS / 1000  # the slave takes longer to leave the in-sync set
            assert waiting.result(on_its_way_s).offset == 1
            assert stopping.result(SLOW_S) == 0
        slave.thaw()


def test_a_damaged_master_hands_over_and_is_repaired(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=2)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 100)
    former = group.replicas[0]
    with group.cluster.admin() as admin:
        admin.set_failover(0, paused=True)  # it must be the master again, damaged, before it may hand over
        former.kill()
        damage(former)
        former.start()
        wait_until(lambda: group.replication(0)["role"] == "master", what="a master again")
        group.wait_insync(0, 1)
        admin.set_failover(0, paused=False)
    wait_until(lambda: master(group) == 1, what="the switch")
    wait_until(lambda: set_aside(former), what="the damaged log aside")
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)
    wait_until(lambda: switches(group), what="the list of switches")
    assert switches(group)[-1].cause == "a log is damaged at replica 0"


def test_a_rolling_restart_of_six_brokers_under_load() -> None:
    """Three broker ids with two replicas each: no delivery fails, and nothing is lost or doubled."""
    with cluster(brokers=3, failover="auto", session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS) as running:
        for broker_id in range(3):
            running.add_slave(broker_id)
        running.create_topic("t", partitions=6, replication="sync")
        with running.admin() as admin, running.producer(linger_ms=0) as producer:
            acknowledged, stop = 0, threading.Event()

            def send() -> None:
                nonlocal acknowledged
                while not stop.is_set():
                    producer.send("t", b"%d" % acknowledged).result(SLOW_S)
                    acknowledged += 1

            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(send)
                try:
                    for process in (*running.brokers, *running.slaves):
                        wait_until(partial(all_in_sync, admin), what="all in sync")
                        process.restart()
                    wait_until(partial(all_in_sync, admin), what="all in sync")
                finally:
                    stop.set()
                sending.result(SLOW_S)
            masters = [
                next(one.replica for one in each.replicas if one.role == "master") for each in admin.replicas().values()
            ]
        with running.consumer(topics=["t"], idle_timeout_s=0.5) as consumer:
            assert sorted(map(int, values_to_end(consumer))) == list(range(acknowledged))
        assert masters == [0, 0, 0], "each restart of a master moved it to the slave, whose restart moved it back"


def all_in_sync(admin: Admin) -> bool:
    found = [each.replicas for each in admin.replicas().values()]
    return [len(replicas) for replicas in found] == [2, 2, 2] and all(one.holds_all for both in found for one in both)
