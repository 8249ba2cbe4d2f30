"""The Coordinator's decision log: what was decided is there after any crash, and damage is told."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from metamq.errors import ConfigError, CorruptData, StorageError
from metamq.tx.database import decision_log
from metamq.tx.database.decision_log import DecisionLog, LogEnded, records
from tests.parts import wait_until


def end(log: DecisionLog, gtrid: str) -> None:
    if log.ended(gtrid):
        log.compact()


def test_decisions_are_there_until_they_are_ended(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    identity = log.identity
    log.commit("a", ("x", "y"))
    log.commit("b", ("y",))
    log.ended("a")
    log.ended("never")
    log.close()
    log.close()
    for _ in range(3):
        log = DecisionLog(tmp_path / "log")
        assert (log.identity, log.open) == (identity, {"b": ("y",)})
        log.close()
    assert DecisionLog(tmp_path / "other").identity != identity


def test_one_process_a_folder(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    with pytest.raises(ConfigError, match="in use by another Coordinator"):
        DecisionLog(tmp_path)
    log.close()
    DecisionLog(tmp_path).close()


def test_a_torn_tail_is_cut_and_damage_before_it_is_refused(tmp_path: Path) -> None:
    """Cut and flipped at every byte: never is a decision lost in silence that was on the disk for sure."""
    log = DecisionLog(tmp_path)
    for name in "abc":
        log.commit(name, ("x",))
    log.close()
    data = (tmp_path / "decisions").read_bytes()
    ends = [end for end, _record in records(data)]
    for cut in range(ends[0], len(data)):
        (tmp_path / "decisions").write_bytes(data[:cut])
        log = DecisionLog(tmp_path)
        assert set(log.open) == set("abc"[: sum(end <= cut for end in ends[1:])])
        log.close()
    for at in range(len(data)):
        (tmp_path / "decisions").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if at < ends[-2]:  # the record behind it proves that it was flushed
            with pytest.raises(CorruptData):
                DecisionLog(tmp_path)
        else:
            log = DecisionLog(tmp_path)
            assert set(log.open) == {"a", "b"}
            log.close()


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_the_nth_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """For every n: what commit() said OK to is found by the next opening, and what was ended does not come back."""
    real = getattr(os, call)
    for nth in itertools.count():
        folder = tmp_path / f"{call}-{nth}"
        calls = itertools.count()

        def fails(*arguments: object, nth: int = nth, calls: itertools.count[int] = calls) -> object:
            if next(calls) == nth:
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        monkeypatch.setattr(os, call, fails)
        monkeypatch.setattr(decision_log, "COMPACT_BYTES", 200)
        said: set[str] = set()
        ended: set[str] = set()
        failed = False
        try:
            log = DecisionLog(folder, fsync=os.fsync)
            try:
                for name in map(str, range(12)):
                    log.commit(name, ("x",))
                    said.add(name)
                    if int(name) % 2:
                        ended.add(name)
                        end(log, name)
            finally:
                log.close()
        except StorageError:
            failed = True
        monkeypatch.undo()
        log = DecisionLog(folder)
        assert said - ended <= set(log.open) <= {str(n) for n in range(12)}
        log.close()
        if not failed:
            assert nth > 0
            return


def test_after_a_failure_nothing_more_is_decided(tmp_path: Path) -> None:
    broken = False

    def fsync(file: int) -> None:
        if broken:
            raise OSError(errno.EIO, "I/O error")
        os.fsync(file)

    log = DecisionLog(tmp_path, fsync=fsync)
    broken = True
    for _ in range(2):
        with pytest.raises(StorageError):
            log.commit("a", ("x",))
        broken = False
    with pytest.raises(StorageError):
        log.check()
    log.close()


def test_it_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "COMPACT_BYTES", 10_000)
    log = DecisionLog(tmp_path)
    log.commit("kept", ("x",))
    for number in range(2000):
        log.commit(f"{number:040}", ("x", "y"))
        end(log, f"{number:040}")
    assert (tmp_path / "decisions").stat().st_size < 20_000
    log.close()
    assert DecisionLog(tmp_path).open == {"kept": ("x",)}


class SlowDisk:
    """An fsync that waits until it may go on."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: OSError | None = None
        self._go_on = threading.Event()
        self._go_on.set()

    def __call__(self, file: int) -> None:
        self.calls += 1
        assert self._go_on.wait(30)
        if self.error is not None:
            raise self.error
        os.fsync(file)

    def hold(self) -> None:
        self._go_on.clear()

    def go_on(self) -> None:
        self._go_on.set()


