"""What a promotion would lose is a number only where it is known; else the plan names the replica to promote."""

from __future__ import annotations

import pytest

from metamq.client.admin.promotion_plan import NO_ANSWER, TWO_MASTERS, Has, loss_of
from metamq.zk.cluster.epochs import Known
from tests.broker.ha.test_replication import a_sync_topic, replica_group, send
from tests.parts import wait_until

T = ("t", 0)


@pytest.mark.parametrize(
    ("mine", "others", "lost", "instead"),
    [
        (Has(1, 18, {T: 5}), [Has(0, 1, {T: 3})], {}, None),
        (Has(0, 1, {T: 30}), [Has(1, 18, {T: 5})], None, 1),
        (Has(0, 18, {T: 3}), [Has(1, 18, {T: 5})], {"t": 2}, None),
        (Has(1, 18, {T: 3}), [Has(0, 18, {T: 5})], {"t": 2}, None),
        (Has(1, 18, {}), [Has(0, 18, {T: 5, ("t", 1): 2, ("u", 0): 0})], {"t": 7}, None),
        (Has(0, 18, {T: 3}), [Has(2, 18, {T: 3})], None, 1),
        (Has(0, 18, {T: 3}), [Has(2, 18, {T: 4}, is_in_sync=True)], {"t": 1}, None),
        (Has(0, 1, {T: 3}), [Has(2, 18, {T: 3}, is_in_sync=True)], None, 2),
        (Has(0, 1, {T: 3}), [Has(2, 1, {T: 3})], None, 1),
    ],
    ids=[
        "the last master, beside one of before",
        "a longer log of before, beside the last master",
        "behind the last master",
        "the last master has lost the end of its log",
        "without a partition",
        "the last master is down",
        "the last master is down, and one in sync is there",
        "a log of before, and one in sync is there",
        "the last master is down, and all are of before",
    ],
)
def test_what_is_lost_is_told_beside_a_replica_that_has_what_was_acknowledged(
    mine: Has, others: list[Has], lost: dict[str, int] | None, instead: int | None
) -> None:
    found = loss_of(mine, others, Known(1, 7, [(1, 0)]), claimed=18)
    assert (found.lost, found.promote_instead) == (lost, instead)
    assert bool(found.unknown) == (lost is None)


def test_without_another_replica_nothing_is_known() -> None:
    assert loss_of(Has(1, 18, {T: 3}), [], Known(18, 7, [(1, 0), (18, 1)])).unknown == NO_ANSWER


def test_of_two_that_were_masters_at_once_none_shows_nothing_lost() -> None:
    """Replica 1 was promoted; then ZooKeeper came back from before that, and replica 0 went on."""
    state, replicas = Known(17, 9, [(1, 0)]), [Has(0, 17, {T: 5}), Has(1, 2, {T: 5})]
    assert [loss_of(one, [other], state) for one, other in (replicas, replicas[::-1])] == [
        (None, TWO_MASTERS, None)
    ] * 2


@pytest.mark.slow
def test_two_slaves_that_are_behind_do_not_show_nothing_lost_beside_each_other() -> None:
    with replica_group() as group:
        topic = a_sync_topic(group, partitions=1)
        group.add_slave()
        group.add_slave()
        group.wait_insync(0, 1, 2)
        send(group, topic, 5)
        group.wait_equal(0, 1, 2)
        for slave in group.replicas[1:]:
            slave.kill()
        send(group, topic, 5, b"alone")
        group.replicas[0].kill()
        for slave in group.replicas[1:]:
            slave.start()
        with group.cluster.admin() as admin:
            plan = admin.plan_promotion(0, 1)
            assert (plan.lost, plan.promote_instead) == (None, 0)
            group.replicas[0].start()
            wait_until(lambda: admin.plan_promotion(0, 1).in_sync, what="replica 1 in sync")
            assert admin.plan_promotion(0, 1).lost == {}
