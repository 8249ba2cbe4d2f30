"""Logs that begin anew: emptied to begin elsewhere, or in the place of a damaged one; a crash at any step included."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.derived import unlink_all
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.flushed import FlushFile, FlushPoint
from metamq.broker.log.disk.producers import Duplicate, New
from metamq.broker.log.fresh import set_aside
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.log.steps import FLUSH
from metamq.errors import CorruptData, OffsetOutOfRange, StorageError

SEED = 20250312
CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=200, retention_bytes=800)


def filled(shelf: Any, count: int = 9, files: Any = None) -> PartitionLog:
    log: PartitionLog = shelf.open(CONFIG, files=files)
    for number in range(log.end_offset, log.end_offset + count):
        shelf.append(log, [b"value %d" % number * 3], producer_id=5, sequence=number, now_us=number + 1)
    return log


def values_of(count: int, start: int = 0) -> list[bytes]:
    return [b"value %d" % number * 3 for number in range(start, count)]


def assert_empty(shelf: Any, log: PartitionLog, offset: int, position: int) -> None:
    marks = {(log.start_offset, log.start_position), (log.end_offset, log.end_position)}
    marks |= {(log.flushed_offset, log.flushed_position), (log.stable_offset, log.stable_position)}
    assert marks == {(offset, position)}
    assert log.size_bytes == 0
    assert log.epochs().entries == ()
    assert [segment.size_bytes for segment in log.segments()] == [0]
    assert log.read(offset, 100).data == b""
    assert shelf.offset_at_time(log, 0) is None
    assert log.start_flush() is None
    with pytest.raises(OffsetOutOfRange):
        log.read(offset + 1, 100)
    _batch, header = shelf.batch([b"x"], producer_id=5, sequence=3)
    assert log.check_producer(header) == New(), "nothing is known of producers"


def assert_usable(shelf: Any, log: PartitionLog, offset: int) -> None:
    """What is appended now begins there, and stays over restarts."""
    log.clear_bound()
    for number in range(6):
        assert shelf.append(log, [b"other %d" % number], producer_id=5, sequence=number, epoch=9) == offset + number
    for clean in (False, True):
        assert shelf.read_all(log) == [b"other %d" % number for number in range(6)]
        assert log.epochs().entries == ((9, offset, log.start_position),)
        _batch, header = shelf.batch([b"x"], producer_id=5, sequence=5)
        assert isinstance(log.check_producer(header), Duplicate)
        log.close(clean)
        log = shelf.open(CONFIG)
        assert (log.recovery.cut_bytes, log.recovery.clean) == (0, clean)
    log.close()


PLACES = {
    "ahead": (400, 40_000),
    "at the end, as another": (1009, -1),
    "inside": (4, 408),
    "at the start": (0, 0),
    "at a segment's start, as another": (7, -2),
}


def place(log: PartitionLog, name: str) -> tuple[int, int]:
    offset, position = PLACES[name]
    return offset, {-1: log.end_position, -2: log.segments()[2].base_position}.get(position, position)


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_an_emptied_log_begins_where_it_is_told(shelf: Any, name: str, flushed: bool) -> None:
    log = filled(shelf)
    if flushed:
        shelf.flush(log)
        shelf.checkpoint(log)
    offset, position = place(log, name)
    files = [path for path in shelf.folder.iterdir() if path.name != "flushed"]
    void = log.reset_to(offset, position)
    assert len(void) == len(files)
    assert_empty(shelf, log, offset, position)
    unlink_all(void)
    assert {path.suffix for path in shelf.folder.iterdir()} == {".log", ""}
    assert_usable(shelf, log, offset)


@pytest.mark.parametrize("removed", [True, False])
def test_it_is_so_after_a_restart_whoever_removes_the_files(shelf: Any, removed: bool) -> None:
    log = filled(shelf)
    void = log.reset_to(4, 408)
    if removed:
        unlink_all(void)
    log.close(clean=False)
    log = shelf.open(CONFIG, bound=True)
    assert log.recovery.clean
    assert not any(Path(path).exists() for path in void)
    assert_empty(shelf, log, 4, 408)
    assert_usable(shelf, log, 4)


def test_a_log_that_has_just_been_made_is_left_alone(shelf: Any, disk: Any) -> None:
    """A new replica of a log that still has its beginning."""
    files = disk.files()
    log = shelf.open(CONFIG, files=files)
    disk.writes = disk.syncs = 0
    assert log.reset_to(0, 0) == []
    assert (disk.writes, disk.syncs) == (0, 0)
    shelf.append(log, [b"value"])
    assert log.stable_offset == 0, "it is bound all the same"
    log.reset_to(7, 800)
    before = disk.writes
    assert log.reset_to(7, 800) == []
    assert disk.writes == before
    assert_empty(shelf, log, 7, 800)
    assert_usable(shelf, log, 7)


def test_readers_see_nothing_of_it_unless_told(shelf: Any) -> None:
    log = filled(shelf)
    assert log.stable_offset == 9
    log.reset_to(4, 408)
    shelf.append(log, [b"other"])
    assert (log.stable_offset, log.end_offset) == (4, 5)
    assert log.read(4, 100).data == b""
    log.close()


def test_a_flush_or_retention_under_way_does_no_harm(make_shelf: Any) -> None:
    """At every step of retention the log may be emptied, also to begin where a segment began that is about to go."""
    for number in range(20):
        shelf = make_shelf()
        log = filled(shelf)
        steps = log.retain(0)
        try:
            step = next(steps)
            for _ in range(number):
                step = steps.send(carried_out(shelf, log, step))
        except StopIteration:
            log.close()
            assert number > 4
            return
        ticket = log.start_flush()
        void = log.reset_to(0, 0)
        if ticket is not None:
            log.finish_flush(ticket)
        assert_empty(shelf, log, 0, 0)
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(carried_out(shelf, log, step))
        unlink_all(void)
        assert_empty(shelf, log, 0, 0)
        assert len(shelf.paths("log")) == 1
        assert_usable(shelf, log, 0)
    raise AssertionError("retention does not end")


def carried_out(shelf: Any, log: PartitionLog, step: Any) -> Any:
    return shelf.flush(log) if step == FLUSH else step()


def test_the_emptying_ends_only_when_every_change_of_a_name_is_on_the_disk(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(shelf)
    durable: set[str] = set()

    def sync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            durable.update(os.listdir(fd))
            durable.intersection_update(os.listdir(fd))

    shelf.files.sync = sync
    write = FlushFile.write
    points = []

    def noted(self: FlushFile, point: FlushPoint) -> None:
        if not point.emptying:
            assert durable == set(os.listdir(shelf.folder))
        points.append(point.emptying)
        write(self, point)

    monkeypatch.setattr(FlushFile, "write", noted)
    log.reset_to(4, 408)
    assert points == [True, True, False, False]
    log.close(clean=False)


# -- crashes ----------------------------------------------------------------------------------------------------------


class Mortal:
    """A file cache under which every change of a file is counted; after `left` more of them none happens any more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 1_000_000
        self.done: list[str] = []
        for name in ("rename", "unlink", "ftruncate"):
            patch.setattr(os, name, self._change(name, getattr(os, name)))
        patch.setattr(FileCache, "create", self._change("create", FileCache.create))
        self.files = FileCache(8, write=self._change("write", os.pwrite), sync=self._change("sync", lambda fd: None))

    def _change(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if not self.left:
                raise OSError(f"dead before {name}")
            self.left -= 1
            self.done.append(name)
            return do(*args, **kwargs)

        return changed


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`with mortal(3) as disk`: the process that uses `disk.files` dies before its fourth change of a file."""

    @contextlib.contextmanager
    def life(left: int = 1_000_000) -> Iterator[Mortal]:
        with monkeypatch.context() as patch:
            disk = Mortal(patch)
            disk.left = left
            yield disk
            disk.left = 0
            disk.files.close()

    return life


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_a_crash_at_any_step_leaves_the_old_log_or_the_new(
    make_shelf: Any, mortal: Any, name: str, flushed: bool
) -> None:
    emptied = False
    for number in range(200):
        shelf = make_shelf()
        log = filled(shelf)
        if flushed:
            shelf.checkpoint(log)
        target = place(log, name)
        log.close(clean=False)
        with mortal() as disk:
            log = shelf.open(CONFIG, files=disk.files)
            disk.left = number
            try:
                log.reset_to(*target)
                ended = True
            except StorageError:
                ended = False
            log.close(clean=False)
        log = shelf.open(CONFIG)
        if log.size_bytes:
            assert not emptied, "never back"
            assert (log.start_offset, log.end_offset) == (0, 9)
            assert shelf.read_all(log) == values_of(9)
            log.reset_to(*target)
        else:
            emptied = True
        assert_empty(shelf, log, *target)
        assert_usable(shelf, log, target[0])
        if ended:
            assert number > 12
            return
    raise AssertionError("emptying does not end")


def test_a_power_cut_may_undo_any_change_of_a_name_that_was_not_flushed(
    make_shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision and its end: old files are there or not, renamed or not; the new segment, too."""
    decided: list[bytes] = []
    write_other = FlushFile.write_other

    def noted(self: FlushFile, point: FlushPoint) -> None:
        write_other(self, point)
        if point.emptying:
            decided.append(Path(self.path).read_bytes())

    monkeypatch.setattr(FlushFile, "write_other", noted)
    print(f"seed {SEED}")
    choice = random.Random(SEED)
    for _ in range(60):
        shelf = make_shelf()
        log = filled(shelf)
        shelf.checkpoint(log)
        target = choice.choice([(400, 40_000), (4, 408), (0, 0), (9, log.end_position)])
        old = {path: path.read_bytes() for path in shelf.folder.iterdir() if path.name != "flushed"}
        log.reset_to(*target)
        log.close(clean=False)
        (shelf.folder / "flushed").write_bytes(decided[-1])
        for path in list(shelf.folder.iterdir()):
            if path.name != "flushed" and choice.random() < 0.5:
                path.unlink()
        for path, data in old.items():
            if choice.random() < 0.5:
                path.write_bytes(data)
        log = shelf.open(CONFIG, bound=True)
        assert_empty(shelf, log, *target)
        assert_usable(shelf, log, target[0])


def test_a_crash_while_the_emptying_is_finished_leaves_it_to_the_next_start(make_shelf: Any, mortal: Any) -> None:
    for number in range(100):
        shelf = make_shelf()
        filled(shelf).close(clean=False)
        with mortal() as disk:
            log = shelf.open(CONFIG, files=disk.files)
            disk.left = 4  # the decision: two writes, two fsyncs
            with pytest.raises(StorageError):
                log.reset_to(4, 408)
            log.close(clean=False)
        with mortal(number) as disk:
            try:
                shelf.open(CONFIG, files=disk.files).close(clean=False)
                ended = True
            except StorageError:
                ended = False
        log = shelf.open(CONFIG, bound=True)
        assert_empty(shelf, log, 4, 408)
        assert_usable(shelf, log, 4)
        if ended:
            assert number > 12
            return
    raise AssertionError("the start does not end")


# -- damaged logs -----------------------------------------------------------------------------------------------------


def test_a_damaged_log_is_put_aside_whole_and_a_new_one_made(shelf: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = filled(shelf)
    shelf.checkpoint(log)
    log.close()
    shelf.damage(100)
    (shelf.folder / "flushed").unlink()
    held = shelf.contents()
    with pytest.raises(CorruptData):
        shelf.open(CONFIG)
    with caplog.at_level(logging.WARNING, "metamq.broker.log"):
        target = set_aside(shelf.folder, "flights/0-0", shelf.files, now_us=1_741_772_096_000_000)
    assert Path(target) == shelf.folder.with_name("0.damaged-20250312T093456Z")
    assert f"flights/0-0: the damaged log was moved to {target}" in caplog.text
    log = shelf.open(CONFIG)
    assert_empty(shelf, log, 0, 0)
    assert_usable(shelf, log, 0)
    folder, shelf.folder = shelf.folder, Path(target)
    assert shelf.contents() == held
    shelf.folder = folder


def test_two_that_are_put_aside_in_one_second_do_not_meet(shelf: Any) -> None:
    names = []
    for _ in range(3):
        shelf.open(CONFIG).close()
        names.append(Path(set_aside(shelf.folder, "flights/0-0", shelf.files, now_us=0)).name)
    assert names == [f"0.damaged-19700101T000000Z{tail}" for tail in ("", "-2", "-3")]
    assert not shelf.folder.exists()


def test_a_crash_while_a_log_is_put_aside_leaves_it_or_a_new_one(make_shelf: Any, mortal: Any) -> None:
    for number in range(20):
        shelf = make_shelf()
        log = filled(shelf)
        shelf.checkpoint(log)
        log.close()
        (shelf.folder / "flushed").unlink()
        held = shelf.contents()
        with mortal(number) as disk:
            try:
                set_aside(shelf.folder, "flights/0-0", disk.files, now_us=0)
                shelf.open(CONFIG, files=disk.files).close(clean=False)
                ended = True
            except StorageError:
                ended = False
        if number == 0:
            assert shelf.contents() == held
            with pytest.raises(CorruptData):
                shelf.open(CONFIG)
            continue
        log = shelf.open(CONFIG)
        assert_empty(shelf, log, 0, 0)
        log.close()
        if ended:
            assert disk.done[:2] == ["rename", "sync"]
            assert number > 5
            return
    raise AssertionError("it does not end")
