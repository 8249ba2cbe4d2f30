"""Opening a log after a crash: torn tails are cut, damage is refused with nothing modified."""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.flushed import SLOT_BYTES, FlushFile
from metamq.broker.log.disk.scan import find_flushed_claim
from metamq.broker.log.disk.segments import Segment
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import CorruptData, StorageError
from metamq.wire.batch import HEADER_BYTES, stamp

SEED = 20240917
ONE_SEGMENT = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300)


def written(shelf: Any, flushed: int, unflushed: int, config: LogConfig = ONE_SEGMENT) -> list[tuple[int, int]]:
    """A log of batches of two messages, left as by a crash; (offset, position) of every boundary."""
    log = shelf.open(config)
    marks = [(0, 0)]
    for number in range(flushed + unflushed):
        if number == flushed:
            shelf.flush(log)
        shelf.append(log, [b"value %d" % number] * 2, producer_id=5, sequence=number)
        marks.append((log.end_offset, log.end_position))
    if not unflushed:
        shelf.flush(log)
    log.close(clean=False)
    return marks


def expected_values(batches: int) -> list[bytes]:
    return [b"value %d" % number for number in range(batches) for _ in range(2)]


def copy_of(shelf: Any, target: Path) -> Any:
    copy = type(shelf)(target)
    shutil.copytree(shelf.folder, copy.folder)
    return copy


def assert_cut(shelf: Any, batches: int, position: int, config: LogConfig = ONE_SEGMENT) -> PartitionLog:
    """Opens the log and finds it cut at `position`, after `batches` batches; then it works, and stays so."""
    log = shelf.open(config)
    assert (log.end_offset, log.end_position) == (2 * batches, position)
    assert shelf.read_all(log) == expected_values(batches)
    assert shelf.append(log, [b"after"], producer_id=5, sequence=batches) == 2 * batches
    log.close(clean=False)
    log = shelf.open(config)
    assert shelf.read_all(log) == [*expected_values(batches), b"after"]
    return log


def assert_refused(shelf: Any, match: str, config: LogConfig = ONE_SEGMENT) -> CorruptData:
    before = shelf.contents()
    with pytest.raises(CorruptData, match=match) as caught:
        shelf.open(config)
    assert shelf.contents() == before, "a refused log is left as it is"
    assert "flights/0-0" in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.slow
def test_a_log_cut_at_every_byte_of_its_last_batches(shelf: Any, tmp_path: Path) -> None:
    marks = written(shelf, flushed=3, unflushed=3)
    size = marks[-1][1]
    for end in range(marks[3][1], size):
        copy = copy_of(shelf, tmp_path / "copies" / str(end))
        path, _ = copy.byte_at(0)
        os.truncate(path, end)
        whole = max(n for n, (_, position) in enumerate(marks) if position <= end)
        log = assert_cut(copy, whole, marks[whole][1])
        log.close(clean=False)
        report = copy_of(shelf, tmp_path / "again" / str(end))
        os.truncate(report.byte_at(0)[0], end)
        log = report.open(ONE_SEGMENT)
        cut = end - marks[whole][1]
        assert log.recovery.cut_bytes == cut
        assert bool(log.recovery.reason) is bool(cut)
        assert log.recovery.stable_offset_before == 6
        log.close(clean=False)
        shutil.rmtree(copy.folder.parent.parent)
        shutil.rmtree(report.folder.parent.parent)


def test_a_log_shorter_than_its_flushed_point_is_refused(shelf: Any) -> None:
    marks = written(shelf, flushed=3, unflushed=1)
    for end in (marks[3][1] - 1, marks[2][1], 0):
        os.truncate(shelf.byte_at(0)[0], end)
        error = assert_refused(shelf, f"flushed up to byte {marks[3][1]:,} and ends before")
        assert error.position == end


@pytest.mark.parametrize("kind", ["flip", "zero", "ones"])
def test_damage_at_each_of_many_places(shelf: Any, tmp_path: Path, kind: str) -> None:
    """Every place of the tail, byte by byte in its first batch; and every place below the flushed point."""
    change = {"flip": lambda byte: byte ^ 0x04, "zero": lambda byte: 0, "ones": lambda byte: 0xFF}[kind]
    marks = written(shelf, flushed=2, unflushed=2)
    flushed, end = marks[2][1], marks[4][1]
    choice = random.Random(SEED)
    print(f"seed {SEED}")
    places = sorted({*range(flushed, marks[3][1]), *choice.sample(range(end), 100)})
    for place in places:
        copy = copy_of(shelf, tmp_path / "copies" / f"{kind}{place}")
        before = copy.contents()
        copy.damage(place, change)
        if copy.contents() == before:
            continue
        whole = max(n for n, (_, position) in enumerate(marks) if position <= place)
        if place < flushed:
            error = assert_refused(copy, "is damaged at byte")
            assert error.position == marks[whole][1]
        else:
            log = assert_cut(copy, whole, marks[whole][1])
            log.close(clean=False)
        shutil.rmtree(copy.folder.parent.parent)


