"""The master's side with a real log, and a slave that says what the test wants: what no real slave does on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import BatchIds, Partition
from metamq.broker.data.topics import Topics
from metamq.broker.ha import client as ha_client
from metamq.broker.ha.client import HAClient
from metamq.broker.ha.connection import HAConnection
from metamq.broker.ha.insync import Change
from metamq.broker.ha.service import HAService, HASettings
from metamq.broker.log.disk.files import FileCache
from metamq.errors import ClosedError, ConfigError, CorruptData, Fenced, MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.wire.frames import Buffer
from metamq.zk.cluster.brokers import BrokerState
from metamq.zk.cluster.registrations import BrokerAddress, Registration
from metamq.zk.cluster.topics import TopicConfig

EPOCH = 4
LAG_S = 600.0
"""So long that it is over when a test says so, and not when the machine stands still."""
TOPIC = TopicConfig("t", {0: 1})


class Slave:
    """The slave's end of a link, without a network between: a Wire."""

    peer = "a test"
    writable = True

    def __init__(
        self, service: HAService, epoch: int = EPOCH, broker_id: int = 0, replica: int = 1, incarnation: int = 7
    ) -> None:
        self.sent_seq = 0
        join = sync.Join(sync.JOIN, epoch, sync.MAGIC, broker_id, replica, incarnation, "folder", False, 1)
        self.link: HAConnection
        self.service = service
        self.link, _accept = service.join(join, self)

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        packed = msgpack.packb(header)
        frame = sync.unpack_from_master(msgpack.unpackb(packed))
        if isinstance(frame, sync.Data):
            self.sent_seq = frame.first_seq + len(frame.entries) - 1
        return len(packed) + sum(map(len, bodies or ()))

    def close(self) -> None:
        pass

    def says(self, frame: sync.FromSlave) -> None:
        self.service.received(self.link, msgpack.unpackb(msgpack.packb(frame)))

    def attach(self) -> None:
        empty = sync.AttachPartition(1, TOPIC.topic, TOPIC.id, 0, 0, 0, 0, 0, 0, [])
        self.says(sync.Attach(sync.ATTACH, EPOCH, [empty]))

    def acknowledges(self, seq: int, epoch: int = EPOCH) -> None:
        self.says(sync.Ack(sync.ACK, epoch, seq, seq, []))


class Master:
    """The service of one master with one partition, and a ZooKeeper that confirms everything."""

    def __init__(self, topics: Topics) -> None:
        self.partition = topics.get("t", 0)
        self.ids = BatchIds(EPOCH)
        self.asked: list[Change] = []
        self.may_ask = True
        self.answers = asyncio.Event()
        """ZooKeeper answers what it is asked for; until then it does not."""
        self.answers.set()
        self.state = BrokerState(EPOCH, 0, ((0, 1),), 1)
        settings = HASettings(0, (0, 1), EPOCH, 1, 3_600_000, round(LAG_S * 1000), 0)
        self.service = HAService(
            settings,
            topics,
            (self.state, 0),
            change=lambda change: self.change(change),  # which a test may replace
            read=self.read,
            may_ask=lambda: self.may_ask,
            deposed=lambda: None,
            failed=lambda partition, error: None,
        )

    async def change(self, change: Change) -> int:
        self.asked.append(change)
        await self.answers.wait()
        return change.version + 1

    async def read(self) -> tuple[BrokerState, int]:
        return self.state, 0

    def append(self) -> None:
        partition = self.partition
        assert isinstance(partition, Partition)
        batch = memoryview(encode([b"value"], base_timestamp_us=1))
        position = partition.log.end_position
        partition.append(batch, [read_header(batch, 0)], self.ids)
        self.service.appended(partition, batch, position, partition.log.end_offset)

    @property
    def stable(self) -> int:
        assert self.partition is not None
        return self.partition.log.stable_offset

    def after(self, seconds: float) -> None:
        self.service.tick(asyncio.get_running_loop().time() + seconds)


