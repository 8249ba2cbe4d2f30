"""Messages that are deleted up to an offset: gone for readers at once, then gone from the disk, whatever fails.

The invariant, after each step and each crash: the log starts at the begin of a batch, never before an earlier start;
all messages from the trim's offset on are there; and what readers get begins at the trim's offset.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log import recovery, trim
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.steps import FLUSH
from metamq.broker.log.trim import TrimmedLog
from metamq.errors import ClosedError, CorruptData, OffsetOutOfRange, StorageError
from tests.broker.log.test_times import append, lying
from tests.examples import examples

CONFIG = LogConfig(segment_bytes=2000, index_interval_bytes=300)
ONE_SEGMENT = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300)
BATCHES, EACH = 30, 3


def opened(shelf: Any, config: LogConfig = CONFIG, files: FileCache | None = None) -> TrimmedLog:
    log = TrimmedLog.open(shelf.folder, "flights/0-0", config, files or shelf.files, now_us=0)
    log.clear_bound()
    return log


def values(first: int = 0, end: int = BATCHES * EACH) -> list[bytes]:
    return [b"secret %05d" % number for number in range(first, end)]


def filled(shelf: Any, config: LogConfig = CONFIG, files: FileCache | None = None) -> TrimmedLog:
    log = opened(shelf, config, files)
    for number in range(BATCHES):
        batch = values(number * EACH, (number + 1) * EACH)
        shelf.append(log, batch, producer_id=7, sequence=number, timestamps_us=[number] * EACH)
    return log


def trimmed(shelf: Any, log: TrimmedLog, offset: int, epoch: int = 1) -> bool:
    log.hide_before(offset, epoch)
    return bool(shelf.finish(log, log.remove_hidden(0)))


def carried_out(shelf: Any, log: TrimmedLog, between: Callable[[object], None]) -> bool:
    """Removes what is hidden, and calls `between` after each step."""
    steps, result = log.remove_hidden(0), None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            return bool(end.value)
        if step == FLUSH:
            shelf.flush(log)
        result = None if step == FLUSH else step()
        between(step)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def kept(offset: int) -> int:
    """The offset at which the log starts after a trim: batches stay whole."""
    return offset // EACH * EACH


def check(shelf: Any, log: TrimmedLog, offset: int) -> None:
    """The log after a trim before `offset`, and what its files have."""
    assert log.begin_offset == offset
    assert log.start_offset == kept(offset)
    assert shelf.read_all(log, offset) == values(offset)
    if offset:
        with pytest.raises(OffsetOutOfRange) as refused:
            log.read(offset - 1, 1)
        assert f"{offset}" in str(refused.value)
    found = on_disk(shelf.folder)
    assert [value for value in values(0, kept(offset)) if value in found] == []
    assert not [path for path in shelf.folder.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("config", [CONFIG, ONE_SEGMENT])
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 44, 45, 46, 87, 88, 90])
def test_messages_before_an_offset_are_gone(shelf: Any, config: LogConfig, offset: int) -> None:
    log = filled(shelf, config)
    assert trimmed(shelf, log, offset)
    check(shelf, log, offset)
    assert not log.has_hidden
    assert trimmed(shelf, log, offset)  # again, as after a lost answer
    shelf.append(log, values(90, 92), producer_id=7, sequence=BATCHES)
    assert shelf.read_all(log, offset) == values(offset, 92)
    log.close()
    log = opened(shelf, config)
    assert log.start_offset == kept(offset)
    assert shelf.read_all(log) == values(kept(offset), 92)
    log.close()


def test_hidden_messages_are_not_read_before_they_are_removed(shelf: Any) -> None:
    log = filled(shelf)
    log.hide_before(44, 1)
    assert (log.begin_offset, log.start_offset) == (44, 0)
    with pytest.raises(OffsetOutOfRange):
        log.read(0, 1)
    with pytest.raises(OffsetOutOfRange):
        log.locate(43, 1)
    assert shelf.read_all(log, 44) == values(44)
    log.close()


def test_a_trim_deletes_no_message_of_a_later_epoch(shelf: Any) -> None:
    log = opened(shelf)
    for number in range(10):
        shelf.append(log, [b"%d" % number], epoch=1 if number < 6 else 18)
    assert trimmed(shelf, log, 9, epoch=17)  # the history of epoch 17 had other messages from offset 6 on
    assert (log.begin_offset, log.start_offset) == (6, 6)
    assert trimmed(shelf, log, 9, epoch=18)
    assert log.start_offset == 9
    log.close()


def test_a_trim_waits_until_the_replica_has_the_messages(shelf: Any) -> None:
    log = filled(shelf)
    log.set_bound(log.stable_offset, log.stable_position)
    shelf.append(log, values(90, 93), producer_id=7, sequence=BATCHES)
    assert not trimmed(shelf, log, 93)
    assert (log.begin_offset, log.start_offset) == (90, 0)
    log.clear_bound()
    assert log.begin_offset == 93
    assert trimmed(shelf, log, 93)
    assert log.start_offset == log.end_offset == 93
    log.close()


def test_what_a_transaction_needs_stays(shelf: Any) -> None:
    log = filled(shelf)
    log.hide_before(50, 1)
    assert not shelf.finish(log, log.remove_hidden(0, keep_from=100))
    assert (log.start_offset, log.begin_offset) == (0, 50)
    assert shelf.finish(log, log.remove_hidden(0, keep_from=log.end_position))
    check(shelf, log, 50)
    log.close()


def test_an_archive_gets_nothing(shelf: Any, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    log = filled(shelf, LogConfig(segment_bytes=2000, index_interval_bytes=300, cleanup="archive", archive_dir=archive))
    assert trimmed(shelf, log, 50)
    check(shelf, log, 50)
    assert not archive.exists()
    log.close()


def test_searches_by_time_go_on_in_the_copy(shelf: Any) -> None:
    log = filled(shelf, ONE_SEGMENT)
    assert trimmed(shelf, log, 45)
    assert [shelf.offset_at_time(log, at) for at in (0, 15, 20, 29, 30)] == [
        (45, 15),
        (45, 15),
        (60, 20),
        (87, 29),
        None,
    ]
    log.close()


def test_searches_by_time_find_no_hidden_message(shelf: Any) -> None:
    """Also while the hidden messages are on the disk, and where one of them has a later time than those behind it."""
    log = filled(shelf, ONE_SEGMENT)
    log.hide_before(46, 1)
    found = [(46, 15), (46, 15), (60, 20), (87, 29), None]
    for _ in range(2):
        assert [shelf.offset_at_time(log, at) for at in (0, 15, 20, 29, 30)] == found
    shelf.append(log, [b"a", b"b", b"c"], timestamps_us=[900, 50, 40])
    shelf.append(log, [b"d"], timestamps_us=[200])
    assert shelf.offset_at_time(log, 90) == (90, 900)
    log.hide_before(91, 1)
    for _ in range(2):
        assert [shelf.offset_at_time(log, at) for at in (0, 50, 90, 201)] == [(91, 50), (91, 50), (93, 200), None]
        assert shelf.finish(log, log.remove_hidden(0))
    assert log.start_offset == 90
    log.close()


Trimmed = st.lists(
    st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 15), st.integers(-9, 6)), max_size=30
)


@pytest.mark.slow
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=Trimmed, asked=st.lists(st.integers(-1, 40), min_size=1, max_size=12), seed=st.randoms())
def test_searches_by_time_against_brute_force(make_shelf: Any, batches: Any, asked: Any, seed: Any) -> None:
    """Headers that state too late a time, and trims, of which some are carried out: no message is missed or hidden."""
    shelf = make_shelf()
    log = opened(shelf, LogConfig(segment_bytes=1500, index_interval_bytes=200))
    times: list[int] = []
    for timestamps, too_much, trimmed_to in batches:
        append(log, lying(max(timestamps) + too_much, timestamps))
        times += timestamps
        if trimmed_to >= 0:
            log.hide_before(max(log.begin_offset, len(times) - trimmed_to), 1)
            if seed.random() < 0.5:
                shelf.finish(log, log.remove_hidden(0))
        for wanted in seed.sample(asked, min(2, len(asked))):
            begin = log.begin_offset
            expected = next(((n, at) for n, at in enumerate(times) if n >= begin and at >= wanted), None)
            assert shelf.offset_at_time(log, wanted) == expected
    log.close(clean=False)


def test_producers_are_known_after_a_trim_and_a_cut(shelf: Any) -> None:
    log = filled(shelf, ONE_SEGMENT)
    assert trimmed(shelf, log, 45)
    _batch, header = shelf.batch(values(87), producer_id=7, sequence=BATCHES - 1)
    assert log.check_producer(header).base_offset == 87  # type: ignore[union-attr]
    log.truncate(log.start_position)
    _batch, header = shelf.batch(values(42, 45), producer_id=7, sequence=14)
    assert log.check_producer(header).base_offset == 42  # type: ignore[union-attr]
    log.close()


def test_appends_and_retention_go_on_during_a_trim(shelf: Any) -> None:
    log = filled(shelf, ONE_SEGMENT)
    log.hide_before(50, 1)
    sequence = BATCHES

    def between(_step: object) -> None:
        nonlocal sequence
        first = sequence * EACH
        shelf.append(log, values(first, first + EACH), producer_id=7, sequence=sequence)
        sequence += 1
        assert shelf.read_all(log, 50) == values(50, sequence * EACH)

    assert carried_out(shelf, log, between)
    assert log.start_offset == kept(50)
    assert shelf.read_all(log, 50) == values(50, sequence * EACH)
    log.close()


@pytest.mark.parametrize("change", ["cut", "emptied", "closed"])
def test_a_log_that_is_cut_during_the_copy_stays_as_it_is(shelf: Any, change: str) -> None:
    log = filled(shelf, ONE_SEGMENT)
    log.hide_before(50, 1)

    def between(step: object) -> None:
        if getattr(step, "func", None) is not trim._make:
            return
        if change == "cut":
            log.truncate(log.end_position - 1)
        elif change == "emptied":
            log.reset_to(10, 500)
        else:
            log.close()

    if change == "closed":
        with pytest.raises(ClosedError):
            carried_out(shelf, log, between)
    else:
        assert not carried_out(shelf, log, between)
    if change != "closed":
        log.close()
    log = opened(shelf, ONE_SEGMENT)
    assert shelf.read_all(log) == {"cut": values(0, 87), "emptied": [], "closed": values()}[change]
    log.close()


# -- crashes and failures -----------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


def crash_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ends the process before the change of files with this number."""
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def change(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                raise Crash(name)
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, change)

    for name in ("rename", "unlink", "pwrite", "fsync"):
        wrap(name)


