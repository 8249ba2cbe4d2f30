"""A disk without room at each kind of write of a log: nothing stored is lost, and all goes on when there is room."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.producers import Duplicate
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import DiskFull
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from tests.broker.log.conftest import SMALL, Shelf

KINDS = {
    "batches": ".log",
    "an index": ".index.tmp",
    "producer states": ".producers.tmp",
    "the epochs": "epochs.tmp",
    "the flushed point": "/flushed",
    "a new segment": "create",
}
NEEDED = {"batches", "a new segment"}
"""Without these an append is refused; without the others it is not."""


class FullFiles(FileCache):
    """A file cache on a disk that has no room for one kind of write, or for any."""

    def __init__(self) -> None:
        super().__init__(8, write=self.pwrite, sync=lambda fd: None)
        self.full: str | None = None
        self.refused = 0

    def refuse(self, what: str) -> None:
        if self.full is not None and what.endswith(self.full):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        self.refuse(os.readlink(f"/proc/self/fd/{fd}"))
        return os.pwrite(fd, data, at)

    def create(self, path: str) -> int:
        self.refuse("create")
        return super().create(path)


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names descriptors by /proc")


def fill(shelf: Shelf, log: PartitionLog, numbers: range, *, epoch: int = 1) -> list[bytes]:
    """Appends messages of one producer until the disk is full; returns those that were stored."""
    stored = []
    for number in numbers:
        value = b"%d-" % number + b"x" * 300
        try:
            shelf.append(log, [value], epoch=epoch, producer_id=7, sequence=number)
        except DiskFull:
            break
        stored.append(value)
    return stored


@pytest.mark.parametrize("kind", KINDS)
def test_a_master_without_room(shelf: Shelf, kind: str) -> None:
    files = FullFiles()
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(10))
    shelf.flush(log)
    files.full = KINDS[kind]
    end = log.end_position
    stored += fill(shelf, log, range(len(stored), 40), epoch=2)
    assert (len(stored) < 40) == (kind in NEEDED)
    if kind == "batches":
        assert log.end_position == end
    shelf.checkpoint(log)
    shelf.flush(log)
    assert files.refused
    assert shelf.read_all(log) == stored, "readers are served"
    files.full = None
    stored += fill(shelf, log, range(len(stored), 60), epoch=2)
    assert len(stored) == 60, "there is room again"
    shelf.checkpoint(log)
    log.close()
    assert log.name == "flights/0-0"
    again = shelf.open()
    assert shelf.read_all(again) == stored
    assert again.epochs().last == 2
    batch = encode([b"again"], base_timestamp_us=0, producer_id=7, sequence=59)
    assert isinstance(again.check_producer(read_header(batch)), Duplicate)


def test_batches_of_one_write_are_stored_together_or_not_at_all(shelf: Shelf) -> None:
    """The disk takes a part of them."""
    room = [1 << 20]

    def write(fd: int, data: Any, at: int) -> int:
        part = memoryview(data)[: room[0]]
        if len(data) and not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(part)
        return os.pwrite(fd, part, at)

    log = shelf.open(files=FileCache(8, write=write, sync=lambda fd: None))
    shelf.append(log, [b"first"])
    end = log.end_position
    pairs = [shelf.batch([b"value %d" % number], producer_id=1 + number) for number in range(3)]
    batches, headers = memoryview(bytearray().join(batch for batch, _ in pairs)), [header for _, header in pairs]
    room[0] = 2 * headers[0].size
    with pytest.raises(DiskFull):
        log.append(batches, headers, epoch=1, batch_id=2, now_us=0)
    assert (log.end_offset, log.end_position, shelf.read_all(log)) == (1, end, [b"first"])
    assert os.path.getsize(log.segments()[-1].path) == end
    assert not any(isinstance(log.check_producer(header), Duplicate) for header in headers)
    room[0] = 1 << 20
    assert log.append(batches, headers, epoch=1, batch_id=2, now_us=0) == 1
    assert shelf.read_all(log) == [b"first", b"value 0", b"value 1", b"value 2"]
    assert all(isinstance(log.check_producer(header), Duplicate) for header in headers)
    log.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_on_a_full_disk_loses_nothing_that_was_flushed(shelf: Shelf, kind: str) -> None:
    files = FullFiles()
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(10))
    files.full = KINDS[kind]
    stored += fill(shelf, log, range(len(stored), 40), epoch=2)
    shelf.checkpoint(log)
    shelf.flush(log)
    lost: list[str] = []
    again = shelf.open(on_loss=lost.append)  # the process was killed, and nothing closed
    assert shelf.read_all(again) == stored
    assert lost == [], "what was written in part is cut off at once"


def test_a_part_of_a_batch_is_cut_off_before_anything_else(shelf: Shelf) -> None:
    files = FullFiles()
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(3))
    (path,) = shelf.paths("log")
    whole = path.read_bytes()
    writes = iter([100, None])

    def write(fd: int, data: Any, at: int) -> int:
        size = next(writes)
        if size is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, memoryview(data)[:size], at)

    files._write = write
    with pytest.raises(DiskFull) as caught:
        shelf.append(log, [b"y" * 300])
    assert (caught.value.retriable, caught.value.outcome) == (True, "not_done")
    assert path.read_bytes() == whole
    files._write = os.pwrite
    shelf.append(log, [b"z"])
    assert shelf.read_all(log) == [*stored, b"z"]


@pytest.mark.parametrize("kind", ["producer states", "the flushed point"])
def test_retention_removes_nothing_that_a_start_would_miss(shelf: Shelf, kind: str) -> None:
    """The producers' snapshot of a roll is all that is left of what they stored in segments that are gone."""
    files = FullFiles()
    files.full = KINDS[kind]
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(40))
    log.reconfigure(KEEP_NOTHING)
    assert shelf.retain(log, 1) == []
    assert (log.start_offset, shelf.read_all(log)) == (0, stored)
    files.full = None
    assert shelf.retain(log, 1) != []
    again = shelf.open()
    assert again.start_offset > 0
    batch = encode([b"again"], base_timestamp_us=0, producer_id=7, sequence=39)
    assert isinstance(again.check_producer(read_header(batch)), Duplicate)


