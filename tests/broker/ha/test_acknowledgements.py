"""What a slave's acknowledgements count for at its master: where held and flushed differ, and where they come out of
their order. The slave is the test's."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.ha import connection
from metamq.wire import sync
from metamq.wire.columns import encode
from metamq.zk.cluster.topics import TopicConfig
from tests.broker.ha.test_service import EPOCH, LAG_S, TOPIC, Slave, a_master, turns

FLUSHED = replace(TOPIC, flush="ack")


def run(path: Path, scene: Callable[[Any], Awaitable[None]], topic: TopicConfig = FLUSHED) -> None:
    async def play(make: Callable[[], Awaitable[Any]]) -> None:
        await scene(await make())

    with a_master(path, topic) as (_topics, make):
        asyncio.run(play(make))


async def in_sync_slave(master: Any) -> Slave:
    slave = Slave(master.service)
    slave.attach()
    slave.acknowledges(0)
    await turns()
    assert slave.link.member in master.service.membership.insync
    return slave


def append_flushed(master: Any) -> None:
    """At the master it is on the disk."""
    master.append()
    ticket = master.partition.start_flush(0)
    ticket.sync()
    master.partition.finish_flush(ticket)


def test_an_acknowledgement_of_a_sequence_number_and_a_copy_behind_it_counts_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slave that fell back reads the last DATA and the first COPY at once, and answers both with one."""

    async def scene(master: Any) -> None:
        slave = await in_sync_slave(master)
        master.append()
        await turns()
        monkeypatch.setattr(connection, "BACKLOG_BYTES", len(encode([b"value"], base_timestamp_us=1)))
        slave.writable = False
        master.append()
        master.append()
        place = slave.link.places[master.partition]
        assert not place.live, "the queue has room for one"
        slave.writable = True
        slave.link.pump()
        assert place.live
        end = master.partition.log.end_position
        slave.says(sync.Ack(sync.ACK, EPOCH, 1, 1, [(1, end, end)]))
        assert master.stable == 3
        slave.acknowledges(1)
        assert master.stable == place.held.offset == place.flushed.offset == 3
        assert slave.link.behind_since() is None

    run(tmp_path, scene, TOPIC)


def test_statistics_from_another_thread_disturb_no_acknowledgement(tmp_path: Path) -> None:
    """A scrape of the metrics looks at what is being acknowledged meanwhile."""

    async def scene(master: Any) -> None:
        slave = await in_sync_slave(master)
        place, stop = slave.link.places[master.partition], threading.Event()

        def look() -> None:
            while not stop.is_set():
                slave.link.behind_since()

        before_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(1) as pool:
                looking = pool.submit(look)
                try:
                    for end in range(1, 3000):
                        place.copies.append((connection.ReplicaEnd(end, end), 0.0))
                        place.sent_position = end
                        place.copied(end, end)
                        assert place.held == place.flushed == (end, end)
                finally:
                    stop.set()
                looking.result()
        finally:
            sys.setswitchinterval(before_s)

    run(tmp_path, scene, TOPIC)


def test_what_a_slave_had_not_flushed_before_it_came_back_counts_once_it_has(tmp_path: Path) -> None:
    async def scene(master: Any) -> None:
        slave = await in_sync_slave(master)
        append_flushed(master)
        await turns()
        slave.says(sync.Ack(sync.ACK, EPOCH, 1, 0, []))
        assert master.stable == 0
        again, log = Slave(master.service), master.partition.log
        epochs = [tuple(entry) for entry in log.epochs().entries]
        had = sync.AttachPartition(1, TOPIC.topic, TOPIC.id, 0, 0, 0, 1, log.end_position, 0, epochs)
        again.says(sync.Attach(sync.ATTACH, EPOCH, [had]))
        again.says(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, log.end_position, 0)]))
        await turns()
        assert master.stable == 0, "written, not flushed"
        again.says(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, log.end_position, log.end_position)]))
        assert master.stable == 1

    run(tmp_path, scene)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_slave_whose_fsync_hangs_is_let_go(tmp_path: Path, comes_back: bool) -> None:
    """It writes, and says so all the time: of what came live, or of what it had when it came back."""

    async def scene(master: Any) -> None:
        slave = await in_sync_slave(master)
        append_flushed(master)
        await turns()
        log, held = master.partition.log, sync.Ack(sync.ACK, EPOCH, 1, 0, [])
        if comes_back:
            slave = Slave(master.service)
            epochs = [tuple(entry) for entry in log.epochs().entries]
            had = sync.AttachPartition(1, TOPIC.topic, TOPIC.id, 0, 0, 0, 1, log.end_position, 0, epochs)
            slave.says(sync.Attach(sync.ATTACH, EPOCH, [had]))
            held = sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, log.end_position, 0)])
        slave.says(held)
        master.after(LAG_S / 2)
        assert master.stable == 0
        master.after(LAG_S + 1)
        await turns()
        assert master.stable == 1
        assert master.service.membership.insync == {(0, 1)}

    run(tmp_path, scene)


def test_a_slave_that_has_flushed_all_it_holds_counts_so_when_its_topic_begins_to_ask_for_it(tmp_path: Path) -> None:
    async def scene(master: Any) -> None:
        slave = await in_sync_slave(master)
        master.append()
        await turns()
        slave.acknowledges(1)
        place, log = slave.link.places[master.partition], master.partition.log
        assert (place.held.offset, place.flushed.offset) == (1, 0)
        slave.says(sync.Ack(sync.ACK, EPOCH, 1, 1, [(1, log.end_position, log.end_position)]))
        assert place.flushed == place.held

    run(tmp_path, scene, TOPIC)


def test_a_write_that_waits_for_a_slaves_flush_waits_no_longer_once_its_topic_does_not_ask_for_it(
    tmp_path: Path,
) -> None:
    async def scene(topics: Any, make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        topics.flush_changed = master.service.flush_changed
        slave = await in_sync_slave(master)
        append_flushed(master)
        await turns()
        slave.says(sync.Ack(sync.ACK, EPOCH, 1, 0, []))
        answered: list[object] = []
        assert not master.partition.when_stable(1, answered.append)
        await topics.apply({"t": TOPIC}, {})
        assert (master.stable, answered) == (1, [None])
        await topics.apply({"t": FLUSHED}, {})
        append_flushed(master)
        await turns()
        slave.says(sync.Ack(sync.ACK, EPOCH, 2, 0, []))
        assert master.stable == 1, "what was seen stays; the next one counts when it is flushed"
        slave.acknowledges(2)
        assert master.stable == 2

    with a_master(tmp_path, FLUSHED) as (topics, make):
        asyncio.run(scene(topics, make))
