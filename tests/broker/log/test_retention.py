"""What goes by age and by size, to nowhere or to an archive, and what stays."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk import derived
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.log.steps import FLUSH
from metamq.errors import ClosedError, OffsetOutOfRange, StorageError

SECOND_US = 1_000_000


def config(**fields: Any) -> LogConfig:
    return LogConfig(segment_bytes=400, index_interval_bytes=200, **fields)


def fill(shelf: Any, log: PartitionLog, count: int = 12) -> None:
    """Batches of one message and 144 bytes, one a second; two a segment."""
    for number in range(log.end_offset, log.end_offset + count):
        shelf.append(log, [b"value %d" % number * 6], now_us=number * SECOND_US)


def test_nothing_goes_without_a_limit(shelf: Any) -> None:
    log = shelf.open(config())
    fill(shelf, log)
    assert shelf.retain(log, 10**18) == []
    log.close()


def test_by_size(shelf: Any) -> None:
    log = shelf.open(config(retention_bytes=1000))
    fill(shelf, log)
    before = log.segments()
    removed = shelf.retain(log, 0)
    assert removed == before[: len(removed)]
    assert 1000 - 400 < log.size_bytes <= 1000
    assert log.segments() == before[len(removed) :]
    assert not any(Path(segment.path).exists() for segment in removed)
    assert log.start_offset == removed[-1].end_offset
    assert shelf.retain(log, 0) == []
    with pytest.raises(OffsetOutOfRange) as caught:
        log.read(log.start_offset - 1, 100)
    assert caught.value.start == log.start_offset
    for clean in (False, True):
        values = shelf.read_all(log)
        log.close(clean)
        log = shelf.open(config(retention_bytes=1000))
        assert shelf.read_all(log) == values
    log.close()


def test_the_active_segment_stays_whatever_its_size(shelf: Any) -> None:
    log = shelf.open(config(retention_bytes=0))
    fill(shelf, log)
    shelf.retain(log, 0)
    (active,) = log.segments()
    assert active.size_bytes > 0
    log.close()


def test_by_age_of_the_last_append(shelf: Any) -> None:
    settings = config(retention_ms=5000)
    log = shelf.open(settings)
    fill(shelf, log)
    log.close()
    log = shelf.open(settings)
    ends = [(segment.end_offset - 1) * SECOND_US for segment in log.segments()]
    assert shelf.retain(log, ends[0] + 5 * SECOND_US) == []
    assert len(shelf.retain(log, ends[0] + 5 * SECOND_US + 1)) == 1
    assert len(shelf.retain(log, ends[2] + 5 * SECOND_US + 1)) == 2
    log.close()


def test_an_old_active_segment_is_sealed_and_goes(shelf: Any) -> None:
    settings = config(retention_ms=5000)
    log = shelf.open(settings)
    fill(shelf, log)
    end = log.end_offset
    assert len(shelf.retain(log, 1000 * SECOND_US)) == 6
    assert (log.start_offset, log.end_offset, log.size_bytes) == (end, end, 0)
    assert shelf.retain(log, 2000 * SECOND_US) == []
    log.close(clean=False)
    log = shelf.open(settings)
    assert (log.start_offset, log.end_offset) == (end, end)
    fill(shelf, log, 3)
    assert len(shelf.read_all(log)) == 3
    log.close()
    log = shelf.open(settings)
    assert (log.start_offset, log.end_offset) == (end, end + 3)
    log.close()


def test_never_past_the_stable_mark(shelf: Any) -> None:
    log = shelf.open(config(retention_bytes=0, retention_ms=0, flush=FlushPolicy(before_ack=True)))
    fill(shelf, log, 4)
    assert shelf.retain(log, 10**18) == []
    shelf.flush(log)
    fill(shelf, log, 1)
    stable = log.stable_offset
    shelf.retain(log, 10**18)
    assert log.start_offset <= stable
    log.close()


def test_archive_keeps_what_goes(shelf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "archive"
    log = shelf.open(config(retention_bytes=0, cleanup="archive", archive_dir=archive))
    fill(shelf, log)
    bytes_before = {Path(s.path).name: Path(s.path).read_bytes() for s in log.segments()}
    synced: set[str] = set()
    sync_folder = FileCache.sync_folder
    monkeypatch.setattr(FileCache, "sync_folder", lambda self, path: (synced.add(path), sync_folder(self, path)))
    removed = shelf.retain(log, 0)
    assert synced >= {str(tmp_path), str(archive), str(archive / "flights@t1")}, "folders made just now are durable"
    assert len(removed) == 5
    for segment in removed:
        assert not Path(segment.path).exists()
        kept = archive / "flights@t1" / "0" / Path(segment.path).name
        assert kept.read_bytes() == bytes_before[kept.name]
    assert sorted(path.suffix for path in archive.rglob("*") if path.is_file()) == [".log"] * 5
    log.close()


def test_a_failed_archive_keeps_the_source(shelf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = tmp_path / "archive"
    log = shelf.open(config(retention_bytes=0, cleanup="archive", archive_dir=archive))
    fill(shelf, log)
    segments = log.segments()
    blocked = archive / "flights@t1" / "0" / Path(segments[2].path).name
    (blocked / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "metamq.broker.log"):
        assert shelf.retain(log, 0) == segments[:2], "the two before it went"
    assert "could not be archived" in caplog.text
    assert log.segments() == segments[2:]
    assert len(shelf.read_all(log)) == log.end_offset - log.start_offset
    (blocked / "in the way").rmdir()
    blocked.rmdir()
    assert shelf.retain(log, 0) == segments[2:5]
    log.close()


def test_an_archive_on_another_file_system_is_a_copy(
    shelf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_paths: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_link)
    archive = tmp_path / "archive"
    log = shelf.open(config(retention_bytes=0, cleanup="archive", archive_dir=archive))
    fill(shelf, log)
    first = Path(log.segments()[0].path)
    data = first.read_bytes()
    assert len(shelf.retain(log, 0)) == 5
    assert (archive / "flights@t1" / "0" / first.name).read_bytes() == data
    assert not list(archive.rglob("*.tmp"))
    log.close()


def test_segments_that_a_crash_left_before_the_start_go_at_the_next_open(shelf: Any) -> None:
    """The start is moved durably before a file is removed: the files may come back, the start does not."""
    log = shelf.open(config(retention_bytes=0))
    fill(shelf, log)
    held = {path: path.read_bytes() for path in [*shelf.paths("log"), *shelf.paths("index")]}
    shelf.retain(log, 0)
    kept, start = set(shelf.paths("log")), log.start_offset
    log.close(clean=False)
    for path, data in held.items():
        if path not in kept:
            path.write_bytes(data)
    log = shelf.open(config())
    assert log.start_offset == start
    assert set(shelf.paths("log")) == kept
    assert {path.stem for path in shelf.paths("index")} <= {path.stem for path in kept}
    log.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names descriptors by /proc")
def test_nothing_goes_before_what_replaces_it_is_durable(shelf: Any) -> None:
    """The new segment's name, the producers' states, then the new start; only then the first removal."""
    log = shelf.open(config(retention_ms=1000))
    fill(shelf, log)
    shelf.checkpoint(log)
    shelf.flush(log)
    first = Path(log.segments()[0].path)
    synced: list[str] = []

    def sync(fd: int) -> None:
        assert first.exists()
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    shelf.files.sync = sync
    assert len(shelf.retain(log, 10**12)) == 6
    (snapshot,) = shelf.paths("producers")
    assert {snapshot.name, "0"} <= set(synced[:-1])
    assert synced[-1] == "flushed"
    log.close(clean=False)


def test_a_failure_at_any_step_of_retention(make_shelf: Any, disk: Any) -> None:
    for fail_at in range(20):
        shelf = make_shelf()
        files = disk.files()
        log = shelf.open(config(retention_bytes=0), files=files)
        fill(shelf, log)
        disk.syncs = 0
        disk.sync_fault = lambda n: OSError(errno.EIO, "Input/output error") if n == fail_at else None  # noqa: B023
        try:
            shelf.retain(log, 0)
            failed = False
        except StorageError:
            failed = True
        log.close(clean=False)
        files.close()
        disk.sync_fault = lambda n: None
        log = shelf.open(config())
        assert log.end_offset == 12
        assert len(shelf.read_all(log)) == 12 - log.start_offset
        log.close()
        if not failed:
            assert fail_at > 3
            return
    raise AssertionError("retention does not end")


def steps_of(shelf: Any, log: PartitionLog, steps: Any, between: Callable[[int], None]) -> int:
    """Carries the steps out with something else before and after each; returns how many there were."""
    count = 0
    between(count)
    for step in steps:
        count += 1
        between(-count)
        if step == FLUSH:
            with contextlib.suppress(StorageError):
                shelf.flush(log)
        else:
            step()
        between(count)
    return count


@pytest.mark.parametrize("cleanup", ["delete", "archive"])
def test_appends_and_flushes_go_on_between_the_steps(make_shelf: Any, tmp_path: Path, cleanup: str) -> None:
    shelf = make_shelf()
    settings = config(retention_bytes=700, cleanup=cleanup, archive_dir=tmp_path / "archive")
    log = shelf.open(settings)
    fill(shelf, log)
    first = log.segments()[0].base_offset

    def go_on(number: int) -> None:
        for _ in range(abs(number) % 4):
            fill(shelf, log, 1)
        if number % 2:
            shelf.flush(log)
        assert len(shelf.read_all(log)) == log.end_offset - log.start_offset

    assert steps_of(shelf, log, log.retain(0), go_on) >= 5
    assert steps_of(shelf, log, log.checkpoint(), go_on) >= 2
    assert log.start_offset > first
    for clean in (False, True):
        values, marks = shelf.read_all(log), (log.start_offset, log.end_offset)
        log.close(clean)
        log = shelf.open(settings)
        assert (log.start_offset, log.end_offset) == marks
        assert shelf.read_all(log) == values
    log.close()


def test_a_crash_between_any_two_steps(make_shelf: Any) -> None:
    """What a copy of the folder has at any of these moments is a log that opens, with all of its messages."""
    shelf = make_shelf()
    log = shelf.open(config(retention_bytes=700))
    fill(shelf, log)
    copies: list[tuple[int, int, Any]] = []

    def copy(number: int) -> None:
        other = make_shelf()
        shutil.copytree(shelf.folder, other.folder)
        copies.append((log.start_offset, log.end_offset, other))
        fill(shelf, log, 1)

    steps_of(shelf, log, log.retain(0), copy)
    steps_of(shelf, log, log.checkpoint(), copy)
    assert len({start for start, _end, _shelf in copies}) == 2
    for start, end, other in copies:
        found = other.open(config())
        assert (found.start_offset, found.end_offset) == (start, end)
        assert len(other.read_all(found)) == end - start
        found.close()
    log.close()


def test_a_large_file_goes_in_steps_but_not_the_one_in_the_archive(
    shelf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    truncate = os.truncate

    def noted(path: str, size: int) -> None:
        sizes.append(size)
        truncate(path, size)

    monkeypatch.setattr(os, "truncate", noted)
    monkeypatch.setattr(derived, "STEP_BYTES", 100)
    log = shelf.open(config(retention_bytes=700))
    fill(shelf, log)
    removed = shelf.retain(log, 0)
    assert sizes[:2] == [removed[0].size_bytes - 100, removed[0].size_bytes - 200]
    assert not any(Path(segment.path).exists() for segment in removed)
    sizes.clear()
    archive = tmp_path / "archive"
    log.reconfigure(config(retention_bytes=0, cleanup="archive", archive_dir=archive))
    kept = {Path(segment.path).name: Path(segment.path).read_bytes() for segment in log.segments()[:-1]}
    shelf.retain(log, 0)
    assert {path.name: path.read_bytes() for path in archive.rglob("*.log")} == kept
    assert not sizes
    log.close()


@pytest.mark.parametrize("at", range(8))
def test_closed_between_any_two_steps(shelf: Any, tmp_path: Path, at: int) -> None:
    """A topic may be deleted meanwhile, or made anew: nothing is touched after that."""
    log = shelf.open(config(retention_bytes=700, cleanup="archive", archive_dir=tmp_path / "archive"))
    fill(shelf, log)
    closed: dict[str, str] = {}

    def close(number: int) -> None:
        if number == at:
            log.close(clean=False)
            closed.update(shelf.contents())

    try:
        count = steps_of(shelf, log, log.retain(0), close)
    except ClosedError:
        assert shelf.contents() == closed
    else:
        assert at >= count
        log.close()


def test_a_log_that_was_cut_meanwhile_keeps_what_was_to_go(shelf: Any) -> None:
    log = shelf.open(config(retention_bytes=700))
    fill(shelf, log)
    steps = log.retain(0)
    assert next(steps) == FLUSH
    log.truncate(log.segments()[0].base_position + 200)
    assert shelf.finish(log, steps) == []
    assert log.start_offset == 0
    assert len(shelf.read_all(log)) == log.end_offset == 1
    log.close()
