"""Reading a range where it lies, in the files of a broker on the same machine; the broker is asked when that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.client.scan import fetch as fetching
from metamq.client.scan.fetch import FetchTask
from metamq.client.scan.files import FileReader
from metamq.errors import CorruptData, OffsetDiverged
from metamq.testing import Cluster
from metamq.wire.addresses import is_own_address
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import FilePlace
from metamq.wire.limits import BATCH_BYTES_MAX
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, statistics
from tests.spark.conftest import send
from tests.spark.test_fetch import numbered, planned, table

COUNT = 6000
BATCH_BYTES = 200 * 1000


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A broker with a topic of one partition and many batches, in one segment."""
    with cluster(folder=tmp_path / "cluster") as running:
        running.create_topic("t", partitions=1)
        fill(running, "t")
        yield running


def fill(running: Cluster, topic: str, count: int = COUNT, **settings: Any) -> None:
    with running.producer(batch_bytes=BATCH_BYTES, **settings) as producer:
        producer.send_many(topic, numbered(count, 1000)).result()


def files(running: Cluster, topic: str, **options: str) -> list[FetchTask]:
    """The tasks of a batch query that reads files where it may."""
    return planned(running, topic, readFiles="true", **options)


def segment_of(running: Cluster) -> Path:
    (path,) = running.broker.data.glob("topics/t@*/0/*.log")
    return path


def messages(chunk: fetching.Chunk) -> int:
    return sum(header.count for header, _data in chunk)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FileReader]:
    """Those that were."""
    found: list[FileReader] = []

    class Seen(FileReader):
        def __init__(self, place: FilePlace, size: int, buffers: BufferPool, data: str) -> None:
            super().__init__(place, size, buffers, data)
            found.append(self)

    monkeypatch.setattr(fetching, "FileReader", Seen)
    return found


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_is_read_is_what_the_broker_sends(own: Cluster, opened: list[FileReader], compression: str | None) -> None:
    own.create_topic("segments", partitions=1, segment_bytes=1 << 20)
    fill(own, "segments", compression=compression)
    for more in ({}, {"startingOffsets": '{"segments": {"0-0": 1234}}', "maxRecordsPerPartition": "700"}):
        through = table(planned(own, "segments", **more))
        assert not opened
        assert table(files(own, "segments", **more)).equals(through)
        assert bool(opened) == (compression is None)  # else all of it is too little
        opened.clear()


