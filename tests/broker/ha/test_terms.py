"""One epoch, one term: what a master does when the state says that another term of its own replica has begun."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from metamq.testing import BrokerProcess
from metamq.zk.brokers import read_state, state_json
from metamq.zk.session import Session
from tests.broker.ha.test_replication import Group, a_sync_topic, group, send
from tests.parts import statistics, wait_until

__all__ = ["group"]


def raise_epoch(group: Group) -> int:
    """As another process of the same replica does that becomes the master; returns the epoch."""

    async def write() -> int:
        async with await Session.open(group.cluster.zookeeper) as session:
            stored = await read_state(session, 0)
            assert stored is not None
            state = replace(stored[0], epoch=stored[0].epoch + 1)
            await session.set(session.paths.broker_state(0), state_json(state), stored[1])
            return state.epoch

    return asyncio.run(write())


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
