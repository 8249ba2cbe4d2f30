"""Three replicas, producers and readers, and masters and slaves that are killed, frozen and promoted at random."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from metamq import Consumer, Producer
from metamq.errors import MetamqError
from metamq.testing import cluster
from tests.broker.ha.history import History, faults
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group
from tests.parts import wait_until

TOPIC = "chaos"
PARTITIONS = 3
REPLICAS = 3


class Chaos:
    """Does something bad, again and again, and makes good what must be for the cluster to go on."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.done: list[str] = []
        self.frozen: set[int] = set()

    def run(self, until: float) -> None:
        actions = [self.kill_master, self.kill_slave, self.hand_over, self.freeze, self.freeze_master]
        while time.monotonic() < until:
            time.sleep(self.random.uniform(0.3, 1.5))
            action = self.random.choice(actions)
            self.done.append(action.__name__)
            action()
            self.mend()
        self.thaw_all()

    def master(self) -> int | None:
        with contextlib.suppress(MetamqError), self.group.cluster.admin() as admin:
            for replica in admin.replicas()[0].replicas:
                if replica.role == "master":
                    return replica.replica
        return None

    def kill_master(self) -> None:
        number = self.master()
        if number is not None and self.group.replicas[number].running:
            self.group.replicas[number].kill()
            self.frozen.discard(number)

    def kill_slave(self) -> None:
        master = self.master()
        running = [n for n in range(REPLICAS) if n != master and self.group.replicas[n].running]
        if running:
            number = self.random.choice(running)
            self.group.replicas[number].kill()
            self.frozen.discard(number)

    def hand_over(self) -> None:
        self.promote_any()

    def freeze(self) -> None:
        running = [n for n in range(REPLICAS) if self.group.replicas[n].running and n not in self.frozen]
        if running:
            number = self.random.choice(running)
            self.group.replicas[number].freeze()
            self.frozen.add(number)

    def freeze_master(self) -> None:
        number = self.master()
        if number is not None and self.group.replicas[number].running and number not in self.frozen:
            self.group.replicas[number].freeze()
            self.frozen.add(number)

    def promote_any(self) -> None:
        """Asks the replicas one after the other; who is not in sync refuses."""
        master = self.master()
        for number in self.random.sample(range(REPLICAS), REPLICAS):
            if number != master and self.group.replicas[number].running and number not in self.frozen:
                with contextlib.suppress(MetamqError):
                    self.group.promote(number)
                    self.done.append(f"promoted {number}")
                    return

    def mend(self) -> None:
        """Brings back what is down, most of the time, and sees to it that there is a master in the end."""
        for number in list(self.frozen):
            if self.random.random() < 0.5:
                self.group.replicas[number].thaw()
                self.frozen.discard(number)
        master = self.master()
        if master is None or not self.group.replicas[master].running or master in self.frozen:
            self.promote_any()
        for replica in self.group.replicas:
            if not replica.running and self.random.random() < 0.6:
                replica.start(wait=False)

    def thaw_all(self) -> None:
        for number in list(self.frozen):
            self.group.replicas[number].thaw()
        self.frozen.clear()
        for replica in self.group.replicas:
            if not replica.running:
                replica.start(wait=False)


def produce(group: Group, name: int, history: History, stop: threading.Event) -> None:
    """Sends numbered messages, a few at a time, and notes where the acknowledged ones are."""
    number = 0
    with Producer(group.cluster.zookeeper, delivery_timeout_s=60, request_timeout_s=2) as producer:
        while not stop.is_set():
            sent = []
            for _ in range(20):
                value = b"%d-%d" % (name, number)
                sent.append((value, producer.send(TOPIC, value, partition=f"0-{number % PARTITIONS}")))
                number += 1
            for value, delivery in sent:
                with contextlib.suppress(MetamqError):
                    receipt = delivery.result(70)
                    history.acknowledged[value] = (receipt.partition, receipt.offset)


def read(group: Group, history: History, stop: threading.Event) -> None:
    """Reads all of it as it comes."""
    with Consumer(group.cluster.zookeeper, topics=[TOPIC]) as consumer:
        threading.Thread(target=lambda: (stop.wait(), consumer.close()), daemon=True).start()
        for message in consumer:
            history.seen.append(((message.partition, message.offset), message.value))


