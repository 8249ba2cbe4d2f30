"""What slaves know of the master's stable marks, and readers who wait there for what they do not know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from metamq.broker.data.partition import BatchIds, Partition
from metamq.broker.front_door.fetch_session import FetchSession, ReplicaReadRole
from metamq.broker.front_door.limits.turns import Turns
from metamq.errors import CorruptData, OffsetDiverged
from metamq.wire import status, sync
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.wire.commands import Get, GetPartition, GetResult
from metamq.wire.connection import Request
from metamq.wire.frames import Buffer
from tests.broker.ha import test_service
from tests.broker.ha.test_replication import Group, a_sync_topic, replica_group
from tests.broker.ha.test_service import EPOCH, TOPIC, Master, a_master, turns

MIB = 1024 * 1024


class Slave(test_service.Slave):
    """Keeps what it is told of stable marks."""

    def __init__(self, master: Master) -> None:
        self.told: list[int] = []
        super().__init__(master.service)

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        size = super().push(header, bodies)
        frame = sync.unpack_from_master(msgpack.unpackb(msgpack.packb(header)))
        self.told += [offset for _handle, offset, _position in getattr(frame, "stable", [])]
        return size


async def flush(partition: Partition) -> None:
    ticket = partition.start_flush(0)
    assert ticket is not None
    await asyncio.to_thread(ticket.sync)
    partition.finish_flush(ticket)


def test_a_slave_that_does_not_count_is_told_of_stable_marks_too(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master)
        slave.link.learner = True
        slave.attach()
        for count in range(1, 4):
            master.append()
            await turns()
            slave.acknowledges(count)
            slave.link.beat()
            assert slave.told[-1] == master.stable == count

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_slaves_are_told_when_the_masters_own_flush_is_the_last(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master)
        slave.attach()
        await turns()
        slave.acknowledges(0)
        await turns()
        master.append()
        await turns()
        slave.acknowledges(1)
        assert master.stable == 0
        await flush(master.partition)
        slave.link.beat()
        assert slave.told[-1] == master.stable == 1

    with a_master(tmp_path, replace(TOPIC, flush="ack")) as (_topics, make):
        asyncio.run(scenario(make))


@contextmanager
def a_slow_link() -> Iterator[Group]:
    """Copies take their time; and a slave becomes readable in the middle of them."""
    with replica_group(replication_bytes_per_s=8 * MIB) as group:
        yield group


@pytest.mark.slow
def test_a_slave_that_copies_idle_topics_shows_and_offers_them() -> None:
    """News of the stable marks comes once, before the copies; that one partition is here makes the slave look anew at
    its role, while the other is still being copied."""
    with a_slow_link() as group:
        for topic, frames in (("small", 1), ("large", 12)):
            a_sync_topic(group, topic, partitions=1)
            with group.cluster.producer(compression=None) as producer:
                producer.send_many(topic, [bytes(1024)] * (frames * 1024)).result(20)
        group.add_slave()
        group.wait_insync(0, 1)
        group.wait_equal(0, 1)


class Replica:
    """The role that a fetch session sees, as the test has it played."""

    is_master = False
    epoch = EPOCH
    master = 0

    def __init__(self, find: Callable[[str, str, int], Partition]) -> None:
        self.find = find
        self.turns = Turns()

    def preferred_replica(self, partition: Partition, position: int) -> int:
        return self.master

    def found_damage(self, partition: Partition, error: CorruptData) -> None:
        raise error


class Reader:
    """A fetch session over the log of a slave that has ten messages."""

    def __init__(self, partition: Partition, find: Callable[[str, str, int], Partition]) -> None:
        self.partition = partition
        self.ids = BatchIds(EPOCH)
        self.role = Replica(find)
        self.answers: list[list[GetResult]] = []
        self.session = FetchSession(
            cast(ReplicaReadRole, self.role),
            lambda _request, results, _bodies: self.answers.append(results),
            lambda: True,
            asyncio.get_running_loop(),
        )
        partition.unbound()
        self.append(10)
        partition.freeze()

    def append(self, count: int) -> None:
        for _ in range(count):
            batch = memoryview(encode([b"v"], base_timestamp_us=1))
            self.partition.append(batch, [read_header(batch, 0)], self.ids)

    def polls(self, offset: int, wait_ms: int) -> None:
        """Opens the partition, with a message of this epoch read last."""
        opened = [GetPartition(1, TOPIC.topic, TOPIC.id, 0, EPOCH)]
        poll = msgpack.unpackb(msgpack.packb(Get(wait_ms, 1, 1 << 20, 1 << 20, opened, [(1, offset)], [])))
        self.session.get(Request(1, 2, poll, memoryview(b"")))


def with_a_reader(path: Path, scenario: Callable[[Reader], Awaitable[None]]) -> None:
    async def run() -> None:
        await topics.apply({"t": TOPIC}, {})
        partition = topics.get("t", 0)
        assert partition is not None
        await scenario(Reader(partition, topics.find))

    with a_master(path) as (topics, _make):
        asyncio.run(run())


@pytest.mark.parametrize("ahead", [0, 10])
def test_who_waits_at_a_slave_in_vain_is_sent_to_the_master(tmp_path: Path, ahead: int) -> None:
    """It may be what the slave is never told of; a master that is not there is not named."""

    async def scenario(reader: Reader) -> None:
        reader.polls(10 + ahead, wait_ms=0)
        ((result,),) = reader.answers
        assert (result.status, result.size, result.preferred_replica) == (status.OK, 0, 0)
        reader.append(5)
        reader.partition.unbound()
        reader.session.get(Request(1, 2, list(Get(0, 1, 1 << 20, 1 << 20, [], [], [])), memoryview(b"")))
        assert reader.answers[1:] == [[]], "it was answered, so that it is not armed any more"

    async def without_a_master(reader: Reader) -> None:
        reader.role.master = -1
        reader.polls(10 + ahead, wait_ms=0)
        assert reader.answers == [[]]

    with_a_reader(tmp_path / "with", scenario)
    with_a_reader(tmp_path / "without", without_a_master)


def test_a_reader_that_waits_ahead_of_a_slave_is_told_when_that_one_is_promoted_with_loss(tmp_path: Path) -> None:
    """Whether they agree could not be said before: it had read 20 where the slave had 10."""

    async def scenario(reader: Reader) -> None:
        reader.polls(20, wait_ms=20_000)
        assert reader.answers == []
        reader.role.is_master, reader.role.epoch = True, EPOCH + 1
        reader.ids.start_epoch(EPOCH + 1)
        reader.partition.unbound()
        reader.append(15)
        await turns()
        ((result,),) = reader.answers
        error = status.decode_error(result.status, result.error)
        assert isinstance(error, OffsetDiverged)
        assert error.agreed == 10

    with_a_reader(tmp_path, scenario)
