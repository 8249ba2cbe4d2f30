"""Without a descriptor left a log loses nothing, ends nothing, and does later what it could not do at once."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.flushed import FlushFile
from metamq.broker.log.flush import FILES_MAX
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import StorageError, TooManyOpenFiles

SMALL = LogConfig(segment_bytes=700, index_interval_bytes=100, retention_bytes=3000, flush=FlushPolicy(before_ack=True))


class Scarcity:
    """From the open after so many on, no file can be opened, until told otherwise."""

    def __init__(self) -> None:
        self.opens = 0
        self.left: int | None = None

    def allow(self, opens: int | None) -> None:
        self.left = opens

    def check(self) -> None:
        self.opens += 1
        if self.left is not None:
            if not self.left:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.left -= 1


@pytest.fixture
def scarcity(monkeypatch: pytest.MonkeyPatch) -> Scarcity:
    """Over every way in which a log comes to a descriptor."""
    found = Scarcity()

    def over(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            found.check()
            return original(*args, **named)

        return call

    for name in ("open", "dup", "scandir"):
        monkeypatch.setattr(os, name, over(getattr(os, name)))
    monkeypatch.setattr("builtins.open", over(open))
    return found


class Run:
    """A log under random work, and what it has to hold."""

    def __init__(self, shelf: Any, scarcity: Scarcity, chance: random.Random) -> None:
        self.shelf, self.scarcity, self.chance = shelf, scarcity, chance
        self.log: PartitionLog = shelf.open(SMALL)
        self.values: dict[int, bytes] = {}
        self.epoch, self.number, self.late = 1, 0, 0
        self.met: list[TooManyOpenFiles] = []

    def step(self) -> None:
        work = self.chance.choice([self.append] * 6 + [self.flush, self.checkpoint, self.retain, self.cut, self.reopen])
        if self.chance.random() < 0.5:
            self.scarcity.allow(self.chance.randrange(4))
        try:
            work()
        except TooManyOpenFiles as error:
            self.met.append(error)
            self.scarcity.allow(None)
            work()
        finally:
            self.scarcity.allow(None)
        self.check()

    def append(self) -> None:
        before = self.log.end_offset
        value = b"%d" % self.number * self.chance.randrange(1, 40)
        self.epoch += self.chance.random() < 0.2
        try:
            self.shelf.append(self.log, [value], epoch=self.epoch, producer_id=7, sequence=self.number, now_us=1)
        except TooManyOpenFiles:
            assert self.log.end_offset == before
            raise
        self.values[before] = value
        self.number += 1

    def flush(self) -> None:
        while self.shelf.flush(self.log):
            pass
        assert self.log.flushed_position == self.log.end_position

    def checkpoint(self) -> None:
        self.shelf.checkpoint(self.log)

    def retain(self) -> None:
        self.shelf.retain(self.log, 2)

    def cut(self) -> None:
        position = self.chance.choice(self.shelf.boundaries(self.log))
        try:
            self.log.truncate(position)
        except TooManyOpenFiles:
            raise
        except StorageError:  # in the middle, after it had made sure of room: nothing short of another thread does that
            self.scarcity.allow(None)
            self.reopen(clean=False)
            self.log.truncate(position)
        self.log.clear_bound()
        self.values = {offset: value for offset, value in self.values.items() if offset < self.log.end_offset}

    def reopen(self, *, clean: bool | None = None) -> None:
        clean = self.chance.random() < 0.5 if clean is None else clean
        try:
            self.log.close(clean=clean)
        except TooManyOpenFiles as error:
            self.met.append(error)
            self.scarcity.allow(None)
        self.log = self.shelf.open(SMALL)

    def check(self) -> None:
        self.flush()
        self.values = {offset: value for offset, value in self.values.items() if offset >= self.log.start_offset}
        assert self.shelf.read_all(self.log) == list(self.values.values())
        assert self.log.epochs().last <= self.epoch
        stored = FlushFile(str(self.shelf.folder), self.shelf.files).load("flights/0-0")
        assert stored is not None
        assert stored.position == self.log.flushed_position, "what counts as flushed is on record"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_meets_it_the_log_goes_on_and_holds_the_same(shelf: Any, scarcity: Scarcity, seed: int) -> None:
    print(f"seed {seed}")
    run = Run(shelf, scarcity, random.Random(seed))
    for _ in range(60):
        run.step()
    run.log.close()
    assert {(error.retriable, error.outcome) for error in run.met} == {(True, "not_done")}
    again = shelf.open(SMALL)
    assert shelf.read_all(again) == list(run.values.values())
    again.close()


def test_a_flush_of_many_files_takes_a_few_at_a_time(shelf: Any) -> None:
    synced: list[int] = []
    files = FileCache(64, sync=synced.append)
    log = shelf.open(LogConfig(segment_bytes=200, flush=FlushPolicy(before_ack=True)), files=files)
    for number in range(3 * FILES_MAX):
        shelf.append(log, [b"x" * 150], now_us=number)
    synced.clear()
    ends = []
    while (ticket := log.start_flush()) is not None:
        assert len(ticket._descriptors) <= 2 * FILES_MAX + 1
        ticket.sync()
        log.finish_flush(ticket)
        ends.append((log.flushed_offset, log.stable_offset, ticket.whole))
    assert ends[:3] == [(8, 8, False), (16, 16, False), (24, 24, ends[2][2])]
    assert ends[-1] == (24, 24, True)
    log.close(clean=False)
    again = shelf.open(LogConfig(segment_bytes=200))
    assert len(shelf.read_all(again)) == 3 * FILES_MAX
    again.close()


def test_the_error_names_the_log_and_the_limit(shelf: Any, scarcity: Scarcity) -> None:
    log = shelf.open(SMALL)
    scarcity.allow(0)
    with pytest.raises(TooManyOpenFiles, match=r"flights/0-0: .*: all [0-9,]+ descriptors of the process are in use"):
        shelf.append(log, [b"x"])
    scarcity.allow(None)
    assert shelf.append(log, [b"x"]) == 0
    log.close()


def test_what_is_not_on_record_as_flushed_does_not_count_as_flushed(shelf: Any, scarcity: Scarcity) -> None:
    log = shelf.open(SMALL, files=FileCache(1))
    shelf.append(log, [b"x"])
    shelf.flush(log)
    first = log.end_position
    shelf.append(log, [b"y"])
    ticket = log.start_flush()
    assert ticket is not None
    ticket.sync()
    scarcity.allow(0)
    with pytest.raises(TooManyOpenFiles):
        log.finish_flush(ticket)
    assert (log.flushed_offset, log.flushed_position, log.stable_offset) == (1, first, 1)
    scarcity.allow(None)
    assert shelf.flush(log)
    assert (log.flushed_offset, log.flushed_position, log.stable_offset) == (2, log.end_position, 2)
    log.close()
