"""Reads of the disk that take long, fail, or come too late: only their own reader waits, and none gets wrong data."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.data import cold_reads
from metamq.broker.data.partition import Partition
from metamq.broker.front_door import fetch_session
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk import cold, times
from metamq.broker.log.disk import files as log_files
from metamq.broker.log.disk.index import SparseIndex
from metamq.errors import CorruptData, Fenced, OffsetOutOfRange, StorageError, Timeout, TopicNotFound
from metamq.testing import Cluster
from metamq.wire import batch as layout
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import LATEST, Command, GetPartition, GetResult, OffsetsEntry, OffsetsResult
from metamq.wire.headers import unpack, unpack_list
from tests.broker.front_door.conftest import Front, RawClient, values_in
from tests.broker.log.test_times import lying
from tests.broker.slow_disk import EIO, SlowDisk
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, wait_until

VALUE = bytes(range(256)) * 1024
IDS = itertools.count(1)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(brokers=0) as made:
        yield made


class Local(Front):
    """A broker in this process, and its data folder."""

    def __init__(self, running: Cluster, broker: LocalBroker) -> None:
        self.cluster, self.port, self.broker = running, broker.port, broker
        self._ids: dict[str, str] = {}
        self._clients: list[RawClient] = []

    def topic(self, name: str, partitions: int = 1, **settings: Any) -> str:
        if name not in self._ids:
            with self.cluster.admin() as admin:
                made = admin.create_topic(name, partitions=partitions, brokers=[self.broker.broker_id], **settings)
                self._ids[name] = made.id
        return self._ids[name]

    @property
    def cold(self) -> cold_reads.ColdReads:
        return self.broker.broker._topics.cold_reads

    def partition(self, topic: str) -> Partition:
        found = self.broker.broker._topics.get(topic, 0)
        assert found is not None
        return found

    def open(self, client: RawClient, topic: str, partitions: int = 1) -> None:
        opened = [GetPartition(index + 1, topic, self.topic(topic), index) for index in range(partitions)]
        assert client.ask(Command.GET, self.get(wait_ms=0, opened=opened)).header == []


@pytest.fixture
def front(running: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Local]:
    settings = {"retention_check_s": 0.1, **getattr(request, "param", {})}
    with LocalBroker(running.zookeeper, tmp_path / "b", id=next(IDS), **settings) as broker:
        made = Local(running, broker)
        try:
            yield made
        finally:
            made.close_clients()


@pytest.fixture
def disk(front: Local, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.goes.set()
    made.is_cold = False


def found(answer: Any) -> dict[int, list[bytes] | Exception]:
    """The values, or the error, of each handle."""
    assert answer.status == status.OK, answer.header
    results: dict[int, list[bytes] | Exception] = {}
    position = 0
    for result in unpack_list(GetResult, answer.header):
        if result.status == status.OK:
            results[result.handle] = values_in(answer.body[position : position + result.size])
        else:
            results[result.handle] = status.decode_error(result.status, result.error)
        position += result.size
    return results


def topic_of(front: Local, values: int = 3, partitions: int = 1, **settings: Any) -> str:
    """A topic with large messages, a batch each."""
    name = f"cold-{front.broker.broker_id}"
    front.topic(name, partitions, **settings)
    for index in range(partitions):
        for _ in range(values):
            front.fill(name, index, [VALUE])
    return name


def read_that_waits(front: Local, disk: SlowDisk, values: int = 3, **settings: Any) -> tuple[str, Any]:
    """A topic, and a client whose GET waits for a disk that has stopped."""
    topic, client = topic_of(front, values, **settings), front.connect()
    front.open(client, topic)
    disk.stops()
    client.request(Command.GET, front.get(wait_ms=0, armed=[(1, 0)]))
    wait_until(lambda: disk.waiting)
    return topic, client


def test_a_read_from_the_disk_gives_what_one_from_memory_gives(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front, 12, segment_bytes=1 << 20), front.connect()
    front.open(client, topic)
    disk.is_cold = True
    read: list[bytes] = []
    while len(read) < 12:
        read += found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, len(read))])))[1]  # type: ignore[arg-type]
    assert read == [VALUE] * 12
    assert disk.began


def test_while_a_read_takes_long_others_are_served_and_the_poll_does_not_end(front: Local, disk: SlowDisk) -> None:
    topic, client, other = topic_of(front), front.connect(), front.connect()
    front.open(client, topic)
    front.open(other, topic)
    disk.stops()
    asked = client.request(Command.GET, front.get(wait_ms=0, armed=[(1, 0)]))
    wait_until(lambda: disk.waiting)
    front.topic("pulse")
    assert found(other.ask(Command.GET, front.get(wait_ms=20, armed=[(1, 3)]))) == {}
    assert front.put(other, topic, [(0, front.batch([b"more"]))])[0].base_offset == 3
    disk.goes.set()
    answer = client.answer()
    assert answer.opaque == asked
    assert VALUE in found(answer)[1]  # type: ignore[operator]


def test_a_partition_in_memory_is_answered_while_another_is_read(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front, partitions=2), front.connect()
    front.open(client, topic, 2)
    disk.stops()
    client.request(Command.GET, front.get(armed=[(1, 0)]))
    wait_until(lambda: disk.waiting)
    disk.is_cold = False
    client.request(Command.GET, front.get(wait_ms=50_000, armed=[(2, 0)]))
    assert found(client.answer()) == {}, "the answer to the GET that was parked"
    assert found(client.answer()) == {2: [VALUE] * 3}
    last = client.request(Command.GET, front.get(wait_ms=50_000))
    disk.goes.set()
    answer = client.answer()
    assert (answer.opaque, found(answer)) == (last, {1: [VALUE] * 3})


def test_a_read_that_fails_is_an_error_and_not_the_end_of_the_data(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front), front.connect()
    front.open(client, topic)
    disk.is_cold, disk.error = True, EIO
    error = found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 0)])))[1]
    assert isinstance(error, StorageError)
    assert os.strerror(errno.EIO) in str(error)
    disk.error = None
    assert found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 0)])))[1] == [VALUE] * 3


def test_a_file_that_became_shorter_is_damage(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front), front.connect()
    front.open(client, topic)
    partition = front.partition(topic)
    disk.is_cold = True
    os.truncate(partition.log.segments()[0].path, len(VALUE) // 2)
    error = found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 0)])))[1]
    assert isinstance(error, CorruptData)
    assert partition.damage is not None, "the master notes it"


def test_retention_removes_what_is_being_read(front: Local, disk: SlowDisk) -> None:
    topic, client = read_that_waits(front, disk, 8, segment_bytes=1 << 20)
    with front.cluster.admin() as admin:
        admin.alter(topic, retention_bytes=1)
    wait_until(lambda: front.partition(topic).log.start_offset)
    disk.goes.set()
    assert isinstance(found(client.answer())[1], OffsetOutOfRange)


def test_the_topic_is_deleted_while_it_is_read(front: Local, disk: SlowDisk) -> None:
    topic, client = read_that_waits(front, disk)
    partition = front.partition(topic)
    front.delete(topic)
    wait_until(lambda: partition.closed_by)
    disk.goes.set()
    assert isinstance(found(client.answer())[1], TopicNotFound)


def test_a_log_that_is_cut_meanwhile_gives_nothing_that_was_read_before(front: Local, disk: SlowDisk) -> None:
    """As a slave's log is, whose readers then open it again."""
    topic, client = read_that_waits(front, disk)
    partition = front.partition(topic)
    front.broker.loop.call_soon_threadsafe(partition.cut, 0)
    wait_until(lambda: partition.cuts)
    front.fill(topic, 0, [VALUE[::-1]])
    disk.goes.set()
    assert isinstance(found(client.answer())[1], Fenced)


