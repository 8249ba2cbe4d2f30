"""Faults planted in the log on purpose: each scenario holds as the code is, and fails with the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from metamq.broker.log import recovery
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk import scan
from metamq.broker.log.disk.flushed import FlushFile, FlushPoint
from metamq.broker.log.disk.producers import New
from metamq.errors import CorruptData
from metamq.wire.batch import read_header

CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=200)
ONE_SEGMENT = LogConfig(segment_bytes=1 << 20, index_interval_bytes=200)


def values_of(count: int) -> list[bytes]:
    return [b"value %d" % number for number in range(count)]


def flipped_in_the_tail(shelf: Any) -> None:
    """A torn batch is not served."""
    log = shelf.open(ONE_SEGMENT)
    for value in values_of(3):
        shelf.append(log, [value])
    end = log.end_position
    log.close(clean=False)
    shelf.damage(end - 10)
    log = shelf.open(ONE_SEGMENT)
    assert log.end_offset == 2
    log.close()


def zeros_behind_the_tail(shelf: Any) -> None:
    """The file's size is not the log's."""
    log = shelf.open(ONE_SEGMENT)
    shelf.append(log, [b"value 0"])
    log.close(clean=False)
    with open(shelf.byte_at(0)[0], "ab") as file:
        file.write(bytes(4096))
    log = shelf.open(ONE_SEGMENT)
    shelf.append(log, [b"value 1"])
    assert shelf.read_all(log) == values_of(2)
    log.close()


def damage_behind_a_stale_flushed_point(shelf: Any) -> None:
    """Acknowledged and flushed bytes are not cut because the file `flushed` missed an update."""
    log = shelf.open(ONE_SEGMENT)
    for value in values_of(3):
        shelf.append(log, [value])
        if log.end_offset == 1:
            stale = (shelf.folder / "flushed").read_bytes()  # the first flush made it durable
        shelf.flush(log)
    log.close(clean=False)
    (shelf.folder / "flushed").write_bytes(stale)
    shelf.damage(100)
    with pytest.raises(CorruptData):
        shelf.open(ONE_SEGMENT)


def states_after_a_cut(shelf: Any) -> None:
    """A snapshot of producer states does not outlive the bytes it describes."""
    log = shelf.open(CONFIG)
    for sequence in range(3):
        shelf.append(log, [b"v" * 40], producer_id=5, sequence=sequence)
    first_roll = log.segments()[1].base_position
    log.close(clean=False)
    shelf.damage(first_roll - 10)
    log = shelf.open(ONE_SEGMENT)
    while log.end_position <= first_roll:
        shelf.append(log, [b"w" * 40], producer_id=6, sequence=log.end_offset)
    shelf.flush(log)
    log.close(clean=False)
    log = shelf.open(ONE_SEGMENT)
    _batch, header = shelf.batch([b"x"], producer_id=5, sequence=1)
    assert log.check_producer(header) == New()
    log.close()


def flushed_point_before_the_cut(shelf: Any) -> None:
    """A crash right after a cut leaves a log that opens."""
    log = shelf.open(CONFIG)
    for value in values_of(9):
        shelf.append(log, [value])
    shelf.flush(log)
    log.truncate(300)
    log.close(clean=False)
    log = shelf.open(CONFIG)
    assert shelf.read_all(log) == values_of(log.end_offset)
    log.close()


def skip_the_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan, "check_stored", lambda buffer, at, end: (read_header(buffer, at), None))


def trust_the_size(patch: pytest.MonkeyPatch) -> None:
    load = FlushFile.load

    def all_is_flushed(self: FlushFile, name: str) -> FlushPoint | None:
        point = load(self, name)
        segments = recovery.take_inventory(self.path.removesuffix("/flushed")).segments
        return point and point._replace(position=segments[-1].end_position, offset=1, clean=True)

    patch.setattr(FlushFile, "load", all_is_flushed)


def ignore_later_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "find_flushed_claim", lambda *_: None)


def keep_stale_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery._Recovery, "_forget_stale", lambda *_: None)


def cut_before_the_flushed_point(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlushFile, "write_both", lambda *_: None)


FAULTS = [
    (skip_the_checksums, flipped_in_the_tail),
    (trust_the_size, zeros_behind_the_tail),
    (ignore_later_batches, damage_behind_a_stale_flushed_point),
    (keep_stale_snapshots, states_after_a_cut),
    (cut_before_the_flushed_point, flushed_point_before_the_cut),
]


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_scenario_tells_the_fault(
    make_shelf: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[Any], None],
) -> None:
    scenario(make_shelf())
    fault(monkeypatch)
    with pytest.raises((AssertionError, CorruptData, pytest.fail.Exception)):
        scenario(make_shelf())