def test_a_range_longer_than_one_answer_goes_on_in_the_file(own: Cluster, opened: list[FileReader]) -> None:
    """The first ends within a batch."""
    own.create_topic("long", partitions=1)
    fill(own, "long", 2 * BATCH_BYTES_MAX // 1000)
    assert table(files(own, "long"))["offset"].to_pylist() == list(range(2 * BATCH_BYTES_MAX // 1000))
    assert len(opened) == 3
    assert statistics(own.broker)["counters"]["bytes_out"] < BATCH_BYTES_MAX, "what nobody sent is not counted"


@pytest.mark.parametrize(
    ("peer", "here", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.1.1", True),
        ("::1", "::1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.2", "10.0.0.1", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_only_who_is_on_the_brokers_machine_is_told_of_files(peer: str, here: str, is_own: bool) -> None:
    assert is_own_address(peer, here) == is_own


@pytest.mark.parametrize(
    ("number", "again"),
    [pytest.param(errno.EACCES, 0, id="not ours: never again"), pytest.param(errno.ENOENT, 1, id="gone: the next may")],
)
def test_a_file_that_cannot_be_opened_is_read_through_the_broker(
    own: Cluster, opened: list[FileReader], monkeypatch: pytest.MonkeyPatch, number: int, again: int
) -> None:
    """As where the broker belongs to another user, or retention was faster."""

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as there:
        there.setattr("metamq.client.scan.files.os.open", refused)
        assert table(files(own, "t")).num_rows == COUNT
    assert not opened
    assert table(files(own, "t")).num_rows == COUNT
    assert len(opened) == again


def test_who_is_elsewhere_is_sent_what_there_is(
    tmp_path: Path, opened: list[FileReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.broker.front_door.protocol.are_near", lambda _peer, _here: False)
    with (
        cluster(brokers=0, folder=tmp_path / "cluster") as running,
        LocalBroker(running.zookeeper, tmp_path / "data", http_port=-1),
    ):
        running.create_topic("t", partitions=1)
        fill(running, "t")
        assert table(files(running, "t")).num_rows == COUNT
    assert not opened


def test_another_file_of_that_path_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "segment.log"
    path.write_bytes(bytes(1000))
    found = path.stat()
    FileReader(FilePlace(str(path), found.st_dev, found.st_ino, 0, 1), 1000, BufferPool(0), str(tmp_path)).close()
    with pytest.raises(OSError, match="another file"):
        FileReader(FilePlace(str(path), found.st_dev, found.st_ino + 1, 0, 1), 1000, BufferPool(0), str(tmp_path))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda own: own.broker.kill(), id="its broker is killed"),
        pytest.param(lambda own: segment_of(own).unlink(), id="it is removed, as by retention"),
    ],
)
def test_a_file_is_read_to_its_end(own: Cluster, opened: list[FileReader], fault: Callable[[Cluster], object]) -> None:
    """What was there when the range was planned, whatever comes meanwhile."""
    (task,) = files(own, "t")
    reading = fetching.fetch(task)
    count = messages(next(reading))
    fault(own)
    assert count + sum(map(messages, reading)) == COUNT
    assert len(opened) == 1


def test_what_goes_wrong_with_a_file_is_asked_of_the_broker(
    own: Cluster, opened: list[FileReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = files(own, "t")
    reading = fetching.fetch(task)
    count = messages(next(reading))

    def broken(_bytes_max: int) -> memoryview:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(opened[0], "read", broken)
    assert count + sum(map(messages, reading)) == COUNT
    assert len(opened) == 1


def test_what_came_in_the_place_of_others_is_not_taken(
    own: Cluster, opened: list[FileReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss was accepted; here the broker did not have these batches when it told of the file."""
    (task,) = files(own, "t")
    reading = fetching.fetch(task)
    count = messages(next(reading))
    monkeypatch.setattr(opened[0], "epoch", opened[0].epoch - 1)
    read: list[int] = []
    monkeypatch.setattr(opened[0], "skip", read.append)
    assert count + sum(map(messages, reading)) == COUNT
    assert not read
    assert len(opened) == 1
    later = fetching.Fetching(task)
    later._epoch = opened[0].epoch + 2
    chunk, damage = later._taken(memoryview(segment_of(own).read_bytes()), later._epoch)
    assert not chunk
    assert isinstance(damage, OffsetDiverged), "nor what is older than what was read"


def test_damage_in_a_file_is_the_brokers_to_tell(own: Cluster, opened: list[FileReader]) -> None:
    (task,) = files(own, "t")
    path = segment_of(own)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size - 5000)
        file.write(b"damaged")
    counts: list[int] = []
    with pytest.raises(CorruptData, match="producer's checksum"):
        counts.extend(map(messages, fetching.fetch(task)))
    assert len(opened) == 1
    assert 0 < sum(counts) < COUNT


def test_a_file_that_was_cut_ends_early(own: Cluster) -> None:
    """As a slave's where a loss was accepted."""
    path = segment_of(own)
    found = path.stat()
    reader = FileReader(
        FilePlace(str(path), found.st_dev, found.st_ino, 0, 1), found.st_size, BufferPool(0), str(path.parent)
    )
    os.truncate(path, found.st_size - 1000)
    with pytest.raises(OSError, match="ends early"):
        reader.read(found.st_size)
    os.truncate(path, 10)
    with pytest.raises(OSError, match="ends early"):
        reader.read(1000)
    reader.close()


def test_few_bytes_are_sent(own: Cluster, opened: list[FileReader]) -> None:
    own.create_topic("few", partitions=1)
    send(own, "few", numbered(10))
    assert table(files(own, "few")).num_rows == 10
    assert not opened