def test_connections_that_end_leave_nothing_behind(front: Local, disk: SlowDisk) -> None:
    topic = topic_of(front, partitions=12)
    front.open(front.connect(), topic, 12)
    front.close_clients()
    descriptors = len(os.listdir("/proc/self/fd"))
    disk.stops()
    for _ in range(5):
        client = front.connect()
        front.open(client, topic, 12)
        client.request(Command.GET, front.get(armed=[(index + 1, 0) for index in range(12)]))
    wait_until(lambda: disk.waiting == cold_reads.THREADS)
    front.close_clients()
    wait_until(lambda: not front.cold._queues)
    disk.goes.set()
    wait_until(lambda: not front.cold._running)
    assert disk.began == cold_reads.THREADS, "the waiting reads were forgotten"
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_client_that_arms_again_and_again_starts_no_more_reads(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front), front.connect()
    front.open(client, topic)
    disk.stops()
    client.request(Command.GET, front.get(wait_ms=50_000, armed=[(1, 0)]))
    for number in range(100):
        client.request(Command.GET, front.get(wait_ms=50_000, armed=[(1, number % 3)]))
        assert found(client.answer()) == {}
    for number in range(2, 40):  # and under new handles
        opened = [GetPartition(number, topic, front.topic(topic), 0)]
        client.request(Command.GET, front.get(wait_ms=50_000, closed=[number - 1], opened=opened, armed=[(number, 0)]))
        assert found(client.answer()) == {}
    assert disk.began <= fetch_session.THREAD_READS_MAX
    disk.goes.set()
    assert found(client.answer()) == {39: [VALUE] * 3}


