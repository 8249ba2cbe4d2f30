"""Append, read, roll, reopen; the index and the times against brute force."""

from __future__ import annotations

import random
import tracemalloc
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import ClosedError, CorruptData, OffsetOutOfRange
from metamq.wire.batch import HEADER_BYTES, read_header, walk
from metamq.wire.buffer_pool import SMALL_BYTES
from metamq.wire.columns import decode
from tests.examples import examples


def fill(shelf: Any, log: PartitionLog, batches: int, seed: int = 1) -> list[bytes]:
    choice = random.Random(seed)
    values: list[bytes] = []
    for number in range(batches):
        some = [b"%d-%d" % (number, n) * choice.randrange(1, 9) for n in range(choice.randrange(1, 6))]
        assert shelf.append(log, some, base_timestamp_us=number) == len(values)
        values += some
    return values


def test_a_new_log_is_empty(shelf: Any) -> None:
    log = shelf.open()
    assert (log.start_offset, log.end_offset, log.stable_offset, log.size_bytes) == (0, 0, 0, 0)
    assert log.read(0, 100).data == b""
    assert shelf.offset_at_time(log, 0) is None
    assert log.recovery.clean
    log.close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("flushed", [True, False])
def test_what_was_appended_is_read_again_after_a_reopen(shelf: Any, clean: bool, flushed: bool) -> None:
    log = shelf.open()
    values = fill(shelf, log, 60)
    assert len(log.segments()) > 3
    assert shelf.read_all(log) == values
    if flushed:
        shelf.flush(log)
    ends = log.end_offset, log.end_position, log.segments()
    log.close(clean)
    again = shelf.open()
    assert (again.end_offset, again.end_position, again.segments()) == ends
    assert again.recovery.clean is clean
    assert again.recovery.cut_bytes == 0
    assert again.recovery.scanned_bytes == 0 or not clean
    assert shelf.read_all(again) == values
    assert shelf.append(again, [b"more"]) == len(values)
    assert shelf.read_all(again) == [*values, b"more"]
    again.close()


def test_every_offset_leads_to_its_batch_whatever_the_limit(shelf: Any) -> None:
    log = shelf.open()
    values = fill(shelf, log, 40)
    starts = set(shelf.boundaries(log))
    for offset, value in enumerate(values):
        for bytes_max in (0, 1, 100, 333, 5000):
            piece = log.read(offset, bytes_max)
            first = read_header(piece.data)
            assert first.base_offset == piece.base_offset <= offset < first.end_offset
            assert piece.position in starts
            assert len(piece.data) % 8 == 0
            assert first.size <= len(piece.data) <= max(bytes_max, first.size, HEADER_BYTES)
        assert shelf.read_all(log, offset, 200)[0] == value
    log.close()


def test_large_batches_are_read_whole_and_once(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [200_000, 100, SMALL_BYTES, SMALL_BYTES - 500, 300_000]
    values = [bytes([number]) * size for number, size in enumerate(sizes)]
    log = shelf.open(LogConfig())
    for value in values:
        shelf.append(log, [value])
    large: list[int] = []
    read = FileCache.read

    def noted(files: FileCache, path: str, size: int, at: int) -> bytes | memoryview:
        large.extend([size] if size > SMALL_BYTES else [])
        return read(files, path, size, at)

    monkeypatch.setattr(FileCache, "read", noted)
    for offset, value in enumerate(values):
        for bytes_max in (1, SMALL_BYTES, SMALL_BYTES + 1, 250_000, 1 << 20):
            large.clear()
            piece = log.read(offset, bytes_max)
            _at, header = next(iter(walk(memoryview(piece.data))))
            assert large == ([len(piece.data)] if len(piece.data) > SMALL_BYTES else [])
            assert decode(memoryview(piece.data)[: header.size], header).values.tolist() == [value]
    log.close()


@pytest.mark.parametrize("unit", [100, 2 * SMALL_BYTES])
def test_no_part_of_a_batch_comes_behind_one_that_leaves_no_room_for_it(shelf: Any, unit: int) -> None:
    log = shelf.open(LogConfig())
    ends = []
    for count in (5, 4, 3):
        shelf.append(log, [b"x" * count * unit])
        ends.append(log.end_position)
    first, both, all_three = ends
    expected = {1: first, first - 8: first, first: first, both: first, 2 * first - 8: first, all_three: all_three}
    assert {bytes_max: len(log.read(0, bytes_max).data) for bytes_max in expected} == expected
    assert 2 * first <= len(log.read(0, 2 * first).data) <= 2 * first + 8
    assert len(log.read(1, 1 << 30).data) == all_three - first
    log.close()


def test_a_read_ends_with_its_segment(shelf: Any) -> None:
    log = shelf.open()
    fill(shelf, log, 40)
    first, second = log.segments()[:2]
    piece = log.read(0, 1 << 20)
    assert len(piece.data) == first.size_bytes
    assert log.read(first.end_offset, 1 << 20).position == second.base_position
    log.close()


def test_a_batch_larger_than_a_segment_has_one_for_itself(shelf: Any) -> None:
    log = shelf.open()
    shelf.append(log, [b"small"])
    shelf.append(log, [b"x" * 5000])
    shelf.append(log, [b"small"])
    assert [segment.end_offset - segment.base_offset for segment in log.segments()] == [1, 1, 1]
    assert shelf.read_all(log, 1, 10) == [b"x" * 5000, b"small"]
    log.close()


def test_outside_of_the_log(shelf: Any) -> None:
    log = shelf.open()
    shelf.append(log, [b"a", b"b"])
    assert log.read(2, 100).data == b""
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRange, match="flights/0-0 has the offsets 0 to 2") as caught:
            log.read(offset, 100)
        assert (caught.value.offset, caught.value.start, caught.value.end) == (offset, 0, 2)
    log.close()