KEEP_NOTHING = LogConfig(segment_bytes=SMALL.segment_bytes, index_interval_bytes=300, retention_bytes=1)


def test_retention_goes_as_far_as_it_can_without_room_for_the_producers_last_numbers(shelf: Shelf) -> None:
    """What an earlier roll has saved is enough for the segments before that, and their removal makes room."""
    files = FullFiles()
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(20))
    saved = max(int(path.stem.split("-")[1]) for path in shelf.paths("producers"))
    files.full = KINDS["producer states"]
    stored += fill(shelf, log, range(20, 40))
    log.reconfigure(KEEP_NOTHING)
    removed = shelf.retain(log, 1)
    assert files.refused
    assert log.start_position == saved
    assert shelf.read_all(log) == stored[removed[-1].end_offset :]
    again = shelf.open()
    batch = encode([b"again"], base_timestamp_us=0, producer_id=7, sequence=39)
    assert isinstance(again.check_producer(read_header(batch)), Duplicate)


def test_the_indexes_of_what_is_to_go_make_room_for_the_producers_last_numbers(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FullFiles()
    files.full = KINDS["producer states"]
    log = shelf.open(files=files)
    fill(shelf, log, range(40))
    log.reconfigure(KEEP_NOTHING)
    unlink = os.unlink

    def make_room(path: str) -> None:
        unlink(path)
        if path.endswith(".index"):
            files.full = None

    monkeypatch.setattr(os, "unlink", make_room)
    assert shelf.retain(log, 1) != []
    assert len(shelf.paths("log")) == 1
    again = shelf.open()
    batch = encode([b"again"], base_timestamp_us=0, producer_id=7, sequence=39)
    assert isinstance(again.check_producer(read_header(batch)), Duplicate)


def copy_to(shelf: Shelf, source: PartitionLog, target: PartitionLog) -> None:
    """What a slave does, up to its master's end."""
    while target.end_position < source.end_position:
        run = source.read_position(target.end_position, 1000)
        target.append_replicated(run.data, run.position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slave_without_room(make_shelf: Callable[[], Shelf], kind: str) -> None:
    master, slave = make_shelf(), make_shelf()
    source, files = master.open(), FullFiles()
    fill(master, source, range(60))
    copy = slave.open(files=files, bound=True)
    files.full = KINDS[kind]
    try:
        copy_to(slave, source, copy)
        assert kind not in NEEDED
    except DiskFull:
        assert kind in NEEDED
    slave.checkpoint(copy)
    assert files.refused
    files.full = None
    copy_to(slave, source, copy)
    slave.flush(copy)
    copy.clear_bound()
    assert slave.read_all(copy) == master.read_all(source)


@pytest.mark.parametrize("kind", ["the flushed point", "a new segment"])
@pytest.mark.parametrize("crash", [False, True])
def test_a_slave_that_is_cut_or_emptied_without_room_is_so_when_there_is_some(
    shelf: Shelf, kind: str, crash: bool
) -> None:
    files = FullFiles()
    log = shelf.open(files=files)
    stored = fill(shelf, log, range(20))
    shelf.flush(log)
    middle = shelf.boundaries(log)[10]
    files.full = KINDS[kind]
    if kind == "the flushed point":
        with pytest.raises(DiskFull):
            log.truncate(middle)
        assert shelf.read_all(log) == stored, "as it was"
    with pytest.raises(DiskFull):
        log.reset_to(1000, 8000)
    files.full = None
    if crash:
        log = shelf.open()
    log.reset_to(1000, 8000)
    log.clear_bound()
    shelf.append(log, [b"first"])
    assert (log.start_offset, shelf.read_all(log)) == (1000, [b"first"])
    log.close()
    assert shelf.read_all(shelf.open()) == [b"first"]


class RoomGone:
    """A disk that, after `left` more changes of files, has no room for the next one, and room again for all others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 1_000_000
        patch.setattr(os, "rename", self._refusing(os.rename))
        patch.setattr(FileCache, "create", self._refusing(FileCache.create))
        self.files = FileCache(8, write=self._refusing(os.pwrite), sync=self._refusing(lambda fd: None))

    def _refusing(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return do(*args, **kwargs)

        return changed


@pytest.mark.parametrize("crash", [False, True])
def test_no_room_at_any_step_of_emptying_leaves_one_log_for_the_disk_and_the_broker(
    make_shelf: Callable[[], Shelf], monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    """What is stored afterwards is in the log that the next start finds. Where that would not be so, it is refused."""
    disk = RoomGone(monkeypatch)
    for number in range(100):
        shelf = make_shelf()
        disk.left = 1_000_000
        log = shelf.open(files=disk.files)
        stored = fill(shelf, log, range(20))
        shelf.checkpoint(log)
        disk.left = number
        with contextlib.suppress(DiskFull):
            log.reset_to(1000, 8000)
            break
        with contextlib.suppress(DiskFull):
            shelf.append(log, [b"more"])
            stored.append(b"more")
        if crash:
            log = shelf.open()
            assert shelf.read_all(log) == stored or (stored[-1] != b"more" and log.size_bytes == 0)
        log.reset_to(1000, 8000)
        log.clear_bound()
        shelf.append(log, [b"first"])
        assert (log.start_offset, shelf.read_all(log)) == (1000, [b"first"])
    assert number > 10
