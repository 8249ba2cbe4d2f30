"""A broker id, or a replica, that is gone for good is removed; clients that run go on with the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin
from metamq.client.admin import admin_removal
from metamq.errors import ConfigError, ConnectError, MetamqError
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import another_boot, read_to_end, wait_until

pytestmark = pytest.mark.timeout(300)
SESSION_MS = 4000


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(folder=tmp_path, session_timeout_ms=SESSION_MS) as one:
        yield one


def wait_gone(admin: Admin, broker_id: int, replica: int) -> None:
    """Until its session has ended."""
    wait_until(
        lambda: all(one.replica != replica or one.address is None for one in admin.replicas()[broker_id].replicas),
        what="the end of its session",
    )


def had_slaves(running: Cluster) -> bool:
    with running.admin() as admin:
        return "/brokers/ids/0/had-slaves" in admin.export_cluster()["nodes"]


@pytest.mark.slow
def test_a_broker_goes_with_its_partitions_and_clients_that_run_go_on(running: Cluster) -> None:
    gone = running.add_broker(session_timeout_ms=SESSION_MS)
    with running.admin() as admin, running.producer(delivery_timeout_s=60) as producer:
        admin.create_topic("orders", partitions=4)
        admin.create_topic("elsewhere", partitions=1, brokers=[1])
        consumer = running.consumer(topics=["orders"], group="readers", start="earliest", idle_timeout_s=1)
        with consumer:
            producer.send_many("orders", [b"%d" % n for n in range(100)], keys=[b"%d" % n for n in range(100)]).result(
                60
            )
            assert len(read_to_end(consumer)) == 100
            consumer.commit()
            with pytest.raises(ConfigError, match="replica 0 of broker 1 is registered, at"):
                admin.plan_removal(1)
            gone.kill()
            wait_until(lambda: not admin.brokers()[1].live, what="the end of its session")
            plan = admin.plan_removal(1)
            assert (plan.partitions, plan.emptied) == ({"orders": 2, "elsewhere": 1}, ("elsewhere",))
            assert plan.offsets == 2
            with pytest.raises(
                ConfigError, match="the messages in 1 partition of elsewhere, 2 partitions of orders are"
            ):
                admin.remove_broker(1)
            assert admin.remove_broker(1, accept_loss=True) == plan

            assert {topic: dict(config.partitions) for topic, config in admin.topics().items()} == {"orders": {0: 2}}
            assert list(admin.brokers()) == [0]
            values = [b"later-%d" % n for n in range(100)]
            wait_until(lambda: {*consumer.assignment} == {("orders", "0-0"), ("orders", "0-1")}, what="another plan")
            producer.send_many("orders", values, keys=values).result(60)
            found: list[Any] = []
            while len(found) < 100:
                found += [message.value for message in read_to_end(consumer)]
            assert sorted(found) == sorted(values)
        assert {one.partition for one in admin.describe_group("readers").partitions} == {"0-0", "0-1"}
        with pytest.raises(ConfigError, match="there is no broker 1"):
            admin.remove_broker(1, accept_loss=True)
    kept = sorted(path.name for path in (gone.data / "topics").iterdir())
    with pytest.raises(MetamqError, match="does not know broker 1"):
        gone.start()
    assert "was removed by `metamq cluster remove-broker`" in gone.log_path.read_text()
    assert sorted(path.name for path in (gone.data / "topics").iterdir()) == kept, "its data is left alone"


def test_a_removed_broker_without_topics_says_so_when_it_is_started_again(running: Cluster) -> None:
    gone = running.add_broker(session_timeout_ms=SESSION_MS)
    gone.stop()
    with running.admin() as admin:
        wait_until(lambda: not admin.brokers()[1].live, what="the end of its session")
        admin.remove_broker(1)
    before = len(gone.log_path.read_text())
    gone.start(wait=False)
    said = "or this broker was removed by `metamq cluster remove-broker`"
    wait_until(lambda: said in gone.log_path.read_text()[before:], what="what it says of itself")
    gone.stop()


@pytest.mark.parametrize("step", ["_delete_state", "_take_from", "_offsets"])
def test_a_removal_that_was_interrupted_is_repeated(
    running: Cluster, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = running.add_broker()
    with running.admin() as admin:
        admin.create_topic("orders", partitions=4)
        admin.create_topic("elsewhere", partitions=1, brokers=[1])
        with running.consumer(topics=["orders"], group="g", start="earliest", idle_timeout_s=0.2) as consumer:
            assert read_to_end(consumer) == []
        gone.stop()
        done = getattr(admin_removal, step)
        calls = []

        async def cut(*arguments: Any) -> Any:
            calls.append(arguments)
            result = await done(*arguments)
            if len(calls) == 1 + (step == "_offsets"):  # the first is the plan's
                raise ConnectError("ZooKeeper", "cut by the test")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(admin_removal, step, cut)
            with pytest.raises(ConnectError):
                admin.remove_broker(1, accept_loss=True)
        admin.remove_broker(1, accept_loss=True)
        left = admin.export_cluster()["nodes"]
        assert not [path for path in left if "/ids/1/" in path or path.rpartition("/")[2].startswith("1-")]
        assert {topic: dict(config.partitions) for topic, config in admin.topics().items()} == {"orders": {0: 2}}


@pytest.mark.slow
def test_the_last_slave_goes_and_its_master_counts_as_one_that_never_had_any(running: Cluster) -> None:
    slave = running.add_slave()
    with running.admin() as admin:
        wait_until(lambda: [one.holds_all for one in admin.replicas()[0].replicas] == [True, True], what="in sync")
        with pytest.raises(ConfigError, match="replica 1 of broker 0 is registered, at"):
            admin.remove_replica(0, 1)
        with pytest.raises(ConfigError, match=r"replica 0 is the master of broker 0. Promote another .* --slave 1`"):
            admin.remove_replica(0, 0)
        with pytest.raises(ConfigError, match=r"ZooKeeper has nothing about replica 2 .* Its slaves are: 1\."):
            admin.remove_replica(0, 2)
        for replica in (-1, 16):
            with pytest.raises(ConfigError, match=rf"there is no replica {replica}. Replicas have the numbers 0 to 15"):
                admin.plan_removal(0, replica)
        assert had_slaves(running)
        slave.kill()
        wait_gone(admin, 0, 1)
        assert admin.remove_replica(0, 1).forgets_slaves
        assert not had_slaves(running)
        wait_until(lambda: [one.replica for one in admin.replicas()[0].replicas] == [0], what="out of the set")
        with pytest.raises(ConfigError, match=r"ZooKeeper has nothing about replica 1 of broker 0.* has no slave\."):
            admin.remove_replica(0, 1)
        with pytest.raises(ConfigError, match=r"replica 0 is the master of broker 0\. It is the only replica"):
            admin.remove_replica(0, 0)
        slave.start()
        wait_until(lambda: len(admin.replicas()[0].replicas) == 2, what="the slave is back")
        assert had_slaves(running)


@pytest.mark.slow
def test_a_master_is_not_removed_nor_the_only_replica_that_has_everything(running: Cluster) -> None:
    slave = running.add_slave()
    with running.admin() as admin, running.producer() as producer:
        admin.create_topic("orders", partitions=1, replication="sync", flush="ack")
        wait_until(lambda: [one.holds_all for one in admin.replicas()[0].replicas] == [True, True], what="in sync")
        producer.send("orders", b"x").result(60)
        running.broker.kill()
        slave.kill()
        for replica in (0, 1):
            wait_gone(admin, 0, replica)
        with pytest.raises(ConfigError, match=r"replica 0 is the master of broker 0. Promote .* --slave 1") as refused:
            admin.remove_replica(0, 0)
        assert not isinstance(refused.value, ConnectError)
        another_boot(running.broker)
        running.broker.start(wait=False)
        wait_until(lambda: admin.replicas()[0].replicas[0].role == "waiting", what="the master waits")
        with pytest.raises(ConfigError, match="the only replica that is known to have all acknowledged messages"):
            admin.remove_replica(0, 1)
        assert admin.remove_replica(0, 1, accept_loss=True).loss
        wait_until(lambda: admin.replicas()[0].replicas[0].role == "master", what="the master leads")