def test_a_zeroed_tail_is_cut(shelf: Any) -> None:
    marks = written(shelf, flushed=2, unflushed=3)
    path, _ = shelf.byte_at(0)
    data = path.read_bytes()
    path.write_bytes(data[: marks[3][1]] + bytes(len(data) - marks[3][1] + 4096))
    log = assert_cut(shelf, 3, marks[3][1])
    log.close()


def test_the_cut_is_reported_once_in_one_line(shelf: Any, caplog: pytest.LogCaptureFixture) -> None:
    marks = written(shelf, flushed=2, unflushed=3)
    shelf.damage(marks[3][1] + 70)
    with caplog.at_level(logging.INFO, "metamq.broker.log"):
        log = shelf.open(ONE_SEGMENT)
    cut = marks[5][1] - marks[3][1]
    assert log.recovery.cut_bytes == cut
    assert "checksum" in log.recovery.reason
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"flights/0-0: cut {cut:,} bytes at byte {marks[3][1]:,}, offset 6,")
    log.close(clean=False)


def with_stale_flushed_point(shelf: Any) -> list[tuple[int, int]]:
    """A log whose file `flushed` lost its last update, as in a power cut: it says 1 batch, the truth is 3."""
    log = shelf.open(ONE_SEGMENT)
    marks = [(0, 0)]
    for number in range(5):
        shelf.append(log, [b"value %d" % number] * 2, producer_id=5, sequence=number)
        marks.append((log.end_offset, log.end_position))
        if number == 0:
            shelf.flush(log)
            stale = (shelf.folder / "flushed").read_bytes()
        if number == 2:
            shelf.flush(log)
    log.close(clean=False)
    (shelf.folder / "flushed").write_bytes(stale)
    return marks


def test_a_later_batch_proves_that_the_damage_was_flushed(shelf: Any) -> None:
    marks = with_stale_flushed_point(shelf)
    shelf.damage(marks[1][1] + 100)
    error = assert_refused(shelf, "says that these bytes were flushed before it came")
    assert error.position == marks[1][1]


def test_a_proof_is_found_behind_a_damaged_length(shelf: Any) -> None:
    marks = with_stale_flushed_point(shelf)
    for number in (1, 2):
        for byte in range(4):
            shelf.damage(marks[number][1] + byte, lambda byte: 0xFF)
    assert_refused(shelf, "says that these bytes were flushed")


def test_a_stale_flushed_point_alone_does_no_harm(shelf: Any) -> None:
    with_stale_flushed_point(shelf)
    log = shelf.open(ONE_SEGMENT)
    assert log.recovery.cut_bytes == 0
    assert shelf.read_all(log) == expected_values(5)
    log.close()


def test_without_a_proof_the_tail_is_torn(shelf: Any) -> None:
    """Batches 3 and 4 were appended after the flush of 0 to 2, and no batch says that 3 was flushed."""
    marks = with_stale_flushed_point(shelf)
    shelf.damage(marks[3][1] + 100)
    log = assert_cut(shelf, 3, marks[3][1])
    log.close()


def test_a_proof_is_found_in_a_later_segment(shelf: Any) -> None:
    config = LogConfig(segment_bytes=300, index_interval_bytes=300)
    log = shelf.open(config)
    shelf.append(log, [b"value 0"] * 2)
    shelf.flush(log)
    stale = (shelf.folder / "flushed").read_bytes()
    for number in range(1, 6):
        shelf.append(log, [b"value %d" % number] * 2)
        shelf.flush(log)
    assert len(log.segments()) == 3
    log.close(clean=False)
    (shelf.folder / "flushed").write_bytes(stale)
    shelf.damage(log.segments()[1].base_position + 60)
    assert_refused(shelf, "says that these bytes were flushed", config)


