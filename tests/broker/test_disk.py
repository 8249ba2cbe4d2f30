"""A full disk, a failing one, and a damaged log: refused by name, nothing acknowledged lost, the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import struct
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from metamq.broker.log.disk.segments import take_inventory
from metamq.client.net.transport import BrokerConnection
from metamq.errors import CorruptData, DiskFull, MetamqError
from metamq.testing import BrokerProcess, Cluster
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.headers import unpack_list
from metamq.wire.limits import BATCH_BYTES_MAX
from metamq.zk.cluster.topics import TopicConfig
from tests.load import Load, blocking, check
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, http_get, read_topic, statistics, timed_out, wait_until

AnyBroker = BrokerProcess | LocalBroker

MEBIBYTE = 1024 * 1024
RESERVE_BYTES = 2 * BATCH_BYTES_MAX


class SmallDisk:
    """A file system of its own in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["mount", "-t", "tmpfs", "-o", "size=96m,nr_inodes=300", "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    def fill(self) -> None:
        """Leaves about 8 MiB less than the reserve."""
        disk = os.statvfs(self.folder)
        ballast = disk.f_bavail * disk.f_frsize - RESERVE_BYTES + 8 * MEBIBYTE
        with open(self.folder / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, ballast)

    def use_up_files(self) -> None:
        """No further file can be made, though bytes are free."""
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (self.folder / f"ballast-{number}").touch(exist_ok=False)

    def use_up_bytes(self) -> None:
        """No byte is free, though files can be made."""
        disk = os.statvfs(self.folder)
        with open(self.folder / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize)

    def empty(self) -> None:
        """Makes room again."""
        for path in self.folder.glob("ballast*"):
            path.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        disk = SmallDisk(folder)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
    yield disk
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


def start(parts: Cluster, data: Path, broker_id: int, **settings: object) -> BrokerProcess:
    broker = BrokerProcess(parts.zookeeper, data, broker_id, **settings)
    broker.start()
    parts.brokers.append(broker)
    return broker


def messages_in(broker: AnyBroker) -> int:
    return sum(statistics(broker)["counters"]["messages_in"].values())


def test_without_room_writes_wait_reads_and_retention_go_on_and_all_is_stored_in_the_end(
    parts: Cluster, small_disk: SmallDisk
) -> None:
    broker = start(parts, small_disk.folder / "broker", 1, disk_reserve_bytes=RESERVE_BYTES, retention_check_s=0.1)
    with parts.admin() as admin:
        topic = admin.create_topic("full", partitions=2, brokers=[1], flush="ack")
        old = admin.create_topic("old", partitions=1, brokers=[1], segment_bytes=10_000)
    with parts.producer(delivery_timeout_s=4 * SLOW_S) as producer:
        for number in range(50):
            producer.send("old", b"x" * 1000)
            producer.send("full", b"before-%d" % number, b"k")
            producer.flush()
        small_disk.fill()
        wait_until(lambda: http_get(broker.http_port, "/readyz")[0] == 503, what="the refusal")
        text = http_get(broker.http_port, "/readyz")[1]
        assert f"{small_disk.folder / 'broker'} has " in text
        assert "bytes free, the broker keeps 33,554,432 in reserve. Free disk, " in text
        assert http_get(broker.http_port, "/healthz")[0] == 200

        waiting = [producer.send("full", b"during-%d" % number, b"k") for number in range(20)]
        assert timed_out(parts, "full", "bytes free, the broker keeps").outcome == "not_done"
        assert not any(delivery.done() for delivery in waiting)
        assert len(read_topic(broker, "full", topic.id)["1-0"] + read_topic(broker, "full", topic.id)["1-1"]) == 50

        with parts.admin() as admin:
            admin.alter("old", retention_bytes=1)
        wait_until(lambda: _partition(broker, "old")["start_offset"] > 0, what="retention on a full disk")
        assert statistics(broker)["writes_refused"]

        small_disk.empty()
        offsets = [delivery.result(SLOW_S).offset for delivery in waiting]
        assert offsets == list(range(offsets[0], offsets[0] + 20))
    assert http_get(broker.http_port, "/readyz")[0] == 200
    stored = [m.value for messages in read_topic(broker, "full", topic.id).values() for m in messages]
    assert sorted(stored) == sorted([b"before-%d" % n for n in range(50)] + [b"during-%d" % n for n in range(20)])
    assert old.id != topic.id
    assert broker.stop() == 0


def put(broker: AnyBroker, topic: TopicConfig) -> MetamqError | None:
    """What the broker says to a PUT that nobody repeats."""

    async def send() -> MetamqError | None:
        connection = await BrokerConnection.open("127.0.0.1", broker.port)
        try:
            batch = encode([b"once"], base_timestamp_us=1)
            response = await connection.send(Command.PUT, [PutEntry(topic.topic, topic.id, 0, len(batch))], [batch])
            (result,) = unpack_list(PutResult, response.header)
            return status.decode_error(result.status, result.error) if result.status != status.OK else None
        finally:
            await connection.close()

    return asyncio.run(send())


def has_more_than(broker: LocalBroker, messages: int) -> bool:
    return messages_in(broker) > messages


def first_offset(broker: LocalBroker, topic: str) -> int:
    return int(_partition(broker, topic)["start_offset"])


@pytest.mark.slow
def test_room_that_goes_and_comes_under_load_loses_and_doubles_nothing(
    parts: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file system of its own, which needs root: the free bytes are what the test says."""
    free_bytes = 10 * RESERVE_BYTES
    settings = {"id": 7, "disk_reserve_bytes": RESERVE_BYTES, "retention_check_s": 0.1}
    with LocalBroker(parts.zookeeper, tmp_path / "broker", **settings) as broker, parts.admin() as admin:
        monkeypatch.setattr(broker.broker._folder, "free_bytes", lambda: free_bytes)
        topic = admin.create_topic("tide", partitions=2, brokers=[7], flush="ack")
        loads = [Load(n, 7, blocking(parts.zookeeper, keyed=n == 0, topic="tide")) for n in range(2)]
        try:
            for turn in range(1, 5):
                old = admin.create_topic(f"old-{turn}", partitions=1, brokers=[7], segment_bytes=2000)
                before = messages_in(broker)
                with parts.producer() as producer:
                    for _ in range(10):
                        producer.send(old.topic, b"x" * 500).result(SLOW_S)
                wait_until(partial(has_more_than, broker, before + 200))

                free_bytes = RESERVE_BYTES - turn
                wait_until(lambda: statistics(broker)["writes_refused"], what="the refusal")
                full = messages_in(broker)
                refused = put(broker, topic)
                assert isinstance(refused, DiskFull)
                assert (refused.free_bytes, refused.reserve_bytes) == (RESERVE_BYTES - turn, RESERVE_BYTES)
                assert len(read_topic(broker, old.topic, old.id)["7-0"]) == 10
                admin.alter(old.topic, retention_bytes=1)
                wait_until(partial(first_offset, broker, old.topic))
                assert sum(map(len, read_topic(broker, "tide", topic.id).values())) > 0
                assert messages_in(broker) == full
                free_bytes = RESERVE_BYTES
        finally:
            free_bytes = RESERVE_BYTES
            for load in loads:
                load.ending.set()
        told = [load.join() for load in loads]
        assert not any(one.failed for one in told)
        check(told, read_topic(broker, "tide", topic.id))


def _partition(broker: AnyBroker, topic: str) -> dict[str, int]:
    found: dict[str, int] = next(p for p in statistics(broker)["partitions"] if p["topic"] == topic)
    return found


@pytest.mark.slow
def test_a_disk_that_is_full_all_the_same_ends_nothing(parts: Cluster, small_disk: SmallDisk) -> None:
    """No file can be made: no segment, no index, no checkpoint, no topic, no note of a clean stop."""
    broker = start(
        parts,
        small_disk.folder / "broker",
        2,
        disk_reserve_bytes=RESERVE_BYTES,
        retention_check_s=0.1,
        scrub_every_s=0.1,
    )
    pid = broker.pid
    with parts.admin() as admin:
        topic = admin.create_topic("enospc", partitions=1, brokers=[2], flush="ack", segment_bytes=20_000)
        admin.create_topic("gone", partitions=1, brokers=[2])
        with parts.producer(delivery_timeout_s=4 * SLOW_S) as producer:
            deliveries = [producer.send("enospc", b"%d" % n) for n in range(10)]
            producer.flush()
            small_disk.use_up_files()
            deliveries += [producer.send("enospc", b"%d-" % n + b"x" * 9000) for n in range(8)]
            refused = put_until_refused(broker, topic)
            assert "no space is left on the disk. Free disk, inodes or quota" in str(refused)
            assert refused.outcome == "not_done"
            assert len(read_topic(broker, "enospc", topic.id)["2-0"]) >= 10, "readers are served"
            with pytest.raises(MetamqError):
                admin.create_topic("new", partitions=1, brokers=[2], timeout_s=1)
            admin.delete("gone")
            wait_until(
                lambda: "topics are not followed at present" in broker.log_path.read_text(), what="the new topic"
            )
            assert (broker.running, broker.pid) == (True, pid)
            small_disk.empty()
            offsets = [delivery.result(4 * SLOW_S).offset for delivery in deliveries]
        assert len(offsets) == len(set(offsets)) == 18
        wait_until(lambda: any(p["topic"] == "new" for p in statistics(broker)["partitions"]), what="the new topic")
        wait_until(lambda: not list((broker.data / "topics").glob("gone@*")), what="the deleted topic gone")
    stored = [m.value.partition(b"-")[0] for m in read_topic(broker, "enospc", topic.id)["2-0"]]
    assert [value for value in stored if value != b"once"] == [b"%d" % n for n in [*range(10), *range(8)]]
    small_disk.use_up_files()
    broker.kill()
    broker.start(wait=False)
    wait_until(lambda: "waits for space on its disk" in broker.log_path.read_text(), what="a start without room")
    small_disk.empty()
    broker.wait_ready(SLOW_S)
    assert broker.stop() == 0


def test_a_new_broker_on_a_full_disk_waits_for_room(parts: Cluster, small_disk: SmallDisk, tmp_path: Path) -> None:
    small_disk.use_up_bytes()
    broker = BrokerProcess(parts.zookeeper, small_disk.folder / "broker", 4)
    broker.log_path = tmp_path / "broker.log"
    parts.brokers.append(broker)
    broker.start(wait=False)
    wait_until(lambda: "waits for space on its disk" in broker.log_path.read_text(), what="a start without room")
    small_disk.empty()
    broker.wait_ready(SLOW_S)
    assert broker.stop() == 0


def put_until_refused(broker: AnyBroker, topic: TopicConfig) -> MetamqError:
    """The answer to a batch for which there is no room: as many are stored as the last segment takes."""
    while True:
        if (error := put(broker, topic)) is not None:
            return error


def test_the_first_failed_write_ends_the_broker_and_a_restart_loses_nothing(parts: Cluster, tmp_path: Path) -> None:
    broker = start(parts, tmp_path / "broker", 3)
    with parts.admin() as admin:
        topic = admin.create_topic("efbig", partitions=1, brokers=[3], flush="ack")
    with parts.producer(delivery_timeout_s=4 * SLOW_S) as producer:
        deliveries = [producer.send("efbig", b"%d" % n + b"x" * 1000) for n in range(10)]
        producer.flush()
        limits = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (30_000, limits[1]))  # the disk takes half of a batch
        deliveries += [producer.send("efbig", b"%d" % n + b"x" * 1000) for n in range(10, 40)]
        assert broker.wait(60) == 1
        assert "broker 3 stops: efbig/3-0: writing failed: File too large" in broker.log_path.read_text()
        broker.start()
        assert [delivery.result(4 * SLOW_S).offset for delivery in deliveries] == list(range(40))
    stored = read_topic(broker, "efbig", topic.id)["3-0"]
    assert [m.value.rstrip(b"x") for m in stored] == [b"%d" % n for n in range(40)]


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = struct.unpack("B", file.read(1))
        file.seek(at)
        file.write(struct.pack("B", byte ^ 0x40))


def test_damage_below_the_flushed_point_stops_that_partition_by_name_and_no_other(
    parts: Cluster, tmp_path: Path
) -> None:
    broker = start(parts, tmp_path / "broker", 4)
    with parts.admin() as admin:
        topic = admin.create_topic("damage", partitions=3, brokers=[4], flush="ack")
    with parts.producer() as producer:
        for index in range(3):
            for _ in range(5):
                producer.send("damage", b"x" * 100, partition=f"4-{index}").result(SLOW_S)
    broker.kill()
    folder = tmp_path / "broker" / "topics" / f"damage@{topic.id}" / "1"
    segment = take_inventory(str(folder)).segments[0]
    before = Path(segment.path).read_bytes()
    flip(segment.path, 150)
    broker.start()
    code, text = http_get(broker.http_port, "/readyz")
    assert code == 503
    assert text.startswith("damage/4-1: ")
    assert "These bytes were once on the disk, so nothing was cut." in text
    assert "damage/4-0" not in text
    assert "damage/4-1 is not served: " in broker.log_path.read_text()
    with parts.producer() as producer:
        with pytest.raises(CorruptData, match=r"damage/4-1: .* is damaged at byte "):
            producer.send("damage", b"y", partition="4-1").result(SLOW_S)
        assert [producer.send("damage", b"y", partition=f"4-{i}").result(SLOW_S).offset for i in (0, 2)] == [5, 5]
    assert len(Path(segment.path).read_bytes()) == len(before)
    flip(segment.path, 150)
    broker.kill()
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200
    assert [len(messages) for messages in read_topic(broker, "damage", topic.id).values()] == [6, 5, 6]


def rotten(parts: Cluster, data: Path, broker_id: int) -> BrokerProcess:
    """A broker that is up, and about to look at a damaged sealed segment, since its retention reads the index anew."""
    topic = f"rot-{broker_id}"
    broker = start(parts, data, broker_id, retention_check_s=0.1)
    with parts.admin() as admin:
        config = admin.create_topic(topic, partitions=2, brokers=[broker_id], segment_bytes=2000)
    with parts.producer() as producer:
        for index in range(2):
            for _ in range(6):
                producer.send(topic, b"x" * 900, partition=f"{broker_id}-{index}").result(SLOW_S)
    assert broker.stop() == 0
    segment = take_inventory(str(data / "topics" / f"{topic}@{config.id}" / "0")).segments[0]
    os.unlink(segment.index_path)
    flip(segment.path, 20)
    broker.start()
    return broker


def test_damage_that_retention_finds_shows(parts: Cluster, tmp_path: Path) -> None:
    broker = rotten(parts, tmp_path / "broker", 6)
    try:
        wait_until(lambda: "not served any more: " in broker.log_path.read_text())
        code, text = http_get(broker.http_port, "/readyz")
        assert code == 503
        assert "/topics/rot-6@" in text
        assert "is damaged at byte 0: the broker's checksum does not match." in text
    finally:
        broker.kill()


def test_damage_that_retention_finds_stops_that_partition_and_not_the_broker(parts: Cluster, tmp_path: Path) -> None:
    broker = rotten(parts, tmp_path / "broker", 5)
    wait_until(lambda: "rot-5/0 is not served any more: " in broker.log_path.read_text())
    with parts.producer() as producer:
        error = producer.send("rot-5", b"y", partition="5-0").exception(SLOW_S)
        assert isinstance(error, CorruptData), error
        assert producer.send("rot-5", b"y", partition="5-1").result(SLOW_S).offset == 6
    assert broker.stop() == 0
