"""The master's side with a real log, and a slave that says what the test wants: what no real slave does on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from metamq.broker.data_folder import DataFolder
from metamq.broker.ha.connection import HAConnection
from metamq.broker.ha.insync import Change
from metamq.broker.ha.service import HAService, HASettings
from metamq.broker.log import FileCache
from metamq.broker.partition import BatchIds, Partition
from metamq.broker.topics import Topics
from metamq.errors import ClosedError
from metamq.wire import sync
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.wire.frames import Buffer
from metamq.zk.brokers import BrokerState
from metamq.zk.topics import TopicConfig

EPOCH = 4
LAG_S = 5.0
TOPIC = TopicConfig("t", {0: 1})


class Slave:
    """The slave's end of a link, without a network between: a Wire."""

    peer = "a test"
    writable = True

    def __init__(self, service: HAService) -> None:
        self.sent_seq = 0
        join = sync.Join(sync.JOIN, EPOCH, sync.MAGIC, 0, 1, 7, "folder", False, 1)
        self.link: HAConnection
        self.service = service
        self.link, _accept = service.join(join, self)

    def push(self, header: object, bodies: list[Buffer] | None = None) -> None:
        frame = sync.unpack_from_master(msgpack.unpackb(msgpack.packb(header)))
        if isinstance(frame, sync.Data):
            self.sent_seq = frame.first_seq + len(frame.entries) - 1

    def close(self) -> None:
        pass

    def says(self, frame: sync.FromSlave) -> None:
        self.service.received(self.link, msgpack.unpackb(msgpack.packb(frame)))

    def attach(self) -> None:
        empty = sync.AttachPartition(1, TOPIC.topic, TOPIC.id, 0, 0, 0, 0, 0, 0, [])
        self.says(sync.Attach(sync.ATTACH, EPOCH, [empty]))

    def acknowledges(self, seq: int) -> None:
        self.says(sync.Ack(sync.ACK, EPOCH, seq, seq, []))


class Master:
    """The service of one master with one partition, and a ZooKeeper that confirms everything."""

    def __init__(self, topics: Topics) -> None:
        self.partition = topics.get("t", 0)
        self.ids = BatchIds(EPOCH)
        self.asked: list[Change] = []
        self.state = BrokerState(EPOCH, 0, ((0, 1),), 1)
        settings = HASettings(0, (0, 1), EPOCH, 1, 3_600_000, round(LAG_S * 1000), 0)
        self.service = HAService(
            settings,
            topics,
            (self.state, 0),
            change=self.change,
            read=self.read,
            deposed=lambda: None,
            refuse_writes=lambda error: None,
            failed=lambda partition, error: None,
        )

    async def change(self, change: Change) -> int:
        self.asked.append(change)
        return change.version + 1

    async def read(self) -> tuple[BrokerState, int]:
        return self.state, 0

    def append(self) -> None:
        partition = self.partition
        assert isinstance(partition, Partition)
        batch = memoryview(encode([b"value"], base_timestamp_us=1))
        position = partition.log.end_position
        partition.append(batch, read_header(batch, 0), self.ids)
        self.service.appended(partition, batch, position, partition.log.end_offset)

    @property
    def stable(self) -> int:
        assert self.partition is not None
        return self.partition.log.stable_offset

    def after(self, seconds: float) -> None:
        self.service.tick(asyncio.get_running_loop().time() + seconds)


@contextmanager
def a_master(path: Path) -> Iterator[tuple[Topics, Callable[[], Awaitable[Master]]]]:
    folder = DataFolder.open(path, 0)
    files = FileCache(8, sync=lambda fd: None)
    topics = Topics(0, folder, files)

    async def make() -> Master:
        await topics.apply({"t": TOPIC}, {})
        return Master(topics)

    try:
        yield topics, make
    finally:
        topics.close(ClosedError("broker"), clean=False)
        files.close()
        folder.close(clean=False)


async def turns() -> None:
    """What the loop has been asked to do is done."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_slave_that_joins_and_acknowledges_nothing_holds_writes_up_for_the_lag_alone(tmp_path: Path) -> None:
    """Its link lives: it says something all the time, and so is not found out by its silence."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        master.append()
        await turns()
        assert (master.stable, slave.sent_seq) == (1, 1), "it does not count yet"
        slave.acknowledges(0)
        master.append()
        await turns()
        assert (master.stable, slave.sent_seq) == (1, 2), "it counts, and lacks the first message"
        master.after(LAG_S / 2)
        assert master.stable == 1
        master.after(LAG_S + 1)
        assert master.stable == 2, "it was let go"
        slave.acknowledges(0)
        master.append()
        await turns()
        assert master.stable == 3, "it does not begin again while it is behind"
        assert master.asked == []
        slave.acknowledges(slave.sent_seq)
        master.after(0)
        slave.acknowledges(slave.sent_seq)
        await turns()
        assert [change.members for change in master.asked] == [{(0, 1), (1, 7)}]
        master.append()
        await turns()
        assert master.stable == 3
        slave.acknowledges(slave.sent_seq)
        assert master.stable == 4

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_under_constant_load_a_slave_joins_that_was_let_go_before(tmp_path: Path) -> None:
    """It is never up to the log's end; that it keeps up is enough."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        master.append()
        await turns()
        slave.acknowledges(0)
        master.after(LAG_S + 1)
        for _ in range(5):
            master.append()
            await turns()
            slave.acknowledges(slave.sent_seq - 1)
            master.after(0)
        assert [change.members for change in master.asked] == [{(0, 1), (1, 7)}]

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))
