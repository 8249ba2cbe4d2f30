"""Brokers remove the offsets of groups that no consumer uses; those of a consumer that runs stay."""

from __future__ import annotations

from metamq import Admin
from tests.one_zookeeper import cluster
from tests.parts import wait_until


def test_the_offsets_of_unused_groups_expire() -> None:
    with cluster(group_expiry_s=1) as one, Admin(one.zookeeper) as admin:
        one.create_topic("orders", partitions=2)
        with one.producer() as producer, one.consumer(topics="orders", group="running") as running:
            producer.send("orders", b"1").result(60)
            next(iter(running))
            with one.consumer(topics="orders", group="gone") as gone:
                next(iter(gone))
            assert {"running", "gone"} <= set(admin.groups())
            wait_until(lambda: "gone" not in admin.groups(), what="the end of the unused group")
            assert "running" in admin.groups()
