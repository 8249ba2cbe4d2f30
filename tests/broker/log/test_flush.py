"""Flushing: tickets, policies, and what a disk that fails does to a log."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.errors import ConfigError, StorageError

ONE_SEGMENT = LogConfig(segment_bytes=1 << 20)


@pytest.mark.parametrize(
    ("policy", "messages", "since_ms", "due"),
    [
        (FlushPolicy(), 0, 5000, False),
        (FlushPolicy(), 1, 999, False),
        (FlushPolicy(), 1, 1000, True),
        (FlushPolicy(every_ms=None), 10**9, 10**9, False),
        (FlushPolicy(every_messages=10, every_ms=None), 9, 10**9, False),
        (FlushPolicy(every_messages=10, every_ms=None), 10, 0, True),
        (FlushPolicy(before_ack=True, every_ms=None), 1, 0, True),
        (FlushPolicy(before_ack=True), 0, 10**9, False),
    ],
)
def test_policy(policy: FlushPolicy, messages: int, since_ms: float, due: bool) -> None:
    assert policy.due(messages, since_ms) is due


def test_settings_that_cannot_work() -> None:
    for wrong in ({"segment_bytes": 0}, {"cleanup": "archive"}, {"batch_bytes_max": 1 << 40}):
        with pytest.raises(ConfigError):
            LogConfig(**wrong)  # type: ignore[arg-type]


def test_a_flush_takes_what_was_there_when_it_began(shelf: Any, before_ack: LogConfig) -> None:
    log = shelf.open(before_ack)
    assert log.start_flush() is None
    shelf.append(log, [b"a", b"b"])
    assert log.flush_due(0)
    ticket = log.start_flush()
    shelf.append(log, [b"c"])
    assert log.start_flush() is None, "one at a time"
    thread = threading.Thread(target=ticket.sync)
    thread.start()
    thread.join(10)
    assert log.stable_offset == 0
    log.finish_flush(ticket)
    assert (log.flushed_offset, log.stable_offset, log.end_offset) == (2, 2, 3)
    shelf.flush(log)
    assert log.flushed_position == log.end_position
    assert not log.flush_due(10**9)
    log.close()


def test_a_flush_covers_every_segment_written_since_the_last(shelf: Any, disk: Any) -> None:
    files = disk.files()
    log = shelf.open(files=files)
    for _ in range(25):
        shelf.append(log, [b"v" * 100])
    segments = len(log.segments())
    assert segments >= 3
    disk.syncs = 0
    shelf.flush(log)
    snapshots = len(shelf.paths("producers"))
    assert disk.syncs == segments + snapshots + 3, "the files `flushed` and `epochs` and the folder besides"
    shelf.append(log, [b"v"])
    disk.syncs = 0
    shelf.flush(log)
    assert disk.syncs == 1
    assert log.start_flush() is None
    log.close()


def test_eviction_does_not_disturb_a_flush(shelf: Any) -> None:
    shelf.files.limit = 1
    log = shelf.open()
    shelf.append(log, [b"a"])
    ticket = log.start_flush()
    shelf.files.close()
    ticket.sync()
    log.finish_flush(ticket)
    assert log.flushed_offset == 1
    log.close()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors by /proc")
def test_tickets_leave_no_descriptor(shelf: Any, disk: Any) -> None:
    before = open_descriptors()
    files = disk.files()
    log = shelf.open(files=files)
    shelf.append(log, [b"a"])
    shelf.flush(log)
    shelf.append(log, [b"a"])
    disk.sync_fault = lambda number: OSError(errno.EIO, "Input/output error")
    with pytest.raises(StorageError):
        shelf.flush(log)
    log.close()
    files.close()
    assert len(open_descriptors()) == len(before)


def test_a_failed_fsync_is_never_tried_again(shelf: Any, disk: Any, before_ack: LogConfig) -> None:
    log = shelf.open(before_ack, files=disk.files())
    shelf.append(log, [b"a"])
    shelf.flush(log)
    shelf.append(log, [b"b"])
    disk.sync_fault = lambda number: OSError(errno.EIO, "Input/output error")
    ticket = log.start_flush()
    with pytest.raises(StorageError, match="flights/0-0: fsync failed: Input/output error") as caught:
        ticket.sync()
    assert caught.value.outcome == "unknown"
    syncs = disk.syncs
    disk.sync_fault = lambda number: None
    with pytest.raises(StorageError, match="takes no writes since its disk failed") as refused:
        shelf.append(log, [b"c"])
    assert refused.value.outcome == "not_done"
    for _ in range(2):
        with pytest.raises(StorageError, match="fsync failed"):
            ticket.sync()
        with pytest.raises(StorageError, match="fsync failed"):
            log.finish_flush(ticket)
    for use in (log.start_flush, lambda: shelf.checkpoint(log), lambda: log.truncate(0), lambda: shelf.retain(log, 0)):
        with pytest.raises(StorageError, match="takes no writes"):
            use()
    assert disk.syncs == syncs
    assert (log.flushed_offset, log.stable_offset) == (1, 1)
    assert shelf.read_all(log) == [b"a"], "reads go on"
    log.close()
    assert disk.syncs == syncs, "nor does the close"
    log = shelf.open(before_ack)
    assert not log.recovery.clean
    log.close()


def test_a_close_that_fails_after_the_fsync_is_a_failed_flush(
    shelf: Any, before_ack: LogConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over NFS, close() is where a failed write may be told.
    log = shelf.open(before_ack)
    shelf.append(log, [b"a"])
    ticket = log.start_flush()
    closed: list[int] = []

    def close(fd: int) -> None:
        closed.append(fd)
        os_close(fd)
        raise OSError(errno.EIO, f"close {len(closed)} failed")

    os_close = os.close
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageError, match="fsync failed: close 1 failed"):
        ticket.sync()
    monkeypatch.undo()
    assert ticket.done
    assert len(closed) > 1, "one that fails leaves no other open"
    with pytest.raises(StorageError, match="takes no writes since its disk failed"):
        shelf.append(log, [b"b"])
    log.close()


def test_the_tail_is_written_again_before_it_counts_as_flushed(shelf: Any, disk: Any) -> None:
    """After a failed fsync the kernel may hold unwritten pages as clean: an fsync alone would prove nothing."""
    log = shelf.open(ONE_SEGMENT)
    shelf.append(log, [b"a"])
    shelf.flush(log)
    flushed = log.flushed_position
    shelf.append(log, [b"b"])
    log.close(clean=False)
    places: list[tuple[int, int]] = []

    def note(number: int, size: int) -> None:
        places.append((number, size))

    disk.write_fault = note
    log = shelf.open(ONE_SEGMENT, files=disk.files())
    assert [size for _number, size in places] == [log.end_position - flushed]
    assert (log.flushed_position, log.end_offset) == (flushed, 2)
    shelf.flush(log)
    assert log.flushed_position == log.end_position
    log.close()


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("half", [True, False])
def test_a_failed_write_ends_the_writing(shelf: Any, disk: Any, code: int, half: bool) -> None:
    log = shelf.open(ONE_SEGMENT, files=disk.files())
    shelf.append(log, [b"a"])
    shelf.append(log, [b"b"])
    end = log.end_position
    error = OSError(code, os.strerror(code))
    disk.writes = 0
    faults = [100, error] if half else [error]
    disk.write_fault = lambda number, size: faults[number] if number < len(faults) else None
    with pytest.raises(StorageError, match=f"flights/0-0: writing failed: {os.strerror(code)}") as caught:
        shelf.append(log, [b"c"])
    assert caught.value.hint
    assert (log.end_offset, log.end_position) == (2, end)
    with pytest.raises(StorageError, match=os.strerror(code)):
        shelf.append(log, [b"d"])
    assert shelf.read_all(log) == [b"a", b"b"]
    log.close()
    log = shelf.open(ONE_SEGMENT)
    assert shelf.read_all(log) == [b"a", b"b"]
    assert log.recovery.cut_bytes == (100 if half else 0)
    log.close()


def test_short_writes_are_completed(shelf: Any, disk: Any) -> None:
    disk.write_fault = lambda number, size: max(size // 2, 1)
    log = shelf.open(files=disk.files())
    values = [b"%d" % n * 50 for n in range(30)]
    for value in values:
        shelf.append(log, [value])
    log.close()
    log = shelf.open()
    assert shelf.read_all(log) == values
    log.close()


def test_a_disk_that_takes_nothing(shelf: Any, disk: Any) -> None:
    log = shelf.open(files=disk.files())
    disk.write_fault = lambda number, size: 0
    with pytest.raises(StorageError, match="takes no more bytes"):
        shelf.append(log, [b"a"])
    log.close()


@pytest.mark.parametrize("fail_at", range(6))
def test_a_failure_at_any_step_of_a_roll(shelf: Any, disk: Any, fail_at: int) -> None:
    config = LogConfig(segment_bytes=200)
    log = shelf.open(config, files=disk.files())
    shelf.append(log, [b"a" * 30])
    shelf.flush(log)
    disk.writes = 0
    disk.write_fault = lambda number, size: OSError(errno.EIO, "Input/output error") if number >= fail_at else None
    stored = [b"a" * 30]

    def go_on() -> None:
        for number in range(10):
            shelf.append(log, [b"%d" % number * 30])
            stored.append(b"%d" % number * 30)

    with pytest.raises(StorageError, match="Input/output error"):
        go_on()
    assert shelf.read_all(log) == stored
    log.close()
    log = shelf.open(config)
    assert shelf.read_all(log) == stored
    log.close()


def test_a_checkpoint_saves_a_scan(shelf: Any) -> None:
    log = shelf.open(ONE_SEGMENT)
    for number in range(20):
        shelf.append(log, [b"v" * 50], producer_id=3, sequence=number)
    shelf.checkpoint(log)
    assert log.flushed_position == log.end_position
    log.close(clean=False)
    log = shelf.open(ONE_SEGMENT)
    assert (log.recovery.clean, log.recovery.scanned_bytes) == (False, 0)
    at = log.end_position
    for number in range(20, 25):
        shelf.append(log, [b"v" * 50], producer_id=3, sequence=number)
    end = log.end_position
    log.close(clean=False)
    log = shelf.open(ONE_SEGMENT)
    assert end - at <= log.recovery.scanned_bytes <= end - at + 4096 + 200
    assert len(shelf.read_all(log)) == 25
    log.close()


def test_an_untouched_log_is_closed_without_a_write(shelf: Any, disk: Any) -> None:
    log = shelf.open()
    shelf.append(log, [b"a"])
    log.close()
    log = shelf.open(files=disk.files())
    assert shelf.read_all(log) == [b"a"]
    log.close()
    assert (disk.writes, disk.syncs) == (0, 0)
    log = shelf.open()
    assert log.recovery.clean
    log.close()


@pytest.mark.parametrize("appends", [2, 3])
def test_a_segment_that_a_killed_process_began_gets_a_durable_name(shelf: Any, appends: int) -> None:
    """Whoever opens the log next appends to it, and acknowledges after a flush; without the name a power cut takes all
    of the segment."""
    config = LogConfig(segment_bytes=380)
    log = shelf.open(config)
    shelf.append(log, [b"x" * 100])
    shelf.flush(log)
    for _ in range(appends - 1):
        shelf.append(log, [b"x" * 100])
    assert len(log.segments()) == appends
    log.close(clean=False)
    synced: list[str] = []
    files = FileCache(8, sync=lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    log = shelf.open(config, files=files)
    synced.clear()
    shelf.append(log, [b"x" * 10])
    shelf.flush(log)
    assert str(shelf.folder) in synced
    log.close(clean=False)