@pytest.fixture
def group() -> Iterator[Group]:
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS) as running:
        made = Group(running)
        yield made
        for replica in made.replicas:
            if replica.running:
                replica.thaw()
                replica.kill()


def survive(group: Group, duration_s: float) -> tuple[History, dict[str, list[bytes]], list[str]]:
    """Chaos for so long; then all is mended. Returns what was told, what is there, and what was done."""
    seed = int(os.environ.get("METAMQ_SEED", random.randrange(1 << 32)))
    print(f"METAMQ_SEED={seed}")
    for _ in range(REPLICAS - 1):
        group.add_slave()
    group.cluster.create_topic(TOPIC, partitions=PARTITIONS, replication="sync")
    group.wait_insync(*range(REPLICAS))
    stop, stop_reading = threading.Event(), threading.Event()
    histories = [History() for _ in range(3)]
    producers = [threading.Thread(target=produce, args=(group, n, histories[n], stop)) for n in range(2)]
    reader = threading.Thread(target=read, args=(group, histories[2], stop_reading))
    for thread in (*producers, reader):
        thread.start()
    chaos = Chaos(group, seed)
    try:
        chaos.run(time.monotonic() + duration_s)
        healed(group, chaos)
        stop.set()
        for thread in producers:
            thread.join(120)
        acknowledged = sum(len(one.acknowledged) for one in histories)
        wait_until(lambda: len(histories[-1].seen) >= acknowledged, limit_s=60, what="all of it read")
    finally:
        stop.set()
        for thread in producers:
            thread.join(120)
        stop_reading.set()
        reader.join(60)
    print(" ".join(chaos.done))
    history = History()
    for one in histories:
        history.acknowledged |= one.acknowledged
        history.seen += one.seen
    return history, logs_of(group), chaos.done


def healed(group: Group, chaos: Chaos) -> None:
    """Until every replica is in sync again."""

    def all_in_sync() -> bool:
        for replica in group.replicas:
            if not replica.running:
                replica.start(wait=False)
        with contextlib.suppress(MetamqError), group.cluster.admin() as admin:
            described = admin.replicas()[0].replicas
            if any(one.role == "master" and one.address is None for one in described):
                chaos.promote_any()
            return len(described) == REPLICAS and all(one.in_sync and one.address for one in described)
        return False

    wait_until(all_in_sync, limit_s=60, what="all replicas in sync")


def logs_of(group: Group) -> dict[str, list[bytes]]:
    logs: dict[str, list[bytes]] = defaultdict(list, {f"0-{n}": [] for n in range(PARTITIONS)})
    with group.cluster.consumer(topics=[TOPIC], idle_timeout_s=2) as consumer:
        for batch in consumer.batches():
            assert batch.offset == len(logs[batch.partition])
            logs[batch.partition] += batch.values
    return logs


def check(group: Group, duration_s: float) -> None:
    history, logs, done = survive(group, duration_s)
    assert faults(history, logs) == []
    assert len(history.acknowledged) > 100, done
    group.wait_equal(*range(REPLICAS))
    print(f"{len(history.acknowledged)} acknowledged, {len(history.seen)} seen, {len(done)} faults")


def test_nothing_acknowledged_is_lost_or_doubled_and_nothing_seen_is_taken_back(group: Group) -> None:
    check(group, 20)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_for_ten_minutes(group: Group) -> None:
    check(group, 600)


def test_the_check_bites() -> None:
    history = History({b"1-0": ("0-0", 0), b"1-1": ("0-0", 1)}, [(("0-0", 0), b"1-0")])
    assert faults(history, {"0-0": [b"1-0", b"1-1"]}) == []
    assert "was acknowledged" in faults(history, {"0-0": [b"1-0"]})[0]
    assert "is there 2 times" in faults(history, {"0-0": [b"1-0", b"1-1", b"1-1"]})[0]
    assert "not in the order" in faults(History(), {"0-0": [b"1-1", b"1-0"]})[0]
    assert "a reader saw" in faults(History(seen=[(("0-0", 0), b"1-9")]), {"0-0": [b"1-0"]})[0]