@contextmanager
def a_master(path: Path, topic: TopicConfig = TOPIC) -> Iterator[tuple[Topics, Callable[[], Awaitable[Master]]]]:
    folder = DataFolder.open(path, 0)
    files = FileCache(8, sync=lambda fd: None)
    topics = Topics(0, folder, files)

    async def make() -> Master:
        await topics.apply({"t": topic}, {})
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


async def in_sync(master: Any) -> Slave:
    slave = Slave(master.service)
    slave.attach()
    slave.acknowledges(0)
    await turns()
    assert [change.members for change in master.asked] == [{(0, 1), (1, 7)}]
    master.append()
    await turns()
    assert master.stable == 0, "it is waited for"
    return slave


def test_what_waits_for_replicas_when_its_log_is_found_to_be_damaged_may_be_stored(tmp_path: Path) -> None:
    with a_master(tmp_path) as (topics, make):

        async def scene() -> None:
            master = await make()
            slave = Slave(master.service)
            slave.attach()
            slave.acknowledges(0)
            await turns()
            master.append()
            told: list[MetamqError | None] = []
            assert master.partition is not None
            assert not master.partition.when_stable(1, told.append)
            topics.is_damaged(master.partition, CorruptData("t/0", "an older batch"))
            (error,) = told
            assert isinstance(error, CorruptData)
            assert error.outcome == "unknown"
            assert isinstance(master.partition.closed_by, CorruptData)
            assert master.partition.closed_by.outcome == "not_done", "what comes now is refused"

        asyncio.run(scene())


def test_nobody_is_added_while_a_log_is_damaged_at_the_master_but_who_was_in_sync_before(tmp_path: Path) -> None:
    with a_master(tmp_path) as (topics, make):

        async def scene() -> None:
            master = await make()
            member = Slave(master.service)
            member.attach()
            member.acknowledges(0)
            await turns()
            master.append()
            await turns()
            member.acknowledges(1)
            assert master.service.insync_count == 2
            assert master.partition is not None
            master.partition.log.epochs()  # which a real master has read by now
            topics.damaged = master.service.damaged
            topics.is_damaged(master.partition, CorruptData("t/0", "an older batch"))

            other = Slave(master.service, replica=2, incarnation=1)
            other.attach()
            other.acknowledges(0)
            await turns()
            assert master.service.insync_count == 2, "what it lacks, nobody can say"
            assert [s["stage"] for s in master.service.statistics()["slaves"]] == [
                "in sync",
                "without a log that is damaged at the master",
            ]

            master.service.leave(member.link, "its network is away")
            master.after(LAG_S + 1)
            await turns()
            assert master.service.insync_count == 1
            again = Slave(master.service)
            for _ in range(2):  # that it keeps up; that it counts
                again.acknowledges(0)
                await turns()
            assert master.service.membership.insync == {(0, 1), again.link.member}, "it has what is damaged here"
            for seconds in range(0, int(LAG_S) + 100, 50):
                again.acknowledges(0)
                master.after(seconds)
                await turns()
            assert master.service.insync_count == 2, "it does not lag behind a log that nobody can copy"

            await topics.apply({}, {})
            other = Slave(master.service, replica=2, incarnation=1)
            for _ in range(2):
                other.acknowledges(0)
                await turns()
            assert master.service.insync_count == 3, "the damaged log is deleted"

        asyncio.run(scene())