def test_flush_before_ack_shows_only_what_is_on_the_disk(shelf: Any, before_ack: LogConfig) -> None:
    log = shelf.open(before_ack)
    shelf.append(log, [b"a"])
    assert (log.end_offset, log.stable_offset) == (1, 0)
    assert shelf.read_all(log) == []
    assert shelf.offset_at_time(log, 0) is None
    assert log.read(1, 100).data == b""
    shelf.flush(log)
    shelf.append(log, [b"b"])
    assert shelf.read_all(log) == [b"a"]
    log.reconfigure(LogConfig())
    assert shelf.read_all(log) == [b"a", b"b"]
    log.reconfigure(before_ack)
    assert log.stable_offset == 2, "readers never see less than before"
    log.close()


@pytest.mark.parametrize("crash", [False, True])
def test_batches_of_one_write_are_stored_like_others(shelf: Any, tmp_path: Path, crash: bool) -> None:
    """The same bytes, index and producer states as by one write each."""
    one_by_one, choice = type(shelf)(tmp_path / "one by one"), random.Random(3)
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300)
    logs = shelf.open(config), one_by_one.open(config)
    batch_id = 0
    for turn in range(40):
        fields = [{"producer_id": 1 + number, "sequence": turn} for number in range(choice.randrange(1, 9))]
        pairs = [shelf.batch([choice.randbytes(50)], **one) for one in fields]
        data = b"".join(bytes(batch) for batch, _header in pairs)
        offset = logs[0].append(
            memoryview(bytearray(data)), [header for _batch, header in pairs], epoch=1, batch_id=batch_id, now_us=turn
        )
        assert offset == logs[1].end_offset
        for number, (batch, header) in enumerate(pairs):
            logs[1].append(batch, [header], epoch=1, batch_id=batch_id + number, now_us=turn)
        batch_id += len(pairs)
        if choice.random() < 0.2:
            shelf.flush(logs[0])
            one_by_one.flush(logs[1])
    contents = [[Path(segment.path).read_bytes() for segment in log.segments()] for log in logs]
    assert contents[0] == contents[1]
    for log in logs:
        log.close(clean=not crash)
    for name in ("*.index", "*.producers"):
        files = [sorted(one.folder.glob(name)) for one in (shelf, one_by_one)]
        assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    again = [shelf.open(config), one_by_one.open(config)]
    assert shelf.read_all(again[0]) == shelf.read_all(again[1])
    for log in again:
        log.close()


def test_stored_headers(shelf: Any) -> None:
    log = shelf.open()
    batch, header = shelf.batch([b"a", b"b"])
    log.append(batch, [header], epoch=7, batch_id=99, now_us=1234)
    shelf.flush(log)
    batch, header = shelf.batch([b"c"])
    log.append(batch, [header], epoch=8, batch_id=100, now_us=1235)
    batch, header = shelf.batch([b"d"])
    log.append(batch, [header], epoch=8, batch_id=101, now_us=1236)
    stored = [header for _at, header in walk(memoryview(log.read(0, 1000).data))]
    assert [(h.epoch, h.batch_id, h.base_offset, h.append_time_us) for h in stored] == [
        (7, 99, 0, 1234),
        (8, 100, 2, 1235),
        (8, 101, 3, 1236),
    ]
    assert [h.unflushed_bytes for h in stored] == [0, 0, stored[1].size]
    assert log.last_append_us == 1236
    log.close()


