"""What an automatic switch costs on `async` topics: the former master counts it, and reports it when it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from metamq.broker.roles.succession import taken_over_in
from metamq.testing.network import Way
from metamq.zk.cluster.brokers import BrokerState
from metamq.zk.cluster.failover import Failover, Switch, with_loss, with_switch
from tests.broker.ha.chaos import networked_group, party
from tests.broker.ha.test_replication import metrics
from tests.parts import wait_until

LINK = Way(party(0), party(1))
LOST = 7


@pytest.mark.slow
def test_the_former_master_reports_what_it_gave_up(tmp_path: Path) -> None:
    """Only messages of the `async` topic count: those of the `sync` topic were not acknowledged."""
    settings = {"replicas": 2, "insync_lag_ms": 120_000, "failover": "auto"}
    with networked_group(tmp_path, **settings) as group, group.cluster.admin() as admin:
        group.cluster.create_topic("orders", partitions=1, replication="async")
        group.cluster.create_topic("safe", partitions=1, replication="sync")
        group.wait_insync(0, 1)
        with group.cluster.producer(linger_ms=0) as producer:
            for topic in ("orders", "safe"):
                producer.send(topic, b"at both").result(60)
            wait_until(lambda: group.ends(0) == group.ends(1), what="two equal logs")
            group.network.cut(LINK, LINK.back)
            for number in range(LOST):
                producer.send("orders", b"%d" % number).result(60)
            waits = producer.send("safe", b"waits for the slave")
            wait_until(lambda: group.ends(0) != group.ends(1), what="a message that only the master has")
            group.replicas[0].kill()
            group.network.heal(LINK, LINK.back, broken=True)
            wait_until(lambda: group.state().master == 1, what="the switch")
            waits.result(60)
        group.replicas[0].start()
        group.wait_insync(0, 1, master=1)
        lost = f"{LOST} messages of async topics (orders: {LOST})"
        wait_until(lambda: [one.lost for one in admin.failover(0).switches] == [lost], what="the report")
        assert (
            f"gave up messages that it may have acknowledged as the master: {lost}"
            in group.replicas[0].log_path.read_text()
        )
        assert metrics(group.replicas[0])["metamq_replication_given_up_messages_total", ""] == LOST
        assert metrics(group.replicas[1])["metamq_replication_given_up_messages_total", ""] == 0
        assert group.read("orders") == [b"at both"]
        assert group.read("safe") == [b"at both", b"waits for the slave"]


def a_switch(epoch: int, was: int, now: int, lost: str = "") -> Switch:
    return Switch(epoch, "a test", was, now, 0, 0, True, lost)


def test_a_loss_is_noted_at_the_switch_that_ended_the_epoch() -> None:
    failover = Failover("auto")
    for switch in (a_switch(2, 0, 1), a_switch(17, 1, 0), a_switch(18, 0, 1), a_switch(33, 1, 0)):
        failover = with_switch(failover, switch)
    assert [one.lost for one in with_loss(failover, 0, 17, "3").switches] == ["", "", "3", ""]
    assert [one.lost for one in with_loss(failover, 1, 2, "3").switches] == ["", "3", "", ""]
    assert [one.lost for one in with_loss(with_loss(failover, 0, 1, "3"), 0, 1, "4").switches] == ["3; 4", "", "", ""]
    assert with_loss(with_loss(failover, 0, 1, "3"), 0, 1, "3") == with_loss(failover, 0, 1, "3"), "a lost answer"
    for was, epoch in ((0, 18), (2, 1)):
        with pytest.raises(LookupError):
            with_loss(failover, was, epoch, "3")


def a_state(epoch: int, master: int, reigns: tuple[tuple[int, int], ...]) -> BrokerState:
    return BrokerState(epoch, master, ((master, 1),), 1, reigns)


@pytest.mark.parametrize(
    ("epoch", "master", "reigns", "taken_over"),
    [
        (18, 1, ((1, 0), (18, 1)), 18),
        (34, 1, ((1, 0), (18, 1)), 18),  # its answer was lost, and another epoch has begun
        (18, 1, ((18, 1),), 18),  # a loss was accepted
        (33, 0, ((1, 0), (18, 1), (33, 0)), 0),  # another one was the master in between
        (35, 2, ((1, 0), (18, 1), (35, 2)), 0),
        (33, 0, ((1, 0),), 33),  # it replaced itself
    ],
)
def test_the_epoch_of_a_take_over(
    epoch: int, master: int, reigns: tuple[tuple[int, int], ...], taken_over: int
) -> None:
    assert taken_over_in(a_state(17, 0, ((1, 0),)), a_state(epoch, master, reigns)) == taken_over
