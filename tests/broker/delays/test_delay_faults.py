"""Delayed messages arrive once and not early, whatever is killed, lost, frozen or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.delays import forwarder, moved_node
from metamq.broker.delays import waiting as waiting_module
from metamq.broker.delays.waiting import WaitingLog, WaitingMessage
from metamq.client.net.branches import TxClient
from metamq.errors import ConnectError, CorruptData, MetamqError
from metamq.testing import Cluster
from metamq.zk.cluster.delays import read_moved, write_moved
from metamq.zk.errors import ConnectionLost
from metamq.zk.session.session import Session
from tests.broker.delays.delayed_history import Sent, Wrong, check, check_order, read_all, send_delayed, send_in_order
from tests.broker.ha.test_replication import replica_group
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, read_to_end, wait_until

_ids = itertools.count(1)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(brokers=1) as found:
        yield found


@pytest.fixture
def local(running: Cluster, tmp_path: Path) -> Iterator[LocalBroker]:
    """A second broker, in this process, in which calls can fail."""
    with LocalBroker(running.zookeeper, tmp_path / "local", id=next(_ids)) as broker:
        yield broker


class FailingCalls:
    """Makes some of the forwarder's requests fail: before they are done, or after, so that the answer is lost."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.failed = 0
        self.is_over = False
        self._chance = random.Random(seed)
        self._wrap(patch, moved_node, "write_moved", ConnectionLost("the node", "cut"))
        self._wrap(patch, moved_node, "read_moved", ConnectionLost("the node", "cut"))
        self._wrap(patch, TxClient, "ask", ConnectError("a broker", "cut"))

    def _wrap(self, patch: pytest.MonkeyPatch, where: Any, name: str, error: MetamqError) -> None:
        real = getattr(where, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            outcome = "done" if self.is_over else self._chance.choice(["done", "done", "done", "not", "lost"])
            if outcome == "not":
                self.failed += 1
                raise error
            result = await real(*arguments, **named)
            if outcome == "lost":
                self.failed += 1
                raise error
            return result

        patch.setattr(where, name, call)


def on_local(running: Cluster, local: LocalBroker, seed: int, count: int = 300) -> tuple[str, list[Sent]]:
    """Delays messages for a topic of both brokers, at the local one; returns the topic."""
    topic = f"t-{seed}-{time.monotonic_ns()}"
    with running.admin() as admin:
        admin.create_topic(f"{topic}.delayed", partitions=1, brokers=[local.broker_id])
        admin.create_topic(topic, partitions=4)
    return topic, send_delayed(running, topic, count, 1.5, seed)


def waiting(local: LocalBroker) -> int:
    return local.broker._parts.delays.figures.waiting


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_requests_fail_and_answers_are_lost(
    running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(forwarder, "RETRY_S", 0.02)
    monkeypatch.setattr(moved_node, "RETRY_S", 0.02)
    monkeypatch.setattr(forwarder, "CHUNK_MESSAGES", 20)  # many requests
    topic, sent = on_local(running, local, seed)
    calls = FailingCalls(monkeypatch, seed)
    wait_until(lambda: calls.failed > 15)
    calls.is_over = True
    check(sent, read_all(running, topic, len(sent), lambda: waiting(local)))


@pytest.mark.parametrize("fault", ["offsets", "early", "undecided"])
def test_the_check_finds_a_seeded_fault(
    running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(forwarder, "RETRY_S", 0.02)
    monkeypatch.setattr(moved_node, "RETRY_S", 0.02)
    monkeypatch.setattr(forwarder, "CHUNK_MESSAGES", 50)
    if fault == "early":
        real = forwarder.now_us
        monkeypatch.setattr(forwarder, "now_us", lambda: real() + 300_000)
    topic, sent = on_local(running, local, 7)
    calls = FailingCalls(monkeypatch, 7) if fault == "undecided" else None
    if fault == "offsets":  # a decision that ZooKeeper does not get counts as made, and the next change fails
        write, forgotten = moved_node.write_moved, list[str]()

        async def forgets(session: Any, broker_id: int, moved: Any) -> Any:
            if len(forgotten) < 2 and moved.committing:
                forgotten.append("a decision")
                if len(forgotten) == 2:
                    raise ConnectionLost(session.servers, "a seeded fault")
                return moved
            return await write(session, broker_id, moved)

        monkeypatch.setattr(moved_node, "write_moved", forgets)
    if fault == "undecided":  # after a lost answer it continues, and does not read the node

        async def skips(_session: Any, _broker_id: int, moved: Any) -> Any:
            return moved

        monkeypatch.setattr(moved_node, "write_moved", skips)
    if calls is not None:
        wait_until(lambda: calls.failed > 15)
        calls.is_over = True
    wait_until(lambda: not waiting(local))
    with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.5) as consumer:
        found = read_to_end(consumer)
    with pytest.raises(Wrong):
        check(sent, found)


@pytest.mark.parametrize("is_seeded", [False, True])
def test_the_order_of_a_delay(
    running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch, is_seeded: bool
) -> None:
    """The seeded fault: the way of a message depends on the time at which it is moved."""
    if is_seeded:
        real, chance = waiting_module.left_after_us, random.Random(3)
        monkeypatch.setattr(
            waiting_module,
            "left_after_us",
            lambda level, left_us: max(0, real(level, left_us) - chance.randrange(20_000)),
        )
    topic, _ = on_local(running, local, 12, count=0)
    send_in_order(running, topic, 3000, [0.61, 0.81])
    found = read_all(running, topic, 3000, lambda: waiting(local))
    with pytest.raises(Wrong) if is_seeded else contextlib.nullcontext():
        check_order(found)


@pytest.mark.slow
def test_the_order_of_a_delay_while_the_broker_is_killed() -> None:
    with cluster() as running:
        running.create_topic("orders", partitions=2)
        send_in_order(running, "orders", 5000, [0.7, 3.3])
        for _ in range(2):
            running.processes[0].kill()
            running.processes[0].start()
        found = read_all(running, "orders", 5000)
        check_order(found)
        assert len(found) == 5000


def test_offsets_of_lost_messages_hide_no_later_ones(running: Cluster, local: LocalBroker) -> None:
    """After an accepted loss the node has offsets that the log gives to later messages, under another epoch."""
    topic = f"t-{time.monotonic_ns()}"
    with running.admin() as admin:
        made = admin.create_topic(f"{topic}.delayed", partitions=1, brokers=[local.broker_id])
        admin.create_topic(topic, partitions=4)

    async def note() -> None:
        async with await Session.open(running.zookeeper) as session:
            moved = None
            while moved is None:
                before = await read_moved(session, local.broker_id)
                offsets = {**before.offsets, f"{made.id}/0": (1000, 777)}
                moved = await write_moved(session, local.broker_id, replace(before, offsets=offsets))

    asyncio.run(note())
    with running.producer() as producer:
        for number in range(5):
            producer.send(topic, b"%d" % number, delay_s=0.2)
    found = read_all(running, topic, 5, lambda: waiting(local))
    assert sorted(message.value for message in found) == [b"%d" % number for number in range(5)]


@pytest.mark.slow
def test_a_log_that_cannot_be_read_holds_up_only_its_own_messages(
    running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, broken = WaitingLog.head, [""]

    async def failing(self: WaitingLog) -> WaitingMessage | None:
        if self.partition.topic == f"{broken[0]}.delayed":
            raise CorruptData(self.partition.name, "a seeded fault")
        return await head(self)

    monkeypatch.setattr(WaitingLog, "head", failing)
    broken[0], lost = on_local(running, local, 8, count=3)
    topic, sent = on_local(running, local, 9, count=20)
    check(sent, read_all(running, topic, len(sent), lambda: 0))
    bad, broken[0] = broken[0], ""
    check(lost, read_all(running, bad, len(lost), lambda: waiting(local)))


def test_messages_that_move_to_a_new_level_are_counted_at_once(
    running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwarder knows the log of a level that it has made, before it looks for other logs."""
    topic = f"t-{time.monotonic_ns()}"
    with running.admin() as admin:
        admin.create_topic(f"{topic}.delayed", partitions=1, brokers=[local.broker_id])
        admin.create_topic(topic)
    wait_until(lambda: f"{topic}.delayed" in local.broker._parts.delays._topics.open)
    ready, counts = forwarder.DelayForwarder._ready, list[int]()

    async def counted(self: forwarder.DelayForwarder, term: Any) -> list[WaitingMessage]:
        chunk = await ready(self, term)
        counts.append(self.figures.waiting)
        return chunk

    monkeypatch.setattr(forwarder.DelayForwarder, "_ready", counted)
    monkeypatch.setattr(forwarder, "LOOK_S", 1e9)
    with running.producer() as producer:
        producer.send(topic, b"tomorrow", delay_s=86400).result()
    wait_until(lambda: 1 in counts and len(counts) > counts.index(1) + 5)
    assert 0 not in counts[counts.index(1) :]


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [-5.0, 5.0])
def test_the_clock_steps(running: Cluster, local: LocalBroker, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """None is lost or there twice. A clock that goes back delays them; one that goes ahead does the reverse."""
    real, step_us = forwarder.now_us, [0]
    monkeypatch.setattr(forwarder, "now_us", lambda: real() + step_us[0])
    topic, sent = on_local(running, local, 5)
    step_us[0] = int(step_s * 1e6)
    found = read_all(running, topic, len(sent), lambda: waiting(local))
    check([one._replace(earliest_us=one.earliest_us - max(step_us[0], 0)) for one in sent], found)


@pytest.mark.slow
def test_brokers_are_killed_in_turn() -> None:
    chance = random.Random(11)
    with cluster(brokers=2) as running:
        running.create_topic("orders", partitions=4)
        sent = send_delayed(running, "orders", 2000, 6.0)
        ends_s = time.monotonic() + 6.0
        while time.monotonic() < ends_s:
            victim = chance.choice(running.processes)
            victim.kill()
            victim.start()
        check(sent, read_all(running, "orders", len(sent)))


@pytest.mark.slow
def test_a_promotion_from_a_dead_and_from_a_living_master() -> None:
    with replica_group() as group:
        group.add_slave()
        group.wait_insync(0, 1)
        running = group.cluster
        running.create_topic("orders", partitions=2, replication="sync")
        sent = send_delayed(running, "orders", 1000, 5.0)
        group.promote(1)  # from a living master
        group.wait_insync(0, 1, master=1)
        group.replicas[1].kill()
        group.promote(0)
        check(sent, read_all(running, "orders", len(sent), lambda: 0))


@pytest.mark.slow
def test_zookeeper_is_frozen_and_killed() -> None:
    from metamq.testing import cluster as own_zookeeper

    with own_zookeeper(brokers=2) as running:
        running.create_topic("orders", partitions=4)
        sent = send_delayed(running, "orders", 500, 2.0)
        with running.freeze("zookeeper"):
            wait_until(lambda: time.time() * 1e6 > max(one.earliest_us for one in sent[:100]))
        with running.stop_zookeeper():
            wait_until(lambda: time.time() * 1e6 > max(one.earliest_us for one in sent))
        check(sent, read_all(running, "orders", len(sent)))