def test_a_distance_too_large_for_its_field_proves_nothing(shelf: Any) -> None:
    """A batch 5 GiB into a log of which nothing was flushed yet."""
    shelf.folder.mkdir()
    segment = Segment(f"{shelf.folder}/tail.log", 1, 5 << 30, 0)
    for unflushed_bytes, proof in ((5 << 30, None), ((5 << 30) - (2 << 30), segment.base_position)):
        batch, _header = shelf.batch([b"value"])
        stamp(batch, 0, epoch=1, base_offset=1, batch_id=1, append_time_us=0, unflushed_bytes=unflushed_bytes)
        Path(segment.path).write_bytes(batch)
        segment.size_bytes = len(batch)
        assert find_flushed_claim(shelf.files, segment, segment.base_position, 1 << 30, range(1, 2)) == proof
        assert find_flushed_claim(shelf.files, segment, segment.base_position, 1 << 30, range(2, 3)) is None
        shelf.files.forget(segment.path)


MANY_SEGMENTS = LogConfig(segment_bytes=400, index_interval_bytes=300)


def test_a_missing_segment_is_refused(shelf: Any, tmp_path: Path) -> None:
    written(shelf, flushed=12, unflushed=2, config=MANY_SEGMENTS)
    count = len(shelf.paths("log"))
    assert count >= 5
    for number in range(count - 1):
        copy = copy_of(shelf, tmp_path / "copies" / str(number))
        copy.paths("log")[number].unlink()
        assert_refused(copy, "segment", MANY_SEGMENTS)


def test_a_segment_of_the_wrong_size_is_refused(shelf: Any, tmp_path: Path) -> None:
    written(shelf, flushed=12, unflushed=0, config=MANY_SEGMENTS)
    for number, change in ((1, -8), (1, 8), (2, -400)):
        copy = copy_of(shelf, tmp_path / "copies" / f"{number}{change}")
        path = copy.paths("log")[number]
        os.truncate(path, max(path.stat().st_size + change, 0))
        assert_refused(copy, "the next begins at", MANY_SEGMENTS)


def test_a_torn_tail_over_several_segments(shelf: Any, tmp_path: Path) -> None:
    """The names of later segments reached the disk, the bytes before them did not."""
    marks = written(shelf, flushed=2, unflushed=10, config=MANY_SEGMENTS)
    bases = [int(path.stem.split("-")[1]) for path in shelf.paths("log")]
    flushed = marks[2][1]
    for number, base in enumerate(bases):
        if base < flushed:
            continue
        for lost in (0, 8, 100):
            copy = copy_of(shelf, tmp_path / "copies" / f"{number}-{lost}")
            path = copy.paths("log")[number]
            keep = max(path.stat().st_size - lost, 0) if lost else 0
            os.truncate(path, keep)
            whole = max(n for n, (_, position) in enumerate(marks) if position <= base + keep)
            log = assert_cut(copy, whole, marks[whole][1], MANY_SEGMENTS)
            assert sum(segment.size_bytes for segment in log.segments()) == log.size_bytes
            log.close(clean=False)


def test_an_empty_last_segment_is_no_damage(shelf: Any) -> None:
    """Killed between the making of a segment and the first append to it."""
    marks = written(shelf, flushed=2, unflushed=0)
    end_offset, end = marks[-1]
    (shelf.folder / f"{end_offset:020d}-{end:020d}.log").touch()
    log = shelf.open(ONE_SEGMENT)
    assert [segment.size_bytes for segment in log.segments()] == [end, 0]
    shelf.append(log, [b"more"])
    log.close(clean=False)
    log = shelf.open(ONE_SEGMENT)
    assert shelf.read_all(log) == [*expected_values(2), b"more"]
    log.close()


def test_the_flushed_file_lost_or_damaged(shelf: Any) -> None:
    written(shelf, flushed=2, unflushed=1)
    path = shelf.folder / "flushed"
    good = path.read_bytes()
    path.unlink()
    assert_refused(shelf, "the file is missing")
    path.write_bytes(bytes(len(good)))
    assert_refused(shelf, "neither of its two slots")
    path.write_bytes(b"")
    assert_refused(shelf, "neither of its two slots")


def test_one_torn_slot_leaves_the_one_before(shelf: Any) -> None:
    marks = written(shelf, flushed=2, unflushed=1)
    path = shelf.folder / "flushed"
    newest = max((0, 1), key=lambda n: int.from_bytes(path.read_bytes()[n * SLOT_BYTES + 8 :][:8], "little"))
    data = bytearray(path.read_bytes())
    data[newest * SLOT_BYTES + 20] ^= 1
    path.write_bytes(data)
    point = FlushFile(str(shelf.folder), FileCache(1)).load("flights/0-0")
    assert point is not None
    assert point.position == 0
    shelf.damage(marks[2][1] + 9)
    log = assert_cut(shelf, 2, marks[2][1])
    log.close()


