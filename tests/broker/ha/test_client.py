"""The slave's end of a link with real logs, and a master that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from metamq.broker.data.flusher import Flusher
from metamq.broker.data.topics import Topics
from metamq.broker.ha import slave_link
from metamq.broker.ha.client import HAClient
from metamq.broker.ha.slave_link import SlaveLink
from metamq.errors import MetamqError
from metamq.wire import sync
from metamq.zk.cluster.registrations import Registration
from tests.broker.ha.test_acknowledgements import FLUSHED
from tests.broker.ha.test_service import EPOCH, TOPIC, a_master, fails

REGISTRATION = Registration(
    broker_id=0, replica=1, incarnation=7, folder="f", lock="x", host="127.0.0.1", port=1, version="1"
)


class SlaveEnd:
    """The real slave's end of a link; the test is the network, and the master."""

    address = "a test"

    def __init__(self, topics: Topics) -> None:
        self.closed: asyncio.Future[MetamqError] = asyncio.get_running_loop().create_future()
        self.said: list[Any] = []
        self._speaks = asyncio.Event()
        self.registration = REGISTRATION
        self.followed: list[int] = []
        client = HAClient(
            lambda: self.registration, topics, Flusher(fails), learner=False, security=None, generation=lambda: 1,
            known_epoch=lambda: 0, begun=lambda epoch: None,
            followed=self.followed.append, gave_up=lambda given_up: None,
            changed=lambda: None, full=lambda: None, failed=fails,
        )  # fmt: skip
        self.link = SlaveLink(client, self, topics, client._flusher)  # type: ignore[arg-type]
        topics.closing = self.link.detach
        self.link.begin(sync.Accept(sync.ACCEPT, EPOCH, 2, 3_600_000))

    def push(self, frame: sync.FromSlave) -> None:
        self.said.append(frame)
        self._speaks.set()

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    async def speaks(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._speaks.clear()
                await self._speaks.wait()

    async def acknowledges(self, what: Callable[[sync.Ack], bool]) -> None:
        await self.speaks(lambda: any(isinstance(frame, sync.Ack) and what(frame) for frame in self.said))

    def attached(self) -> list[sync.AttachPartition]:
        return [partition for frame in self.said if isinstance(frame, sync.Attach) for partition in frame.partitions]

    def decides(self, handle: int, decision: sync.SyncDecision, offset: int = 0, position: int = 0) -> None:
        self.hears(sync.Attached(sync.ATTACHED, EPOCH, [sync.AttachResult(handle, decision, offset, position, "")]))

    def hears(self, frame: sync.FromMaster, body: bytes = b"") -> None:
        self.link.received(msgpack.unpackb(msgpack.packb(frame)), memoryview(body))
        assert not self.link.ended.done()


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
        for handle in (1, 2):
            slave.decides(handle, sync.SyncDecision.FROM)
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
        slave.decides(1, sync.SyncDecision.FROM, 1, len(batch))
        flushed = len(batch) if flushes else 0
        await slave.acknowledges(lambda ack: [(1, len(batch), flushed)] == [tuple(entry) for entry in ack.copied])
        assert partition.log.flushed_position == flushed
        slave.link.close()

    run_slave(tmp_path, scene)


@pytest.mark.parametrize("ends", ["decided", "deleted"])
def test_a_generation_is_followed_once_the_last_log_is_decided_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A log that has to wait is not decided upon: under a generation that was followed it could not be cut any more."""
    monkeypatch.setattr(slave_link, "ATTACH_AGAIN_S", 0.01)

    async def scene(_master: Any, topics: Topics) -> None:
        other = replace(FLUSHED, topic="other")
        await topics.apply({"t": FLUSHED, "other": other}, {})
        slave = SlaveEnd(topics)
        slave.decides(1, sync.SyncDecision.WAIT)
        slave.decides(2, sync.SyncDecision.FROM)
        assert slave.followed == []
        await slave.speaks(lambda: len(slave.attached()) == 3)
        again = slave.attached()[-1]
        assert (again.topic, slave.followed) == ("t", [])
        if ends == "decided":
            slave.decides(again.handle, sync.SyncDecision.FROM)
        else:
            slave.decides(again.handle, sync.SyncDecision.WAIT)
            await topics.apply({"other": other}, {})
        assert slave.followed == [2]
        slave.link.close()

    run_slave(tmp_path, scene)


def test_a_replica_that_finds_out_that_it_lacks_something_leaves_the_link_it_joined_as_another(tmp_path: Path) -> None:
    """A log that is opened late tells it; in sync would stay a member that is nobody any more."""

    async def scene(_master: Any, topics: Topics) -> None:
        await topics.apply({"t": FLUSHED}, {})
        slave = SlaveEnd(topics)
        partition = topics.get("t", 0)
        assert partition is not None
        slave.registration = replace(REGISTRATION, incarnation=8)
        slave.link.attach([partition])
        assert "joins as another one" in str(slave.link.ended.result())
        slave.link.close()

    run_slave(tmp_path, scene)


def test_what_a_slave_has_is_flushed_once_its_topic_asks_for_that(tmp_path: Path) -> None:
    """Else its master would count it as behind until the next append, and hand nothing over to it."""

    async def scene(master: Any, topics: Topics) -> None:
        await topics.apply({"t": TOPIC}, {})
        slave = SlaveEnd(topics)
        topics.flush_changed = slave.link.flushes_now
        slave.decides(1, sync.SyncDecision.FROM)
        master.append()
        batch = bytes(master.partition.log.read_position(0, 1000).data)
        slave.hears(sync.Data(sync.DATA, EPOCH, 1, [(1, 0, len(batch), 0)], []), batch)
        await slave.acknowledges(lambda ack: ack.held_seq == 1)
        await topics.apply({"t": replace(TOPIC, flush="ack")}, {})
        await slave.acknowledges(lambda ack: [(1, len(batch), len(batch))] == [tuple(entry) for entry in ack.copied])
        slave.link.close()

    run_slave(tmp_path, scene)
