"""Damaged logs of real replicas: a slave copies its own anew, a master refuses its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.cli.log_reader import find_partitions, verify_partition
from metamq.cli.show.replica_view import damage_faults as advice
from metamq.client.net.transport import BrokerConnection
from metamq.errors import CorruptData
from metamq.testing import BrokerProcess
from metamq.wire import status
from metamq.wire.batch import walk
from metamq.wire.commands import Command, Get, GetPartition, GetResult
from metamq.wire.headers import unpack_list
from metamq.zk.cluster.topics import FlushEvery
from tests.broker.ha.test_replication import Group, a_sync_topic, log_bytes, raises_fenced, replica_group, send
from tests.parts import is_at_end, statistics, wait_until

BASE_OFFSET_AT = 8
"""In a batch's header."""
FAR_BYTES = 2048


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group(far_behind_bytes=FAR_BYTES) as made:
        yield made


def damage(broker: BrokerProcess, at: int = 0) -> None:
    """Changes a byte of the log of partition 0."""
    (path,) = (broker.data / "topics").glob("[!~]*/0/*.log")
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data[at : at + 1])


def set_aside(broker: BrokerProcess) -> list[Path]:
    return list((broker.data / "topics").glob("*/0.damaged-*"))


def incarnation(broker: BrokerProcess) -> int:
    return int(statistics(broker)["incarnation"])


@pytest.mark.slow
def test_a_slave_that_finds_damage_at_its_start_copies_the_log_anew_and_a_master_refuses_it(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=2)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 100)
    first = incarnation(slave)
    slave.kill()
    damage(slave)
    slave.start()
    wait_until(lambda: incarnation(slave) == first + 1, what="another incarnation")
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    assert len(set_aside(slave)) == 1
    assert "is copied again from the master" in slave.log_path.read_text()
    assert sorted(group.read(topic)) == sorted(values)

    master = group.cluster.broker
    master.kill()
    damage(master)
    master.start()
    wait_until(lambda: group.replication(0)["role"] == "master", what="a master again")
    assert set_aside(master) == [], "nobody else may have what is in it"
    assert "is not served" in master.log_path.read_text()
    group.wait_insync(0, 1)
    group.promote(1)  # which has it all; then the former master is a slave, and copies
    wait_until(lambda: set_aside(master) != [], what="the former master's log aside")
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_slave_that_comes_when_its_master_is_damaged_is_not_promoted_without_accepted_loss(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=2)
    send(group, topic, 100)
    master = group.cluster.broker
    master.kill()
    damage(master)
    master.start()
    wait_until(lambda: group.replication(0)["role"] == "master", what="a master again")
    slave = group.add_slave()
    wait_until(lambda: group.ends(1).get((topic, 1), (0, 0))[0] > 0, what="a copy of what is left")
    wait_until(lambda: group.replication(0)["slaves"][0]["stage"].startswith("without a log"), what="its stage")
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))
    with group.cluster.admin() as admin:
        admin.delete(topic)
    group.wait_insync(0, 1)  # nothing is damaged any more
    assert slave.running


def test_a_slave_that_is_damaged_while_it_runs_copies_the_log_anew(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 50)
    damage(slave, at=BASE_OFFSET_AT)

    async def read() -> None:
        connection = await BrokerConnection.open("127.0.0.1", slave.port)
        try:
            poll = Get(1000, 1, 1 << 20, 1 << 20, [GetPartition(1, topic, identity, 0)], [(1, 0)], [])
            (result,) = unpack_list(GetResult, await connection.request(Command.GET, poll, timeout_s=60))
            assert isinstance(status.decode_error(result.status, result.error), CorruptData)
        finally:
            await connection.close()

    with group.cluster.admin() as admin:
        identity = admin.describe_topic(topic).config.id
    asyncio.run(read())
    wait_until(lambda: set_aside(slave) != [], what="the log aside")
    assert incarnation(slave) == 2
    group.wait_insync(0, 1)
    values += send(group, topic, 10, b"more")
    group.wait_equal(0, 1)
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
def test_what_comes_damaged_from_a_slave_is_read_from_the_master(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 500)
    group.wait_equal(0, 1)  # else the slave may not know yet that there is something to read
    (log,) = log_bytes(slave.data).values()
    ends = [at + header.size for at, header in walk(memoryview(log))]
    with group.cluster.consumer(
        topics=[topic], read_from="any", partition_fetch_max_bytes=1, prefetch_bytes=1, idle_timeout_s=2
    ) as consumer:
        read: list[bytes] = []
        damaged_at = 0
        while True:
            for message in consumer:
                read.append(message.value)
                if not damaged_at and statistics(slave)["counters"]["bytes_out"] > 0:  # it may be sent there late
                    damaged_at = len(read) + 20
                    damage(slave, at=ends[damaged_at] - 8)  # the value, which only its reader looks at
            if is_at_end(consumer):
                break
    assert 0 < damaged_at < len(values) - 100, "far from the end it reads from the slave"
    assert read == values