def many_commits(log: DecisionLog, disk: SlowDisk, count: int) -> tuple[ThreadPoolExecutor, list[Future[None]]]:
    """So many threads that commit, of which one flushes, and the others wait for it."""
    disk.hold()
    pool = ThreadPoolExecutor(count)
    calls = [pool.submit(log.commit, str(number), ("x",)) for number in range(count)]
    wait_until(lambda: len(log._pending) == count, what="all records written")
    return pool, calls


def test_decisions_of_many_threads_share_a_flush(tmp_path: Path) -> None:
    disk = SlowDisk()
    log = DecisionLog(tmp_path, fsync=disk)
    before = disk.calls
    pool, calls = many_commits(log, disk, 16)
    assert log.open == {}, "nothing is decided before the disk has it"
    assert not any(call.done() for call in calls)
    disk.go_on()
    for call in calls:
        call.result(30)
    pool.shutdown()
    assert disk.calls - before <= 2, "the first one, and one for all that came meanwhile"
    assert set(log.open) == set(map(str, range(16)))
    log.close()
    assert set(DecisionLog(tmp_path).open) == set(map(str, range(16)))


def test_a_failed_flush_is_told_to_all_that_it_was_for(tmp_path: Path) -> None:
    disk = SlowDisk()
    log = DecisionLog(tmp_path, fsync=disk)
    pool, calls = many_commits(log, disk, 8)
    disk.error = OSError(errno.EIO, "I/O error")
    disk.go_on()
    for call in calls:
        error = call.exception(30)
        assert isinstance(error, StorageError)
        assert error.outcome == "unknown"
    pool.shutdown()
    with pytest.raises(LogEnded):
        log.commit("later", ("x",))
    assert log.open == {}
    log.close()


def test_closing_flushes_what_is_written(tmp_path: Path) -> None:
    """The next process finds it, so its thread must be told that it is decided."""
    disk = SlowDisk()
    log = DecisionLog(tmp_path, fsync=disk)
    pool, calls = many_commits(log, disk, 8)
    closing = threading.Thread(target=log.close)
    closing.start()
    disk.go_on()
    closing.join(30)
    successor = DecisionLog(tmp_path)
    found = set()
    for number, call in enumerate(calls):
        if call.exception(30) is None:
            found.add(str(number))
    pool.shutdown()
    assert set(successor.open) == found == set(map(str, range(8)))
    successor.close()


def test_a_log_that_is_made_short_keeps_what_waits_for_its_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "COMPACT_BYTES", 2_000)
    log = DecisionLog(tmp_path)
    kept: list[str] = []

    def work(name: str) -> None:
        for number in range(50):
            gtrid = f"{name}-{number:030}"
            log.commit(gtrid, ("x", "y"))
            if number % 10:
                end(log, gtrid)
            else:
                kept.append(gtrid)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, map(str, range(16))))
    assert set(log.open) == set(kept)
    log.close()
    assert set(DecisionLog(tmp_path).open) == set(kept)


def test_any_part_of_a_group_may_be_lost_with_the_machine(tmp_path: Path) -> None:
    """A page of the file that was not flushed is on the disk or not, whatever is behind it: no decision that was
    told is lost, and it is no damage."""
    disk = SlowDisk()
    log = DecisionLog(tmp_path, fsync=disk)
    for name in ("told-1", "told-2"):
        log.commit(name, ("x",))
    path = tmp_path / "decisions"
    flushed = path.stat().st_size
    pool, calls = many_commits(log, disk, 6)
    data = path.read_bytes()
    ends = [end for end, _record in records(data) if end >= flushed]
    assert len(ends) == 7
    disk.go_on()
    for call in calls:
        call.result(30)
    pool.shutdown()
    log.close()
    for lost in itertools.product([False, True], repeat=6):
        found = bytearray(data)
        for is_lost, begin, end in zip(lost, ends, ends[1:], strict=False):
            if is_lost:
                found[begin:end] = bytes(end - begin)
        path.write_bytes(found)
        log = DecisionLog(tmp_path)
        assert {"told-1", "told-2"} <= set(log.open)
        assert len(log.open) == 2 + (lost.index(True) if any(lost) else 6)
        log.close()