def test_what_a_slave_in_sync_has_and_its_master_lacks_is_damage_at_the_master(tmp_path: Path) -> None:
    """The master's folder was emptied, say. One that is not in sync says nothing of what was acknowledged."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        told: list[tuple[Any, MetamqError]] = []
        master.service.failed = lambda partition, error: told.append((partition, error))
        member = await in_sync(master)
        master.service.closed_by_slave(member.link, "it was killed")
        more = sync.AttachPartition(1, TOPIC.topic, TOPIC.id, 0, 0, 0, 5, 800, 3, [(EPOCH, 0, 0)])
        for slave, is_damage in ((Slave(master.service, replica=2), False), (Slave(master.service), True)):
            slave.says(sync.Attach(sync.ATTACH, EPOCH, [more]))
            assert bool(told) == is_damage
        ((partition, error),) = told
        assert partition is master.partition
        assert isinstance(error, CorruptData)
        assert "replica 1 is in sync and has data that this log lacks" in str(error)
        assert "Promote replica 1" in error.hint

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_what_a_slave_was_before_it_lost_something_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        former = await in_sync(master)
        master.service.closed_by_slave(former.link, "it was killed")
        Slave(master.service, incarnation=8)
        master.after(0)
        await turns()
        assert master.stable == 1

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_what_no_slave_of_this_term_says_is_refused_and_counts_for_nothing(tmp_path: Path) -> None:
    """Another epoch, more than was sent, a number below what it said before; whose JOIN is not to be taken."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        slave.acknowledges(0)  # it is required from here on
        master.append()
        await turns()
        for wrong in (
            lambda: slave.acknowledges(slave.sent_seq, EPOCH - 1),
            lambda: slave.acknowledges(slave.sent_seq, EPOCH + 1),
            lambda: slave.acknowledges(slave.sent_seq + 1),
            lambda: slave.says(sync.Ack(sync.ACK, EPOCH, 0, 1, [])),
            lambda: slave.says(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, 1 << 40, 0)])),
        ):
            raises(ProtocolError, wrong)
            assert master.stable == 0
        raises(Fenced, lambda: Slave(master.service, epoch=EPOCH + 1))
        raises(ConfigError, lambda: Slave(master.service, broker_id=1))
        raises(ConfigError, lambda: Slave(master.service, replica=0))
        slave.acknowledges(slave.sent_seq)
        assert master.stable == 1

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_two_links_of_one_replica_count_once(tmp_path: Path) -> None:
    """The second one takes the first one's place, whose acknowledgements are nobody's any more."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        first = Slave(master.service)
        first.attach()
        first.acknowledges(0)
        master.append()
        await turns()
        second = Slave(master.service)
        second.attach()
        await turns()
        assert len(master.service.links) == 1
        first.acknowledges(first.sent_seq)
        assert master.stable == 0
        assert first.link.closed

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_a_master_that_reads_another_epoch_takes_no_more_writes_at_once(tmp_path: Path) -> None:
    """Also when it had refused them to hand over, and that took too long."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        slave.acknowledges(0)
        slave.says(sync.HandOver(sync.HANDOVER, EPOCH, 1))
        master.state = BrokerState(EPOCH + 1, 1, ((1, 7),), 1)
        await asyncio.gather(*slave.link.tasks)
        asked = len(master.asked)
        assert "replica 1 is the master" in str(master.service.writes_refused)
        master.after(LAG_S + 1)
        await turns()
        assert len(master.asked) == asked

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_writes_are_refused_until_the_last_hand_over_has_ended(tmp_path: Path) -> None:
    """A slave whose link broke in the middle asks again over the next one."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        first = Slave(master.service)
        first.attach()
        master.append()  # which neither acknowledges
        first.says(sync.HandOver(sync.HANDOVER, EPOCH, 60_000))
        await turns()
        second = Slave(master.service)
        second.attach()
        second.says(sync.HandOver(sync.HANDOVER, EPOCH, 60_000))
        assert first.link.closed
        await asyncio.gather(*first.link.tasks)
        assert "it hands over" in str(master.service.writes_refused)
        master.service.leave(second.link, "it is gone")
        await asyncio.gather(*second.link.tasks)
        assert master.service.writes_refused is None

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_a_slave_leaves_a_master_that_hangs_in_the_handshake_when_there_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ha_client, "JOIN_TIMEOUT_S", 600)  # for so long it would wait for the first one

    async def scenario(topics: Topics) -> None:
        asked = [asyncio.Event(), asyncio.Event()]

        def listen(number: int) -> Awaitable[asyncio.Server]:
            async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                asked[number].set()
                await reader.read()
                writer.close()

            return asyncio.start_server(hang, "127.0.0.1", 0)

        servers = [await listen(number) for number in range(2)]
        registration = Registration(
            broker_id=0, replica=2, incarnation=1, folder="f", lock="x", host="127.0.0.1", port=1, version="1"
        )
        client = HAClient(
            lambda: registration, topics, Flusher(fails), learner=False, security=None, generation=lambda: 1,
            known_epoch=lambda: 0, begun=lambda epoch: None,
            followed=lambda generation: None, gave_up=lambda given_up: None,
            changed=lambda: None, full=lambda: None, failed=fails,
        )  # fmt: skip
        following = asyncio.ensure_future(client.run())
        try:
            async with asyncio.timeout(60):
                for replica, server in enumerate(servers):
                    port = server.sockets[0].getsockname()[1]
                    client.follow(BrokerAddress(0, replica, "master", "127.0.0.1", port, "1"))
                    await asked[replica].wait()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for server in servers:
                server.close()

    with a_master(tmp_path) as (topics, _make):
        asyncio.run(scenario(topics))


def fails(error: MetamqError) -> None:
    raise error


def raises(kind: type[MetamqError], what: Callable[[], object]) -> None:
    with pytest.raises(kind):
        what()


def test_a_slave_that_has_nothing_to_get_stays_in_sync(tmp_path: Path) -> None:
    """However long nothing is appended: it lacks nothing. One that says nothing goes, whatever there is to get."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        slave.acknowledges(0)
        await turns()
        assert [change.members for change in master.asked] == [{(0, 1), (1, 7)}]
        now = asyncio.get_running_loop().time()
        for _ in range(20):
            now += LAG_S
            slave.link.heard_at = now  # what its heartbeats do
            master.service.tick(now)
            await turns()
        assert len(master.asked) == 1
        assert len(master.service.links) == 1
        slave.link.heard_at = now - 3600 * 4
        master.service.tick(now)
        assert not master.service.links

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_an_answer_that_comes_after_the_deposition_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        master.answers.clear()
        slave = Slave(master.service)
        slave.attach()
        slave.acknowledges(0)
        await turns()
        assert len(master.asked) == 1
        master.service.state_read(BrokerState(EPOCH + 1, 1, ((1, 7),), 1), 1)
        master.answers.set()
        await turns()
        assert master.service.membership.insync == {(0, 1)}

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))
    assert "was not changed" not in caplog.text


