"""A broker that names files which are not its logs': none is read, and what there is it has to send."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.client.scan import connection_pool
from metamq.client.scan import files as opening
from metamq.client.scan.fetch import fetch
from metamq.client.scan.files import FileReader, NotItsFile
from metamq.errors import ProtocolError
from metamq.testing import Cluster
from metamq.wire.buffer_pool import BufferPool
from metamq.wire.commands import FilePlace
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker
from tests.spark.test_fetch import planned, table
from tests.spark.test_files import COUNT, fill

Place = Callable[[Path], FilePlace]


def place_of(path: Path | str, at: int = 0) -> FilePlace:
    """With the device and the inode that are there, as one who misleads tells them."""
    found = os.stat(str(path).partition("\0")[0])
    return FilePlace(str(path), found.st_dev, found.st_ino, at, 1)


def a_fifo(data: Path) -> FilePlace:
    os.mkfifo(data / "fifo")
    return place_of(data / "fifo")


def a_link(data: Path) -> FilePlace:
    (data / "link").symlink_to("/etc/hostname")
    return place_of(data / "link")


def a_folder(data: Path) -> FilePlace:
    return place_of(data)._replace(path=str(data / "topics"))


STRANGE: dict[str, Place] = {
    "a FIFO": a_fifo,
    "a symbolic link": a_link,
    "a folder": a_folder,
    "a device": lambda _data: place_of("/dev/zero"),
    "a file elsewhere": lambda _data: place_of("/etc/hostname"),
    "the processs environment": lambda _data: place_of("/proc/self/environ"),
    "a way out of the folder": lambda data: place_of(f"{data}/../../../../../../../../../../etc/hostname"),
    "a folder that begins alike": lambda data: place_of("/etc/hostname")._replace(path=f"{data}-2/hostname"),
    "a relative path": lambda _data: place_of("/etc/hostname")._replace(path="etc/hostname"),
    "a NUL": lambda data: place_of(f"{data}\0/x"),
    "half a character": lambda data: place_of(data)._replace(path=f"{data}/\ud800"),
    "no path": lambda data: place_of(data)._replace(path=""),
    "a position before the file": lambda data: place_of(data)._replace(path=f"{data}/x", at=-1),
    "a position beyond any file": lambda data: place_of(data)._replace(path=f"{data}/x", at=2**63 - 1),
}


@pytest.mark.parametrize("place", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_file_is_refused_without_waiting(tmp_path: Path, place: Place) -> None:
    (tmp_path / "topics").mkdir()
    with pytest.raises(OSError, match=r"regular|normal|below|links|no file"):
        FileReader(place(tmp_path), 1 << 20, BufferPool(1 << 20), str(tmp_path))


@pytest.mark.parametrize("data", ["", "/", "relative", "/tmp/../tmp"])
def test_without_a_data_folder_no_file_is_the_replicas(tmp_path: Path, data: str) -> None:
    path = tmp_path / "segment.log"
    path.write_bytes(bytes(1000))
    with pytest.raises(NotItsFile, match="no data folder registered"):
        FileReader(place_of(path), 1000, BufferPool(0), data)


@pytest.fixture
def misleading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, list[FilePlace]]]:
    """A broker that tells of the file in the list, once it has one, instead of its own."""
    told: list[FilePlace] = []
    original = "metamq.broker.front_door.fetch_session.file_place"
    from metamq.broker.front_door.fetch_session import file_place

    monkeypatch.setattr(original, lambda part, log: told[0] if told else file_place(part, log))
    monkeypatch.setattr(opening, "_warned", False)
    with (
        cluster(brokers=0, folder=tmp_path / "cluster") as running,
        LocalBroker(running.zookeeper, tmp_path / "data", http_port=-1),
    ):
        running.create_topic("t", partitions=1)
        fill(running, "t")
        yield running, told


def test_what_is_refused_is_asked_of_the_broker_with_one_warning(
    misleading: tuple[Cluster, list[FilePlace]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running, told = misleading
    data = tmp_path / "data"
    tasks = planned(running, "t", readFiles="true")
    assert {replica.data for task in tasks for replica in task.replicas} == {str(data)}
    (data / "topics").mkdir(exist_ok=True)
    with caplog.at_level(logging.WARNING, "metamq.client"):
        for place in STRANGE.values():
            told[:] = [place(data)]
            if told[0].path.isprintable() and told[0].path.isascii():  # else the broker cannot send it
                assert table(tasks).num_rows == COUNT
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "metamq.client"]
    assert "t/0-0 is read through the broker: " in warning


def test_a_replica_that_registers_no_data_folder_is_asked_to_send(
    misleading: tuple[Cluster, list[FilePlace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As brokers of an earlier release."""
    running, _told = misleading
    tasks = planned(running, "t", readFiles="true")
    earlier = [task._replace(replicas=tuple(one._replace(data="") for one in task.replicas)) for task in tasks]

    def never(*_: object) -> None:
        raise AssertionError("a file is read")

    monkeypatch.setattr("metamq.client.scan.fetch.FileReader", never)
    assert table(earlier).num_rows == COUNT
    with pytest.raises(AssertionError):
        table(tasks)


def test_a_file_that_nobody_asked_for_is_an_error_of_metamqs(
    misleading: tuple[Cluster, list[FilePlace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, told = misleading
    told[:] = [place_of("/dev/zero")]
    (task,) = planned(running, "t")
    assert not task.in_place
    opened = connection_pool.GetPartition
    monkeypatch.setattr(connection_pool, "GetPartition", lambda *fields: opened(*fields[:5], in_place=True))
    with pytest.raises(ProtocolError, match="names a file, but the request was for the data"):
        list(fetch(task))


def test_two_answers_to_one_question_are_an_error_of_metamqs(
    misleading: tuple[Cluster, list[FilePlace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _told = misleading
    (task,) = planned(running, "t")
    unpacked = connection_pool.unpack_list
    monkeypatch.setattr(connection_pool, "unpack_list", lambda cls, header: 2 * unpacked(cls, header))
    with pytest.raises(ProtocolError, match=r"answers for the handles \[\d+, \d+\], not for \d+"):
        list(fetch(task))


def test_bytes_that_are_no_batches_are_asked_of_the_broker(
    misleading: tuple[Cluster, list[FilePlace]], tmp_path: Path
) -> None:
    running, told = misleading
    path = tmp_path / "data" / "other.log"
    path.write_bytes(b"\xff" * (1 << 20))
    told[:] = [place_of(path)]
    assert table(planned(running, "t", readFiles="true")).num_rows == COUNT
