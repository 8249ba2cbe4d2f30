"""Verifying a log piece by piece: every changed byte is found, and what the log no longer has counts for nothing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.segments import Segment
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.log.scrub import STEP_BATCHES, Walk
from tests.broker.log.conftest import SMALL, Shelf

MANY = LogConfig(segment_bytes=1 << 20)


def filled(shelf: Shelf, batches: int = 12, config: LogConfig = SMALL) -> PartitionLog:
    """Several sealed segments and an active one, all flushed."""
    log = shelf.open(config)
    for number in range(batches):
        shelf.append(log, [b"%d-" % number + b"x" * 300])
    shelf.flush(log)
    return log


def walked(piece: Segment) -> Walk:
    walk = Walk(piece)
    while not walk.is_over:
        walk.step()
    return walk


def findings(log: PartitionLog) -> list[tuple[int, str]]:
    walks = [walked(piece) for piece in log.pieces()]
    return [(walk.position, walk.problem) for walk in walks if walk.problem is not None]


def test_a_sound_log_is_verified_up_to_where_it_is_flushed(shelf: Shelf) -> None:
    log = filled(shelf, 60)
    shelf.append(log, [b"not flushed"])
    pieces = log.pieces()
    assert len(pieces) > 2
    assert [walked(piece).problem for piece in pieces] == [None] * len(pieces)
    assert sum(piece.size_bytes for piece in pieces) == log.flushed_position < log.end_position


def test_a_flipped_bit_of_any_byte_is_found_at_its_batch(shelf: Shelf) -> None:
    log = filled(shelf, 5)
    boundaries = shelf.boundaries(log)
    for position in range(log.end_position):
        shelf.damage(position, lambda byte, at=position: byte ^ 1 << at % 8)  # type: ignore[misc]
        ((found, _problem),) = findings(log)
        assert found == max(boundary for boundary in boundaries if boundary <= position), position
        shelf.damage(position, lambda byte, at=position: byte ^ 1 << at % 8)  # type: ignore[misc]
    assert findings(log) == []


def test_a_missing_file_a_short_one_and_a_segment_in_the_place_of_another_are_found(shelf: Shelf) -> None:
    log = filled(shelf, 60)
    first, second, third = shelf.paths("log")[:3]
    first.unlink()
    with second.open("r+b") as file:
        file.truncate(second.stat().st_size - 8)
    third.write_bytes(shelf.paths("log")[3].read_bytes())
    found = dict(findings(log))
    assert "is missing" in found[0]
    assert any("bytes expected, the file has" in problem for problem in found.values())
    assert any(" instead of " in problem for problem in found.values())
    assert len(found) == 3


def test_a_disk_that_cannot_read_its_bytes_is_damage_and_a_lack_of_descriptors_is_none(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = filled(shelf).pieces()[0]

    def failing(number: int) -> Callable[..., int]:
        def read(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        return read

    monkeypatch.setattr("metamq.broker.log.scrub.os.preadv", failing(5))
    assert "Input/output error" in str(walked(piece).problem)
    monkeypatch.undo()
    monkeypatch.setattr("metamq.broker.log.scrub.os.open", failing(24))
    with pytest.raises(OSError, match="Too many open files"):
        Walk(piece).step()


def test_a_step_is_short_where_batches_are_small(shelf: Shelf) -> None:
    log = filled(shelf, 3 * STEP_BATCHES, MANY)
    (piece,) = log.pieces()
    walk, steps = Walk(piece), 0
    while not walk.is_over:
        walk.step()
        steps += 1
    assert steps == 3
    assert walk.problem is None


def test_what_retention_removed_or_a_cut_took_is_no_piece_of_the_log_any_more(shelf: Shelf) -> None:
    log = filled(shelf, 60)
    first, *_, last = log.pieces()
    assert log.has_piece(first)
    assert log.has_piece(last)
    log.reconfigure(LogConfig(segment_bytes=2000, retention_bytes=log.size_bytes - first.size_bytes))
    assert len(shelf.retain(log, 1)) == 1
    assert walked(first).problem is not None
    assert not log.has_piece(first), "so the missing file counts for nothing"
    log.truncate(last.base_position + 8)
    assert not log.has_piece(last)
    log.close()
    assert not log.has_piece(log.pieces()[0])


def cached_pages(path: Path) -> int:
    """How many of its pages are in the page cache. To read them without waiting would bring them there."""
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found
        )
        del start
    if status:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in found)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def says_what_is_cached(path: Path) -> bool:
    """If reads of this file, which is cached, can be limited to the page cache. Not so on overlayfs."""
    with open(path, "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            return False
    return True


def test_cached_bytes_stay_where_the_file_system_does_not_say_which_these_are(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(shelf, 6, MANY)
    (piece,) = log.pieces()
    path, preadv = Path(piece.path), os.preadv

    def without_flags(fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", without_flags)
    drop(path)
    path.read_bytes()
    everything = cached_pages(path)
    assert walked(piece).problem is None
    assert cached_pages(path) == everything > 0


def test_what_was_not_in_the_page_cache_is_not_there_afterwards_and_what_was_stays(shelf: Shelf) -> None:
    log = filled(shelf, 6, MANY)
    (piece,) = log.pieces()
    path = Path(piece.path)
    is_known = says_what_is_cached(path)
    try:
        drop(path)
        if cached_pages(path):
            pytest.skip("this file system keeps files in the page cache whatever it is told")
    except OSError as error:
        pytest.skip(f"this file system does not tell what is cached: {error}")
    assert walked(piece).problem is None
    assert (cached_pages(path) == 0) == is_known
    path.read_bytes()
    everything = cached_pages(path)
    assert everything > 0
    assert walked(piece).problem is None
    assert cached_pages(path) == everything