def test_a_log_that_was_closed_for_damage_at_the_master_waits_and_the_link_goes_on(tmp_path: Path) -> None:
    """Not even its epochs can be told, since they were never read."""

    async def scenario(make: Callable[[], Awaitable[Any]], topics: Topics) -> None:
        master = await make()
        topics.is_damaged(master.partition, CorruptData("t/0", "a test"))
        slave = Slave(master.service)
        slave.attach()
        assert not slave.link.closed
        assert not slave.link.places

    with a_master(tmp_path) as (topics, make):
        asyncio.run(scenario(make, topics))


def test_a_change_that_failed_is_asked_for_again(tmp_path: Path) -> None:
    """Whatever it failed with: ZooKeeper's state of the broker may have been unreadable for a moment."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        works, errors = master.change, [Fenced("broker 0", "its state was deleted"), CorruptData("the state", "junk")]

        async def change(change: Change) -> int:
            if errors:
                raise errors.pop()
            return int(await works(change))

        master.change = change
        slave = Slave(master.service)
        slave.attach()
        slave.acknowledges(0)
        for _ in range(3):
            await turns()
            master.after(0)
        await turns()
        assert slave.link.member in master.service.membership.insync

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_of_replicas_that_are_gone_nothing_is_kept(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        for incarnation in range(7, 12):
            slave = Slave(master.service, incarnation=incarnation)
            master.after(0)
            master.service.closed_by_slave(slave.link, "it was killed")
        master.after(0)
        behind = master.service._behind
        assert [behind._away_since, behind._missing_since, behind._lacks] == [{}, {}, {}]

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))
