"""One epoch, one term: what a master does when the state says that another term of its own replica has begun."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from metamq.testing import BrokerProcess
from metamq.zk.brokers import read_state, state_json
from metamq.zk.session import Session
from tests.broker.ha.test_replication import Group, a_sync_topic, group, send
from tests.broker.test_disk import SmallDisk, small_disk
from tests.parts import statistics, wait_until

__all__ = ["group", "small_disk"]


def raise_epoch(group: Group, broker_id: int = 0) -> int:
    """As another process of the same replica does that becomes the master; returns the epoch."""

    async def write() -> int:
        async with await Session.open(group.cluster.zookeeper) as session:
            stored = await read_state(session, broker_id)
            assert stored is not None
            state = replace(stored[0], epoch=stored[0].epoch + 1)
            await session.set(session.paths.broker_state(broker_id), state_json(state), stored[1])
            return state.epoch

    return asyncio.run(write())


def known_epoch(group: Group, broker_id: int) -> int:
    async def read() -> int:
        async with await Session.open(group.cluster.zookeeper) as session:
            stored = await read_state(session, broker_id)
            assert stored is not None
            return stored[0].epoch

    return asyncio.run(read())


def test_a_master_in_whose_name_another_term_has_begun_begins_the_next_one(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"before")
    epoch = raise_epoch(group)
    wait_until(lambda: statistics(group.replicas[0])["epoch"] > epoch, what="a term after that")
    values += send(group, topic, 5, b"after")
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


def kept_epoch(replica: BrokerProcess) -> int:
    return int(json.loads((replica.data / "meta.json").read_text())["epoch"])


def test_master_and_slave_keep_the_epoch_in_their_folders(group: Group) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    send(group, topic, 5)
    assert kept_epoch(group.replicas[0]) == kept_epoch(group.replicas[1]) == group.state().epoch
    before = group.state().epoch
    group.promote(1)
    group.wait_insync(0, 1, master=1)
    wait_until(lambda: kept_epoch(group.replicas[0]) > before, what="the former master linked")
    assert kept_epoch(group.replicas[0]) == kept_epoch(group.replicas[1]) == group.state().epoch


def test_a_full_disk_uses_up_no_epochs(group: Group, small_disk: SmallDisk) -> None:
    """A term that cannot be noted is not begun, however often that is tried."""
    broker = BrokerProcess(group.cluster.zookeeper, small_disk.folder / "broker", 7)
    group.replicas.append(broker)
    broker.start()
    small_disk.use_up_files()
    epoch = raise_epoch(group, 7)
    wait_until(lambda: "the role is not followed at present" in broker.log_path.read_text(), what="the full disk met")
    assert known_epoch(group, 7) == epoch
    small_disk.empty()
    wait_until(lambda: statistics(broker)["epoch"] > epoch, what="a term when there is room")
    assert broker.stop() == 0
