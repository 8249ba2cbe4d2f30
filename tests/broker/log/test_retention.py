"""What goes by age and by size, to nowhere or to an archive, and what stays."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log import FlushPolicy, LogConfig, PartitionLog
from metamq.errors import OffsetOutOfRange, StorageError

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
    assert log.apply_retention(10**18) == []
    log.close()


def test_by_size(shelf: Any) -> None:
    log = shelf.open(config(retention_bytes=1000))
    fill(shelf, log)
    before = log.segments()
    removed = log.apply_retention(0)
    assert removed == before[: len(removed)]
    assert 1000 - 400 < log.size_bytes <= 1000
    assert log.segments() == before[len(removed) :]
    assert not any(Path(segment.path).exists() for segment in removed)
    assert log.start_offset == removed[-1].end_offset
    assert log.apply_retention(0) == []
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
    log.apply_retention(0)
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
    assert log.apply_retention(ends[0] + 5 * SECOND_US) == []
    assert len(log.apply_retention(ends[0] + 5 * SECOND_US + 1)) == 1
    assert len(log.apply_retention(ends[2] + 5 * SECOND_US + 1)) == 2
    log.close()


def test_an_old_active_segment_is_sealed_and_goes(shelf: Any) -> None:
    settings = config(retention_ms=5000)
    log = shelf.open(settings)
    fill(shelf, log)
    end = log.end_offset
    assert len(log.apply_retention(1000 * SECOND_US)) == 6
    assert (log.start_offset, log.end_offset, log.size_bytes) == (end, end, 0)
    assert log.apply_retention(2000 * SECOND_US) == []
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
    assert log.apply_retention(10**18) == []
    shelf.flush(log)
    fill(shelf, log, 1)
    stable = log.stable_offset
    log.apply_retention(10**18)
    assert log.start_offset <= stable
    log.close()


def test_archive_keeps_what_goes(shelf: Any, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    log = shelf.open(config(retention_bytes=0, cleanup="archive", archive_dir=archive))
    fill(shelf, log)
    bytes_before = {Path(s.path).name: Path(s.path).read_bytes() for s in log.segments()}
    removed = log.apply_retention(0)
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
        assert log.apply_retention(0) == segments[:2], "the two before it went"
    assert "could not be archived" in caplog.text
    assert log.segments() == segments[2:]
    assert len(shelf.read_all(log)) == log.end_offset - log.start_offset
    (blocked / "in the way").rmdir()
    blocked.rmdir()
    assert log.apply_retention(0) == segments[2:5]
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
    assert len(log.apply_retention(0)) == 5
    assert (archive / "flights@t1" / "0" / first.name).read_bytes() == data
    assert not list(archive.rglob("*.tmp"))
    log.close()


def test_segments_that_a_crash_left_before_the_start_go_at_the_next_open(shelf: Any) -> None:
    """The start is moved durably before a file is removed: the files may come back, the start does not."""
    log = shelf.open(config(retention_bytes=0))
    fill(shelf, log)
    held = {path: path.read_bytes() for path in [*shelf.paths("log"), *shelf.paths("index")]}
    log.apply_retention(0)
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
    log.checkpoint()
    shelf.flush(log)
    first = Path(log.segments()[0].path)
    synced: list[str] = []

    def sync(fd: int) -> None:
        assert first.exists()
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    shelf.files.sync = sync
    assert len(log.apply_retention(10**12)) == 6
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
            log.apply_retention(0)
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