def test_where_the_system_does_not_say_what_is_cached_only_new_data_is_read_at_once(
    front: Local, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, client = topic_of(front), front.connect()
    front.open(client, topic)
    monkeypatch.setattr(cold, "NO_WAIT", 0)
    assert found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 2)])))[1] == [VALUE]
    assert not disk.began
    for _ in range(1 + log_files.RECENT_BYTES // len(VALUE)):
        front.fill(topic, 0, [VALUE])
    assert found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 0)])))[1][:3] == [VALUE] * 3  # type: ignore[index]
    assert disk.began


def test_a_lost_index_is_made_again_in_a_thread(front: Local, disk: SlowDisk) -> None:
    topic, client = topic_of(front, 12, segment_bytes=1 << 20), front.connect()
    front.open(client, topic)
    files = front.partition(topic).log._files
    sealed = front.partition(topic).log.segments()[0].path
    os.unlink(sealed.replace(".log", ".index"))
    front.broker.loop.call_soon_threadsafe(files.indexes.forget, sealed)
    disk.is_cold = True
    assert found(client.ask(Command.GET, front.get(wait_ms=0, armed=[(1, 1)])))[1][0] == VALUE  # type: ignore[index]


def timed_topic(front: Local, batches: int = 60) -> str:
    """A topic with small segments, whose message n is sent at n; two times in each batch."""
    name = f"timed-{front.broker.broker_id}"
    front.topic(name, segment_bytes=1 << 20)
    with RawClient(front.port) as client:
        for number in range(batches):
            times = [2 * number, 2 * number + 1]
            batch = encode([VALUE[: 100 * 1024]] * 2, base_timestamp_us=times[0], timestamps_us=times)
            assert front.put(client, name, [(0, batch)])[0].status == status.OK
    return name


def ask_time(front: Local, client: RawClient, topic: str, timestamp_us: int) -> int:
    return client.request(Command.OFFSETS, [OffsetsEntry(topic, front.topic(topic), 0, timestamp_us)])


def looked_up(answer: Any) -> OffsetsResult:
    return unpack(OffsetsResult, answer.header[0])


def lose_indexes(front: Local, topic: str) -> None:
    log = front.partition(topic).log
    for segment in log.segments()[:-1]:
        os.unlink(segment.path.replace(".log", ".index"))
        front.broker.loop.call_soon_threadsafe(log._files.indexes.forget, segment.path)


@pytest.mark.parametrize("with_indexes", [True, False])
def test_a_time_is_found_on_the_disk_as_in_memory(front: Local, disk: SlowDisk, with_indexes: bool) -> None:
    topic, client = timed_topic(front), front.connect()
    if not with_indexes:
        lose_indexes(front, topic)
    disk.is_cold = True
    for wanted in (0, 1, 2, 57, 118, 119):
        ask_time(front, client, topic, wanted)
        assert looked_up(client.answer()).offset == wanted
    ask_time(front, client, topic, 120)
    assert looked_up(client.answer())[1:3] == (120, -1), "no such message: the end"
    assert disk.began


