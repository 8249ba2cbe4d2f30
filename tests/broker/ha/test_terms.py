"""One epoch, one term: what a master does when the state says that another term of its own replica has begun."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.roles.keeper import RoleKeeper
from metamq.broker.roles.role import BetweenRoles
from metamq.broker.transactions import processor
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.errors import MetamqError, TooManyOpenFiles
from metamq.testing import BrokerProcess
from metamq.tx.store.fold import Entry
from metamq.wire.commands import Promote
from metamq.zk.cluster.brokers import read_state, state_json
from metamq.zk.session.session import Session
from tests.broker.ha.test_replication import Group, a_sync_topic, group, send
from tests.broker.test_disk import SmallDisk, small_disk
from tests.parts import SLOW_S, LocalBroker, statistics, values_to_end, wait_until

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


@pytest.mark.slow
def test_a_term_that_lacks_descriptors_uses_up_one_epoch(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is taken before the journal is read: each retry begins the same term again."""
    lacking, attempts, read = 0, [], processor.read_journal

    def read_or_lack(partition: Partition) -> Iterator[Entry]:
        attempts.append(partition.name)
        if len(attempts) <= lacking:
            raise TooManyOpenFiles("opening the journal", 20)
        return read(partition)

    monkeypatch.setattr(processor, "read_journal", read_or_lack)
    with LocalBroker(group.cluster.zookeeper, tmp_path / "broker", id=7) as broker, group.cluster.admin() as admin:
        admin.create_topic("t", brokers=[7], partitions=1)
        with group.cluster.producer() as producer:
            with producer.transaction():
                producer.send("t", b"before")
            attempts.clear()
            lacking = 3
            epoch = raise_epoch(group, 7)
            wait_until(lambda: statistics(broker)["epoch"] > epoch and len(attempts) > lacking, what="the term")
            with producer.transaction():
                producer.send("t", b"after")
        assert known_epoch(group, 7) == 17, "the next of this replica's numbers after 1"
        with group.cluster.consumer(topics=["t"], idle_timeout_s=0.5) as consumer:
            assert values_to_end(consumer) == [b"before", b"after"]


def test_a_promotion_that_runs_when_the_broker_stops_leaves_no_master(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker waits for the promotion, and ends the role that it brings."""
    begin, begun = TransactionalCommandProcessor.begin_term, threading.Event()
    close, closing = RoleKeeper.close, threading.Event()

    async def paused(own: TransactionalCommandProcessor, epoch: int, generation: int) -> object:
        begun.set()
        await asyncio.to_thread(closing.wait)
        return await begin(own, epoch, generation)

    async def noted(keeper: RoleKeeper) -> None:
        closing.set()
        await close(keeper)

    topic = a_sync_topic(group)
    with LocalBroker(group.cluster.zookeeper, tmp_path / "slave", id=0, replica=1) as slave:
        group.wait_insync(0, 1)
        send(group, topic, 5)
        monkeypatch.setattr(TransactionalCommandProcessor, "begin_term", paused)
        monkeypatch.setattr(RoleKeeper, "close", noted)
        parts = slave.broker._parts
        promotion = asyncio.run_coroutine_threadsafe(parts.keeper.promote(Promote(False)), slave.loop)
        wait_until(begun.is_set)
        slave.loop.call_soon_threadsafe(slave.broker.end)
        with pytest.raises(MetamqError):
            promotion.result(SLOW_S)
    assert isinstance(parts.status.role, BetweenRoles)