def test_a_damaged_slave_without_a_master_keeps_its_log_and_is_not_promoted(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    send(group, topic, 50)
    slave.kill()
    group.cluster.broker.stop()
    damage(slave)
    slave.start()
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))
    assert set_aside(slave) == [], "it may be the best copy that there is"
    group.cluster.broker.start()
    wait_until(lambda: set_aside(slave) != [], what="the log aside")
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)


def damage_value(broker: BrokerProcess, number: int) -> None:
    """Changes a byte of a value, which only a checksum notices, in one of the batches of partition 0."""
    (path,) = (broker.data / "topics").glob("[!~]*/0/*.log")
    ends = [at + header.size for at, header in walk(memoryview(path.read_bytes()))]
    damage(broker, at=ends[number] - 8)


def has_damage(broker: BrokerProcess) -> bool:
    """Whether `metamq log verify` finds damage in any log of a replica, the journal's included."""
    return any(verify_partition(one, lambda _size: None).is_damaged for one in find_partitions(broker.data))


@pytest.mark.slow
def test_a_slave_whose_log_was_damaged_while_it_was_down_finds_it_and_copies_it_again(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=1)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 50)
    group.wait_equal(0, 1)
    assert slave.stop() == 0
    damage_value(slave, 20)
    assert has_damage(slave)
    slave.start()  # nothing is read of a log that was closed cleanly: it is in sync before the scrub has found it
    wait_until(lambda: set_aside(slave) != [], what="the log aside")
    group.wait_insync(0, 1)
    group.wait_equal(0, 1)
    assert not has_damage(slave)
    assert incarnation(slave) == 2
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
def test_a_masters_damage_that_a_reader_meets_is_repaired_by_a_promotion(group: Group) -> None:
    """The whole way: the reader's error, the report, the advice, the promotion, the repair, and back."""
    topic = a_sync_topic(group, flush="ack", partitions=1)
    master, slave = group.cluster.broker, group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 50)
    group.wait_equal(0, 1)
    damage_value(master, 20)
    with pytest.raises(CorruptData, match=f"{topic}/0-0 at offset 20 is damaged"):
        group.read(topic)

    def advised() -> list[str]:
        with group.cluster.admin() as admin:
            return [found.hint for found in advice(admin.replicas()[0])]

    wait_until(advised, what="the damage told")
    assert "`metamq ha promote --broker 0 --slave 1` makes replica 1, which is in sync, the master" in advised()[0]
    values += send(group, topic, 10, b"while it is damaged")
    group.promote(1)
    wait_until(lambda: set_aside(master) != [], what="the former master's log aside")
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert [has_damage(one) for one in (master, slave)] == [False, False]
    assert advised() == []
    group.promote(0)
    group.wait_insync(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_slave_that_meets_its_masters_damage_says_so_and_copies_the_rest(group: Group) -> None:
    topic = a_sync_topic(group, flush="ack", partitions=2)
    master = group.cluster.broker
    send(group, topic, 60)
    damage_value(master, 10)
    slave = group.add_slave(scrub_bytes_per_s=0)
    wait_until(lambda: "is damaged, but still served: " in master.log_path.read_text(), what="the damage reported")
    wait_until(lambda: group.ends(1).get((topic, 1)) == group.ends(0)[topic, 1], what="a copy of the other partition")
    wait_until(lambda: group.replication(0)["slaves"][0]["stage"].startswith("without a log"), what="its stage")
    assert slave.running
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))


TORN_BYTES = 50


def cut_short(log: bytes) -> bytes:
    return log[:-TORN_BYTES]


def zeroed(log: bytes) -> bytes:
    return log[:-TORN_BYTES] + bytes(TORN_BYTES)


def garbled(log: bytes) -> bytes:
    return log[:-TORN_BYTES] + bytes(byte ^ 0xFF for byte in log[-TORN_BYTES:])


def tear(broker: BrokerProcess, torn: Callable[[bytes], bytes]) -> None:
    """The last bytes of partition 0 never reached the disk."""
    (path,) = (broker.data / "topics").glob("[!~]*/0/*.log")
    path.write_bytes(torn(path.read_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize("torn", [cut_short, zeroed, garbled])
def test_a_slave_whose_unflushed_tail_is_torn_is_somebody_else_until_it_has_caught_up(
    group: Group, torn: Callable[[bytes], bytes]
) -> None:
    """It had acknowledged what is gone now, and the set counts on who acknowledged it."""
    topic = a_sync_topic(group, partitions=1, flush=FlushEvery(None, None))
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 50)
    group.wait_equal(0, 1)
    group.lose_master(group.cluster.broker.kill, 1)
    slave.kill()
    tear(slave, torn)
    slave.start()
    assert set_aside(slave) == [], "what was never flushed is no damage"
    assert group.ends(1)[topic, 0][0] == 49
    assert incarnation(slave) == 2
    assert group.state().insync == ((0, 1), (1, 1)), "which says nothing of who is there now"
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))
    group.cluster.broker.start()
    wait_until(lambda: group.state().insync == ((0, 1), (1, 2)), what="the new incarnation in sync")
    values += send(group, topic, 10, b"more")
    group.wait_equal(0, 1)
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)