def test_creation_broken_off_is_begun_again(shelf: Any) -> None:
    shelf.folder.mkdir()
    (shelf.folder / f"{0:020d}-{0:020d}.log").touch()
    (shelf.folder / "flushed.tmp").write_bytes(b"half")
    log = shelf.open(ONE_SEGMENT)
    shelf.append(log, [b"value 0"] * 2)
    log.close()
    log = shelf.open(ONE_SEGMENT)
    assert shelf.read_all(log) == expected_values(1)
    assert not (shelf.folder / "flushed.tmp").exists()
    log.close()


def test_growth_after_a_clean_close_is_noticed(shelf: Any) -> None:
    marks = written(shelf, flushed=2, unflushed=0)
    shelf.open(ONE_SEGMENT).close()
    with open(shelf.byte_at(0)[0], "ab") as file:
        file.write(bytes(HEADER_BYTES))
    log = shelf.open(ONE_SEGMENT)
    assert not log.recovery.clean
    assert (log.end_position, log.recovery.cut_bytes) == (marks[2][1], HEADER_BYTES)
    log.close()


def test_what_described_the_cut_bytes_is_gone(shelf: Any) -> None:
    """Else the index and the producer states of bytes that were cut would be taken for those that came after."""
    log = shelf.open(MANY_SEGMENTS)
    for number in range(3):
        shelf.append(log, [b"value %d" % number] * 2, producer_id=5, sequence=number)
    shelf.flush(log)
    flushed = log.end_position
    for number in range(3, 12):
        shelf.append(log, [b"value %d" % number] * 2, producer_id=5, sequence=number)
    log.close(clean=False)
    shelf.damage(flushed)
    log = shelf.open(MANY_SEGMENTS)
    for path in [*shelf.paths("producers"), *shelf.paths("index"), *shelf.paths("log")]:
        assert int(path.stem.split("-")[1]) <= flushed, path
    for number in range(3, 12):
        shelf.append(log, [b"v" * 3 * number], producer_id=6, sequence=number)
    values = shelf.read_all(log)
    log.close(clean=False)
    log = shelf.open(MANY_SEGMENTS)
    assert shelf.read_all(log) == values
    assert [shelf.read_all(log, offset)[0] for offset in range(len(values))] == values
    log.close()


def test_a_second_crash_during_recovery(make_shelf: Any, disk: Any) -> None:
    """The disk fails at the n-th write or fsync of the recovery, for each n; the next start has the same outcome."""
    faults = 0
    for kind in ("write", "sync"):
        for fail_at in range(100):
            shelf = make_shelf()
            marks = written(shelf, flushed=2, unflushed=10, config=MANY_SEGMENTS)
            shelf.damage(marks[6][1] + 50)
            files = disk.files()
            disk.writes = disk.syncs = 0
            error = OSError(5, "Input/output error")
            disk.write_fault = lambda n, size: error if (kind, n) == ("write", fail_at) else None  # noqa: B023
            disk.sync_fault = lambda n: error if (kind, n) == ("sync", fail_at) else None  # noqa: B023
            try:
                shelf.open(MANY_SEGMENTS, files=files).close(clean=False)
                break
            except StorageError:
                faults += 1
            finally:
                files.close()
            log = assert_cut(shelf, 6, marks[6][1], MANY_SEGMENTS)
            log.close(clean=False)
        else:
            raise AssertionError("recovery does not end")
    assert faults >= 5


