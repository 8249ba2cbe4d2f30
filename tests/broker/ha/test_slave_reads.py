"""Reading from slaves, with real processes: what is served, who is sent where, that nothing is missed or doubled."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from metamq import Consumer
from metamq.client.net.outages import WARN_AFTER_S
from metamq.client.net.transport import BrokerConnection
from metamq.errors import Fenced
from metamq.testing import BrokerProcess
from metamq.wire import status
from metamq.wire.commands import EARLIEST, LATEST, Command, Get, GetPartition, OffsetsEntry, OffsetsResult
from metamq.wire.commands import GetResult as Result
from metamq.wire.headers import unpack_list
from metamq.zk.cluster.offers import slaves_offering
from metamq.zk.session.session import Session
from tests.broker.ha.test_replication import Group, a_sync_topic, replica_group, send
from tests.parts import statistics, until_answered, wait_until

FAR_BYTES = 64 * 1024
FETCH_WAIT_MS = 500


@pytest.fixture
def group() -> Iterator[Group]:
    # A master's retention is a test's own business.
    with replica_group(far_behind_bytes=FAR_BYTES, retention_check_s=3600) as made:
        yield made


class Reader:
    """A consumer in a thread; checks that each partition's offsets come one after the other."""

    def __init__(self, group: Group, topic: str, **settings: Any) -> None:
        self.values: list[bytes] = []
        self.wrong: list[str] = []
        self._next: dict[str, int] = defaultdict(int)
        self._may = threading.Semaphore(0)
        self._free = False
        self.consumer: Consumer[bytes] = group.cluster.consumer(topics=[topic], fetch_wait_ms=FETCH_WAIT_MS, **settings)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for message in self.consumer:
            if not self._free:
                self._may.acquire()
            if message.offset != self._next[message.partition]:
                self.wrong.append(f"{message.partition}: {message.offset} after {self._next[message.partition]}")
            self._next[message.partition] = message.offset + 1
            self.values.append(message.value)

    def read(self, count: int) -> None:
        """Lets the application take so many messages."""
        wanted = len(self.values) + count
        for _ in range(count):
            self._may.release()
        wait_until(lambda: len(self.values) >= wanted, what=f"{count} messages")

    def read_all(self, values: list[bytes]) -> None:
        """From now on all that comes; waits until these are there, and nothing else."""
        self._free = True
        self._may.release()
        wait_until(lambda: len(self.values) >= len(values), limit_s=60, what=f"{len(values)} messages")
        assert sorted(self.values) == sorted(values)
        assert self.wrong == []

    def close(self) -> None:
        self.consumer.close()
        self._free = True
        self._may.release()
        self._thread.join(60)


def bytes_out(broker: BrokerProcess) -> int:
    found: int = statistics(broker)["counters"]["bytes_out"]
    return found


def fetches(broker: BrokerProcess) -> int:
    found: int = statistics(broker)["counters"]["fetches"]
    return found


def leaves_alone(group: Group, topic: str, replica: BrokerProcess, reader: Reader, values: list[bytes]) -> bool:
    """Whether a reader that has these gets some more, and nothing of it from this replica."""
    before = bytes_out(replica)
    values += send(group, topic, 20, b"more of %d" % len(values))
    reader.read_all(values)
    return bytes_out(replica) == before


def offering(group: Group, topic: str) -> set[tuple[int, int]]:
    async def ask() -> set[tuple[int, int]]:
        async with await Session.open(group.cluster.zookeeper) as session:
            return await slaves_offering(session, topic)

    return until_answered(lambda: asyncio.run(ask()))


def wait_offered(group: Group, topic: str, *slaves: int) -> None:
    wait_until(lambda: offering(group, topic) == {(0, slave) for slave in slaves}, what=f"{slaves} offering {topic}")


def topic_id(group: Group, topic: str) -> str:
    with group.cluster.admin() as admin:
        return admin.describe_topic(topic).config.id


