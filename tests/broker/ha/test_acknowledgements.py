"""What a slave's acknowledgements count for at its master: where held and flushed differ, and where they come out of
their order. The slave is the test's, save where a real one is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from metamq.broker.flusher import Flusher
from metamq.broker.ha import connection
from metamq.broker.ha.client import HAClient, _Link
from metamq.broker.topics import Topics
from metamq.errors import MetamqError
from metamq.wire import sync
from metamq.wire.columns import encode
from metamq.zk.brokers import Registration
from metamq.zk.topics import TopicConfig
from tests.broker.ha.test_service import EPOCH, LAG_S, TOPIC, Slave, a_master, fails, turns

FLUSHED = replace(TOPIC, flush="ack")
REGISTRATION = Registration(
    broker_id=0, replica=1, incarnation=7, folder="f", host="127.0.0.1", port=1, version="1", learner=False
)


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


class SlaveEnd:
    """The real slave's end of a link; the test is the network, and the master."""

    address = "a test"

    def __init__(self, topics: Topics) -> None:
        self.closed: asyncio.Future[MetamqError] = asyncio.get_running_loop().create_future()
        self.said: list[Any] = []
        self._speaks = asyncio.Event()
        client = HAClient(
            lambda: REGISTRATION, topics, Flusher(fails), learner=False, generation=lambda: 1,
            followed=lambda generation: None, readable_changed=lambda: None, full=lambda: None, failed=fails,
        )  # fmt: skip
        self.link = _Link(client, self, topics, client._flusher)  # type: ignore[arg-type]
        topics.closing = self.link.detach
        self.link.begin(sync.Accept(sync.ACCEPT, EPOCH, 1, 3_600_000))

    def push(self, frame: sync.FromSlave) -> None:
        self.said.append(frame)
        self._speaks.set()

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def hears(self, frame: sync.FromMaster, body: bytes = b"") -> None:
        self.link.received(msgpack.unpackb(msgpack.packb(frame)), memoryview(body))
        assert not self.link.ended.done()

    async def acknowledges(self, what: Callable[[sync.Ack], bool]) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(frame, sync.Ack) and what(frame) for frame in self.said):
                self._speaks.clear()
                await self._speaks.wait()


def run_slave(path: Path, scene: Callable[[Any, Topics], Awaitable[None]]) -> None:
    """With a master, for the batches it makes, and the slave's own topics."""

    async def play(make: Callable[[], Awaitable[Any]], topics: Topics) -> None:
        await scene(await make(), topics)

    with a_master(path / "master", FLUSHED) as (_topics, make), a_master(path / "slave") as (topics, _make):
        asyncio.run(play(make, topics))


def test_what_was_deleted_before_it_was_flushed_is_not_waited_for(tmp_path: Path) -> None:
    """Else every topic that flushes before it acknowledges would wait, for as long as the link lasts."""

    async def scene(master: Any, topics: Topics) -> None:
        other = replace(FLUSHED, topic="other")
        await topics.apply({"t": FLUSHED, "other": other}, {})
        slave = SlaveEnd(topics)
        from_here = [sync.AttachResult(handle, sync.Decision.FROM, 0, 0, "") for handle in (1, 2)]
        slave.hears(sync.Attached(sync.ATTACHED, EPOCH, from_here))
        master.append()
        batch = master.partition.log.read_position(0, 1000).data
        entries = [(handle, 0, len(batch), 1) for handle in (1, 2)]
        slave.hears(sync.Data(sync.DATA, EPOCH, 1, entries, []), bytes(batch) * 2)
        await topics.apply({"other": other}, {})  # in the same turn: no fsync can have ended
        assert isinstance(slave.said[-1], sync.Detach)
        await slave.acknowledges(lambda ack: (ack.held_seq, ack.flushed_seq) == (2, 2))
        slave.link.close()

    run_slave(tmp_path, scene)


@pytest.mark.parametrize("flushes", [True, False])
def test_a_slave_flushes_what_it_had_written_when_it_attaches(tmp_path: Path, flushes: bool) -> None:
    """Where that counts: its master waits for it, and no append may follow that would make it so."""

    async def scene(master: Any, topics: Topics) -> None:
        config = FLUSHED if flushes else TOPIC
        await topics.apply({"t": config}, {})
        partition = topics.get("t", 0)
        assert partition is not None
        master.append()
        batch = master.partition.log.read_position(0, 1000).data
        partition.append_replicated(batch, 0)
        slave = SlaveEnd(topics)
        slave.hears(sync.Attached(sync.ATTACHED, EPOCH, [sync.AttachResult(1, sync.Decision.FROM, 1, len(batch), "")]))
        flushed = len(batch) if flushes else 0
        await slave.acknowledges(lambda ack: [(1, len(batch), flushed)] == [tuple(entry) for entry in ack.copied])
        assert partition.log.flushed_position == flushed
        slave.link.close()

    run_slave(tmp_path, scene)