def crashes(shelf: Any, monkeypatch: pytest.MonkeyPatch, offset: int, config: LogConfig) -> int:
    """Tries a crash before each change of a file during a trim. Returns how many there were."""
    for number in range(1000):
        shutil.rmtree(shelf.folder, ignore_errors=True)
        log = filled(shelf, config)
        shelf.flush(log)
        is_done = False
        with monkeypatch.context() as patch:
            crash_before(patch, number)
            files = FileCache(8, write=lambda fd, data, at: os.pwrite(fd, data, at), sync=lambda fd: os.fsync(fd))
            log._files = log._store.files = log._flush_file._files = files
            with contextlib.suppress(Crash):
                is_done = trimmed(shelf, log, offset)
        for fd in files._open.values():
            os.close(fd)
        after = opened(shelf, config)
        assert after.start_offset in (*(s.base_offset for s in after.segments()),)
        assert after.start_offset <= kept(offset)
        assert shelf.read_all(after) == values(after.start_offset)
        begun = after.start_offset
        assert trimmed(shelf, after, offset)
        assert after.start_offset >= begun
        check(shelf, after, offset)
        after.close()
        shelf.files = FileCache(8, sync=lambda fd: None)
        if is_done:
            return number
    raise AssertionError("the trim never ended")


@pytest.mark.parametrize("config", [CONFIG, ONE_SEGMENT])
@pytest.mark.parametrize("offset", [50, 90])
def test_a_crash_at_any_change_of_a_file_leaves_a_log_that_a_trim_completes(
    shelf: Any, monkeypatch: pytest.MonkeyPatch, config: LogConfig, offset: int
) -> None:
    assert crashes(shelf, monkeypatch, offset, config) > 5