def test_a_power_cut_loses_nothing_that_was_flushed(make_shelf: Any) -> None:
    """Sectors of the unflushed tail survive at random, and so do later segments and updates of `flushed`."""
    print(f"seed {SEED}")
    choice = random.Random(SEED)
    for _ in range(150):
        shelf = make_shelf()
        log = shelf.open(LogConfig(segment_bytes=choice.choice([400, 1500, 1 << 20]), index_interval_bytes=300))
        slots = [(shelf.folder / "flushed").read_bytes()]
        batches, flushed_batches = 0, 0
        for _ in range(choice.randrange(1, 25)):
            shelf.append(log, [b"value %d" % batches] * 2, producer_id=5, sequence=batches)
            batches += 1
            if choice.random() < 0.2:
                shelf.flush(log)
                slots.append((shelf.folder / "flushed").read_bytes())
                flushed_batches = batches
            if choice.random() < 0.1:
                shelf.checkpoint(log)
                slots = [(shelf.folder / "flushed").read_bytes()]
                flushed_batches = batches
        flushed, segments = log.flushed_position, log.segments()
        log.close(clean=False)
        (shelf.folder / "flushed").write_bytes(choice.choice(slots))
        lost_names = choice.random() < 0.3
        for segment in segments:
            data = bytearray(Path(segment.path).read_bytes())
            keep_size = choice.random() < 0.5
            safe = max(flushed - segment.base_position, 0)
            if lost_names and segment.base_position > flushed:
                Path(segment.path).unlink()
                continue
            for sector in range(safe // 512, len(data) // 512 + 1):
                if choice.random() < 0.4:
                    start, end = max(sector * 512, safe), min((sector + 1) * 512, len(data))
                    data[start:end] = bytes(max(end - start, 0))
            if not keep_size:
                del data[choice.randrange(safe, len(data) + 1) if safe <= len(data) else len(data) :]
            Path(segment.path).write_bytes(data)
        log = shelf.open(LogConfig(segment_bytes=1 << 20, index_interval_bytes=300))
        assert flushed_batches * 2 <= log.end_offset <= 2 * batches
        assert shelf.read_all(log) == expected_values(log.end_offset // 2)
        assert shelf.append(log, [b"after"]) == log.end_offset - 1
        log.close(clean=False)


# -- what is lost is told first -------------------------------------------------------------------------------------


def torn(shelf: Any, stable: LogConfig = ONE_SEGMENT) -> None:
    """A log of three batches whose last is torn."""
    log = shelf.open(stable)
    for number in range(3):
        shelf.append(log, [b"value %d" % number])
    end = log.end_position
    log.close(clean=False)
    shelf.damage(end - 10)


def test_a_cut_is_announced_before_anything_is_changed(shelf: Any) -> None:
    """Whoever is told may note it down durably; if that fails, the next start finds what this one did."""
    torn(shelf)
    before = shelf.contents()
    told: list[str] = []

    def on_loss(what: str) -> None:
        assert shelf.contents() == before
        told.append(what)
        if len(told) == 1:
            raise StorageError("no room for the note")

    with pytest.raises(StorageError, match="no room for the note"):
        shelf.open(ONE_SEGMENT, on_loss=on_loss)
    log = shelf.open(ONE_SEGMENT, on_loss=on_loss)
    assert log.end_offset == 2
    assert told == [told[0]] * 2
    assert told[0].startswith("flights/0-0: the bytes behind offset 2 are torn")
    log.close()
    shelf.open(ONE_SEGMENT, on_loss=on_loss).close()
    assert len(told) == 2


def test_a_log_that_ends_before_what_readers_saw_has_lost_it(shelf: Any) -> None:
    """A disk may forget a whole number of batches: nothing is torn then, and nothing cut."""
    log = shelf.open(ONE_SEGMENT)
    ends = []
    for number in range(3):
        shelf.append(log, [b"value %d" % number])
        ends.append(log.end_position)
        if number == 0:
            ticket = log.start_flush()
    ticket.sync()
    log.finish_flush(ticket)  # stores that readers have seen all three, and that one is on the disk
    log.close(clean=False)
    path, at = shelf.byte_at(ends[1] - 1)
    os.truncate(path, at + 1)
    told: list[str] = []
    log = shelf.open(ONE_SEGMENT, on_loss=told.append)
    assert (log.end_offset, log.recovery.cut_bytes, log.recovery.stable_offset_before) == (2, 0, 3)
    assert told == ["flights/0-0: it ends at offset 2, but readers have seen it up to 3"]
    log.close(clean=False)
    log = shelf.open(ONE_SEGMENT, on_loss=told.append)
    log.close()
    assert len(told) == 1


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_that_has_everything_announces_nothing(shelf: Any, clean: bool) -> None:
    told: list[str] = []
    log = shelf.open(ONE_SEGMENT, on_loss=told.append)
    for number in range(3):
        shelf.append(log, [b"value %d" % number])
        shelf.flush(log)
    shelf.append(log, [b"the last, which is not flushed"])
    log.close(clean)
    log = shelf.open(ONE_SEGMENT, on_loss=told.append)
    assert (log.end_offset, told) == (4, [])
    log.close()