def test_a_closed_log_says_so(shelf: Any) -> None:
    log = shelf.open()
    log.close()
    log.close()
    for use in (
        lambda: log.read(0, 1),
        lambda: shelf.append(log, [b"a"]),
        log.start_flush,
        lambda: shelf.checkpoint(log),
        lambda: shelf.retain(log, 0),
    ):
        with pytest.raises(ClosedError, match="log of flights/0-0 is closed"):
            use()
    assert shelf.files.open_count == 0


Stamped = st.tuples(
    st.lists(st.integers(-5, 30), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 400),
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(Stamped, max_size=25), interval=st.sampled_from([1, 150, 4096]), reopen=st.sampled_from("ncu"))
def test_offsets_and_times_against_brute_force(make_shelf: Any, batches: Any, interval: int, reopen: str) -> None:
    shelf = make_shelf()
    config = LogConfig(segment_bytes=1500, index_interval_bytes=interval)
    log = shelf.open(config)
    times: list[int] = []
    for timestamps, with_column, size in batches:
        if with_column:
            shelf.append(log, [b"v" * size] * len(timestamps), timestamps_us=timestamps)
        else:
            timestamps = [timestamps[0]] * len(timestamps)
            shelf.append(log, [b"v" * size] * len(timestamps), base_timestamp_us=timestamps[0])
        times += timestamps
    if reopen != "n":
        log.close(clean=reopen == "c")
        log = shelf.open(config)
    for offset in range(len(times)):
        piece = log.read(offset, 1)
        assert piece.base_offset <= offset < read_header(piece.data).end_offset
    for wanted in range(-7, 33):
        expected = next(((n, t) for n, t in enumerate(times) if t >= wanted), None)
        assert shelf.offset_at_time(log, wanted) == expected
    begins = {(header.base_offset, at) for at, header in walk(memoryview(whole_log(log)))}
    begins.add((log.end_offset, log.end_position))
    places = product(range(-1, log.end_offset + 2), sorted({at + by for _offset, at in begins for by in (-8, 0, 8)}))
    assert {place for place in places if log.begins_at(*place)} == begins
    log.close(clean=False)


def whole_log(log: PartitionLog) -> bytes:
    data = b""
    while len(data) < log.end_position:
        data += bytes(log.read_position(len(data), 1 << 20).data)
    return data


@pytest.mark.parametrize("harm", ["missing", "short", "flipped", "of another segment"])
def test_an_index_is_rebuilt_whatever_is_wrong_with_it(shelf: Any, harm: str) -> None:
    log = shelf.open()
    values = fill(shelf, log, 40)
    log.close()
    paths = shelf.paths("index")
    assert len(paths) == len(shelf.paths("log"))
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        if harm == "missing":
            path.unlink()
        elif harm == "short":
            path.write_bytes(contents[number][:-1])
        elif harm == "flipped":
            path.write_bytes(contents[number][:50] + bytes([contents[number][50] ^ 1]) + contents[number][51:])
        else:
            path.write_bytes(contents[number - 1])
    log = shelf.open()
    assert log.recovery.clean
    assert shelf.read_all(log) == values
    assert [shelf.read_all(log, offset)[0] for offset in range(len(values))] == values
    shelf.append(log, [b"more"])
    assert shelf.read_all(log)[-1] == b"more"
    log.close()


def test_damage_met_by_a_reader_is_reported_not_skipped(shelf: Any) -> None:
    log = shelf.open()
    fill(shelf, log, 10)
    shelf.damage(8)  # the base offset of the first batch
    with pytest.raises(CorruptData, match="is damaged at byte 0") as caught:
        log.read(0, 100)
    assert "metamq log verify" in caught.value.hint
    log.close()


def test_a_damaged_length_ends_a_search(shelf: Any) -> None:
    """One that leads almost to the segment's end, where no header has room any more."""
    log = shelf.open(LogConfig())
    for _ in range(3):
        shelf.append(log, [b"value"])
    _, second, _, end = shelf.boundaries(log)
    path, at = shelf.byte_at(second)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = (end - 8 - second).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=f"is damaged at byte {end - 8}: 8 bytes are less than a header"):
        log.read(2, 100)
    log.close(clean=False)


def test_the_memory_of_an_idle_log_is_small() -> None:
    with TemporaryDirectory() as root:
        files = FileCache(16, sync=lambda fd: None)
        folders = [Path(root) / "t@1" / str(n) for n in range(200)]
        for folder in folders:
            PartitionLog.open(folder, "t/0-0", LogConfig(), files, now_us=0).close()
        tracemalloc.start()
        logs = [PartitionLog.open(folder, "t/0-0", LogConfig(), files, now_us=0) for folder in folders]
        used, _peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used / len(logs) < 6000
        assert files.open_count == 0, "nothing is opened before it is needed"
        for log in logs:
            log.close()
