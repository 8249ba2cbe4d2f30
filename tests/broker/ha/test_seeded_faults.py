"""The checker of the chaos tests is itself checked: a fault is seeded into the brokers, and must be found.

Two scripts bring about what the chaos comes upon by chance: a master that dies with what its slave has not got, and
one that thaws after another was promoted. Without a fault nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.errors import DeliveryTimeout, MetamqError
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.broker.ha import seeded_faults
from tests.broker.ha.chaos import NetworkedGroup, party
from tests.broker.ha.history import Given, History, faults
from tests.broker.ha.seeded_faults import FaultyBroker
from tests.broker.ha.test_taken_back import Copy
from tests.network import Way
from tests.parts import wait_until

TOPIC = "t"
COUNT = 20
TOGETHER_S = 4
"""So long a faulty group is waited for, which may never come together."""
LINK = Way(party(0), party(1))
ALONE_S = (0.5, 2, 8)
"""For so long a producer waits for what cannot be acknowledged; longer where its master had nothing of it by then."""
TRIES = 3
"""What a fault does depends on who is faster."""


class FaultyGroup(NetworkedGroup):
    """Two replicas with a fault, and what a producer and a reader were told."""

    def __init__(self, zookeeper: EmbeddedZooKeeper, folder: Path, lag_ms: int) -> None:
        super().__init__(zookeeper, folder, replicas=2, made_by=FaultyBroker, insync_lag_ms=lag_ms)
        self.history = History()
        self.found: list[str] = []
        self.cluster.create_topic(TOPIC, partitions=1, replication="sync")
        self.wait_insync(0, 1)

    def send(self, name: int, timeout_s: float = 60) -> None:
        """Sends messages, a batch each and all of the same size, and notes which are acknowledged."""
        with self.cluster.producer(delivery_timeout_s=timeout_s, linger_ms=0) as producer:
            for number in range(COUNT):
                value = b"%d-%04d" % (name, number)
                try:
                    receipt = producer.send(TOPIC, value).result(timeout_s + 5)
                except DeliveryTimeout:
                    return
                self.history.acknowledged[value] = (receipt.partition, receipt.offset)

    def check(self) -> None:
        """Notes what is wrong with what the present master shows."""
        self.found += faults(self.history, {"0-0": self.read(TOPIC)})

    def together(self, master: int) -> None:
        """Until the other one follows; it is a fault as well if it never does, or has another log."""
        try:
            self.wait_insync(0, 1, master=master, limit_s=TOGETHER_S if seeded_faults.SETTING in os.environ else 60)
            self.wait_equal(0, 1)
        except (AssertionError, KeyError, MetamqError) as error:
            self.found.append(str(error)[:100])

    @contextlib.contextmanager
    def being_read(self) -> Iterator[None]:
        """Somebody reads; at the end what was read counts as seen."""
        given = Given("the reader")
        with self.cluster.consumer(topics=[TOPIC]) as consumer:

            def read() -> None:
                for batch in consumer.batches():
                    given.batch(batch.partition, batch.offset, batch.values)

            thread = threading.Thread(target=read)
            thread.start()
            try:
                wait_until(lambda: given.seen, what="the first message read")
                yield
            finally:
                consumer.close()
                thread.join()
                self.history.seen += given.seen


def dies_with_what_nobody_else_has(group: FaultyGroup) -> None:
    """Nothing reaches the slave, the master gets messages, dies, and comes back as the slave; then it is promoted."""
    group.send(1)
    with group.being_read():
        group.network.cut(LINK)
        before = group.ends(0)
        for alone_s in ALONE_S:
            group.send(2, timeout_s=alone_s)
            if group.ends(0) != before:
                break
    group.replicas[0].kill()
    group.network.heal(LINK, broken=True)
    group.promote(1)
    group.send(3)
    group.check()
    group.replicas[0].start()
    group.together(1)
    with contextlib.suppress(MetamqError):
        group.promote(0)
    group.check()


def thaws_after_a_promotion(group: FaultyGroup) -> None:
    """The master is frozen, the slave promoted and written to; then the former master goes on."""
    group.send(4)
    group.lose_master(group.replicas[0].freeze, 1)
    group.promote(1)
    group.send(5)
    group.replicas[0].thaw()
    group.together(1)
    group.send(6)
    group.check()


def zookeeper_goes_back(group: FaultyGroup) -> None:
    """To a copy of before a promotion; whoever waits is given the replica that has most."""
    group.send(7)
    copy = Copy(group)
    group.lose_master(group.replicas[0].kill, 1)
    group.promote(1)
    group.send(8)
    group.replicas[1].kill()
    copy.put_back()
    for number in (1, 0):
        group.replicas[number].start()
    wait_until(lambda: has_role(group, 0, "master") or has_role(group, 1, "waiting"), what="a decision")
    if has_role(group, 1, "waiting"):
        group.promote(1, accept_loss=True)
        group.together(1)
    group.check()


def has_role(group: FaultyGroup, number: int, role: str) -> bool:
    return bool(group.replication(number)["role"] == role)


SCRIPTS = {
    "acknowledged_early": dies_with_what_nobody_else_has,
    "seen_early": dies_with_what_nobody_else_has,
    "cut_at_the_wrong_place": dies_with_what_nobody_else_has,
    "stale_epoch_accepted": thaws_after_a_promotion,
    "zookeeper_of_yesterday_believed": zookeeper_goes_back,
}
LAG_MS = {dies_with_what_nobody_else_has: 120_000, thaws_after_a_promotion: 1000, zookeeper_goes_back: 1000}
"""A slave that is cut off stays in the set in the one, and a promoted one may be thrown out in the other."""


@contextlib.contextmanager
def a_group(folder: Path, lag_ms: int) -> Iterator[FaultyGroup]:
    with EmbeddedZooKeeper(folder / "zookeeper") as zookeeper:
        group = FaultyGroup(zookeeper, folder, lag_ms)
        try:
            yield group
        finally:
            group.close()


def attempt(script: Any, group: FaultyGroup) -> None:
    with contextlib.suppress(AssertionError, MetamqError):  # a fault may keep it from its end
        script(group)


def test_every_fault_has_a_script() -> None:
    assert SCRIPTS.keys() == seeded_faults.FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("script", LAG_MS)
def test_without_a_fault_nothing_is_found(tmp_path: Path, script: Any) -> None:
    with a_group(tmp_path, LAG_MS[script]) as group:
        script(group)
        assert group.found == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", SCRIPTS)
def test_a_seeded_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeded_faults.SETTING, fault)
    script = SCRIPTS[fault]
    for number in range(TRIES):
        (tmp_path / str(number)).mkdir()
        with a_group(tmp_path / str(number), LAG_MS[script]) as group:
            attempt(script, group)
        if [one for one in group.found if "was acknowledged" in one or "a reader saw" in one]:
            return
    raise AssertionError(group.found)