def test_a_search_for_a_time_that_waits_for_the_disk_delays_only_its_connection(front: Local, disk: SlowDisk) -> None:
    topic, client, other = timed_topic(front), front.connect(), front.connect()
    disk.stops()
    asked = [
        ask_time(front, client, topic, 57),
        ask_time(front, client, topic, LATEST),
        ask_time(front, client, topic, 3),
    ]
    wait_until(lambda: disk.waiting)
    ask_time(front, other, topic, LATEST)
    assert looked_up(other.answer()).offset == 120
    disk.goes.set()
    answers = [client.answer() for _ in asked]
    assert [(answer.opaque, looked_up(answer).offset) for answer in answers] == list(
        zip(asked, (57, 120, 3), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("front", [{"search_timeout_s": 0.01}], indirect=True)
@pytest.mark.parametrize("learns", [True, False])
def test_a_search_that_runs_out_of_time_between_reads_of_the_disk_continues_where_it_was(
    front: Local, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    """The headers state too late a time, so each batch is read. Without its memory the search comes to no end."""
    monkeypatch.setattr(times, "LEARN_BATCHES", 5)
    if not learns:
        monkeypatch.setattr(SparseIndex, "learn", lambda index, position, greatest_us: None)
    topic, client = f"late-{front.broker.broker_id}", front.connect()
    front.topic(topic)
    for number in range(1000):
        assert front.put(client, topic, [(0, bytes(lying(2**62, [number])))])[0].status == status.OK
    front.partition(topic).log._files.times = log_files.BoundedCache(0, len)  # as if there were many more batches
    disk.is_cold, asked = True, 0
    while asked < 200:
        ask_time(front, client, topic, 2**61)
        asked += 1
        if (result := looked_up(client.answer())).status == status.OK:
            break
        assert isinstance(status.decode_error(result.status, result.error), Timeout)
    assert (result.status == status.OK) == learns
    if learns:
        assert result[1:3] == (1000, -1), "no such message: the end"
        assert asked > 1
        again = LogConfig().index_interval_bytes // layout.HEADER_BYTES + times.LEARN_BATCHES + 2
        assert disk.began <= 1000 + asked * again


def test_a_search_whose_read_fails_is_an_error(front: Local, disk: SlowDisk) -> None:
    topic, client = timed_topic(front), front.connect()
    disk.is_cold, disk.error = True, EIO
    ask_time(front, client, topic, 57)
    result = looked_up(client.answer())
    assert isinstance(status.decode_error(result.status, result.error), StorageError)
    disk.error = None
    ask_time(front, client, topic, 57)
    assert looked_up(client.answer()).offset == 57


@pytest.mark.parametrize("what", ["cut", "deleted"])
def test_a_search_ends_with_the_log_that_it_reads(front: Local, disk: SlowDisk, what: str) -> None:
    topic, client = timed_topic(front), front.connect()
    partition = front.partition(topic)
    disk.stops()
    ask_time(front, client, topic, 57)
    wait_until(lambda: disk.waiting)
    if what == "cut":
        front.broker.loop.call_soon_threadsafe(partition.cut, 0)
        wait_until(lambda: partition.cuts)
    else:
        front.delete(topic)
        wait_until(lambda: partition.closed_by)
    disk.goes.set()
    result = looked_up(client.answer())
    assert isinstance(status.decode_error(result.status, result.error), Fenced if what == "cut" else TopicNotFound)


def test_connections_that_end_during_a_search_leave_nothing_behind(front: Local, disk: SlowDisk) -> None:
    topic = timed_topic(front)
    disk.stops()
    for _ in range(cold_reads.THREADS + 5):
        ask_time(front, front.connect(), topic, 57)
    wait_until(lambda: disk.waiting == cold_reads.THREADS and len(front.cold._queues) == 5)
    slices = front.broker.broker._parts.door.slices
    assert slices.waiting == cold_reads.THREADS + 5
    front.close_clients()
    wait_until(lambda: not front.cold._queues and not slices.waiting)
    disk.goes.set()
    wait_until(lambda: not front.cold._running)
    client = front.connect()
    ask_time(front, client, topic, 57)
    assert looked_up(client.answer()).offset == 57