@pytest.mark.slow
def test_consumers_read_on_from_a_slave_while_there_is_no_master_and_go_back(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    topic = a_sync_topic(group)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    wait_offered(group, topic, 1)
    values = send(group, topic, 300)
    small = {"prefetch_bytes": 1, "partition_fetch_max_bytes": 1, "fetch_max_bytes": 1}
    on, new = Reader(group, topic, read_from="any", **small), None
    try:
        on.read(20)
        assert bytes_out(slave) == 0, "while there is a master, it is read from"
        group.cluster.broker.kill()
        on.read(100)
        assert bytes_out(slave) > 0
        new = Reader(group, topic, read_from="any")  # where to begin, a slave says as well
        new.read_all(values)
        wait_until(lambda: "reading from slaves" in caplog.text, what="that told")
        caplog.clear()  # a machine that is slow takes longer to find the slave than to complain
        answered, long_polls = fetches(slave), int(2000 * WARN_AFTER_S / FETCH_WAIT_MS)
        wait_until(lambda: fetches(slave) >= answered + long_polls, what="empty answers for longer than WARN_AFTER_S")
        assert "cannot be fetched at present" not in caplog.text
        group.replicas[0].start()
        group.wait_insync(0, 1)
        values += send(group, topic, 20, b"more")
        on.read_all(values)
        new.read_all(values)

        def is_left_alone() -> bool:
            before = bytes_out(slave)
            values.extend(send(group, topic, 5, b"last %d" % len(values)))
            on.read_all(values)
            new.read_all(values)
            return bytes_out(slave) == before

        wait_until(is_left_alone, what="reading from the master, as there is one again")
    finally:
        on.close()
        if new is not None:
            new.close()


@pytest.mark.slow
@pytest.mark.parametrize("read_from", ["master", "any"])
def test_readers_go_on_at_the_new_master_and_at_the_old_one_again(group: Group, read_from: str) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    wait_offered(group, topic, 1)
    values = send(group, topic, 20)
    reader = Reader(group, topic, read_from=read_from)
    try:
        reader.read_all(values)
        for master, former in ((1, 0), (0, 1)):
            group.promote(master)
            values += send(group, topic, 20, b"at %d" % master)
            reader.read_all(values)
            group.wait_insync(0, 1, master=master)

            wait_until(
                partial(leaves_alone, group, topic, group.replicas[former], reader, values),
                what="reading from the new master",
            )
        group.lose_master(group.replicas[0].kill, 1)
        group.promote(1)
        values += send(group, topic, 20, b"last")
        reader.read_all(values)
    finally:
        reader.close()


@pytest.mark.slow
def test_who_is_far_behind_reads_from_a_slave_and_then_from_the_master(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    wait_offered(group, topic, 1)
    with group.cluster.producer(compression=None, linger_ms=0) as producer:
        for _ in range(200):
            producer.send_many(topic, [b"x" * 1000] * 10).result(60)
    read = [b"x" * 1000] * 2000
    small = {"fetch_max_bytes": 32 * 1024, "partition_fetch_max_bytes": 32 * 1024}
    for read_from, from_slave in (("master", False), ("any", True)):
        at_master, at_slave = bytes_out(group.cluster.broker), bytes_out(slave)
        reader = Reader(group, topic, read_from=read_from, **small)
        try:
            reader.read_all(read)
            assert (bytes_out(slave) - at_slave > 2 * FAR_BYTES) == from_slave
            assert bytes_out(group.cluster.broker) > at_master

            wait_until(partial(leaves_alone, group, topic, slave, reader, read), what="reading from the master")
        finally:
            reader.close()


@pytest.mark.slow
def test_what_a_slave_has_not_any_more_is_read_from_the_master_also_by_who_begins(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1, segment_bytes=1024 * 1024, retention_bytes=1024 * 1024)
    group.add_slave(retention_check_s=0.1)
    group.wait_insync(0, 1)
    wait_offered(group, topic, 1)
    with group.cluster.producer(compression=None) as producer:
        for _ in range(80):
            producer.send_many(topic, [b"%0100d" % 7] * 500).result(60)

    def starts(number: int) -> int:
        found: int = statistics(group.replicas[number])["partitions"][0]["start_offset"]
        return found

    wait_until(lambda: starts(1) > 0, what="retention at the slave")
    with group.cluster.admin() as admin:  # from now on nothing goes, at the master neither: it looks when it starts
        admin.alter(topic, retention_bytes=1024 * 1024 * 1024)
    assert starts(0) == 0
    reader = Reader(group, topic, read_from="any", partition_fetch_max_bytes=64 * 1024)
    try:
        reader.read_all([b"%0100d" % 7] * 40_000)
        assert reader.consumer.health().lost_messages == 0
    finally:
        reader.close()
    group.cluster.broker.kill()
    new = Reader(group, topic, read_from="any", partition_fetch_max_bytes=64 * 1024)
    try:
        wait_until(
            lambda: any("begins at" in str(one.last_error) for one in new.consumer.health().partitions.values()),
            what="nobody to say where the earliest is",
        )
        assert new.values == []
        group.cluster.broker.start()
        new.read_all([b"%0100d" % 7] * 40_000)
    finally:
        new.close()


def test_a_slave_waits_for_what_is_to_come_and_refuses_what_is_the_masters(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 10)
    wait_offered(group, topic, 1)
    identity = topic_id(group, topic)
    epochs: list[int] = []

    async def ask() -> None:
        connection = await BrokerConnection.open("127.0.0.1", slave.port)
        try:
            ends = [OffsetsEntry(topic, identity, 0, what) for what in (EARLIEST, LATEST)]
            found = unpack_list(OffsetsResult, await connection.request(Command.OFFSETS, ends, timeout_s=60))
            assert [one.offset for one in found] == [0, len(values)]
            assert found[0].epoch == -1, "of the message before"
            assert found[1].epoch >= 1
            epochs.append(found[1].epoch)
            with_a_place = [OffsetsEntry(topic, identity, 0, LATEST, 0)]
            (one,) = unpack_list(OffsetsResult, await connection.request(Command.OFFSETS, with_a_place, timeout_s=60))
            assert isinstance(status.decode_error(one.status, one.error), Fenced), "only a master has the last word"
            opened = [GetPartition(1, topic, identity, 0)]
            for ahead in (0, 1, 1000):
                poll = Get(100, 1, 1 << 20, 1 << 20, opened, [(1, len(values) + ahead)], [])
                (result,) = unpack_list(Result, await connection.request(Command.GET, poll, timeout_s=60))
                assert (result.status, result.size) == (status.OK, 0), "nothing, and no error"
                assert result.preferred_replica == 0, "whether there is something to wait for, the master knows"
                opened = []
            poll = Get(90_000, 1, 1 << 20, 1 << 20, [], [(1, len(values) + 1)], [])
            waiting = connection.send(Command.GET, poll)
            await asyncio.to_thread(send, group, topic, 2, b"came")
            response = await asyncio.wait_for(waiting, 60)
            (result,) = unpack_list(Result, response.header)
            assert result.status == status.OK
            assert result.stable_offset == len(values) + 2
            assert b"came-1" in bytes(response.body)
            await refuses_a_put(connection)
        finally:
            await connection.close()

    async def refuses_a_put(connection: BrokerConnection) -> None:
        body = b"-" * 64
        answer = await connection.send(Command.PUT, [[topic, identity, 0, len(body)]], [body])
        error = status.decode_error(answer.header[0][0], answer.header[0][3])
        assert isinstance(error, Fenced)

    asyncio.run(ask())

    async def read_behind(epoch: int) -> Result:
        connection = await BrokerConnection.open("127.0.0.1", slave.port)
        try:
            opened = [GetPartition(1, topic, identity, 0, epoch)]
            (result,) = await connection.request(
                Command.GET, Get(1000, 1, 1 << 20, 1 << 20, opened, [(1, len(values))], []), timeout_s=5
            )
            return unpack_list(Result, [result])[0]
        finally:
            await connection.close()

    group.replicas[0].kill()
    slave.restart()  # it has not followed anybody yet, and knows what it has all the same
    assert asyncio.run(read_behind(epochs[0])).status == status.OK
    assert asyncio.run(read_behind(epochs[0] + 1000)).status == status.encode_error(Fenced("", ""))[0]


@pytest.mark.slow
def test_a_slave_offers_what_it_has_and_nothing_when_it_is_gone(group: Group) -> None:
    topic = a_sync_topic(group)
    assert offering(group, topic) == set()
    group.add_slave()
    second = group.add_slave()
    wait_offered(group, topic, 1, 2)
    later = a_sync_topic(group, "later")
    wait_offered(group, later, 1, 2)
    second.stop()
    wait_offered(group, topic, 1)
    group.promote(1)
    wait_until(lambda: offering(group, topic) == {(0, 0)}, what="the former master as a slave that has the topic")
