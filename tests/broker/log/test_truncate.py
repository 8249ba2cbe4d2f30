"""Cutting a log back, as a replica does with what its master does not have."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.errors import ConfigError, StorageError

CONFIG = LogConfig(segment_bytes=700, index_interval_bytes=200)


def values_of(count: int) -> list[bytes]:
    return [b"value %d" % number for number in range(count)]


def filled(shelf: Any, config: LogConfig = CONFIG, count: int = 15, files: Any = None) -> Any:
    log = shelf.open(config, files=files)
    for value in values_of(count):
        shelf.append(log, [value], now_us=log.end_offset)
    return log


@pytest.mark.parametrize("flushed", [True, False])
def test_every_boundary_and_what_lies_between(make_shelf: Any, flushed: bool) -> None:
    boundaries = None
    for number in range(16):
        for beside in (0, 1, 100):
            shelf = make_shelf()
            log = filled(shelf)
            boundaries = boundaries or shelf.boundaries(log)
            if flushed:
                shelf.flush(log)
            log.truncate(boundaries[number] + beside)
            assert log.end_offset == number
            assert log.stable_position == log.end_position == boundaries[number]
            assert log.flushed_position == (boundaries[number] if flushed else 0)
            assert log.last_append_us == max(number - 1, 0)
            assert shelf.read_all(log) == values_of(number)
            assert shelf.offset_at_time(log, 1) is None
            shelf.append(log, [b"other"])
            assert shelf.read_all(log) == [*values_of(number), b"other"]
            log.close(clean=False)
            log = shelf.open(CONFIG)
            assert log.recovery.cut_bytes == 0
            assert shelf.read_all(log) == [*values_of(number), b"other"]
            log.close()


def test_at_or_above_the_end_nothing_happens(shelf: Any) -> None:
    log = filled(shelf)
    log.truncate(log.end_position)
    log.truncate(log.end_position + 1000)
    assert log.end_offset == 15
    log.close()


def test_below_the_start_is_refused(shelf: Any) -> None:
    log = filled(shelf, LogConfig(segment_bytes=700, retention_bytes=0))
    shelf.retain(log, 0)
    with pytest.raises(ConfigError, match=f"it starts at byte {log.start_position:,}"):
        log.truncate(log.start_position - 8)
    log.truncate(log.start_position)
    assert log.end_offset == log.start_offset
    log.close()


def test_a_flush_that_is_under_way_does_not_bring_the_marks_back(shelf: Any) -> None:
    log = filled(shelf, LogConfig(segment_bytes=700, flush=FlushPolicy(before_ack=True)))
    ticket = log.start_flush()
    log.truncate(300)
    end = log.end_position
    assert end <= 300
    log.finish_flush(ticket)
    assert (log.end_position, log.flushed_position, log.stable_position) == (end, end, end)
    shelf.append(log, [b"other"])
    assert log.stable_position == end
    shelf.flush(log)
    assert log.stable_position == log.end_position
    log.close()


def test_the_file_system_fails_at_any_step(make_shelf: Any, disk: Any) -> None:
    """Whatever was done when the disk failed, the next start opens: the log is whole, or cut, or in between."""
    for fail_at in range(20):
        shelf = make_shelf()
        disk.sync_fault = lambda n: None
        files = disk.files()
        log = filled(shelf, files=files)
        shelf.flush(log)
        target = shelf.boundaries(log)[6]
        disk.syncs = 0
        disk.sync_fault = lambda n: OSError(errno.EIO, "Input/output error") if n == fail_at else None  # noqa: B023
        try:
            log.truncate(target)
            failed = False
        except StorageError:
            failed = True
        log.close(clean=False)
        files.close()
        log = shelf.open(CONFIG)
        assert log.end_offset >= 6
        assert shelf.read_all(log) == values_of(log.end_offset)
        log.truncate(target)
        assert shelf.read_all(log) == values_of(6)
        log.close()
        if not failed:
            assert fail_at >= 4
            return
    raise AssertionError("truncate does not end")
