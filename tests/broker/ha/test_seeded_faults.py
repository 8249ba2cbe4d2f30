"""The checker of the chaos tests is itself checked: a fault is seeded into the brokers, and must be found.

Scripts bring about what the chaos comes upon by chance: a master that dies with what its slave has not got, one that
thaws after another was promoted, one that is cut off from its slave. Without a fault nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.errors import DeliveryTimeout, MetamqError
from metamq.testing.network import Way
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.broker.ha import seeded_faults
from tests.broker.ha.chaos import NetworkedGroup, party
from tests.broker.ha.history import Given, History, faults
from tests.broker.ha.seeded_faults import FaultyBroker
from tests.broker.ha.test_taken_back import Copy
from tests.parts import wait_until

TOPIC = "t"
COUNT = 20
TOGETHER_S = 4
"""So long a faulty group is waited for, which may never come together."""
LINK = Way(party(0), party(1))
ALONE_S = (0.5, 2, 8)
"""For so long a producer waits for what cannot be acknowledged; longer where its master had nothing of it by then."""
NOBODY_S = 8
"""Seconds in which a slave that must not take over has the chance to; they are more than two sessions."""
TRIES = 10
"""What a fault does depends on who is faster. The rarest one shows itself in half of the tries."""


class FaultyGroup(NetworkedGroup):
    """Two replicas with a fault, and what a producer and a reader were told."""

    def __init__(self, zookeeper: EmbeddedZooKeeper, folder: Path, *, replication: str, **settings: Any) -> None:
        super().__init__(zookeeper, folder, replicas=2, made_by=FaultyBroker, **settings)
        self.history = History()
        self.found: list[str] = []
        self.cluster.create_topic(TOPIC, partitions=1, replication=replication)
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

    def promote() -> None:
        group.lose_master(group.replicas[0].freeze, 1)
        group.promote(1)

    thaws_after(group, promote)


def thaws_after_a_switch(group: FaultyGroup) -> None:
    """The master is frozen, and the slave takes over by itself; then the former master goes on."""

    def switch() -> None:
        group.replicas[0].freeze()
        wait_until(lambda: group.state().master == 1, what="the switch")

    thaws_after(group, switch)


def thaws_after(group: FaultyGroup, replace_the_master: Callable[[], None]) -> None:
    group.send(4)
    replace_the_master()
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


def dies_while_its_slave_is_not_in_sync(group: FaultyGroup) -> None:
    """Nothing reaches the slave, which leaves the set; the master gets messages, dies, and comes back."""
    group.send(12)
    group.network.cut(LINK)
    group.send(13)
    group.replicas[0].kill()
    group.network.heal(LINK, broken=True)
    give_time_to_switch(group)
    group.replicas[0].start()
    group.send(14)
    group.together(group.state().master)
    group.check()


def is_cut_off_from_its_slave(group: FaultyGroup) -> None:
    """The master lives, acknowledges, and is cut off from its slave only, which stays in the set."""
    group.send(15)
    group.network.cut(LINK, LINK.back)
    group.send(16)
    give_time_to_switch(group)
    group.network.heal(LINK, LINK.back, broken=True)
    group.together(group.state().master)
    group.check()


def give_time_to_switch(group: FaultyGroup) -> None:
    """Gives a slave that would take over the time for it."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: group.state().master == 1, NOBODY_S)


SCRIPTS = [
    ("acknowledged_early", dies_with_what_nobody_else_has),
    ("seen_early", dies_with_what_nobody_else_has),
    ("cut_at_the_wrong_place", dies_with_what_nobody_else_has),
    ("stale_epoch_accepted", thaws_after_a_promotion),
    ("zookeeper_of_yesterday_believed", zookeeper_goes_back),
    ("elects_outside_the_in_sync_set", dies_while_its_slave_is_not_in_sync),
    ("takes_over_too_early", is_cut_off_from_its_slave),
]
SOON_OUT, STAYS_IN = {"insync_lag_ms": 1000}, {"insync_lag_ms": 120_000}
"""A slave that is cut off leaves the in-sync set, or stays in it."""
AUTO = {"failover": "auto", "failover_pause_max_ms": 0}
SETTINGS: dict[Any, dict[str, Any]] = {
    dies_with_what_nobody_else_has: {"replication": "sync", **STAYS_IN},
    thaws_after_a_promotion: {"replication": "sync", **SOON_OUT},
    zookeeper_goes_back: {"replication": "sync", **SOON_OUT},
    thaws_after_a_switch: {"replication": "sync", **SOON_OUT, **AUTO},
    dies_while_its_slave_is_not_in_sync: {"replication": "sync", **SOON_OUT, **AUTO},
    is_cut_off_from_its_slave: {"replication": "async", **STAYS_IN, **AUTO},
}


@contextlib.contextmanager
def a_group(folder: Path, **settings: Any) -> Iterator[FaultyGroup]:
    with EmbeddedZooKeeper(folder / "zookeeper") as zookeeper:
        group = FaultyGroup(zookeeper, folder, **settings)
        try:
            yield group
        finally:
            group.close()


def attempt(script: Any, group: FaultyGroup) -> None:
    with contextlib.suppress(AssertionError, MetamqError):  # a fault may keep it from its end
        script(group)


def test_every_fault_has_a_script() -> None:
    assert {fault for fault, _script in SCRIPTS} == seeded_faults.FAULTS.keys()


@pytest.mark.long
@pytest.mark.parametrize("script", SETTINGS)
def test_without_a_fault_nothing_is_found(tmp_path: Path, script: Any) -> None:
    with a_group(tmp_path, **SETTINGS[script]) as group:
        script(group)
        assert group.found == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "script"), SCRIPTS)
def test_a_seeded_fault_is_found(fault: str, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeded_faults.SETTING, fault)
    for number in range(TRIES):
        (tmp_path / str(number)).mkdir()
        with a_group(tmp_path / str(number), **SETTINGS[script]) as group:
            attempt(script, group)
        if [one for one in group.found if "was acknowledged" in one or "a reader saw" in one]:
            return
    raise AssertionError(group.found)


@pytest.mark.slow
def test_a_take_over_whose_answer_is_lost_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeded_faults.SETTING, "answer_of_a_take_over_lost")
    with a_group(tmp_path, **SETTINGS[thaws_after_a_switch]) as group:
        epoch = group.state().epoch
        group.replicas[0].kill()
        wait_until(lambda: has_role(group, 1, "master"), what="the switch")
        with group.cluster.admin() as admin:
            wait_until(lambda: admin.failover(0).switches, what="the list of switches")
            (switch,) = admin.failover(0).switches
        assert (switch.was, switch.now, switch.is_automatic) == (0, 1, True)
        assert epoch < switch.epoch < group.state().epoch, "the take-over, and the epoch after the lost answer"
