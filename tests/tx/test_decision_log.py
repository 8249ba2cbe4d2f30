"""The Coordinator's decision log: what was decided is there after any crash, and damage is told."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from metamq.errors import ConfigError, CorruptData, StorageError
from metamq.tx.database import decision_log
from metamq.tx.database.decision_log import DecisionLog, records


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
                        log.ended(name)
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
        log.ended(f"{number:040}")
    assert (tmp_path / "decisions").stat().st_size < 20_000
    log.close()
    assert DecisionLog(tmp_path).open == {"kept": ("x",)}