def test_the_checker_finds_a_recovery_that_does_not_know_the_copy(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: as before there were trims, each file counts."""
    monkeypatch.setattr(
        recovery, "_retired", lambda segments, start: [s for s in segments if s.end_position <= start and s.size_bytes]
    )
    with pytest.raises(CorruptData):
        crashes(shelf, monkeypatch, 50, ONE_SEGMENT)


def test_the_checker_finds_a_start_that_is_stored_before_the_copy_has_its_name(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrimmedLog._begin_with

    def too_early(self: TrimmedLog, copy: Any, made: list[str]) -> None:
        before = self.start_offset, self.start_position
        self.start_offset, self.start_position = copy.segment.base_offset, copy.segment.base_position
        self._flush_file.write_both(self._make_point(clean=False))
        self.start_offset, self.start_position = before
        real(self, copy, made)

    monkeypatch.setattr(TrimmedLog, "_begin_with", too_early)
    with pytest.raises(CorruptData):
        crashes(shelf, monkeypatch, 50, ONE_SEGMENT)


@pytest.mark.parametrize("config", [CONFIG, ONE_SEGMENT])
def test_a_full_disk_keeps_the_log_and_a_later_trim_completes(
    shelf: Any, monkeypatch: pytest.MonkeyPatch, config: LogConfig
) -> None:
    log = filled(shelf, config)
    log.hide_before(50, 1)

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(StorageError):
            shelf.finish(log, log.remove_hidden(0))
    assert shelf.read_all(log, 50) == values(50)
    assert log.start_offset < kept(50)
    if config is CONFIG:
        assert log.start_offset > 0  # whole segments went
    shelf.append(log, values(90, 93), producer_id=7, sequence=BATCHES)
    assert shelf.finish(log, log.remove_hidden(0))
    assert log.start_offset == kept(50)
    assert shelf.read_all(log, 50) == values(50, 93)
    log.close()


def test_damage_behind_the_offset_stays_damage(shelf: Any) -> None:
    log = filled(shelf, ONE_SEGMENT)
    shelf.flush(log)
    shelf.damage(log.end_position - 10)
    assert trimmed(shelf, log, 45)
    assert log.start_offset == 45
    assert log.read(45, 1).base_offset == 45
    with pytest.raises(CorruptData):
        shelf.read_all(log, 87)
    log.close(clean=False)
